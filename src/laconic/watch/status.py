"""How a server sees its run at a moment: what is written while it runs, and read by whoever watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from laconic.errors import FileError

__all__ = ["PARTS", "STATES", "Status", "WorkerStatus"]

T = TypeVar("T")

STATES = ("expected", "joining", "computing", "waiting", "lost", "gone", "done")
"""Of a worker: it has never come; agrees where to go on; computes; has pushed and waits for the others; its connection
broke; it has left; it has left when all was done."""
PHASES = ("serving", "stopped", "failed", "ended")
LARGEST = 1 << 63
PARTS = ("compute", "encode", "communication", "overlapped", "apply")
"""What a worker's seconds are spent on."""


@dataclass
class WorkerStatus:
    """One worker. Counts go on over its lives; times are those of its server's clock.

    Args:
        state: One of ``STATES``.
        lives: How often it was started.
        iteration: How far it is, as it told last.
        loss: Of its last batch, as it told last; None before, and when it was not finite.
        bytes_sent: Of frames that it made.
        bytes_received: Of frames that it was sent.
        bytes_raw: What 32 bits a value, both ways, every iteration would have taken.
        retries: How often it had to ask again.
        seconds: By part.
        applied: Pushes that were applied.
        missed: Updates that others made while it computed the last of them: its staleness.
        missed_most: The most of any push.
        missed_sum: Of all pushes.
        heard_at: When it was heard of last.
    """

    state: str = "expected"
    lives: int = 0
    iteration: int = 0
    loss: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_raw: int = 0
    retries: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    applied: int = 0
    missed: int = 0
    missed_most: int = 0
    missed_sum: int = 0
    heard_at: float | None = None


@dataclass
class Status:
    """One server and its workers.

    Args:
        at: When this was so.
        began_at: When the run's first server started.
        phase: One of ``PHASES``.
        version: Updates so far.
        updates: How many there will be.
        iterations: The same in iterations of a worker; without rounds those of all workers taken together.
        received: Bytes of frames that came in.
        sent: Bytes of frames that went out.
        lives: How often the server was started.
        checkpoint: The version that was saved last.
        failure: Why it cannot go on.
        workers: By number.
        faults: How often each kind of thing went wrong.
        recent: The last of these: ``{"at": …, "what": …}``.
    """

    at: float = 0.0
    began_at: float = 0.0
    phase: str = "serving"
    version: int = 0
    updates: int = 0
    iterations: int = 0
    received: int = 0
    sent: int = 0
    lives: int = 1
    checkpoint: int | None = None
    failure: str | None = None
    workers: list[WorkerStatus] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    recent: list[dict[str, Any]] = field(default_factory=list)

    @property
    def iteration(self) -> int:
        """How far it is."""
        return self.iterations * self.version // self.updates if self.updates else 0

    def copy(self) -> Status:
        workers = [replace(worker, seconds=dict(worker.seconds)) for worker in self.workers]
        return replace(self, workers=workers, faults=dict(self.faults), recent=list(self.recent))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: object) -> Status:
        """``FileError`` when it is something else: the folder may be anybody's."""
        try:
            found = _read(cls, values)
            found.workers = [_read(WorkerStatus, one) for one in found.workers]
            if found.phase not in PHASES:
                raise ValueError(f"unknown phase {found.phase!r}")
            for worker in found.workers:
                if worker.state not in STATES:
                    raise ValueError(f"unknown state {worker.state!r}")
                worker.seconds = {part: _seconds(worker.seconds.get(part, 0.0)) for part in PARTS}
            if not all(isinstance(count, int) and 0 <= count < LARGEST for count in found.faults.values()):
                raise ValueError("faults are counts")
            found.recent = [{"at": _seconds(one["at"]), "what": str(one["what"])} for one in found.recent]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise FileError(f"that is no status of a server: {error}") from None
        return found


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "float | None": (int, float, type(None)),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
}


def _read(kind: type[T], values: object) -> T:
    """A dataclass from an object with the same fields; those of newer versions are passed over."""
    if not isinstance(values, Mapping):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    known = {}
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name not in values:
            raise ValueError(f"{one.name!r} is missing")
        value = known[one.name] = values[one.name]
        text = str(one.type)
        allowed = _KINDS.get(text, (list,) if text.startswith("list") else (dict,))
        if not isinstance(value, allowed) or isinstance(value, bool):
            raise ValueError(f"{one.name!r} must be {text}, got {type(value).__name__}")
        if isinstance(value, int | float) and not abs(value) < LARGEST:
            raise ValueError(f"{one.name!r} is too large")
    return kind(**known)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise ValueError("times are finite numbers")
    return float(value)
