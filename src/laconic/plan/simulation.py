"""Event simulation of a parameter server and workers of different speed, vectorized over the workers.

An iteration takes ``step_s`` times the worker's slowness times (1 + jitter E), where E is exponential with mean 1, and
now and then ``straggle`` times as long. All messages pass the server's one link, one after the other, in the order in
which they start to arrive; so do the replies. In mode ``sync`` a round ends when all but ``backup`` messages have
arrived; in ``async`` a message is applied on arrival; in ``bounded:S`` parameters are handed out only if no gradient
can then miss more than S updates, by the rule of laconic's server.

Without rounds events are processed in batches: no worker that is served now can be back before the first of the batch
was served and has computed, so everything that arrives until then can be sorted and queued at once. That is exact, and
10^5 workers x 1,000 rounds take seconds. With a bound far below the number of workers few messages are under way at
once, and batches are small: ``sampled_rounds`` simulates some rounds and extends them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from laconic.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

__all__ = ["SimulationResult", "Workers", "simulate"]


@dataclass(frozen=True)
class Workers:
    """Workers, their links, and the messages that they exchange.

    Args:
        step_s: Seconds of the computation before an exchange, of a worker of slowness 1.
        push: Bytes that a worker sends.
        pull: Bytes that it receives.
        server_bytes_s: Payload bytes per second of the server's link, each way.
        worker_bytes_s: Payload bytes per second of a worker's link; the server's by default.
        apply_s: Seconds that the server needs for one message.
        spread: Standard deviation of the logarithm of the workers' slowness.
        link_spread: Standard deviation of the logarithm of their links' rates.
        jitter: Mean additional time of an iteration, as a share of its shortest time.
        straggle: How many times as long a straggling iteration takes.
        backup: Workers that a synchronous round does not wait for.
        mode: ``sync``, ``async`` or ``bounded:S``.
    """

    count: int
    step_s: float
    push: float = 0.0
    pull: float = 0.0
    server_bytes_s: float = math.inf
    worker_bytes_s: float | None = None
    apply_s: float = 0.0
    spread: float = 0.0
    link_spread: float = 0.0
    jitter: float = 0.0
    straggle: float = 1.0
    straggle_share: float = 0.0
    backup: int = 0
    mode: str = "sync"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise ConfigError(f"count must be a whole number of at least 1, got {self.count!r}")
        if not 0 <= self.backup < self.count:
            raise ConfigError(f"backup must be at least 0 and below count ({self.count}), got {self.backup}")
        if not 0 < self.step_s < math.inf:
            raise ConfigError(f"step_s must be finite and above 0, got {self.step_s}")
        for name in ("push", "pull", "apply_s", "spread", "link_spread", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be finite and at least 0, got {getattr(self, name)}")
        if not 1 <= self.straggle < math.inf or not 0 <= self.straggle_share <= 1:
            raise ConfigError(
                "straggle must be finite and at least 1, and straggle_share from 0 to 1, got "
                f"{self.straggle} and {self.straggle_share}"
            )
        if self.backup and self.mode != "sync":
            raise ConfigError(f"backup must be 0 unless the mode is sync, got {self.backup} with {self.mode!r}")
        if not self.server_bytes_s > 0 or not (self.worker_bytes_s is None or self.worker_bytes_s > 0):
            raise ConfigError("server_bytes_s and worker_bytes_s must be above 0")
        self.bound  # noqa: B018 - rejects an unknown mode

    @property
    def bound(self) -> int | None:
        """Updates that a gradient may miss; None without a limit, and in synchronous rounds."""
        name, _, steps = self.mode.partition(":")
        if name == "bounded" and steps.isdecimal() and int(steps) >= 1:
            return int(steps)
        if self.mode not in ("sync", "async"):
            raise ConfigError(f"mode must be sync, async or bounded:S with S of at least 1, got {self.mode!r}")
        return None


@dataclass(frozen=True)
class SimulationResult:
    """Times and staleness of a simulated training.

    Attributes:
        updates: Messages that were applied.
        seconds: Time of the last of them.
        computing: Mean share of their time that workers compute; the rest they wait.
        staleness_mean: Mean number of updates that a gradient missed.
        staleness_max: Largest number of updates that a gradient missed.
        workers: Number of workers.
        sampled: Updates that were simulated, if not all.
    """

    updates: int
    seconds: float
    computing: float
    staleness_mean: float
    staleness_max: int
    workers: int
    sampled: int | None = None

    @property
    def round_s(self) -> float:
        """Seconds in which as many messages are applied as there are workers."""
        return self.seconds / self.updates * self.workers


def simulate(workers: Workers, rounds: int, *, sampled_rounds: int | None = None) -> SimulationResult:
    """Simulate so many rounds, or as many updates as they would have.

    Args:
        sampled_rounds: Simulate only so many rounds and extend their times to all. A training is much the same after
            a few rounds; with a bound far below the number of workers all rounds would take many minutes.

    >>> simulate(Workers(4, 1.0, push=10, pull=10, server_bytes_s=20), rounds=3).round_s
    5.0
    """
    import numpy as np

    if rounds < 1 or not (sampled_rounds is None or sampled_rounds >= 1):
        raise ConfigError(f"rounds must be at least 1, got {rounds} and {sampled_rounds} sampled ones")
    if sampled_rounds is not None and sampled_rounds < rounds:
        return _extended(simulate(workers, sampled_rounds), rounds / sampled_rounds)
    rng = np.random.default_rng(workers.seed)
    shortest = workers.step_s * rng.lognormal(0.0, workers.spread, workers.count)
    rates = (workers.worker_bytes_s or workers.server_bytes_s) * rng.lognormal(0.0, workers.link_spread, workers.count)
    push = max(workers.push / workers.server_bytes_s, workers.apply_s)
    pull = workers.pull / workers.server_bytes_s
    # Seconds of a message on a worker's own link beyond its turn on the server's.
    up, down = np.maximum(0.0, workers.push / rates - push), np.maximum(0.0, workers.pull / rates - pull)
    times = _Times(workers, rng, shortest, push, pull, up, down)
    return _synchronous(workers, times, rounds) if workers.mode == "sync" else _asynchronous(workers, times, rounds)


def _extended(sampled: SimulationResult, factor: float) -> SimulationResult:
    """Return the result of ``factor`` times as many rounds that are like the sampled ones."""
    return replace(
        sampled, updates=round(sampled.updates * factor), seconds=sampled.seconds * factor, sampled=sampled.updates
    )


@dataclass
class _Times:
    """Seconds of computation and of each part of an exchange, by worker."""

    workers: Workers
    rng: np.random.Generator
    shortest: Floats
    push: float
    pull: float
    up: Floats
    down: Floats

    def compute(self, selected: Any) -> Floats:
        """Return the seconds of one iteration of the selected workers."""
        import numpy as np

        workers = self.workers
        seconds: Floats = self.shortest[selected]
        if workers.jitter:
            seconds = seconds * (1 + workers.jitter * self.rng.standard_exponential(len(seconds)))
        if workers.straggle_share:
            straggles = self.rng.random(len(seconds)) < workers.straggle_share
            seconds = seconds * np.where(straggles, workers.straggle, 1.0)
        return seconds


def _queued(arrivals: Floats, service: float, free: float) -> Floats:
    """Return when each arrival, in order, has been served: f[k] = max(arrival[k], f[k-1]) + service."""
    import numpy as np

    if not service:
        return np.maximum.accumulate(np.maximum(arrivals, free))
    offsets = service * np.arange(len(arrivals))
    served: Floats = np.maximum.accumulate(np.maximum(arrivals, free) - offsets) + offsets + service
    return served


def _synchronous(workers: Workers, times: _Times, rounds: int) -> SimulationResult:
    import numpy as np

    counted = workers.count - workers.backup
    replies = workers.count * times.pull + float(times.down.max())
    now = busy = 0.0
    for _ in range(rounds):
        computing = times.compute(slice(None))
        summed = float(_queued(np.sort(computing + times.up), times.push, 0.0)[counted - 1])
        busy += float(np.minimum(computing, summed).mean())
        now += summed + replies
    return SimulationResult(counted * rounds, now, busy / now, 0.0, 0, workers.count)


def _asynchronous(workers: Workers, times: _Times, rounds: int) -> SimulationResult:
    import numpy as np

    wanted = workers.count * rounds
    shortest = float((times.shortest + times.up + times.down).min()) + times.pull
    gate, waiting = _StalenessGate(workers.bound), _WaitingWorkers(workers.count)
    versions = np.zeros(workers.count, dtype=np.int64)
    arrives, sender = np.zeros(0), np.zeros(0, dtype=np.int64)  # messages under way
    applied = missed = most = 0
    up_free = down_free = busy = 0.0
    served, served_from = np.zeros(0), 0
    while applied < wanted:
        allowed = gate.open(waiting.since)
        current = served_from + np.searchsorted(served, allowed, side="right")
        count = gate.hand_out(current)
        if count:
            started = waiting.pop(count)
            pulled = _queued(allowed[:count], times.pull, down_free)
            down_free = float(pulled[-1])
            seconds = times.compute(started)
            versions[started] = current[:count]
            arrives = np.concatenate([arrives, pulled + times.down[started] + seconds + times.up[started]])
            sender = np.concatenate([sender, started])
            busy += float(seconds.sum())
        # A worker that is served in this batch is back at the earliest when the first was served, or the queue of
        # replies has ended, and it has computed.
        horizon = max(max(float(arrives.min()), up_free) + times.push, down_free) + shortest
        batch = arrives < horizon
        order = np.argsort(arrives[batch])[: wanted - applied]
        pushed = sender[batch][order]
        served, served_from = _queued(arrives[batch][order], times.push, up_free), applied
        arrives, sender = arrives[~batch], sender[~batch]
        up_free = float(served[-1])
        stale = applied + np.arange(len(pushed)) - versions[pushed]
        missed += int(stale.sum())
        most = max(most, int(stale.max()))
        gate.applied(versions[pushed], served)
        applied += len(pushed)
        waiting.put(pushed, served)
    computing = min(1.0, busy / (up_free * workers.count))
    return SimulationResult(applied, up_free, computing, missed / applied, most, workers.count)


class _WaitingWorkers:
    """Workers that wait for parameters, in the order of their requests; at first all of them."""

    def __init__(self, workers: int) -> None:
        import numpy as np

        self._numbers, self._since = np.arange(2 * workers), np.zeros(2 * workers)
        self._first, self._end = 0, workers

    @property
    def since(self) -> Floats:
        """Times of the requests."""
        return self._since[self._first : self._end]

    def pop(self, count: int) -> Any:
        self._first += count
        return self._numbers[self._first - count : self._first].copy()

    def put(self, numbers: Any, since: Floats) -> None:
        if self._end + len(numbers) > len(self._numbers):
            for array in (self._numbers, self._since):
                array[: self._end - self._first] = array[self._first : self._end].copy()
            self._first, self._end = 0, self._end - self._first
        self._numbers[self._end : self._end + len(numbers)] = numbers
        self._since[self._end : self._end + len(numbers)] = since
        self._end += len(numbers)


class _StalenessGate:
    """Decides when parameters are handed out: the H-th time when all gradients of versions below H - S - 1 are applied.

    Everything that was handed out is applied or under way. If parameters were handed out H times, a gradient computed
    on version v misses at most H - 1 - v updates. Versions only grow, so their state is kept in arrays by version; the
    first entry is that of version ``_base``.
    """

    def __init__(self, bound: int | None) -> None:
        import numpy as np

        self._bound, self._given, self._under_way = bound, 0, 0
        self._base = self._oldest = self._top = (
            0  # versions below _oldest are applied; none of _top or above was handed out
        )
        self._out: Any = np.zeros(1 << 16, dtype=np.int64)  # gradients under way, by version
        self._last: Any = np.zeros(1 << 16)  # when the last gradient of a version was applied
        self._settled: Any = np.zeros(1 << 16)  # when all below a version were applied; up to _oldest

    def open(self, since: Floats) -> Floats:
        """Return when waiting workers may start, in order: of all of them, or of the first few."""
        import numpy as np

        if self._bound is None:
            return since
        first = self._given - self._bound  # the first waits for all versions below, the next for one more
        count = min(len(since), self._bound + 1)  # as many as can be under way at once
        if self._under_way:
            count = max(0, min(count, self._oldest - first + 1))
        needed = np.clip(np.arange(first, first + count), self._base, self._oldest) - self._base
        allowed: Floats = np.maximum.accumulate(np.maximum(since[:count], self._settled[needed]))
        return allowed

    def hand_out(self, versions: Any) -> int:
        """Return how many workers start: a later one may have to wait for the first of them."""
        import numpy as np

        if self._bound is None or not len(versions):
            return len(versions)
        count = min(len(versions), max(1, int(versions[0]) - (self._given - self._bound) + 1))
        self._top = int(versions[count - 1]) + 1
        self._grow()
        np.add.at(self._out, versions[:count] - self._base, 1)
        self._given += count
        self._under_way += count
        return count

    def applied(self, versions: Any, when: Floats) -> None:
        """Record that gradients of these versions were applied, one after the other."""
        import numpy as np

        if self._bound is None:
            return
        places = versions - self._base
        np.subtract.at(self._out, places, 1)
        self._last[places] = when  # the last of several gradients of one version stays
        self._under_way -= len(versions)
        begin, end = self._oldest - self._base, self._top - self._base
        if begin == end or self._out[begin]:
            return
        ahead = np.flatnonzero(self._out[begin:end])
        end = begin + int(ahead[0]) if len(ahead) else end
        later = np.maximum.accumulate(self._last[begin:end])
        self._settled[begin + 1 : end + 1] = np.maximum(self._settled[begin], later)
        self._oldest = self._base + end

    def _grow(self) -> None:
        """Make the arrays long enough for versions up to ``_top``, and drop those that are no longer needed."""
        import numpy as np

        if self._top - self._base < len(self._out):
            return
        assert self._bound is not None
        past = max(0, min(self._oldest, self._given - self._bound) - self._base)
        size = max(len(self._out), 2 * (self._top + 1 - self._base - past))
        for name in ("_out", "_last", "_settled"):
            before = getattr(self, name)
            longer = np.zeros(size, dtype=before.dtype)
            longer[: len(before) - past] = before[past:]
            setattr(self, name, longer)
        self._base += past
