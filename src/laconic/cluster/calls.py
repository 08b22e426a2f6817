"""The calls in progress on a server: how many a worker may have, how long each of their steps may take.

A call occupies a thread from its first byte to its last. So that no peer can occupy all of them, calls that have not
named their worker are limited in number and time, each worker has a few calls at most, and every wait for a peer, to
receive a message or to send one, has a deadline. A worker's new call ends its earlier one of the same kind: the earlier
one was interrupted without the server's notice, or is a duplicate.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from laconic import counters
from laconic.cluster.replies import RefusedError

__all__ = ["CALLS_PER_WORKER", "Call", "Calls", "max_unnamed_calls"]

FIRST_MESSAGE_TIMEOUT = 5.0
"""Seconds within which a call must name its worker: until then it occupies a thread for an unknown peer."""
MESSAGE_TIMEOUT = 60.0
"""Seconds within which a peer must send a message that it has, or take one: for 2 MiB on a link of 35 kB/s."""
COMPUTE_TIMEOUT = 600.0
"""Seconds between two messages of a push, whose gradients a worker may still be computing."""
CALLS_PER_WORKER = 3
"""A worker has one call in progress, or two after a fault."""
REPEATS, REPEATS_PER_SECOND = 20, 5.0
"""Calls that a worker makes after a fault only: so many at once, then so many a second. Further ones wait."""
LONGEST_PACE = 2.0
"""Seconds that such a call waits at most. A worker's next call ends it before, so that few of them get through."""
COSTLY_SHARE, COSTLY_SECONDS = 0.1, 1.0
"""Share of a processor that one worker's snapshots and repeated pushes may take, and the seconds of it at once."""
LONGEST_COSTLY_PACE = 30.0
"""Seconds that such a call waits at most for the time that earlier ones took."""
END_DELAY = 1.0
"""Seconds after which a superseded call is cancelled; until then it may get an answer that says why it ends."""


def max_unnamed_calls(workers: int) -> int:
    """Return how many calls may be without a named worker; a call names its worker in its first message."""
    return 64 + 2 * workers


