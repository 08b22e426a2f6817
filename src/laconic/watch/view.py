"""What a run's folder says to somebody who looks: while it runs, after it, and before it has begun."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laconic.errors import FileError
from laconic.watch.folder import CONFIG, PROGRESS, STATUS, SUMMARY, of_server
from laconic.watch.journal import load_status
from laconic.watch.status import PARTS, Status, WorkerStatus

__all__ = ["OVER", "PHASES", "View", "Watcher"]

PHASES = ("absent", "prepared", "running", "silent", "stopped", "failed", "ended")
"""There is no run yet; its server has not started; it runs; its server has not been heard of for seconds; it was
stopped and can be resumed; it cannot go on; it has ended."""
OVER = ("stopped", "failed", "ended")
SILENT = 5.0
"""Seconds after which a server that writes nothing is taken to be dead or cut off."""
MOST_POINTS = 2000
SHOWN = ("method", "model", "data", "script", "layers", "batch", "iterations", "servers")
SHOWN_OF_JOB = ("workers", "mode", "push", "pull", "returns", "every", "lr", "seed")
RATE_OVER = 10.0
"""Seconds over which a speed is taken."""


@dataclass
class View:
    """A run at a moment, all servers taken together.

    Args:
        run: The folder.
        phase: One of ``PHASES``.
        at: When it was looked at.
        config: What matters of the configuration.
        iteration: That is done; without rounds, of all workers taken together.
        iterations: That there are.
        loss: Mean of the workers' last batches.
        elapsed_s: Since the run's first server started.
        silent_s: Since its servers were heard of.
        left_s: Until it ends, at its present speed.
        received: Bytes of frames that servers received.
        sent: That they sent.
        bytes_per_s: Of both, lately.
        saved: Bytes that were not sent.
        version: Updates so far.
        missed: The most updates that a worker's last push had missed: how stale it was.
        missed_most: The most of any push.
        missed_mean: Of all pushes.
        server_lives: How often servers were started.
        checkpoint: The version that was saved last.
        failure: Why it cannot go on.
        workers: By number.
        seconds: Of all workers, by part.
        faults: How often each kind of thing went wrong.
        recent: The last of these.
        notes: What is odd about the folder.
        summary: At the end.
        points: How it went.
    """

    run: str
    phase: str
    at: float
    config: dict[str, Any] = field(default_factory=dict)
    iteration: int = 0
    iterations: int = 0
    loss: float | None = None
    elapsed_s: float = 0.0
    silent_s: float | None = None
    left_s: float | None = None
    received: int = 0
    sent: int = 0
    bytes_per_s: float | None = None
    saved: int = 0
    version: int = 0
    missed: int = 0
    missed_most: int = 0
    missed_mean: float = 0.0
    server_lives: int = 0
    checkpoint: int | None = None
    failure: str | None = None
    workers: list[WorkerStatus] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    recent: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    points: list[dict[str, Any]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.phase in OVER

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Watcher:
    """Looks at a folder again and again, and reads only what is new.

    Args:
        run_dir: The run's folder; it may not be there yet.
        clock: Tells the time.
    """

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.run_dir = run_dir
        self._clock = clock
        self._progress = _Points(run_dir / PROGRESS)

    def look(self) -> View:
        notes: list[str] = []
        config = _load_object(self.run_dir / CONFIG, notes)
        view = View(str(self.run_dir), "absent", self._clock(), notes=notes)
        if config is None:
            return view
        job = config.get("job")
        job = job if isinstance(job, Mapping) else {}
        view.phase = "prepared"
        view.config = {key: config.get(key) for key in SHOWN} | {key: job.get(key) for key in SHOWN_OF_JOB}
        view.iterations = _whole(config.get("iterations"))
        view.summary = _load_object(self.run_dir / SUMMARY, notes)
        found = []
        for number in range(max(1, _whole(config.get("servers")))):
            try:
                status = load_status(self.run_dir / of_server(STATUS, number))
                found += [] if status is None else [status]
            except FileError as error:
                notes.append(str(error))
        if found:
            self._fill(view, found)
        return view

    def _fill(self, view: View, servers: list[Status]) -> None:
        first = servers[0]
        view.phase, view.silent_s = _phase(servers, view.at)
        view.workers = first.workers
        here = [worker for worker in first.workers if worker.lives]
        view.iteration = min(one.iteration for one in servers)
        losses = [worker.loss for worker in here if worker.loss is not None]
        view.loss = sum(losses) / len(losses) if losses else None
        heard = max(one.at for one in servers)
        view.elapsed_s = max(0.0, heard - min(one.began_at for one in servers))
        view.received, view.sent = sum(one.received for one in servers), sum(one.sent for one in servers)
        exchanged = sum(worker.bytes_sent + worker.bytes_received for worker in here)
        view.saved = max(0, sum(worker.bytes_raw for worker in here) - exchanged)
        view.version, view.checkpoint = first.version, first.checkpoint
        view.missed = max((worker.missed for worker in here), default=0)
        view.missed_most = max((worker.missed_most for worker in here), default=0)
        applied = sum(worker.applied for worker in here)
        view.missed_mean = sum(worker.missed_sum for worker in here) / applied if applied else 0.0
        view.server_lives = max(one.lives for one in servers)
        view.failure = next((one.failure for one in servers if one.failure), None)
        view.seconds = {part: sum(worker.seconds[part] for worker in here) for part in PARTS}
        for one in servers:
            for kind, count in one.faults.items():
                view.faults[kind] = view.faults.get(kind, 0) + count
        view.recent = sorted((fault for one in servers for fault in one.recent), key=lambda fault: fault["at"])[-50:]
        view.points = self._progress.read()
        if view.phase == "running":
            view.bytes_per_s, view.left_s = _speed(view)


def _phase(servers: list[Status], now: float) -> tuple[str, float]:
    """What all servers together are, and for how long none of those that serve was heard of."""
    silent = max(0.0, now - min(one.at for one in servers))
    phases = {one.phase for one in servers}
    if "failed" in phases:
        return "failed", silent
    if phases == {"ended"}:
        return "ended", silent
    if "serving" in phases:
        quiet = max(0.0, now - min(one.at for one in servers if one.phase == "serving"))
        return ("silent" if quiet > SILENT else "running"), quiet
    return "stopped", silent


def _speed(view: View) -> tuple[float | None, float | None]:
    """Bytes a second lately, and seconds until all is done."""
    if not view.points:
        return None, None
    last = view.points[-1]
    then = next((one for one in reversed(view.points) if one["at"] <= last["at"] - RATE_OVER), view.points[0])
    seconds = last["at"] - then["at"]
    if seconds <= 0:
        return None, None
    rate = max(0.0, (last["received"] + last["sent"] - then["received"] - then["sent"]) / seconds)
    pace = (last["iteration"] - then["iteration"]) / seconds
    left = (view.iterations - view.iteration) / pace if pace > 0 else None
    return rate, left


_POINT = {"at": float, "version": int, "iteration": int, "received": int, "sent": int, "missed": int, "faults": int}


class _Points:
    """The moments of a file of lines that grows; every other one is dropped when there are too many."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._points: list[dict[str, Any]] = []
        self._every, self._seen = 1, 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                if self._path.stat().st_size < self._at:  # another file: the run was begun anew
                    self._at, self._points, self._every, self._seen = 0, [], 1, 0
                file.seek(self._at)
                fresh = file.read()
        except OSError:
            return self._points
        whole = fresh.rfind(b"\n") + 1  # what is being written now is read next time
        self._at += whole
        for line in fresh[:whole].splitlines():
            found = _point(line)
            if found is not None:
                if self._seen % self._every == 0:
                    self._points.append(found)
                self._seen += 1
                if len(self._points) > MOST_POINTS:
                    self._points, self._every = self._points[::2], 2 * self._every
        return self._points


def _point(line: bytes) -> dict[str, Any] | None:
    """A line; None when it is torn or something else."""
    try:
        values = json.loads(line)
        found: dict[str, Any] = {key: kind(values[key]) for key, kind in _POINT.items()}
        loss = values["loss"]
        found["loss"] = None if loss is None else float(loss)
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
    numbers = [value for value in found.values() if value is not None]
    return found if all(map(math.isfinite, numbers)) else None


def _load_object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """A JSON object of a file that others write whole; None when there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None, parse_float=_finite)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return None
    except OSError as error:
        notes.append(f"cannot read {path}: {error.strerror}")
        return None
    except (ValueError, RecursionError):
        notes.append(f"{path} is not JSON")
        return None
    if not isinstance(found, dict):
        notes.append(f"{path} does not hold an object")
        return None
    return found


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else 0


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
