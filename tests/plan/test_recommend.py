"""Recommendations of the planner, and when it recommends none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from laconic.errors import ConfigError
from laconic.plan import CompressedLayers, PlanRequest, Profile, Recommendation, profile, recommend, sweep
from laconic.plan.calibration import GZIP
from laconic.plan.costs import Message, Network
from laconic.plan.evidence import Evidence, collective_transport, model_error
from laconic.plan.messages import Workload, message_of
from laconic.plan.profile import MachineLoad, Point, Transport
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


def trained(codec: str, **changes: Any) -> Evidence:
    """Return a training that kept 90 % of accuracy."""
    values: dict[str, Any] = {
        "family": "convolutional", "model": "small", "numel": 20 * MILLION, "plain_optimizer": "momentum",
        "optimizer": "momentum", "workers": 4, "seeds": 3, "measure": "accuracy", "plain": 90.0, "reached": 90.0,
    }  # fmt: skip
    return Evidence(codec, **values | changes)


EVIDENCE = [trained(codec) for codec in ("bf16", "qsgd:4", "adaptive:5.0|huffman")]


def advice(params: int = 25 * MILLION, step_s: float = 0.1, **options: Any) -> Recommendation:
    given = {"workers": 4, "family": "convolutional", "evidence": EVIDENCE, **options}
    return recommend(PlanRequest.for_params(MACHINE, params, step_s, **given))


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


def test_codec_without_evidence_is_not_recommended() -> None:
    result = advice(evidence=EVIDENCE[:1])
    assert result.codec == "bf16" and row(result, "qsgd:4").objection == "no evidence"
    assert "qsgd:4 would be" in result.reason and "no evidence" in result.reason
    unknown = advice(family=None)
    assert unknown.codec == "none" and "without --family" in unknown.reason


def test_codec_that_gives_up_more_than_allowed_is_not_recommended() -> None:
    lossy = [trained("qsgd:4", reached=89.0), trained("bf16")]
    assert advice(evidence=lossy).codec == "bf16"
    allowed = advice(evidence=lossy, give_up=1.0)
    assert allowed.codec == "qsgd:4" and "gave up 1 points of accuracy on small, 4 workers, 3 seeds" in allowed.reason
    assert "--give-up 1% allows it" in advice(evidence=lossy).reason
    # noise between seeds excuses a difference, but no more than 0.25 points
    assert advice(evidence=[trained("qsgd:4", reached=89.8, noise=0.3)]).codec == "qsgd:4"
    assert advice(evidence=[trained("qsgd:4", reached=89.7, noise=0.5)]).codec == "none"
    assert advice(evidence=[trained("qsgd:4", reached=89.96)]).codec == "qsgd:4"


def test_worst_of_several_trainings_counts_unless_the_model_itself_was_trained() -> None:
    both = [trained("qsgd:4"), trained("qsgd:4", model="other", reached=80.0)]
    assert advice(evidence=both).codec == "none"
    assert advice(evidence=both, model="small").codec == "qsgd:4"
    assert advice(evidence=[trained("qsgd:4", numel=MILLION // 2)]).codec == "none"  # a model 50 times as large
    assert advice(evidence=[trained("qsgd:4", plain_optimizer="adamw", optimizer="adamw")]).codec == "none"


def test_steps_to_the_same_quality_count() -> None:
    slow = advice(evidence=[trained("qsgd:4", steps=20.0), trained("bf16")])
    assert slow.codec == "bf16" and row(slow, "qsgd:4").speedup_fp32 > slow.row.speedup_fp32
    local = advice(evidence=[trained("qsgd:4", every=8, steps=1.5)])
    assert local.codec == "local 8 qsgd:4" and "reaches its quality" in local.reason
    assert local.quality_speedup == pytest.approx(local.row.speedup_fp32 / 1.5)
    # local steps were not tried with more workers
    more = advice(evidence=[trained("qsgd:4", every=8)], workers=5)
    assert row(more, "local 8 qsgd:4").objection == "no evidence with more than 4 workers" and more.codec == "none"


def test_training_by_another_optimizer_counts_if_one_asks_for_it() -> None:
    """Muon's own step can take most of the time: a promise of 23 times as fast was 3.7 in the lab."""
    known = [trained("qsgd:4", every=8, optimizer="muon")]
    assert advice(evidence=known).codec == "none"
    changed = advice(evidence=known, change_optimizer=True)
    assert changed.codec == "local 8 qsgd:4" and "by muon instead of momentum, whose own time" in changed.reason


