"""Recommendations of the planner, and when it recommends none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from laconic.errors import ConfigError
from laconic.plan import CompressedLayers, PlanRequest, Profile, Recommendation, profile, recommend, sweep
from laconic.plan.calibration import GZIP
from laconic.plan.costs import Message, Network
from laconic.plan.messages import Workload, message_of
from laconic.plan.profile import Point, Transport
from laconic.plan.recommend import Row, fitted_rate

MILLION = 1_000_000


def points(bits: float, encode: float, decode: float) -> tuple[Point, ...]:
    """Return a codec whose times are proportional to the values: nanoseconds each."""
    return tuple(
        Point(n, n * bits / 8, n * encode * 1e-9, n * decode * 1e-9, n * decode * 1e-9) for n in (4096, 1 << 22)
    )


MACHINE = Profile(
    "invented",
    codecs={
        "none": points(32, 0.4, 0.4), "bf16": points(16, 0.3, 0.3), "qsgd:4": points(4, 0.4, 0.3),
        "adaptive:5.0|huffman": points(3, 400.0, 200.0), GZIP: points(29.7, 150.0, 20.0),
    },
    memory=16e9,
    transport=Transport(0.0, 0.0, 0.0),
)  # fmt: skip


def advice(params: int = 25 * MILLION, step_s: float = 0.1, **options: Any) -> Recommendation:
    request = PlanRequest.for_params(MACHINE, params, step_s, **{"workers": 4, **options})
    return recommend(request)


def row(recommendation: Recommendation, codec: str) -> Row:
    return next(row for row in recommendation.rows if row.codec == codec)


def test_codec_is_recommended_on_a_slow_link() -> None:
    result = advice()
    assert result.codec == "qsgd:4" and result.row.speedup_fp32 > 5
    # By hand: 4 x 100 MB over 119.5 MB/s take 3.347 s each way.
    plain = row(result, "none")
    assert plain.step.push_s == plain.step.pull_s == pytest.approx(3.3473, rel=1e-4)
    assert result.row.message.push == pytest.approx(12.5e6, rel=1e-3)
    assert result.values()["recommendation"]["codec"] == "qsgd:4"


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(lambda: advice(100_000, 0.05, workers=8, rate=1e11, topology="ring"), id="small model, fast ring"),
        pytest.param(lambda: advice(100_000, 0.05, workers=8, rate=1e11), id="small model, fast link"),
        pytest.param(lambda: advice(workers=1), id="one worker"),
        pytest.param(
            lambda: advice(codecs=["adaptive:5.0|huffman"], rate=1e10, topology="twoshot"), id="codec slower than link"
        ),
        pytest.param(lambda: advice(codecs=[GZIP]), id="gzip at 1 Gbit/s"),
        pytest.param(lambda: advice(MILLION, 60.0), id="long computation"),
    ],
)
def test_none_is_recommended_if_no_codec_pays(result: Callable[[], Recommendation]) -> None:
    recommendation = result()
    assert recommendation.codec == "none" and recommendation.reason
    assert recommendation.row.speedup_fp32 == 1.0


def test_gzip_breaks_even_far_below_a_gigabit() -> None:
    """Messages of four workers are 7 % smaller both ways: 2.3 bytes a value, which take 150 ns and more to encode."""
    gzip = row(advice(codecs=[GZIP]), GZIP)
    assert gzip.break_even is not None and gzip.break_even < 2.3 * 8 / 150e-9 * 1.05 and gzip.speedup_fp32 < 1


def test_speedup_is_one_at_the_break_even_rate() -> None:
    codec = "adaptive:5.0|huffman"
    limit = row(advice(codecs=[codec]), codec).break_even
    assert limit is not None and 1e8 < limit < 1e11
    for factor, faster in ((0.98, True), (1.02, False)):
        assert (row(advice(codecs=[codec], rate=limit * factor), codec).speedup_fp32 > 1) is faster
    assert math.isinf(row(advice(), "bf16").break_even or 0)


def test_codec_that_does_not_fit_into_memory_is_not_recommended() -> None:
    needs = {row.codec: row.memory for row in advice().rows}
    tight = advice(memory=needs["qsgd:4"] - 1)
    assert tight.codec != "qsgd:4" and not row(tight, "qsgd:4").fits
    # Uncompressed messages need the most memory.
    assert needs["none"] > needs["bf16"] > needs["qsgd:4"] > 16 * 25 * MILLION
    nothing = advice(memory=1e6)
    assert nothing.codec == "none" and "do not fit into" in nothing.reason


def message(spec: str, workload: Workload | None = None) -> Message:
    codecs = {**MACHINE.codecs, "ef|qsgd:4": MACHINE.codecs["qsgd:4"]}
    return message_of(Profile("x", codecs=codecs), workload or Workload.of_params(MILLION), spec, Network(4, 1e9))


def test_error_feedback_needs_memory_for_a_residual() -> None:
    assert message("ef|qsgd:4").memory - message("qsgd:4").memory == pytest.approx(4 * MILLION)


def test_small_tensors_and_vectors_are_not_compressed() -> None:
    workload = Workload(((MILLION, 2), (4000, 2), (50_000, 1)))
    assert message("qsgd:4", workload).push == pytest.approx(MILLION / 2 + 4 * 54_000)


def test_compressed_layers_have_smaller_messages_and_other_steps() -> None:
    dense, layered = advice(codecs=["qsgd:4"]), advice(codecs=["qsgd:4"], layers=CompressedLayers(0.1, 0.5))
    assert layered.row.message.push == pytest.approx(dense.row.message.push / 10)
    assert layered.row.step.compute_s == pytest.approx(0.05)
    assert row(layered, "none").step == dense.rows[0].step


def test_processes_on_one_machine_compute_longer_and_have_no_spare_core() -> None:
    machine = Profile("x", codecs=MACHINE.codecs, slowdown={4: 2.0}, machine={"cores": 2}, transport=MACHINE.transport)
    alone, shared = (PlanRequest.for_params(machine, MILLION, 1.0, processes=n).work for n in (1, 4))
    assert (alone.step_s, shared.step_s) == (1.0, 2.0) and alone.spare_core and not shared.spare_core


def test_transport_of_a_profile_is_added_with_a_parameter_server_only() -> None:
    machine = Profile("x", codecs=MACHINE.codecs, transport=Transport(0.01, 0.001, 1e-9))
    workload = Workload(((5000, 2),) * 12)
    server, ring = (PlanRequest(machine, workload, 1.0, topology=name).network for name in ("ps", "ring"))
    assert (server.exchange_s, server.byte_s) == (pytest.approx(0.02), 1e-9) and (ring.exchange_s, ring.byte_s) == (
        0,
        0,
    )


def test_profile_without_transport_warns_and_uses_that_of_the_shipped_profile() -> None:
    lines: list[str] = []
    machine = Profile("mine", codecs=MACHINE.codecs)
    request = PlanRequest.for_params(machine, MILLION, 0.1)
    recommend(request, notify=lines.append)
    assert request.network.byte_s == (profile.load("cpu").transport or MACHINE.transport).byte_s > 0
    assert len(lines) == 1 and "profile mine has no transport" in lines[0]
    lines.clear()
    recommend(PlanRequest.for_params(machine, MILLION, 0.1, topology="ring"), notify=lines.append)
    assert lines == []


def test_codec_that_the_profile_lacks_is_measured_with_a_notice() -> None:
    lines: list[str] = []
    request = PlanRequest.for_params(MACHINE, MILLION, 0.1, rate=1e8, codecs=["sign"])
    result = recommend(request, notify=lines.append)
    assert len(lines) == 1 and "invented does not have sign" in lines[0]
    assert row(result, "sign").message.push == pytest.approx(MILLION / 8, rel=0.05)


def test_fitted_rate_predicts_the_measured_step() -> None:
    request = PlanRequest.for_params(MACHINE, MILLION, 0.01, workers=4)
    rate = fitted_rate(request, "qsgd:4", 0.2)
    assert rate is not None
    predicted = row(advice(MILLION, 0.01, rate=rate, codecs=["qsgd:4"]), "qsgd:4").step.total_s
    assert predicted == pytest.approx(0.2, rel=1e-3)
    assert fitted_rate(request, "qsgd:4", 0.001) is None


def test_sweep_leaves_out_codecs_that_some_values_exclude() -> None:
    codecs = {**MACHINE.codecs, "shared:2": MACHINE.codecs["qsgd:4"]}
    machine = Profile("x", codecs=codecs, transport=MACHINE.transport)
    curves = sweep(PlanRequest.for_params(machine, MILLION, 0.1, topology="ring"), "workers")
    assert "shared:2" not in curves.speedup_fp32
    assert all(len(ys) == len(curves.x) for ys in curves.speedup_fp32.values())
    with pytest.raises(ConfigError, match="--sweep must be one of"):
        sweep(PlanRequest.for_params(MACHINE, MILLION, 0.1), "colour")


@pytest.mark.parametrize("make, message", [
    (lambda: Workload.of_params(0), "params must be a whole number of at least 1, got 0"),
    (lambda: advice(codecs=["qsdg:4"]), "unknown stage 'qsdg'"),
    (lambda: advice(processes=0), "processes must be at least 1"),
    (lambda: advice(step_s=0.0), "the step time must be finite and above 0, got 0"),
    (lambda: CompressedLayers(0.0, 1.0), "rho must be in"),
    (lambda: PlanRequest.for_model(MACHINE, "vgg"), "profile invented has no model 'vgg'"),
])  # fmt: skip
def test_invalid_request_raises_config_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
