"""Workers as they come: an event simulation of a parameter server, vectorized over the workers.

Workers differ: in speed, in their cables, and from iteration to iteration. An iteration takes ``step_s`` times the
worker's slowness times (1 + jitter E), where E is exponential with mean 1, and now and then ``straggle`` times as long.
All messages pass the server's one cable, one after the other, in the order in which they begin to arrive; answers
likewise. In ``sync`` a round ends when all but ``backup`` messages are there; in ``async`` a message is applied when it
has arrived; in ``bounded:S`` parameters are handed out only if nobody's gradient can then miss more than S updates, as
laconic's server does it.

Without rounds events are taken in batches: nobody who is served now can be back before the first of the batch was
served and has computed, so all that arrives until then can be sorted and queued at once. That is exact, and makes
10^5 workers x 1,000 rounds a matter of seconds. (Less so with a bound far below the number of workers: few are then on
their way at once, and batches are small.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from laconic.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

__all__ = ["Crowd", "Simulated", "simulate"]


@dataclass(frozen=True)
class Crowd:
    """Workers, their cables, and what they exchange.

    Args:
        workers: How many.
        step_s: Seconds of an exchange's computation, of a worker of slowness 1.
        push: Bytes that a worker sends.
        pull: Bytes that it gets.
        server_bytes_s: Payload per second of the server's cable, each way.
        worker_bytes_s: The same of a worker's; the server's by default.
        apply_s: Seconds that the server needs for one message.
        spread: Standard deviation of the logarithm of workers' slowness.
        links: The same of the logarithm of their cables' rates.
        jitter: Mean of what an iteration takes longer than its least, as a share of that.
        straggle: How many times as long an iteration takes now and then.
        straggle_share: Of iterations that do.
        backup: Workers that a synchronous round does not wait for.
        mode: ``sync``, ``async`` or ``bounded:S``.
        seed: Of everything random.
    """

    workers: int
    step_s: float
    push: float = 0.0
    pull: float = 0.0
    server_bytes_s: float = math.inf
    worker_bytes_s: float | None = None
    apply_s: float = 0.0
    spread: float = 0.0
    links: float = 0.0
    jitter: float = 0.0
    straggle: float = 1.0
    straggle_share: float = 0.0
    backup: int = 0
    mode: str = "sync"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.workers, int) or isinstance(self.workers, bool) or self.workers < 1:
            raise ConfigError(f"workers must be a whole number, at least 1, got {self.workers!r}")
        if not 0 <= self.backup < self.workers:
            raise ConfigError(f"backup must be from 0 to less than workers ({self.workers}), got {self.backup}")
        if not 0 < self.step_s < math.inf:
            raise ConfigError(f"step_s must be a finite number above 0, got {self.step_s}")
        for name in ("push", "pull", "apply_s", "spread", "links", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a finite number, not below 0, got {getattr(self, name)}")
        if not 1 <= self.straggle < math.inf or not 0 <= self.straggle_share <= 1:
            raise ConfigError("straggle is a finite number, at least 1, and straggle_share from 0 to 1")
        if self.backup and self.mode != "sync":
            raise ConfigError(f"backup workers are for mode sync, got {self.mode!r}")
        if not self.server_bytes_s > 0 or not (self.worker_bytes_s is None or self.worker_bytes_s > 0):
            raise ConfigError("cables must carry more than nothing")
        self.bound  # noqa: B018 - so that a wrong mode is refused at once

    @property
    def bound(self) -> int | None:
        """Updates that a gradient may miss; None: any number, or a synchronous round."""
        name, _, steps = self.mode.partition(":")
        if name == "bounded" and steps.isdecimal() and int(steps) >= 1:
            return int(steps)
        if self.mode not in ("sync", "async"):
            raise ConfigError(f"mode must be sync, async or bounded:S with S of at least 1, got {self.mode!r}")
        return None


@dataclass(frozen=True)
class Simulated:
    """What came of it.

    Attributes:
        updates: Messages that counted.
        seconds: Until the last of them.
        round_s: Seconds in which as many messages are applied as there are workers.
        computing: The share of their time that workers compute, on average; the rest they wait.
        staleness_mean: Updates that a gradient missed.
        staleness_max: The most.
    """

    updates: int
    seconds: float
    computing: float
    staleness_mean: float
    staleness_max: int
    workers: int

    @property
    def round_s(self) -> float:
        return self.seconds / self.updates * self.workers


def simulate(crowd: Crowd, rounds: int) -> Simulated:
    """So many rounds, or as many updates as these would have.

    >>> simulate(Crowd(4, 1.0, push=10, pull=10, server_bytes_s=20), rounds=3).round_s
    5.0
    """
    import numpy as np

    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}")
    rng = np.random.default_rng(crowd.seed)
    least = crowd.step_s * rng.lognormal(0.0, crowd.spread, crowd.workers)
    own = crowd.worker_bytes_s or crowd.server_bytes_s
    rates = own * rng.lognormal(0.0, crowd.links, crowd.workers)
    push = max(crowd.push / crowd.server_bytes_s, crowd.apply_s)
    pull = crowd.pull / crowd.server_bytes_s
    # What a message takes on a worker's own cable beyond its turn on the server's.
    up, down = np.maximum(0.0, crowd.push / rates - push), np.maximum(0.0, crowd.pull / rates - pull)
    times = _Times(crowd, rng, least, push, pull, up, down)
    return _in_rounds(crowd, times, rounds) if crowd.mode == "sync" else _without(crowd, times, rounds)


@dataclass
class _Times:
    crowd: Crowd
    rng: np.random.Generator
    least: Floats
    push: float
    pull: float
    up: Floats
    down: Floats

    def compute(self, who: Any) -> Floats:
        crowd, base = self.crowd, self.least[who]
        found: Floats = base
        if crowd.jitter:
            found = base * (1 + crowd.jitter * self.rng.standard_exponential(len(base)))
        if crowd.straggle_share:
            found = found * _where(self.rng.random(len(base)) < crowd.straggle_share, crowd.straggle)
        return found


def _where(slow: Any, factor: float) -> Any:
    import numpy as np

    return np.where(slow, factor, 1.0)


def _queued(arrivals: Floats, service: float, free: float) -> Floats:
    """When each of these, in order, has been served: f[k] = max(arrival[k], f[k-1]) + service."""
    import numpy as np

    if not service:
        return np.maximum.accumulate(np.maximum(arrivals, free))
    places = service * np.arange(len(arrivals))
    found: Floats = np.maximum.accumulate(np.maximum(arrivals, free) - places) + places + service
    return found


def _in_rounds(crowd: Crowd, times: _Times, rounds: int) -> Simulated:
    import numpy as np

    wanted = crowd.workers - crowd.backup
    answers = crowd.workers * times.pull + float(times.down.max())
    now = busy = 0.0
    for _ in range(rounds):
        computing = times.compute(slice(None))
        summed = float(_queued(np.sort(computing + times.up), times.push, 0.0)[wanted - 1])
        busy += float(np.minimum(computing, summed).mean())
        now += summed + answers
    return Simulated(wanted * rounds, now, busy / now, 0.0, 0, crowd.workers)


def _without(crowd: Crowd, times: _Times, rounds: int) -> Simulated:
    import numpy as np

    workers, wanted = crowd.workers, crowd.workers * rounds
    soonest = float((times.least + times.up + times.down).min()) + times.pull
    gate, line = _Gate(crowd.bound), _Line(workers)
    versions = np.zeros(workers, dtype=np.int64)
    arrives, sender = np.zeros(0), np.zeros(0, dtype=np.int64)  # of what is on its way
    applied = missed = most = 0
    up_free = down_free = busy = 0.0
    served, served_from = np.zeros(0), 0
    while applied < wanted:
        told = gate.open(line.asked)
        held = served_from + np.searchsorted(served, told, side="right")
        count = gate.hand_out(held)
        if count:
            who = line.pop(count)
            begun = _queued(told[:count], times.pull, down_free)
            down_free = float(begun[-1])
            took = times.compute(who)
            versions[who] = held[:count]
            arrives = np.concatenate([arrives, begun + times.down[who] + took + times.up[who]])
            sender = np.concatenate([sender, who])
            busy += float(took.sum())
        # Whoever is served in this batch is back no sooner than the first was served, or the queue for answers has
        # ended, and it has computed.
        horizon = max(max(float(arrives.min()), up_free) + times.push, down_free) + soonest
        now = arrives < horizon
        order = np.argsort(arrives[now])[: wanted - applied]
        who = sender[now][order]
        served, served_from = _queued(arrives[now][order], times.push, up_free), applied
        arrives, sender = arrives[~now], sender[~now]
        up_free = float(served[-1])
        stale = applied + np.arange(len(who)) - versions[who]
        missed += int(stale.sum())
        most = max(most, int(stale.max()))
        gate.applied(versions[who], served)
        applied += len(who)
        line.put(who, served)
    return Simulated(applied, up_free, min(1.0, busy / (up_free * workers)), missed / applied, most, workers)


class _Line:
    """Those who wait for parameters, in the order in which they asked; at first all, from the beginning."""

    def __init__(self, workers: int) -> None:
        import numpy as np

        self._who, self._asked = np.arange(2 * workers), np.zeros(2 * workers)
        self._first, self._end = 0, workers

    @property
    def asked(self) -> Floats:
        return self._asked[self._first : self._end]

    def pop(self, count: int) -> Any:
        self._first += count
        return self._who[self._first - count : self._first].copy()

    def put(self, who: Any, asked: Floats) -> None:
        if self._end + len(who) > len(self._who):
            for each in (self._who, self._asked):
                each[: self._end - self._first] = each[self._first : self._end].copy()
            self._first, self._end = 0, self._end - self._first
        self._who[self._end : self._end + len(who)] = who
        self._asked[self._end : self._end + len(who)] = asked
        self._end += len(who)


class _Gate:
    """Who may be handed parameters: the H-th may when all gradients of versions below H - S - 1 are applied.

    All that was handed out is applied or on its way. If it is H of them, of which one was computed on version v, that
    one can miss H - 1 - v updates at most. Versions only grow, so what is known of them lies in arrays by version, of
    which the first entry is that of version ``_base``.
    """

    def __init__(self, bound: int | None) -> None:
        import numpy as np

        self._bound, self._given, self._flying = bound, 0, 0
        self._base = self._oldest = self._top = 0  # _oldest: all below are applied; _top: all handed out are below
        self._out: Any = np.zeros(1 << 16, dtype=np.int64)  # gradients on their way
        self._last: Any = np.zeros(1 << 16)  # when the last of a version was applied
        self._settled: Any = np.zeros(1 << 16)  # when all below a version were; up to _oldest

    def open(self, asked: Floats) -> Floats:
        """When those who wait may begin, in order: of all of them, or of the first few."""
        import numpy as np

        if self._bound is None:
            return asked
        first = self._given - self._bound  # the first waits for all below this version, the next for one more
        count = min(len(asked), self._bound + 1)  # as many as could be on their way at once
        if self._flying:
            count = max(0, min(count, self._oldest - first + 1))
        needed = np.clip(np.arange(first, first + count), self._base, self._oldest) - self._base
        found: Floats = np.maximum.accumulate(np.maximum(asked[:count], self._settled[needed]))
        return found

    def hand_out(self, versions: Any) -> int:
        """How many of these begin: the first of them may itself be what a later one has to wait for."""
        import numpy as np

        if self._bound is None or not len(versions):
            return len(versions)
        count = min(len(versions), max(1, int(versions[0]) - (self._given - self._bound) + 1))
        self._top = int(versions[count - 1]) + 1
        self._make_room()
        np.add.at(self._out, versions[:count] - self._base, 1)
        self._given += count
        self._flying += count
        return count

    def applied(self, versions: Any, when: Floats) -> None:
        """Gradients of these versions are applied, one after the other."""
        import numpy as np

        if self._bound is None:
            return
        places = versions - self._base
        np.subtract.at(self._out, places, 1)
        self._last[places] = when  # of several of one version the last stays
        self._flying -= len(versions)
        begin, end = self._oldest - self._base, self._top - self._base
        if begin == end or self._out[begin]:
            return
        ahead = np.flatnonzero(self._out[begin:end])
        end = begin + int(ahead[0]) if len(ahead) else end
        later = np.maximum.accumulate(self._last[begin:end])
        self._settled[begin + 1 : end + 1] = np.maximum(self._settled[begin], later)
        self._oldest = self._base + end

    def _make_room(self) -> None:
        """For versions up to ``_top``, by leaving out those that nobody will ask for again."""
        import numpy as np

        if self._top - self._base < len(self._out):
            return
        assert self._bound is not None
        past = max(0, min(self._oldest, self._given - self._bound) - self._base)
        size = max(len(self._out), 2 * (self._top + 1 - self._base - past))
        for name in ("_out", "_last", "_settled"):
            before = getattr(self, name)
            room = np.zeros(size, dtype=before.dtype)
            room[: len(before) - past] = before[past:]
            setattr(self, name, room)
        self._base += past