class Call:
    """One call. Its methods are called by the thread that handles it, ``overdue`` by the one that watches it."""

    def __init__(self, name: str, context: grpc.ServicerContext) -> None:
        self.name, self.context = name, context
        self.worker: int | None = None
        self.incarnation = self.sequence = -1
        self.superseded = False
        """Whether the server ends this call because of a newer one."""
        self._receive_until = time.monotonic() + FIRST_MESSAGE_TIMEOUT
        self._send_until = self._end_at = math.inf

    def first(self, messages: Iterator[bytes]) -> bytes:
        """Return the first message, which names the worker; empty if there is none."""
        message = next(messages, b"")
        self._receive_until = time.monotonic() + MESSAGE_TIMEOUT  # until it is admitted
        return message

    def receive(self, messages: Iterator[bytes], timeout: float) -> Iterator[bytes]:
        """Yield the messages of a peer, each of which must arrive within the timeout."""
        while True:
            self._receive_until = time.monotonic() + timeout
            try:
                message = next(messages, None)
            finally:
                self._receive_until = math.inf  # what follows is the server's own time
            if message is None:
                return
            yield message

    def send(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Yield messages to gRPC, each of which the peer must take in time."""
        for message in messages:
            self._send_until = time.monotonic() + MESSAGE_TIMEOUT
            yield message
            self._send_until = math.inf

    def pause(self, seconds: float) -> None:
        """Wait, or until the call ends."""
        ended = threading.Event()
        if self.context.add_callback(ended.set):
            self._receive_until = math.inf
            ended.wait(seconds)
        if not self.context.is_active():
            raise RefusedError("gone", "the worker has disconnected")

    def admitted(self) -> None:
        self._receive_until = math.inf

    def supersede(self, delay: float) -> None:
        """End this call soon, because a newer one takes its place."""
        self.superseded = True
        self._end_at = min(self._end_at, time.monotonic() + delay)
        if delay <= 0:
            self.context.cancel()

    def overdue(self, now: float) -> bool:
        return min(self._receive_until, self._send_until, self._end_at) < now


class Calls:
    """All calls in progress.

    Args:
        workers: Number of workers of the job.
    """

    def __init__(self, workers: int) -> None:
        self._max_unnamed = max_unnamed_calls(workers)
        self._unnamed: dict[Call, None] = {}
        """In the order of their arrival."""
        self._named: dict[int, list[Call]] = {worker: [] for worker in range(workers)}
        self._repeats = {worker: (float(REPEATS), 0.0) for worker in range(workers)}
        """How many more repeated calls a worker may make now, and when that was counted."""
        self._seen: dict[tuple[int, str], int] = {}
        """The version at which each worker last made a paced call of each kind."""
        self._paid_at = dict.fromkeys(range(workers), 0.0)
        """When the processor time of each worker's costly calls will be within its share."""
        self._lock = threading.Lock()

    @contextmanager
    def open(self, name: str, context: grpc.ServicerContext) -> Iterator[Call]:
        """Keep a call while it lasts. If there are too many without a worker, the oldest of them is cancelled."""
        call = Call(name, context)
        with self._lock:
            self._unnamed[call] = None
            evicted = next(iter(self._unnamed)) if len(self._unnamed) > self._max_unnamed else None
            if evicted is not None:
                del self._unnamed[evicted]
        if evicted is not None:
            counters.count("unnamed calls", 1, "too many calls do not name their worker: the oldest are cancelled")
            evicted.supersede(0)
        try:
            yield call
        finally:
            with self._lock:
                self._unnamed.pop(call, None)
                if call.worker is not None:
                    self._named[call.worker].remove(call)

    def admit(self, call: Call, worker: int, incarnation: int, sequence: int = -1) -> None:
        """Make this a call of a worker, which may have few, and end those that it replaces.

        Args:
            sequence: The number of an exchange: a late duplicate of an earlier one replaces nothing.
        """
        call.worker, call.incarnation, call.sequence = worker, incarnation, sequence
        call.admitted()
        with self._lock:
            self._unnamed.pop(call, None)
            others = [other for other in self._named[worker] if not other.superseded]
            self._named[worker].append(call)
            replaced = [
                other
                for other in others
                if other.incarnation < incarnation or (other.name == call.name and other.sequence <= sequence)
            ]
            excess = len(self._named[worker]) - CALLS_PER_WORKER
            # Calls that end soon anyway go first, then the oldest.
            candidates = sorted(self._named[worker][:-1], key=lambda other: not (other.superseded or other in replaced))
        for other in replaced:
            other.supersede(END_DELAY)
        for other in candidates[: max(0, excess)]:
            counters.count(
                "calls of a worker", 1, f"a worker has more than {CALLS_PER_WORKER} calls in progress: the oldest end"
            )
            other.supersede(0)

    def pace(self, call: Call, worker: int, cost: float = 1.0, version: int | None = None) -> None:
        """Count a call that costs the server work without a push; one too many waits.

        Otherwise a worker that asks for the weights again and again would keep the server from the others' pushes.

        Args:
            cost: As how many calls it counts.
            version: Of the weights. The first call at a newer one is free: a slow worker, without which the others end
                their exchanges, must catch up after each of them.
        """
        if worker not in self._repeats:
            return  # refused later, with a message
        if version is not None:
            with self._lock:
                newer = version > self._seen.get((worker, call.name), -1)
                self._seen[worker, call.name] = version
            cost = 0.0 if newer else cost
        left = self.charge(worker, cost)
        if left < 0:
            counters.count(
                "paced calls", 1, f"worker {worker} repeats calls more often than {REPEATS_PER_SECOND:g} times a second"
            )
            call.pause(min(LONGEST_PACE, -left / REPEATS_PER_SECOND))

    def charge(self, worker: int, cost: float = 1.0) -> float:
        """Count a call without a wait; return how many more the worker may make now."""
        with self._lock:
            left, at = self._repeats[worker]
            now = time.monotonic()
            left = min(float(REPEATS), left + (now - at) * REPEATS_PER_SECOND) - cost
            self._repeats[worker] = max(left, -LONGEST_PACE * REPEATS_PER_SECOND), now
        return left

    @contextmanager
    def costly(self, call: Call, worker: int, version: int | None = None) -> Iterator[None]:
        """Pace a call for which the server may encode a whole model: also by the processor time that earlier ones took.

        The time within this context is counted, without that in which it waits.
        """
        self.pace(call, worker, version=version)
        with self._lock:
            ahead = self._paid_at[worker] - time.monotonic() - COSTLY_SECONDS / COSTLY_SHARE
        if ahead > 0:
            counters.count(
                "paced calls", 1, f"worker {worker} takes more than {COSTLY_SHARE:.0%} of a processor by snapshots "
                "and repeated pushes"
            )  # fmt: skip
            call.pause(min(LONGEST_COSTLY_PACE, ahead))
        began = time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - began
            with self._lock:
                self._paid_at[worker] = max(self._paid_at[worker], time.monotonic()) + spent / COSTLY_SHARE

    def in_progress(self) -> list[Call]:
        with self._lock:
            return [*self._unnamed, *(call for calls in self._named.values() for call in calls)]

    def cancel_overdue(self) -> None:
        now = time.monotonic()
        for call in self.in_progress():
            if call.overdue(now):
                call.context.cancel()

    def __len__(self) -> int:
        return len(self._unnamed) + sum(map(len, self._named.values()))
