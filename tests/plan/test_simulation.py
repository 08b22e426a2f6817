"""The event simulation, compared with one event at a time and with the cost model."""

from __future__ import annotations

import heapq
import time
from dataclasses import replace

import numpy as np
import pytest

from laconic.errors import ConfigError
from laconic.plan.costs import Message, Network, Work, step
from laconic.plan.formulas import next_push_s
from laconic.plan.simulation import Workers, simulate


def one_by_one(workers: Workers, updates: int) -> tuple[float, float, int]:
    """Simulate one event at a time with a heap, with jitter or stragglers: seconds, mean and largest staleness."""
    bound = workers.bound
    push = max(workers.push / workers.server_bytes_s, workers.apply_s)
    pull = workers.pull / workers.server_bytes_s
    rng = np.random.default_rng(workers.seed)
    shortest = workers.step_s * rng.lognormal(0.0, workers.spread, workers.count)
    own_rate = workers.worker_bytes_s or workers.server_bytes_s
    rates = own_rate * rng.lognormal(0.0, workers.link_spread, workers.count)
    up, down = np.maximum(0, workers.push / rates - push), np.maximum(0, workers.pull / rates - pull)
    waiting, under_way, arrivals, missed = list(range(workers.count)), {}, [], []
    version = handed_out = 0
    up_free = down_free = now = 0.0
    while version < updates:
        while waiting and (bound is None or not under_way or handed_out - min(under_way.values()) <= bound):
            worker = waiting.pop(0)
            under_way[worker], handed_out = version, handed_out + 1
            down_free = max(now, down_free) + pull
            seconds = shortest[worker]
            if workers.jitter:
                seconds *= 1 + workers.jitter * rng.standard_exponential()
            if workers.straggle_share and rng.random() < workers.straggle_share:
                seconds *= workers.straggle
            heapq.heappush(arrivals, (down_free + down[worker] + seconds + up[worker], worker))
        arrival, worker = heapq.heappop(arrivals)
        now = up_free = max(arrival, up_free) + push
        missed.append(version - under_way.pop(worker))
        version += 1
        waiting.append(worker)
    return now, float(np.mean(missed)), max(missed)


def check_against_one_by_one(workers: Workers, rounds: int) -> None:
    result, (seconds, mean, most) = simulate(workers, rounds), one_by_one(workers, rounds * workers.count)
    assert result.updates == rounds * workers.count and result.seconds == pytest.approx(seconds, rel=1e-9)
    assert result.staleness_mean == pytest.approx(mean, rel=1e-9) and result.staleness_max == most
    assert workers.bound is None or most <= workers.bound


@pytest.mark.parametrize(
    "workers",
    [
        Workers(5, 1.0, push=3, pull=2, server_bytes_s=20, spread=0.6, mode="async"),
        Workers(7, 1.0, push=30, pull=20, server_bytes_s=20, spread=0.6, link_spread=0.5, mode="async", seed=1),
        Workers(6, 1.0, push=3, pull=2, server_bytes_s=20, spread=0.6, apply_s=0.3, mode="bounded:3"),
        Workers(9, 1.0, push=3, pull=2, server_bytes_s=20, spread=0.9, link_spread=0.4, mode="bounded:12"),
        Workers(9, 1.0, push=13, pull=2, server_bytes_s=20, spread=0.9, link_spread=0.4, mode="bounded:8", seed=2),
        Workers(4, 1.0, spread=0.3, mode="bounded:1"),
        Workers(40, 1.0, push=1, pull=1, server_bytes_s=500, spread=1.0, mode="bounded:60"),
        Workers(30, 1.0, push=2, pull=1, server_bytes_s=50, link_spread=0.4, spread=0.3, jitter=0.5, mode="async"),
        Workers(
            30, 1.0, push=9, pull=9, server_bytes_s=50, link_spread=0.4, straggle=8, straggle_share=0.1, mode="async"
        ),
        Workers(30, 1.0, push=2, pull=1, server_bytes_s=50, link_spread=0.4, spread=0.3, jitter=0.5, mode="bounded:7"),
        Workers(30, 1.0, push=2, pull=1, server_bytes_s=90, spread=0.3, jitter=0.5, mode="bounded:200"),
        Workers(
            50,
            1.0,
            push=9,
            pull=1,
            link_spread=0.4,
            server_bytes_s=400,
            straggle=8,
            straggle_share=0.1,
            mode="bounded:9",
        ),
    ],
)
def test_batches_of_events_equal_one_event_at_a_time(workers: Workers) -> None:
    check_against_one_by_one(workers, 30)


