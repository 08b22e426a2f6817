"""What a worker leaves for reports: its way through the run, and what each slot took and lost.

Points are thinned out as a run goes on, so that a file is small however long it takes. One that dies takes its own
along: the file is of its last life.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from laconic.records import Record, write
from laconic.train.run import EVENTS, RECORDS, Config, server_file, write_atomically
from laconic.watch.events import read_events
from laconic.watch.series import ThinnedSeries

__all__ = ["SlotCount", "Track", "keep_records", "lost_share", "missed_updates"]

log = logging.getLogger("laconic")

POINTS = 200
"""Of a track, at most."""
COLUMNS = ("iteration", "seconds", "loss", "bytes_sent", "bytes_received")


@dataclass
class SlotCount:
    """Frames of a slot, both ways, and the share of it that was lost in some of those that were sent."""

    numel: int
    sent: int = 0
    received: int = 0
    errors: list[float] = field(default_factory=list)


def lost_share(x: Tensor, decoded: Tensor, residual: Tensor | None) -> float | None:
    """Squared norm of what a frame leaves out, over that of all there was to send; None when there was nothing.

    Args:
        x: What was given to the channel.
        decoded: What the frame says.
        residual: What the channel keeps for later; None if it remembers nothing.
    """
    left = (x - decoded if residual is None else residual).double()
    whole = float((left + decoded).square().sum())
    return float(left.square().sum()) / whole if whole > 0 else None


class Track:
    """A worker's points, every n-th of them."""

    def __init__(self) -> None:
        self._series = ThinnedSeries[tuple[float, ...]](POINTS)
        self._last: tuple[float, ...] | None = None

    def add(self, *point: float) -> None:
        """Add the values of ``COLUMNS``."""
        self._last = point
        self._series.add(point)

    @property
    def columns(self) -> dict[str, list[float]]:
        points = self._series.points
        if self._last is not None and points[-1] != self._last:
            points = [*points, self._last]
        return {name: [point[i] for point in points] for i, name in enumerate(COLUMNS)}

    def save(
        self,
        run_dir: Path,
        worker: int,
        slots: Mapping[str, SlotCount],
        judged: Mapping[str, list[float]] | None = None,
    ) -> None:
        """Into the run's folder; ``judged`` is what ``Snapshots`` found."""
        told = {"worker": worker, **self.columns, "slots": {name: asdict(one) for name, one in slots.items()}}
        told |= {"judged": judged} if judged else {}
        try:
            write_atomically(_path(run_dir, worker), json.dumps(told))
        except OSError as error:  # a disk that is full: the run itself has ended well
            log.warning("worker %d: its report will have no curves: %s", worker, error.strerror)


def _path(run_dir: Path, worker: int) -> Path:
    return run_dir / f"track-{worker}.json"


# ------------------------------------------------------------------------------------------------------------ Records


def keep_records(config: Config, run_dir: Path, summary: Mapping[str, Any], **more: Any) -> None:
    """The run's Records: its summary, each worker's track, slots, and how old gradients were."""
    paths = [_path(run_dir, worker) for worker in range(config.job.workers)]
    told = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    run, seed = run_dir.resolve().name, config.job.seed
    records = [Record("train.run", {"run": run, **summary, **more}, seed)]
    for one in told:
        points = {key: one[key] for key in ("worker", *COLUMNS, "judged") if key in one}
        records.append(Record("train.track", {"run": run, **points, **more}, seed))
    slots = _slots(one["slots"] for one in told)
    if slots:
        records.append(Record("train.slots", {"run": run, "exchanges": config.exchanges, "slots": slots}, seed))
    if not config.job.update_mode.in_rounds:
        missed = missed_updates(read_events(run_dir / server_file(EVENTS, 0)))
        records.append(Record("train.staleness", {"run": run, "missed": {str(n): missed[n] for n in sorted(missed)}}))
    write(records, run_dir / RECORDS)


def _slots(workers: Iterable[Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Of all workers together."""
    found: dict[str, dict[str, Any]] = {}
    for slots in workers:
        for name, one in slots.items():
            into = found.setdefault(name, {"slot": name, "numel": one["numel"], "sent": 0, "received": 0, "errors": []})
            for key in ("sent", "received", "errors"):
                into[key] += one[key]
    return list(found.values())


def missed_updates(events: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """How many gradients missed so many updates: those between their worker's pull and their own."""
    pulled: dict[int, int] = {}
    found: dict[int, int] = {}
    updates = 0
    for event in events:
        if event["event"] == "pull":
            pulled[event["worker"]] = updates
        elif event["event"] == "applied":
            missed = updates - pulled.get(event["worker"], updates)
            found[missed] = found.get(missed, 0) + 1
            updates += 1
    return found
