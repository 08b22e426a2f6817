"""The event simulation: by hand, against one event at a time, and fast enough."""

from __future__ import annotations

import heapq
import time
from dataclasses import replace

import numpy as np
import pytest

from laconic.errors import ConfigError
from laconic.plan.costs import Message, Network, Work, step
from laconic.plan.simulation import Crowd, simulate


def one_by_one(crowd: Crowd, updates: int) -> tuple[float, float, int]:
    """The same by a heap, with jitter or stragglers, not both: seconds, and what was missed on average and at most."""
    workers, bound = crowd.workers, crowd.bound
    push = max(crowd.push / crowd.server_bytes_s, crowd.apply_s)
    pull = crowd.pull / crowd.server_bytes_s
    rng = np.random.default_rng(crowd.seed)
    least = crowd.step_s * rng.lognormal(0.0, crowd.spread, workers)
    rates = (crowd.worker_bytes_s or crowd.server_bytes_s) * rng.lognormal(0.0, crowd.links, workers)
    up, down = np.maximum(0, crowd.push / rates - push), np.maximum(0, crowd.pull / rates - pull)
    waiting, out, arrivals, missed = list(range(workers)), {}, [], []
    version = handed = 0
    up_free = down_free = now = 0.0
    while version < updates:
        while waiting and (bound is None or not out or handed - min(out.values()) <= bound):
            worker = waiting.pop(0)
            out[worker], handed = version, handed + 1
            down_free = max(now, down_free) + pull
            took = least[worker]
            if crowd.jitter:
                took *= 1 + crowd.jitter * rng.standard_exponential()
            if crowd.straggle_share and rng.random() < crowd.straggle_share:
                took *= crowd.straggle
            heapq.heappush(arrivals, (down_free + down[worker] + took + up[worker], worker))
        at, worker = heapq.heappop(arrivals)
        now = up_free = max(at, up_free) + push
        missed.append(version - out.pop(worker))
        version += 1
        waiting.append(worker)
    return now, float(np.mean(missed)), max(missed)


@pytest.mark.parametrize(
    "crowd",
    [
        Crowd(5, 1.0, push=3, pull=2, server_bytes_s=20, spread=0.6, mode="async"),
        Crowd(7, 1.0, push=30, pull=20, server_bytes_s=20, spread=0.6, links=0.5, mode="async", seed=1),
        Crowd(6, 1.0, push=3, pull=2, server_bytes_s=20, spread=0.6, apply_s=0.3, mode="bounded:3"),
        Crowd(9, 1.0, push=3, pull=2, server_bytes_s=20, spread=0.9, links=0.4, mode="bounded:12"),
        Crowd(9, 1.0, push=13, pull=2, server_bytes_s=20, spread=0.9, links=0.4, mode="bounded:8", seed=2),
        Crowd(4, 1.0, spread=0.3, mode="bounded:1"),
        Crowd(40, 1.0, push=1, pull=1, server_bytes_s=500, spread=1.0, mode="bounded:60"),
        Crowd(30, 1.0, push=2, pull=1, server_bytes_s=50, links=0.4, spread=0.3, jitter=0.5, mode="async"),
        Crowd(30, 1.0, push=9, pull=9, server_bytes_s=50, links=0.4, straggle=8, straggle_share=0.1, mode="async"),
        Crowd(30, 1.0, push=2, pull=1, server_bytes_s=50, links=0.4, spread=0.3, jitter=0.5, mode="bounded:7"),
        Crowd(30, 1.0, push=2, pull=1, server_bytes_s=90, spread=0.3, jitter=0.5, mode="bounded:200"),
        Crowd(50, 1.0, push=9, pull=1, links=0.4, server_bytes_s=400, straggle=8, straggle_share=0.1, mode="bounded:9"),
    ],
)
def test_batches_of_events_are_as_good_as_one_at_a_time(crowd: Crowd) -> None:
    found = simulate(crowd, 30)
    seconds, mean, most = one_by_one(crowd, 30 * crowd.workers)
    assert found.seconds == pytest.approx(seconds, rel=1e-9)
    assert found.staleness_mean == pytest.approx(mean, rel=1e-9) and found.staleness_max == most
    assert crowd.bound is None or most <= crowd.bound


