"""Recommendations, and when there is none."""

from __future__ import annotations

import math

import pytest

from laconic.errors import ConfigError, LaconicError
from laconic.plan.advice import Advice, Layers, Load, advise, message_of, parse_memory
from laconic.plan.calibration import (
    GZIP,
    Encoding,
    codec_point,
    crowd_factors,
    gradient_like,
    model_times,
    sum_sizes,
    summable,
    together,
    turns,
)  # fmt: skip
from laconic.plan.costs import Network, Work
from laconic.plan.profile import Point, Profile

MILLION = 1_000_000


def points(bits: float, encode: float, decode: float) -> tuple[Point, ...]:
    """A codec that goes by value: nanoseconds each."""
    return tuple(
        Point(n, n * bits / 8, n * encode * 1e-9, n * decode * 1e-9, n * decode * 1e-9) for n in (4096, 1 << 22)
    )


MACHINE = Profile(
    "made up",
    codecs={
        "none": points(32, 0.4, 0.4),
        "bf16": points(16, 0.3, 0.3),
        "qsgd:4": points(4, 0.4, 0.3),
        "adaptive:5.0|huffman": points(3, 400.0, 200.0),
        GZIP: points(29.7, 150.0, 20.0),
    },
    memory=16e9,
)


def advice(
    params: int = 25 * MILLION, step_s: float = 0.1, workers: int = 4, rate: float = 1e9, **options: object
) -> Advice:
    network = Network(workers, rate, str(options.pop("topology", "ps")))
    return advise(Load.of_params(params), Work(step_s), network, MACHINE, **options)  # type: ignore[arg-type]


def test_a_slow_link_wants_a_codec() -> None:
    found = advice()
    assert found.codec == "qsgd:4" and found.row.speedup_fp32 > 5
    # By hand: 4 x 100 MB over 119.5 MB/s is 3.347 s each way; a twelfth of a second is the step.
    plain = next(row for row in found.rows if row.codec == "none")
    assert plain.step.push_s == plain.step.pull_s == pytest.approx(3.3473, rel=1e-4)
    assert found.row.message.push == pytest.approx(12.5e6, rel=1e-3)
    assert found.values()["recommendation"]["codec"] == "qsgd:4"


@pytest.mark.parametrize(
    "why, found",
    [
        ("a fast network and a small model", lambda: advice(100_000, 0.05, 8, 1e11, topology="ring")),
        ("the same behind a server", lambda: advice(100_000, 0.05, 8, 1e11)),
        ("one worker", lambda: advice(workers=1)),
        (
            "a codec slower than the link",
            lambda: advice(codecs=["adaptive:5.0|huffman"], rate=1e10, topology="twoshot"),
        ),
        ("gzip at 1 Gbit/s", lambda: advice(codecs=[GZIP])),
        ("a model that computes for long", lambda: advice(MILLION, 60.0)),
    ],
)
def test_none_is_recommended_where_it_is_best(why: str, found: object) -> None:
    told: Advice = found()  # type: ignore[operator]
    assert told.codec == "none" and told.reason
    assert told.row.speedup_fp32 == 1.0


def test_gzip_breaks_even_far_below_a_gigabit() -> None:
    """Four workers' messages are 7 % smaller, both ways: 2.3 bytes a value. That takes 150 ns and more to make."""
    found = advice(codecs=[GZIP])
    gzip = next(row for row in found.rows if row.codec == GZIP)
    assert gzip.break_even is not None and gzip.break_even < 2.3 * 8 / 150e-9 * 1.05 and gzip.speedup_fp32 < 1
    assert found.codec != GZIP


def test_break_even_is_where_both_take_as_long() -> None:
    row = next(row for row in advice(codecs=["adaptive:5.0|huffman"]).rows if row.codec.startswith("adaptive"))
    assert row.break_even is not None and 1e8 < row.break_even < 1e11
    for factor, faster in ((0.98, True), (1.02, False)):
        at = advice(codecs=["adaptive:5.0|huffman"], rate=row.break_even * factor)
        assert (next(r for r in at.rows if r.codec.startswith("adaptive")).speedup_fp32 > 1) is faster


def test_what_does_not_fit_is_not_recommended() -> None:
    needs = {row.codec: row.memory for row in advice().rows}
    tight = advice(memory=needs["qsgd:4"] - 1)
    assert tight.codec != "qsgd:4" and not next(row for row in tight.rows if row.codec == "qsgd:4").fits
    # Float32 in and out needs more than what is compressed: if that fits, it all does.
    assert needs["none"] > needs["bf16"] > needs["qsgd:4"] > 16 * 25 * MILLION
    nothing = advice(memory=1e6)
    assert nothing.codec == "none" and "fits into" in nothing.reason


def test_memory_feedback_needs_a_residual() -> None:
    plain, ef = (message_of_spec(spec).memory for spec in ("qsgd:4", "ef|qsgd:4"))
    assert ef - plain == pytest.approx(4 * MILLION)


def message_of_spec(spec: str):
    profile = Profile("x", codecs={**MACHINE.codecs, "ef|qsgd:4": MACHINE.codecs["qsgd:4"]})
    return message_of(profile, Load.of_params(MILLION), spec, Network(4, 1e9))


def test_small_tensors_go_as_they_are() -> None:
    load = Load(((MILLION, 2), (4000, 2), (50_000, 1)))
    found = message_of(MACHINE, load, "qsgd:4", Network(4, 1e9))
    assert found.push == pytest.approx(MILLION / 2 + 4 * 54_000)


