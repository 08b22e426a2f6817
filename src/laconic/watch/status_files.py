"""Files that a server writes about its run: ``status.json`` and ``progress.jsonl``. Both stay small in long runs."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, TextIO

from laconic.errors import FileError
from laconic.json_files import read_json
from laconic.watch.folder import PROGRESS, STATUS, open_to_append, server_file, write_atomically
from laconic.watch.status import Status, mean_loss

__all__ = ["StatusWriter", "load_status", "point_interval", "progress_point"]

log = logging.getLogger("laconic")

STATUS_INTERVAL = 0.25
"""Shortest time between two writes of a status, in seconds."""
HEARTBEAT = 1.0
"""Longest time between two writes of a status, in seconds: readers take an older one for a dead server."""
SHORTEST_POINT_INTERVAL, POINT_INTERVAL_SHARE = 0.05, 1000


def point_interval(elapsed: float) -> float:
    """Return the seconds between two points of progress: 50 ms, or a thousandth of the run so far.

    A run of an hour has about five thousand points, a run of a week ten thousand.

    >>> point_interval(1.0), point_interval(3600.0)
    (0.05, 3.6)
    """
    return max(SHORTEST_POINT_INTERVAL, elapsed / POINT_INTERVAL_SHARE)


def progress_point(status: Status) -> dict[str, Any]:
    """Return the line of ``progress.jsonl`` for a status."""
    losses = [worker.loss for worker in status.workers if worker.loss is not None]
    return {
        "at": round(status.at, 3), "version": status.version, "iteration": status.iteration,
        "loss": mean_loss(losses), "received": status.received, "sent": status.sent,
        "missed": max((worker.missed for worker in status.workers), default=0), "faults": sum(status.faults.values()),
    }  # fmt: skip


def load_status(path: Path) -> Status | None:
    """Read a status; return None if there is no file, raise ``FileError`` if it holds something else."""
    try:
        values = read_json(path, long_as_none=True)
    except FileNotFoundError:
        return None
    try:
        return Status.from_json(values)
    except FileError as error:
        raise FileError(f"{path}: {error}") from None


class StatusWriter:
    """Writes a server's status when it is due. If the folder cannot be written to, one warning is logged."""

    def __init__(self, run_dir: Path, server: int = 0) -> None:
        self._status_path = run_dir / server_file(STATUS, server)
        self._progress_path = run_dir / server_file(PROGRESS, server)
        self._next_status = self._next_point = -math.inf
        self._last_status: dict[str, Any] = {}
        self._last_point: dict[str, Any] = {}
        self._progress: TextIO | None = None
        self._failed = False

    def due(self, now: float) -> bool:
        return now >= min(self._next_status, self._next_point)

    def write(self, status: Status, *, last: bool = False) -> None:
        """Write what is due and has changed; the last status is always written."""
        try:
            self._write_point(status, last)
            self._write_status(status, last)
        except OSError as error:
            if not self._failed:
                log.warning("cannot write the run's status any more: %s", error.strerror)
            self._failed = True

    def _write_status(self, status: Status, last: bool) -> None:
        if status.at < self._next_status and not last:
            return
        values = status.to_json()
        changed = {key: value for key, value in values.items() if key != "at"}
        heartbeat_due = status.at >= self._next_status - STATUS_INTERVAL + HEARTBEAT
        if changed == self._last_status and not heartbeat_due and not last:
            return
        self._last_status, self._next_status = changed, status.at + STATUS_INTERVAL
        write_atomically(self._status_path, json.dumps(values))

    def _write_point(self, status: Status, last: bool) -> None:
        if status.at < self._next_point and not last:
            return
        self._next_point = status.at + point_interval(status.at - status.began_at)
        point = progress_point(status)
        if {**point, "at": 0} == {**self._last_point, "at": 0}:
            return
        self._last_point = point
        if self._progress is None:
            self._progress = open_to_append(self._progress_path)
        self._progress.write(json.dumps(point) + "\n")
        self._progress.flush()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