def test_old_versions_are_dropped_without_changing_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of the staleness gate are made so short that they have to be moved."""
    zeros = np.zeros
    monkeypatch.setattr(np, "zeros", lambda shape, *args, **options: zeros(min(shape, 1 << 10), *args, **options))
    workers = Workers(100, 1.0, push=1, pull=1, server_bytes_s=1e4, spread=0.8, jitter=0.3, mode="bounded:300")
    check_against_one_by_one(workers, 60)


def test_equal_workers_in_rounds_take_the_time_of_the_cost_model() -> None:
    workers = Workers(4, 1.0, push=25e6, pull=25e6, server_bytes_s=125e6)
    modelled = step(Work(0.5, every=2), Network(4, 1e9, goodput=1.0), Message("none", 25e6, 25e6))
    early = next_push_s(4, 0.8, 0.8, 0.2)  # the model knows that replies end one after the other
    assert simulate(workers, 10).round_s == pytest.approx(modelled.exchange_s + early) == pytest.approx(2.6)


def test_round_waits_for_the_slowest_unless_there_are_backup_workers() -> None:
    always = Workers(4, 1.0, straggle=3.0, straggle_share=1.0)
    assert simulate(always, 5).round_s == pytest.approx(3.0)
    slow = Workers(200, 1.0, spread=0.5, jitter=0.2, straggle=10.0, straggle_share=0.02)
    waits, goes_on = simulate(slow, 50), simulate(replace(slow, backup=20), 50)
    assert goes_on.seconds < 0.6 * waits.seconds and goes_on.updates == 50 * 180
    free = simulate(replace(slow, mode="async"), 50)
    assert free.round_s < goes_on.round_s and free.computing > 0.99 and waits.computing < 0.3
    bound = simulate(replace(slow, mode="bounded:400"), 50)
    assert free.round_s < bound.round_s < waits.round_s
    assert bound.staleness_max <= 400 < free.staleness_max


def test_link_of_the_server_limits_many_workers() -> None:
    """10,000 workers whose messages take 1 ms each: no mode applies more than one in a millisecond."""
    workers = Workers(10_000, 0.5, push=1e6, server_bytes_s=1e9, worker_bytes_s=1e9, jitter=0.1)
    for mode in ("sync", "async", "bounded:20000"):
        assert simulate(replace(workers, mode=mode), 3).round_s == pytest.approx(10.0, rel=0.06), mode


def test_ten_thousand_workers_are_simulated_in_seconds() -> None:
    began = time.process_time()
    workers = Workers(10_000, 0.5, spread=0.2, link_spread=0.2, jitter=0.1, push=1e6, server_bytes_s=1e12)
    for mode in ("sync", "async"):
        simulate(replace(workers, mode=mode), 100)
    assert time.process_time() - began < 6.0  # a hundredth of the target of 10^5 x 1,000, ten times over


@pytest.mark.slow
@pytest.mark.parametrize("server_bytes_s", [1e12, 1e11], ids=["", "saturated"])
@pytest.mark.parametrize("mode", ["sync", "async", "bounded:200000"])
def test_hundred_thousand_workers_for_a_thousand_rounds_take_under_a_minute(mode: str, server_bytes_s: float) -> None:
    workers = Workers(
        100_000, 0.5, push=1e6, pull=1e6, server_bytes_s=server_bytes_s, worker_bytes_s=125e6, spread=0.2,
        link_spread=0.2, jitter=0.1, straggle=5, straggle_share=0.001, mode=mode,
    )  # fmt: skip
    began = time.process_time()
    assert simulate(workers, 1000).updates == 10**8
    assert time.process_time() - began < 60


@pytest.mark.parametrize("options, message", [
    ({"count": 0}, "count must be a whole number of at least 1"),
    ({"count": 2.5}, "count must be a whole number of at least 1"),
    ({"mode": "bounded"}, "mode must be sync, async or bounded:S"),
    ({"mode": "async", "backup": 1}, "backup must be 0 unless the mode is sync"),
    ({"step_s": 0.0}, "step_s must be finite and above 0"), ({"jitter": -1.0}, "jitter must be finite and at least 0"),
    ({"straggle": 0.5}, "straggle must be finite and at least 1"),
    ({"straggle": float("nan")}, "straggle must be finite and at least 1"),
    ({"server_bytes_s": 0.0}, "must be above 0"), ({"server_bytes_s": float("nan")}, "must be above 0"),
    ({"worker_bytes_s": float("nan")}, "must be above 0"),
])  # fmt: skip
def test_invalid_field_raises_config_error(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workers(**({"count": 2, "step_s": 1.0} | options))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rounds must be at least 1"):
        simulate(Workers(2, 1.0), 0)


def test_sampled_rounds_extend_to_all() -> None:
    workers = Workers(200, 1.0, push=10, pull=10, server_bytes_s=4000, spread=0.3, jitter=0.2, mode="bounded:20")
    whole, sampled = simulate(workers, 60), simulate(workers, 60, sampled_rounds=15)
    assert (whole.sampled, sampled.sampled) == (None, 15 * 200) and sampled.updates == whole.updates
    assert sampled.seconds == pytest.approx(whole.seconds, rel=0.05)
    assert sampled.staleness_mean == pytest.approx(whole.staleness_mean, rel=0.05)
    assert simulate(workers, 5, sampled_rounds=9) == simulate(workers, 5)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [10, 100, 1000])
def test_bound_far_below_the_workers_takes_less_than_a_minute(bound: int) -> None:
    began = time.process_time()
    workers = Workers(100_000, 1.0, push=10, pull=10, server_bytes_s=1e7, spread=0.3, mode=f"bounded:{bound}")
    result = simulate(workers, 1000, sampled_rounds=5)
    assert result.updates == 100_000_000 and result.staleness_max <= bound
    assert time.process_time() - began < 60
