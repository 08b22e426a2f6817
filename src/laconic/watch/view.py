"""The status of a run as read from its folder: before it has started, while it runs and after its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laconic.errors import FileError
from laconic.json_files import open_regular, parse_json, read_json
from laconic.watch.folder import ACCURACY, CONFIG, PROGRESS, STATUS, SUMMARY, server_file
from laconic.watch.series import ThinnedSeries
from laconic.watch.status import LARGEST, PARTS, Progress, Status, finite_or_none, mean_loss
from laconic.watch.status_files import load_status

__all__ = ["OVER", "PHASES", "View", "Watcher"]

PHASES = ("absent", "prepared", "running", "silent", "stopped", "failed", "ended")
"""Phases of a run: no folder yet; folder without a server's status; running; the server has not written for seconds;
stopped, can be resumed; failed; ended."""
OVER = ("stopped", "failed", "ended")
SILENT_AFTER = 5.0
"""Seconds after which a server that writes nothing counts as dead or disconnected."""
MAX_POINTS = 2000
MAX_SERVERS = 256
CONFIG_KEYS = ("method", "model", "data", "script", "layers", "batch", "iterations", "servers")
JOB_KEYS = ("workers", "mode", "push", "pull", "returns", "every", "lr", "seed")
RATE_WINDOW = 10.0
"""Seconds over which the current speed is measured."""


@dataclass
class View(Progress):
    """Status of a run, all servers together; its phase is one of ``PHASES``.

    Args:
        run: The run's folder.
        config: The options shown to people.
        iteration: Iterations done; in async mode of all workers together.
        loss: Mean loss of the workers' last batches.
        elapsed_s: Seconds since the first start of the run's servers.
        silent_s: Seconds since the last write of its servers.
        left_s: Estimated seconds until the end.
        bytes_per_s: Current traffic in both directions.
        raw: Bytes that float32 would have taken in both directions.
        saved: Bytes saved compared with it.
        missed: Largest staleness of the workers' last pushes, in updates.
        missed_most: Largest staleness of all pushes.
        missed_mean: Mean staleness of all pushes.
        server_lives: Number of starts of the servers.
        seconds: Seconds of all workers by activity.
        notes: Problems with the files of the folder.
        summary: The run's summary, at the end.
        points: Points of ``progress.jsonl``.
        accuracies: Points of ``accuracy.jsonl``: accuracy in per cent on so many test examples.
    """

    run: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    iteration: int = 0
    loss: float | None = None
    elapsed_s: float = 0.0
    silent_s: float | None = None
    left_s: float | None = None
    bytes_per_s: float | None = None
    raw: int = 0
    saved: int = 0
    missed: int = 0
    missed_most: int = 0
    missed_mean: float = 0.0
    server_lives: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    points: list[dict[str, Any]] = field(default_factory=list)
    accuracies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.phase in OVER

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Watcher:
    """Reads a run's folder repeatedly; of ``progress.jsonl`` only the new lines.

    Args:
        run_dir: The run's folder; it need not exist yet.
    """

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.run_dir = run_dir
        self._clock = clock
        self._progress = _LineReader(run_dir / PROGRESS, _parse_point)
        self._accuracy = _LineReader(run_dir / ACCURACY, _parse_accuracy)

    def view(self) -> View:
        """Return the status of the run now."""
        notes: list[str] = []
        config = _load_object(self.run_dir / CONFIG, notes)
        view = View("absent", self._clock(), run=str(self.run_dir), notes=notes)
        if config is None:
            return view
        job = config.get("job")
        job = job if isinstance(job, Mapping) else {}
        view.phase = "prepared"
        view.config = {key: config.get(key) for key in CONFIG_KEYS} | {key: job.get(key) for key in JOB_KEYS}
        view.iterations = _count(config.get("iterations"))
        view.summary = _load_object(self.run_dir / SUMMARY, notes)
        servers, wanted = [], max(1, _count(config.get("servers")))
        if wanted > MAX_SERVERS:
            notes.append(f"{CONFIG} names {wanted} servers: only {MAX_SERVERS} are shown")
        for number in range(min(wanted, MAX_SERVERS)):
            try:
                status = load_status(self.run_dir / server_file(STATUS, number))
                servers += [] if status is None else [status]
            except FileError as error:
                notes.append(str(error))
        if servers:
            self._add_servers(view, servers)
        return view

    def _add_servers(self, view: View, servers: list[Status]) -> None:
        first = servers[0]
        view.phase, view.silent_s = _phase(servers, view.at)
        view.workers = first.workers
        started = [worker for worker in first.workers if worker.lives]
        view.iteration = min(server.iteration for server in servers)
        losses = [worker.loss for worker in started if worker.loss is not None]
        view.loss = mean_loss(losses)
        view.elapsed_s = max(0.0, max(server.at for server in servers) - min(server.began_at for server in servers))
        view.received, view.sent = sum(server.received for server in servers), sum(server.sent for server in servers)
        exchanged = sum(worker.bytes_sent + worker.bytes_received for worker in started)
        view.raw = sum(worker.bytes_raw for worker in started)
        view.saved = max(0, view.raw - exchanged)
        view.version, view.checkpoint = first.version, first.checkpoint
        view.missed = max((worker.missed for worker in started), default=0)
        view.missed_most = max((worker.missed_most for worker in started), default=0)
        applied = sum(worker.applied for worker in started)
        view.missed_mean = sum(worker.missed_sum for worker in started) / applied if applied else 0.0
        view.server_lives = max(server.lives for server in servers)
        view.failure = next((server.failure for server in servers if server.failure), None)
        view.seconds = {part: sum(worker.seconds[part] for worker in started) for part in PARTS}
        for server in servers:
            for kind, count in server.faults.items():
                view.faults[kind] = view.faults.get(kind, 0) + count
        recent = [fault for server in servers for fault in server.recent]
        view.recent = sorted(recent, key=lambda fault: fault["at"])[-50:]
        view.points, view.accuracies = self._progress.read(), self._accuracy.read()
        if view.phase == "running":
            view.bytes_per_s, view.left_s = _speed(view)


def _phase(servers: list[Status], now: float) -> tuple[str, float]:
    """Return the phase of all servers together, and the seconds since the last write of those that serve."""
    silent = max(0.0, now - min(server.at for server in servers))
    phases = {server.phase for server in servers}
    if "failed" in phases:
        return "failed", silent
    if phases == {"ended"}:
        return "ended", silent
    if "serving" in phases:
        silent = max(0.0, now - min(server.at for server in servers if server.phase == "serving"))
        return ("silent" if silent > SILENT_AFTER else "running"), silent
    return "stopped", silent


def _speed(view: View) -> tuple[float | None, float | None]:
    """Return the current bytes per second, and the estimated seconds until the end."""
    if not view.points:
        return None, None
    last = view.points[-1]
    first = next((point for point in reversed(view.points) if point["at"] <= last["at"] - RATE_WINDOW), view.points[0])
    seconds = last["at"] - first["at"]
    if seconds <= 0:
        return None, None
    bytes_per_s = max(0.0, (last["received"] + last["sent"] - first["received"] - first["sent"]) / seconds)
    iterations_per_s = (last["iteration"] - first["iteration"]) / seconds
    left_s = (view.iterations - view.iteration) / iterations_per_s if iterations_per_s > 0 else None
    return bytes_per_s, left_s


_POINT = {"at": float, "version": int, "iteration": int, "received": int, "sent": int, "missed": int, "faults": int}


LINES_NBYTES = 1 << 22
"""The most bytes of lines that are read at once; the next view reads on."""


class _LineReader:
    """Reads the points of a file of lines that grows."""

    def __init__(self, path: Path, parse: Callable[[bytes], dict[str, Any] | None]) -> None:
        self._path, self._parse = path, parse
        self._offset = 0
        self._series = ThinnedSeries[dict[str, Any]](MAX_POINTS)

    def read(self) -> list[dict[str, Any]]:
        try:
            with open_regular(self._path) as file:
                if self._path.stat().st_size < self._offset:  # another file: a new run in the same folder
                    self._offset, self._series = 0, ThinnedSeries(MAX_POINTS)
                file.seek(self._offset)
                new = file.read(LINES_NBYTES)
        except OSError:
            return self._series.points
        complete = new.rfind(b"\n") + 1  # a line that is being written is read next time
        self._offset += complete if complete or len(new) < LINES_NBYTES else len(new)  # so long a line is none of ours
        for line in new[:complete].splitlines():
            point = self._parse(line)
            if point is not None:
                self._series.add(point)
        return self._series.points


def _parse_point(line: bytes) -> dict[str, Any] | None:
    """Return a point, or None if the line is damaged or something else."""
    try:
        values = parse_json(line.decode())
        point: dict[str, Any] = {key: kind(values[key]) for key, kind in _POINT.items()}
        point["loss"] = finite_or_none(values["loss"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
    return point if all(abs(point[key]) < LARGEST for key in _POINT) else None


def _parse_accuracy(line: bytes) -> dict[str, Any] | None:
    """Return a point of ``accuracy.jsonl``, or None if the line is damaged or something else."""
    try:
        values = parse_json(line.decode())
        at, accuracy = float(values["at"]), float(values["accuracy"])
        iteration, examples = _count(values["iteration"]), _count(values["examples"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
    if not 0 <= accuracy <= 100 or not abs(at) < LARGEST or not examples:
        return None
    return {"at": at, "iteration": iteration, "accuracy": accuracy, "examples": examples}


def _load_object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """Read a JSON object; None and a note if there is none."""
    try:
        values = _without_nonfinite(read_json(path, long_as_none=True))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FileError as error:
        notes.append(str(error))
        return None
    if not isinstance(values, dict):
        notes.append(f"{path} does not hold an object")
        return None
    return values


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else 0


def _without_nonfinite(value: Any) -> Any:
    """Replace numbers that are not finite by None: JSON has none, and a page could not be sent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    return [_without_nonfinite(item) for item in value] if isinstance(value, list) else value