def test_versions_are_forgotten_on_the_way() -> None:
    """More updates than the simulation keeps versions for."""
    crowd = Crowd(300, 1.0, push=1, pull=1, server_bytes_s=1e4, spread=0.8, jitter=0.3, mode="bounded:900")
    found, (seconds, mean, most) = simulate(crowd, 250), one_by_one(crowd, 250 * 300)
    assert found.updates == 75_000 > 1 << 16
    assert found.seconds == pytest.approx(seconds, rel=1e-9) and found.staleness_max == most
    assert found.staleness_mean == pytest.approx(mean, rel=1e-9)


def test_equal_workers_in_rounds_take_what_the_model_says() -> None:
    crowd = Crowd(4, 1.0, push=25e6, pull=25e6, server_bytes_s=125e6)
    modelled = step(Work(0.5, every=2), Network(4, 1e9, goodput=1.0), Message("none", 25e6, 25e6))
    assert simulate(crowd, 10).round_s == pytest.approx(modelled.exchange_s) == pytest.approx(2.6)


def test_a_round_waits_for_the_slowest_and_backup_workers_do_not() -> None:
    # With probability 1 each iteration takes three times as long; one worker has a cable of a tenth.
    crowd = Crowd(4, 1.0, straggle=3.0, straggle_share=1.0)
    assert simulate(crowd, 5).round_s == pytest.approx(3.0)
    slow = Crowd(200, 1.0, spread=0.5, jitter=0.2, straggle=10.0, straggle_share=0.02)
    waits, goes_on = simulate(slow, 50), simulate(replace(slow, backup=20), 50)
    assert goes_on.seconds < 0.6 * waits.seconds and goes_on.updates == 50 * 180
    free = simulate(replace(slow, mode="async"), 50)
    assert free.round_s < goes_on.round_s and free.computing > 0.99 and waits.computing < 0.3
    bound = simulate(replace(slow, mode="bounded:400"), 50)
    assert free.round_s < bound.round_s < waits.round_s
    assert bound.staleness_max <= 400 < free.staleness_max


def test_the_servers_cable_is_the_limit_of_many() -> None:
    """10,000 workers whose messages take 1 ms each: no mode applies more than one in a millisecond."""
    crowd = Crowd(10_000, 0.5, push=1e6, server_bytes_s=1e9, worker_bytes_s=1e9, jitter=0.1)
    for mode in ("sync", "async", "bounded:20000"):
        found = simulate(replace(crowd, mode=mode), 3)
        assert found.round_s == pytest.approx(10.0, rel=0.06), mode


def test_ten_thousand_workers_take_little_time() -> None:
    began = time.process_time()
    for mode in ("sync", "async"):
        simulate(Crowd(10_000, 0.5, spread=0.2, links=0.2, jitter=0.1, push=1e6, server_bytes_s=1e12, mode=mode), 100)
    assert time.process_time() - began < 6.0  # a hundredth of the target of 10^5 x 1,000, ten times over


@pytest.mark.slow
@pytest.mark.parametrize("server_bytes_s", [1e12, 1e11], ids=["", "saturated"])
@pytest.mark.parametrize("mode", ["sync", "async", "bounded:200000"])
def test_a_hundred_thousand_workers_for_a_thousand_rounds_within_a_minute(mode: str, server_bytes_s: float) -> None:
    crowd = Crowd(
        100_000, 0.5, push=1e6, pull=1e6, server_bytes_s=server_bytes_s, worker_bytes_s=125e6, spread=0.2, links=0.2,
        jitter=0.1, straggle=5, straggle_share=0.001, mode=mode,
    )  # fmt: skip
    began = time.process_time()
    assert simulate(crowd, 1000).updates == 10**8
    assert time.process_time() - began < 60


@pytest.mark.parametrize(
    "options, words",
    [
        ({"workers": 0}, "workers must be a whole number, at least 1"),
        ({"workers": 2.5}, "workers must be a whole number, at least 1"),
        ({"mode": "bounded"}, "mode must be sync, async or bounded:S"),
        ({"mode": "async", "backup": 1}, "backup workers are for mode sync"),
        ({"step_s": 0.0}, "step_s must be a finite number above 0"),
        ({"jitter": -1.0}, "jitter must be a finite number"),
        ({"straggle": 0.5}, "straggle is a finite number, at least 1"),
        ({"straggle": float("nan")}, "straggle is a finite number, at least 1"),
        ({"server_bytes_s": 0.0}, "more than nothing"),
        ({"server_bytes_s": float("nan")}, "more than nothing"),
        ({"worker_bytes_s": float("nan")}, "more than nothing"),
    ],
)
def test_nonsense_is_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Crowd(**({"workers": 2, "step_s": 1.0} | options))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rounds must be at least 1"):
        simulate(Crowd(2, 1.0), 0)