@pytest.mark.parametrize(
    "codec, optimizer", [("topk:0.01", "sgd"), ("topk:0.01", "momentum"), ("ef|topk:0.01", "adamw")]
)
def test_dropped_gradients_and_sparse_ones_for_adam_are_never_recommended(codec: str, optimizer: str) -> None:
    known = [trained(codec, plain_optimizer=optimizer, optimizer=optimizer)]
    codecs = {**MACHINE.codecs, codec: points(0.5, 0.4, 0.3)}
    machine = Profile("x", codecs=codecs, transport=MACHINE.transport)
    options: dict[str, Any] = {"family": "convolutional", "optimizer": optimizer, "evidence": known, "rate": 1e7}
    result = recommend(PlanRequest.for_params(machine, MILLION, 0.1, **options))
    assert result.codec == "none" and row(result, codec).objection
    local = [trained(codec, every=8, plain_optimizer=optimizer, optimizer=optimizer)]
    result = recommend(PlanRequest.for_params(machine, MILLION, 0.1, **options | {"evidence": local}))
    assert result.codec == f"local 8 {codec}"  # changes of the optimizer bear it, as this training shows


def test_gain_below_the_error_of_predictions_is_not_recommended() -> None:
    error = model_error("ps")
    assert 0.05 < error < model_error("ring") < 0.5
    for step_s in (0.5, 2.0, 8.0, 32.0):
        result = advice(MILLION, step_s, codecs=["qsgd:4"])
        gain = row(result, "qsgd:4").speedup_fp32
        assert (result.codec == "qsgd:4") == (gain > 1 + error)
        assert result.codec != "none" or f"may be {100 * error:.0f} % off" in result.reason
    assert result.codec == "none"


def test_overlap_hides_an_exchange_and_fragments_make_it_smaller() -> None:
    labels = ["local 8 qsgd:4", "local 8,overlap=7 qsgd:4", "local 8,fragments=4,overlap=1 qsgd:4"]
    rows = {one.codec: one for one in advice(codecs=labels, rate=1e10).rows}
    waiting, hidden, parts = (rows[label] for label in labels)
    assert hidden.step.total_s < waiting.step.total_s and hidden.step.hidden_s > 0
    message = waiting.message
    assert hidden.step.exchange_s == pytest.approx(8 * 0.1 + message.encode_s + message.decode_s)
    assert parts.message.push == pytest.approx(message.push / 4) and parts.step.every == 2
    assert waiting.memory == parts.memory > row(advice(), "qsgd:4").memory


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
    smaller = row(layered, "qsgd:4")
    assert smaller.message.push == pytest.approx(dense.row.message.push / 10)
    assert smaller.step.compute_s == pytest.approx(0.05) and smaller.objection == "no evidence with compressed layers"
    assert row(layered, "none").step == dense.rows[0].step and layered.codec == "none"


def test_processes_on_one_machine_compute_longer_and_have_no_spare_core() -> None:
    machine = Profile("x", codecs=MACHINE.codecs, slowdown={4: 2.0}, machine={"cores": 2}, transport=MACHINE.transport)
    alone, shared = (PlanRequest.for_params(machine, MILLION, 1.0, processes=n).work for n in (1, 4))
    assert (alone.step_s, shared.step_s) == (1.0, 2.0) and alone.spare_core and not shared.spare_core


def test_transport_of_a_profile_is_that_of_a_parameter_server() -> None:
    machine = Profile("x", codecs=MACHINE.codecs, transport=Transport(0.01, 0.001, 1e-9))
    workload = Workload(((5000, 2),) * 12)
    server, ring = (PlanRequest(machine, workload, 1.0, topology=name).network for name in ("ps", "ring"))
    assert (server.exchange_s, server.byte_s) == (pytest.approx(0.02), 1e-9)
    assert ring.exchange_s == collective_transport("none").exchange_s < 0.01