def test_layers_make_messages_and_steps_smaller() -> None:
    dense, layered = advice(codecs=["qsgd:4"]), advice(codecs=["qsgd:4"], layers=Layers(0.1, 0.5))
    assert layered.row.message.push == pytest.approx(dense.row.message.push / 10)
    assert layered.row.step.compute_s == pytest.approx(0.05)
    assert next(row for row in layered.rows if row.codec == "none").step == dense.rows[0].step
    with pytest.raises(ConfigError, match="rho must be in"):
        Layers(0.0, 1.0)


def test_processes_on_one_machine_compute_longer() -> None:
    profile = Profile("x", codecs=MACHINE.codecs, crowd={4: 2.0})
    one, four = (
        advise(Load.of_params(MILLION), Work(1.0), Network(4, 1e9), profile, processes=n).rows[0].step.compute_s
        for n in (1, 4)
    )
    assert (one, four) == (1.0, 2.0)


def test_what_a_profile_does_not_have_is_measured_and_said() -> None:
    said: list[str] = []
    found = advise(Load.of_params(MILLION), Work(0.1), Network(2, 1e8), MACHINE, ["sign"], tell=said.append)
    assert len(said) == 1 and "made up does not have sign" in said[0]
    assert next(row for row in found.rows if row.codec == "sign").message.push == pytest.approx(MILLION / 8, rel=0.05)


def test_sums_grow_with_the_workers_and_rings_send_lanes() -> None:
    two, sixteen = (sum_sizes("thc:4", MILLION, workers) for workers in (2, 16))
    assert two[0] == pytest.approx(sixteen[0], rel=0.01) and two[0] == pytest.approx(MILLION / 2, rel=0.05)
    assert two[0] < two[1] < sixteen[1] <= 1.1 * MILLION
    push, pull = sum_sizes("shared:8", MILLION, 4, ring=True)
    assert push == pull == pytest.approx(MILLION, rel=0.03)
    assert summable("ef|thc:4") and not summable("qsgd:4") and not summable(GZIP)


@pytest.mark.parametrize("spec", ["none", "qsgd:4", "thc:4", "ef|topk:0.01|qsgd:4", GZIP])
def test_codecs_are_timed_on_frames_that_decode(spec: str) -> None:
    x = gradient_like(8192)
    found = codec_point(spec, x, budget_s=0.01)
    assert min(found.encode_s, found.decode_s, found.add_s) > 0 and found.nbytes > 0
    if spec != GZIP:
        one = Encoding(spec, x)
        one.decode()
        error = float((one.out - x).square().sum() / x.square().sum())
        assert error < (0.2 if "topk" not in spec else 1.0) and len(one.frame) == pytest.approx(found.nbytes, rel=0.05)
        for _ in range(40):
            one.add()


def test_a_model_is_timed_with_its_own_gradients() -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 10))
    batch = torch.randn(16, 100), torch.randint(10, (16,))
    found = model_times(model, batch, nn.functional.cross_entropy, ["qsgd:4", "thc:4"], turns=2)
    assert found.numel == 11_110 and sorted(found.numels) == [10, 100, 1000, 10_000]
    assert found.numels[-1] in (100, 10_000)  # the first layer's come last
    assert found.ready[-1][1] == 1.0 and all(0 < t <= 1 for t, _ in found.ready)
    # 10,000 values in 4 bits, three small slots in float32.
    assert found.messages["qsgd:4"]["push"] == pytest.approx(5000 + 4440, rel=0.1)
    assert Load.of_model(found).numel == 11_110
    assert message_of(MACHINE, Load.of_model(found), "qsgd:4", Network(2, 1e9)).push == found.messages["qsgd:4"]["push"]


def test_memory_as_people_write_it() -> None:
    assert parse_memory("16GiB") == 16 * 2**30 and parse_memory("1.5 gb") == 1.5e9
    for text in ("16", "lots", "-1gb", "0gib", "4 gigs"):
        if text == "16":
            assert parse_memory(text) == 16
            continue
        with pytest.raises(ConfigError, match="memory is a number and one of"):
            parse_memory(text)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one parameter"):
        Load.of_params(0)
    with pytest.raises(ConfigError, match="unknown stage 'qsdg'"):
        advice(codecs=["qsdg:4"])
    with pytest.raises(ConfigError, match="processes must be at least 1"):
        advice(processes=0)
    assert math.isinf(next(row.break_even for row in advice().rows if row.codec == "bf16") or 0)


def test_processes_are_measured_together() -> None:
    """Each says that it is ready, waits for the others, and prints a number."""
    program = "import os; print('ready', flush=True); input(); print({})"
    found = together(2, ["-c", program.format("os.getpid()")])
    assert len(set(found)) == 2
    for broken in ("raise SystemExit(3)", program.format("0")):
        with pytest.raises(LaconicError, match="a process that should compute"):
            together(1, ["-c", broken])
    assert turns(1) == 1.0 and turns(64) > turns(2) >= 1.0


@pytest.mark.slow
def test_a_crowd_is_slower_than_one_alone() -> None:
    import os

    cores = os.cpu_count() or 1
    found = crowd_factors([2 * cores], seconds=0.3)
    assert 2.0 <= found[2 * cores] < 8.0
