"""Metrics of a worker for reports: progress over time, and bytes and errors of each slot; and the Records of a run.

Points are thinned out during a run, so that the file stays small. A worker that dies loses its points: the file holds
those of its last process.
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

__all__ = ["SlotCount", "Track", "missed_updates", "relative_error", "write_records"]

log = logging.getLogger("laconic")

MAX_POINTS = 200
COLUMNS = ("iteration", "seconds", "loss", "bytes_sent", "bytes_received")


@dataclass
class SlotCount:
    """Bytes of a slot's frames in both directions, and the relative errors of some of the sent frames."""

    numel: int
    sent: int = 0
    received: int = 0
    errors: list[float] = field(default_factory=list)


def relative_error(x: Tensor, decoded: Tensor, residual: Tensor | None) -> float | None:
    """Return the squared norm of what a frame left out, relative to all that was to be sent; None if that is zero.

    Args:
        x: The tensor given to the channel.
        residual: The channel's residual after encoding; None if it has none.
    """
    error = (x - decoded if residual is None else residual).double()
    total = float((error + decoded).square().sum())
    return float(error.square().sum()) / total if total > 0 else None


class Track:
    """Progress of a worker over time."""

    def __init__(self) -> None:
        self._series = ThinnedSeries[tuple[float, ...]](MAX_POINTS)
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
        self, run_dir: Path, worker: int, slots: Mapping[str, SlotCount],
        judged: Mapping[str, list[float]] | None = None,
    ) -> None:  # fmt: skip
        """Write the track to the run's folder; ``judged`` is the result of ``Snapshots.evaluate``."""
        values = {"worker": worker, **self.columns, "slots": {name: asdict(count) for name, count in slots.items()}}
        values |= {"judged": judged} if judged else {}
        try:
            write_atomically(_path(run_dir, worker), json.dumps(values))
        except OSError as error:  # the disk is full, but the run itself has succeeded
            log.warning("worker %d: cannot write its curves for reports: %s", worker, error.strerror)


def _path(run_dir: Path, worker: int) -> Path:
    return run_dir / f"track-{worker}.json"


def write_records(config: Config, run_dir: Path, summary: Mapping[str, Any], **more: Any) -> None:
    """Write the run's Records: its summary, each worker's track, slots and staleness."""
    paths = [_path(run_dir, worker) for worker in range(config.job.workers)]
    tracks = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    run, seed = run_dir.resolve().name, config.job.seed
    records = [Record("train.run", {"run": run, **summary, **more}, seed)]
    for track in tracks:
        points = {key: track[key] for key in ("worker", *COLUMNS, "judged") if key in track}
        records.append(Record("train.track", {"run": run, **points, **more}, seed))
    slots = _sum_slots(track["slots"] for track in tracks)
    if slots:
        records.append(Record("train.slots", {"run": run, "exchanges": config.exchanges, "slots": slots}, seed))
    if not config.job.update_mode.in_rounds:
        missed = missed_updates(read_events(run_dir / server_file(EVENTS, 0)))
        records.append(Record("train.staleness", {"run": run, "missed": {str(n): missed[n] for n in sorted(missed)}}))
    write(records, run_dir / RECORDS)


def _sum_slots(workers: Iterable[Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Add up the slots of all workers."""
    totals: dict[str, dict[str, Any]] = {}
    for slots in workers:
        for name, count in slots.items():
            zero = {"slot": name, "numel": count["numel"], "sent": 0, "received": 0, "errors": []}
            total = totals.setdefault(name, zero)
            for key in ("sent", "received", "errors"):
                total[key] += count[key]
    return list(totals.values())


def missed_updates(events: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return the number of gradients by staleness: updates between the worker's pull and its gradient's update."""
    pulled: dict[int, int] = {}
    counts: dict[int, int] = {}
    updates = 0
    for event in events:
        if event["event"] == "pull":
            pulled[event["worker"]] = updates
        elif event["event"] == "applied":
            missed = updates - pulled.get(event["worker"], updates)
            counts[missed] = counts.get(missed, 0) + 1
            updates += 1
    return counts