def test_small_messages_of_ranks_take_the_fixed_time_of_their_reduction() -> None:
    """A codec of few bytes was predicted to take half the time that two ranks measured."""
    request = PlanRequest(MACHINE, Workload(((5000, 2),) * 12), 1.0, topology="ring", rate=1e15)
    fixed = {spec: request.network_of(codec=spec).exchange_s for spec in ("none", "bf16", "thc:4", "qsgd:4")}
    assert fixed["none"] == fixed["bf16"] < 0.003 < min(fixed["qsgd:4"], fixed["thc:4"]) < 0.05
    assert request.network_of(12, "qsgd:4").exchange_s < 0.7 * fixed["qsgd:4"]
    assert replace(request, profile=replace(MACHINE, device="cuda")).network_of(codec="qsgd:4").exchange_s == 0


def test_profile_without_transport_warns_and_uses_that_of_the_shipped_profile() -> None:
    lines: list[str] = []
    machine = Profile("mine", codecs=MACHINE.codecs)
    request = PlanRequest.for_params(machine, MILLION, 0.1)
    recommend(request, notify=lines.append)
    assert request.network.byte_s == (profile.load("cpu").transport or MACHINE.transport).byte_s > 0
    assert len(lines) == 1 and "profile mine has no transport" in lines[0]
    lines.clear()
    ring = PlanRequest.for_params(machine, MILLION, 0.1, topology="ring")
    recommend(ring, notify=lines.append)
    assert len(lines) == 1 and "no times of ranks: those of two ranks by gloo on two cores are used" in lines[0]
    lines.clear()
    ranks = {way: Transport(0.5, 0.0, 1e-9) for way in ("none", "sum", "twoshot")}
    measured = replace(ring, profile=replace(machine, collective=ranks))
    recommend(measured, notify=lines.append)
    assert lines == [] and measured.network.exchange_s == 0.5
    recommend(replace(ring, profile=replace(machine, device="cuda")), notify=lines.append)
    assert len(lines) == 1 and "which is too short" in lines[0]


def test_missing_and_doubtful_measurements_never_make_a_plan_faster_in_silence() -> None:
    measured = replace(MACHINE, slowdown={4: 2.5}, machine={"cores": 2}, load=MachineLoad(0.1, 0.0, False))
    lines: list[str] = []

    def step_s(machine: Profile) -> float:
        request = PlanRequest.for_params(machine, MILLION, 1.0, processes=4, workers=4, rate=1e9, codecs=["qsgd:4"])
        return recommend(request, notify=lines.append).rows[0].step.total_s

    whole = step_s(measured)
    assert lines == []
    assert step_s(replace(measured, slowdown={})) > 0.75 * whole and "no slowdown of processes: 4" in lines.pop()
    assert step_s(replace(measured, transport=None)) > whole and "has no transport" in lines.pop()
    assert step_s(replace(measured, load=MachineLoad(3.0, 0.5, True))) == whole and "busy machine" in lines.pop()


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
    (lambda: advice(family="tree"), "family must be one of convolutional, recurrent"),
    (lambda: advice(optimizer="adam"), "optimizer must be one of sgd, momentum, adamw, muon, got 'adam'"),
    (lambda: advice(codecs=["local 3,fragments=4 qsgd:4"]), "fragments must be at most the local steps"),
    (lambda: advice(codecs=["local 8,overlap=8 qsgd:4"]), "overlap must be below the 8 steps"),
    (lambda: trained("qsgd:4", measure="looks"), "measure must be one of accuracy, loss, got 'looks'"),
])  # fmt: skip
def test_invalid_request_raises_config_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_sharded_ranks_take_codecs_without_memory_and_less_memory() -> None:
    known = [*EVIDENCE, trained("ef|qsgd:4")]
    sharded = advice(topology="fsdp", evidence=known, rate=1e8)
    assert "keeps memory" in row(sharded, "ef|qsgd:4").objection and sharded.codec != "ef|qsgd:4"
    nodes = advice(topology="hsdp", ranks=8, evidence=known)
    assert row(nodes, "qsgd:4").memory < row(advice(), "qsgd:4").memory and not row(nodes, "ef|qsgd:4").objection
    with pytest.raises(ConfigError, match="ranks must be 1 unless the topology is hsdp"):
        advice(ranks=2)
