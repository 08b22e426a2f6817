"""Status of a server and its workers, as written to and read from ``status.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from laconic.errors import FileError

__all__ = ["LARGEST", "PARTS", "STATES", "Progress", "Status", "WorkerStatus", "finite_or_none", "mean_loss"]

T = TypeVar("T")

STATES = ("expected", "joining", "computing", "waiting", "lost", "gone", "done")
"""States of a worker: has never connected; agrees with the others where to continue; computes; has pushed and waits for
the others; its connection broke; has left early; has left at the end."""
PHASES = ("serving", "stopped", "failed", "ended")
LARGEST = 1 << 63
PARTS = ("compute", "encode", "communication", "overlapped", "apply")
"""Activities by which a worker's seconds are counted."""


@dataclass
class WorkerStatus:
    """Status of one worker. Counts include its earlier processes; times are those of the server's clock.

    Args:
        state: One of ``STATES``.
        lives: Number of starts.
        iteration: Last iteration that it reported.
        loss: Loss of its last batch; None before its first report and if it was not finite.
        bytes_raw: Bytes of float32 in both directions in every iteration.
        missed: Staleness of its last push: updates by others while it computed.
        missed_most: Largest staleness of its pushes.
        missed_sum: Sum of the staleness of its pushes.
        heard_at: Time of its last message.
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
class Progress:
    """What one server reports of a run, and what a ``View`` shows of all its servers.

    Args:
        at: Time of the report.
        iterations: Iterations of a worker in the whole run; in async mode of all workers together.
        received, sent: Bytes of frames.
        checkpoint: Version of the last checkpoint.
        failure: Reason why the run cannot continue.
        faults: Counts by kind.
        recent: Last faults: ``{"at": …, "what": …}``.
    """

    phase: str = "serving"
    at: float = 0.0
    version: int = 0
    iterations: int = 0
    received: int = 0
    sent: int = 0
    checkpoint: int | None = None
    failure: str | None = None
    workers: list[WorkerStatus] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    recent: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Status(Progress):
    """Status of one server and its workers; its phase is one of ``PHASES``.

    Args:
        began_at: Time of the first start of the run's server.
        updates: Updates of the whole run.
        lives: Number of starts of the server.
    """

    began_at: float = 0.0
    updates: int = 0
    lives: int = 1

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self.iterations * self.version // self.updates if self.updates else 0

    def copy(self) -> Status:
        workers = [replace(worker, seconds=dict(worker.seconds)) for worker in self.workers]
        return replace(self, workers=workers, faults=dict(self.faults), recent=list(self.recent))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: object) -> Status:
        """Validate a status read from a folder; raise ``FileError`` if it is not one."""
        try:
            status = _read(cls, values)
            status.workers = [_read(WorkerStatus, worker) for worker in status.workers]
            if status.phase not in PHASES:
                raise ValueError(f"unknown phase {status.phase!r}")
            for worker in status.workers:
                if worker.state not in STATES:
                    raise ValueError(f"unknown state {worker.state!r}")
                worker.seconds = {part: _seconds(worker.seconds.get(part, 0.0)) for part in PARTS}
            if not all(isinstance(count, int) and 0 <= count < LARGEST for count in status.faults.values()):
                raise ValueError("'faults' must be counts")
            status.recent = [{"at": _seconds(fault["at"]), "what": str(fault["what"])} for fault in status.recent]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise FileError(f"not a server's status: {error}") from None
        return status


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "float | None": (int, float, type(None)),
    "int | None": (int, type(None)), "str | None": (str, type(None)),
}  # fmt: skip


def _read(kind: type[T], values: object) -> T:
    """Make a dataclass from a JSON object; fields of newer versions are ignored."""
    if not isinstance(values, Mapping):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    arguments = {}
    for field_ in fields(kind):  # type: ignore[arg-type]
        if field_.name not in values:
            raise ValueError(f"{field_.name!r} is missing")
        value = arguments[field_.name] = values[field_.name]
        text = str(field_.type)
        allowed = _KINDS.get(text, (list,) if text.startswith("list") else (dict,))
        if not isinstance(value, allowed) or isinstance(value, bool):
            raise ValueError(f"{field_.name!r} must be {text}, got {type(value).__name__}")
        if field_.name == "loss":  # of any size: a run that diverges is the one to look at
            arguments["loss"] = finite_or_none(value)
        elif isinstance(value, int | float) and not abs(value) < LARGEST:
            raise ValueError(f"{field_.name!r} is too large")
    return kind(**arguments)


def finite_or_none(value: object) -> float | None:
    """Return a loss as it is shown: None if it is not a finite number."""
    try:
        loss = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return loss if math.isfinite(loss) else None


def mean_loss(losses: Sequence[float]) -> float | None:
    """Return the mean of finite losses, which is finite although their sum may not be; None without any."""
    if not losses:
        return None
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else sum(loss / len(losses) for loss in losses)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise ValueError("times must be finite numbers")
    return float(value)
