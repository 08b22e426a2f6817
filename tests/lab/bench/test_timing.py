from __future__ import annotations

import time

import torch

from laconic_lab.bench.timing import Stopwatch, Timing, per_call


def test_timing_is_medians_of_ratios() -> None:
    timing = Timing((2.0, 4.0, 1.0), (2.0, 2.0, 2.0))
    assert timing.median == 2.0
    assert timing.speed == 1.0 and timing.speed_quartiles == (0.75, 1.0, 1.5)
    assert timing.values("encode")["encode_x_memcpy_quartiles"] == [0.75, 1.5]
    assert Timing((2.0,), (1.0,)).speed == 0.5


def test_stopwatch_copies_between_operations() -> None:
    x = torch.arange(1000.0)
    watch = Stopwatch(x)
    assert torch.equal(watch.target, x)
    order: list[str] = []
    timings = watch.measure({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 4)
    assert order == ["a", "b"] * 5  # one round does not count
    assert len(timings["a"].seconds) == len(timings["b"].copies) == 4 and len(watch.copies) == 8


def test_stopwatch_stops_at_its_budget_and_scales_its_copies() -> None:
    watch = Stopwatch(torch.zeros(1_000_000), budget_s=0.0)
    whole, part = (watch.measure({"a": lambda: None}, 50, share=share)["a"] for share in (1.0, 0.001))
    assert len(whole.seconds) == 3
    assert max(part.copies) < min(whole.copies)


def test_per_call_divides_by_the_number_of_calls() -> None:
    assert 0.001 <= per_call(lambda: time.sleep(0.001), calls=20, batches=3) < 0.015
