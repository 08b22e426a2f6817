"""Keeps a server's status up to date from its events and from its workers' reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from laconic.watch.status import LARGEST, PARTS, Status, WorkerStatus, finite_or_none

__all__ = ["FAULTS", "StatusTracker"]

RECENT_FAULTS = 50
"""Number of recent faults that a status lists."""

FAULTS: Mapping[str, str] = {
    "lost": "the connection of worker {worker} broke",
    "spoilt": "worker {worker} pushed values that are not finite at exchange {sequence}",
    "late": "worker {worker} came too late for exchange {sequence}",
    "duplicate": "worker {worker} pushed exchange {sequence} again",
    "gather": "all workers must rejoin: {why}",
    "rewound": "all workers went back from exchange {was} to {version}",
    "memory_lost": "worker {worker} continues at exchange {version} without its residuals",
    "checkpoint_failed": "the checkpoint of exchange {version} could not be saved",
    "deposit_differs": "worker {worker} holds other weights of exchange {version} than the server",
    "diverged": "the weights overflowed at exchange {version}",
    "restarted": "worker {worker} was restarted",
    "resumed": "the server was restarted at exchange {version}",
}
"""Events that are faults, and their text in a status."""

_REPORTED_COUNTS = ("bytes_sent", "bytes_received", "bytes_raw", "retries")


class StatusTracker:
    """Status of one server. All methods may be called from any thread.

    Args:
        previous: Last status of an earlier start of this server; counts continue from there.

    >>> tracker = StatusTracker(1, 10, 10, clock=lambda: 5.0)
    >>> tracker.record_event({"event": "welcome", "worker": 0, "incarnation": 1})
    >>> tracker.record_report(0, 1, {"iteration": 3, "loss": 0.5, "bytes_sent": 100})
    >>> tracker.record_event({"event": "lost", "worker": 0, "incarnation": 1})
    >>> status = tracker.status()
    >>> status.workers[0].loss, status.workers[0].state, status.faults
    (0.5, 'lost', {'lost': 1})
    """

    def __init__(
        self, workers: int, updates: int, iterations: int, previous: Status | None = None, *,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._lock = threading.Lock()
        self._incarnations = [-1] * workers
        expected = [WorkerStatus() for _ in range(workers)]
        self._status = Status(began_at=clock(), updates=updates, iterations=iterations, workers=expected)
        if previous is not None and len(previous.workers) == workers:
            self._status = previous.copy()
            self._status.lives += 1
            self._status.phase, self._status.failure = "serving", None
            self._status.updates, self._status.iterations = updates, iterations
            for worker in self._status.workers:
                worker.state = "expected" if worker.state == "expected" else "lost"
        self._before_restart = self._status.copy().workers
        """Counts of each worker when its current process started: a process reports its own counts only."""
        self._traffic_before_restart = self._status.received, self._status.sent

    def record_event(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            kind, status = event["event"], self._status
            if kind in ("applied", "agreed", "rewound", "resumed"):  # others have a worker's or an old version
                status.version = event["version"]
            if kind == "checkpoint":
                status.checkpoint = event["version"]
            elif kind == "gather":
                self._replace_states(("computing", "waiting"), "joining")
            elif kind == "agreed":
                self._replace_states(("joining",), "computing")
            if kind in FAULTS:
                self._record_fault(kind, event)
            if isinstance(event.get("worker"), int):
                self._record_worker_event(kind, event["worker"], event)

    def _replace_states(self, old: tuple[str, ...], new: str) -> None:
        for worker in self._status.workers:
            if worker.state in old:
                worker.state = new

    def _record_worker_event(self, kind: str, number: int, event: Mapping[str, Any]) -> None:
        worker = self._status.workers[number]
        worker.heard_at = self._clock()
        if kind == "welcome":
            if event["incarnation"] != self._incarnations[number]:
                self._incarnations[number] = event["incarnation"]
                worker.lives += 1
                self._before_restart[number] = replace(worker, seconds=dict(worker.seconds))
                if worker.lives > 1:
                    self._record_fault("restarted", event)
            worker.state = "joining"
        elif kind in ("join", "pull"):
            worker.state = "computing"
        elif kind == "push":
            worker.state = "waiting"
        elif kind == "applied":
            worker.state = "computing"
            worker.applied += 1
            worker.missed = event.get("missed", 0)
            worker.missed_most = max(worker.missed_most, worker.missed)
            worker.missed_sum += worker.missed
        elif kind == "lost":
            worker.state = "lost"
        elif kind == "leave":
            worker.state = "done" if self._status.version >= self._status.updates else "gone"

    def _record_fault(self, kind: str, event: Mapping[str, Any]) -> None:
        self._status.faults[kind] = self._status.faults.get(kind, 0) + 1
        self._status.recent.append({"at": self._clock(), "what": FAULTS[kind].format_map(event)})
        del self._status.recent[:-RECENT_FAULTS]

    def record_report(self, number: int, incarnation: int, report: Mapping[str, float]) -> None:
        """Take over a worker's report; its counts begin with its current process."""
        with self._lock:
            if not report or incarnation != self._incarnations[number]:
                return
            worker, before = self._status.workers[number], self._before_restart[number]
            worker.heard_at = self._clock()
            worker.iteration = int(report.get("iteration", worker.iteration))
            worker.loss = finite_or_none(report.get("loss"))
            for name in _REPORTED_COUNTS:
                if name in report:
                    setattr(worker, name, min(getattr(before, name) + int(report[name]), LARGEST - 1))
            for part in PARTS:
                if part in report:
                    worker.seconds[part] = min(before.seconds[part] + report[part], LARGEST / 2)

    def status(self, *, received: int = 0, sent: int = 0, phase: str = "serving", failure: str | None = None) -> Status:
        """Return a copy of the current status.

        Args:
            received: Bytes that this server process has received.
            sent: Bytes that it has sent.
            phase: One of ``PHASES``.
            failure: Reason why the server cannot continue.
        """
        with self._lock:
            status = self._status
            status.at, status.phase, status.failure = self._clock(), phase, failure
            if phase == "ended":  # in async mode a worker that finds no work leaves before the last update
                self._replace_states(("gone",), "done")
            status.received = self._traffic_before_restart[0] + received
            status.sent = self._traffic_before_restart[1] + sent
            return status.copy()
