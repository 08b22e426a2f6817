"""What a server hears and does, kept as counts: events in, a status out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from laconic.watch.status import PARTS, Status, WorkerStatus

__all__ = ["Board"]

KEPT = 50
"""How many of the last faults are kept."""

FAULTS: Mapping[str, str] = {
    "lost": "the connection of worker {worker} broke",
    "spoilt": "worker {worker} pushed what is not finite at exchange {sequence}",
    "late": "worker {worker} came too late for exchange {sequence}",
    "duplicate": "worker {worker} pushed exchange {sequence} again",
    "gather": "all agree where to go on: {why}",
    "rewound": "all went back from exchange {was} to {version}",
    "memory_lost": "worker {worker} goes on at exchange {version} with an empty memory",
    "checkpoint_failed": "the checkpoint of exchange {version} could not be saved",
    "diverged": "the weights overflowed at exchange {version}",
    "restarted": "worker {worker} was started again",
    "resumed": "the server was started again at exchange {version}",
}
"""Events that nobody asked for, and how they are told."""

_TOLD_COUNTS = ("bytes_sent", "bytes_received", "bytes_raw", "retries")


class Board:
    """Of one server. May be told things by many threads.

    Args:
        workers: How many there are.
        updates: How many the run has.
        iterations: How many iterations these are.
        before: What was known when an earlier server of the run ended: counts go on from there.
        clock: Tells the time.

    >>> board = Board(1, 10, 10, clock=lambda: 5.0)
    >>> board({"event": "welcome", "worker": 0, "incarnation": 1})
    >>> board.heard(0, 1, {"iteration": 3, "loss": 0.5, "bytes_sent": 100})
    >>> board({"event": "lost", "worker": 0, "incarnation": 1})
    >>> found = board.status()
    >>> found.workers[0].loss, found.workers[0].state, found.faults
    (0.5, 'lost', {'lost': 1})
    """

    def __init__(
        self,
        workers: int,
        updates: int,
        iterations: int,
        before: Status | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._incarnations = [-1] * workers
        seats = [WorkerStatus() for _ in range(workers)]
        self._now = Status(began_at=clock(), updates=updates, iterations=iterations, workers=seats)
        if before is not None and len(before.workers) == workers:
            self._now = before.copy()
            self._now.lives += 1
            self._now.phase, self._now.failure = "serving", None
            self._now.updates, self._now.iterations = updates, iterations
            for worker in self._now.workers:
                worker.state = "expected" if worker.state == "expected" else "lost"
        self._earlier = self._now.copy().workers
        """What workers' earlier lives have done."""
        self._traffic_before = self._now.received, self._now.sent

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Something has happened; see ``Core``."""
        with self._lock:
            kind, now = event["event"], self._now
            if kind in ("applied", "agreed", "rewound", "resumed"):  # others tell versions of workers, or older ones
                now.version = event["version"]
            if kind == "checkpoint":
                now.checkpoint = event["version"]
            elif kind == "gather":
                for worker in now.workers:
                    if worker.state in ("computing", "waiting"):
                        worker.state = "joining"
            elif kind == "agreed":
                for worker in now.workers:
                    if worker.state == "joining":
                        worker.state = "computing"
            if kind in FAULTS:
                self._fault(kind, event)
            if isinstance(event.get("worker"), int):
                self._of_worker(kind, event["worker"], event)

    def _of_worker(self, kind: str, number: int, event: Mapping[str, Any]) -> None:
        worker = self._now.workers[number]
        worker.heard_at = self._clock()
        if kind == "welcome":
            if event["incarnation"] != self._incarnations[number]:
                self._incarnations[number] = event["incarnation"]
                worker.lives += 1
                self._earlier[number] = replace(worker, seconds=dict(worker.seconds))
                if worker.lives > 1:
                    self._fault("restarted", event)
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
            worker.state = "done" if self._now.version >= self._now.updates else "gone"

    def _fault(self, kind: str, event: Mapping[str, Any]) -> None:
        self._now.faults[kind] = self._now.faults.get(kind, 0) + 1
        self._now.recent.append({"at": self._clock(), "what": FAULTS[kind].format_map(event)})
        del self._now.recent[:-KEPT]

    def heard(self, number: int, incarnation: int, told: Mapping[str, float]) -> None:
        """A worker has told how far it is, since this life of it began."""
        with self._lock:
            if not told or incarnation != self._incarnations[number]:
                return
            worker, earlier = self._now.workers[number], self._earlier[number]
            worker.heard_at = self._clock()
            worker.iteration = int(told.get("iteration", worker.iteration))
            worker.loss = told.get("loss")
            for name in _TOLD_COUNTS:
                if name in told:
                    setattr(worker, name, getattr(earlier, name) + int(told[name]))
            for part in PARTS:
                if part in told:
                    worker.seconds[part] = earlier.seconds[part] + told[part]

    def status(self, *, received: int = 0, sent: int = 0, phase: str = "serving", failure: str | None = None) -> Status:
        """As it is now.

        Args:
            received: Bytes that this server has received.
            sent: Bytes that it has sent.
            phase: One of ``PHASES``.
            failure: Why it cannot go on.
        """
        with self._lock:
            now = self._now
            now.at, now.phase, now.failure = self._clock(), phase, failure
            if phase == "ended":  # without rounds who finds no work left goes before the others are done
                for worker in now.workers:
                    worker.state = "done" if worker.state == "gone" else worker.state
            now.received, now.sent = self._traffic_before[0] + received, self._traffic_before[1] + sent
            return now.copy()
