"""What a server leaves in its run's folder for those who watch: cheap, and little however long the run is."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, TextIO

from laconic.errors import FileError
from laconic.watch.folder import PROGRESS, STATUS, of_server, write_whole
from laconic.watch.status import Status

__all__ = ["EVERY", "Journal", "load_status", "point", "spacing"]

log = logging.getLogger("laconic")

EVERY = 0.25
"""Seconds between two looks at a server's status, at least."""
SHORTEST, SHARE = 0.05, 1000
"""Moments of progress are that many seconds apart, or a thousandth of the time that the run has taken."""
HEARTBEAT = 1.0
"""Seconds after which a status is written again although nothing has happened: whoever watches sees that it lives."""


def spacing(elapsed: float) -> float:
    """Seconds between two moments of progress after so many of the run.

    A run of an hour has some five thousand moments, one of a week ten thousand.

    >>> spacing(1.0), spacing(3600.0)
    (0.05, 3.6)
    """
    return max(SHORTEST, elapsed / SHARE)


def point(status: Status) -> dict[str, Any]:
    """A moment of progress."""
    losses = [worker.loss for worker in status.workers if worker.loss is not None]
    return {
        "at": round(status.at, 3),
        "version": status.version,
        "iteration": status.iteration,
        "loss": sum(losses) / len(losses) if losses else None,
        "received": status.received,
        "sent": status.sent,
        "missed": max((worker.missed for worker in status.workers), default=0),
        "faults": sum(status.faults.values()),
    }


def load_status(path: Path) -> Status | None:
    """What was written last, None when nothing was; ``FileError`` when it is something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise FileError(f"{path} does not hold a status: it is not JSON") from None
    try:
        return Status.from_json(values)
    except FileError as error:
        raise FileError(f"{path}: {error}") from None


class Journal:
    """Writes what it is shown, when it is time to.

    A folder that cannot be written to is said once, and training goes on.

    Args:
        run_dir: The run's folder.
        server: Which of several servers writes.
    """

    def __init__(self, run_dir: Path, server: int = 0) -> None:
        self._status = run_dir / of_server(STATUS, server)
        self._progress = run_dir / of_server(PROGRESS, server)
        self._next_status = self._next_point = -math.inf
        self._shown: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        self._file: TextIO | None = None
        self._broken = False

    def due(self, now: float) -> bool:
        """Whether it is worth the trouble to find out how things are."""
        return now >= min(self._next_status, self._next_point)

    def show(self, status: Status, *, last: bool = False) -> None:
        """Write what is new, all of it if it is the last."""
        try:
            self._point(status, last)
            self._whole(status, last)
        except OSError as error:
            if not self._broken:
                log.warning("cannot write how the run is any more: %s", error.strerror)
            self._broken = True

    def _whole(self, status: Status, last: bool) -> None:
        if status.at < self._next_status and not last:
            return
        values = status.to_json()
        changed = {key: value for key, value in values.items() if key != "at"}
        if changed == self._shown and status.at < self._next_status - EVERY + HEARTBEAT and not last:
            return
        self._shown, self._next_status = changed, status.at + EVERY
        write_whole(self._status, json.dumps(values))

    def _point(self, status: Status, last: bool) -> None:
        if status.at < self._next_point and not last:
            return
        self._next_point = status.at + spacing(status.at - status.began_at)
        told = point(status)
        if {**told, "at": 0} == {**self._told, "at": 0}:
            return
        self._told = told
        if self._file is None:
            cut_off = self._progress.exists() and self._progress.read_bytes()[-1:] not in (b"", b"\n")
            self._file = self._progress.open("a", encoding="utf-8")
            if cut_off:  # by a kill or a full disk: what comes now begins a line of its own
                self._file.write("\n")
        self._file.write(json.dumps(told) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
