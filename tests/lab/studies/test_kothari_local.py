"""Computed runs with local steps equal those with real frames."""

from __future__ import annotations

import pytest
import torch
from steppers import host_transfers_forbidden, train_epochs

from laconic_lab.studies.kothari2021 import experiments
from laconic_lab.studies.kothari2021.framed import FrameStepper, LocalFrameStepper
from laconic_lab.studies.kothari2021.runner import make_stepper
from laconic_lab.studies.kothari2021.settings import HYPER, Setting, setting_of
from laconic_lab.studies.kothari2021.stepper import BestStepper, ComputedStepper, LocalStepper, Source, can_compute
from laconic_lab.studies.stepper import Stepper
from laconic_lab.studies.trainer import Unit


def local(channel: str, small: str = "ef|bf16", **options: object) -> Setting:
    return setting_of(
        "lenet5", "laconic", data="digits", every=2, push=channel, pull=channel, push_small=small, pull_small=small,
        **options,
    )  # fmt: skip


WARM = {"warm": [[1, "ef|topk:0.5|sign", "ef|topk:0.5|sign"]]}


@pytest.mark.parametrize("setting", [
    local("ef|topk:0.1|sign"), local("ef|sign", "ef|qsgd:8,round=nearest"), local("topk:0.1|qsgd:4", "none"),
    local("none", "none"), local("ef|topk:0.1|sign", **WARM),
], ids=["signs", "all signs", "random", "uncompressed", "warm-up"])  # fmt: skip
def test_local_stepper_trains_like_frames(source: Source, setting: Setting) -> None:
    assert can_compute(setting)
    computed, framed = LocalStepper(setting, 1, 2, source), FrameStepper(setting, 1, 2, source)
    for stepper in (computed, framed):
        train_epochs(stepper, 2)
    assert computed.curve.accuracy == framed.curve.accuracy
    assert computed.curve.push_bytes == framed.curve.push_bytes
    assert computed.curve.pull_bytes == framed.curve.pull_bytes
    assert (computed.curve.frames_compared, computed.curve.frames_other) == (3 * 3 * 10, 0)
    assert all(torch.equal(held.flat, computed.weights) for held in computed.held)  # it ended with an exchange


def check_resuming(whole: Stepper, first: Stepper, second: Stepper) -> None:
    """A run that another stepper continues between two exchanges ends as one that was not interrupted."""
    train_epochs(whole, 4)
    train_epochs(first, 1)  # three iterations: the third is in no exchange yet
    second.done = 1
    second.load({key: x.clone() for key, x in first.state().items()})
    train_epochs(second, 3)
    again, wanted = second.state(), whole.state()
    assert again.keys() == wanted.keys() and all(again[key].equal(wanted[key]) for key in wanted)


@pytest.mark.parametrize("kind, setting", [
    (LocalStepper, local("ef|topk:0.1|sign")), (BestStepper, setting_of("lenet5", "6", data="digits", every=2)),
])  # fmt: skip
def test_local_run_resumes_between_exchanges(source: Source, kind: type[Stepper], setting: Setting) -> None:
    check_resuming(*(kind(setting, 0, 4, source) for _ in range(3)))


BY_FRAMES = {
    "6": setting_of("lenet5", "6", data="digits", every=2),
    "whole weights of the best": setting_of(
        "lenet5", "6", data="digits", every=2, push=None, pull=None, sends="weights", returns="weights"
    ),
    "adaptive": setting_of("lenet5", "adaptive", data="digits", every=2),
}


@pytest.mark.parametrize("name", BY_FRAMES)
def test_local_steps_with_real_frames_train_like_frames(source: Source, name: str) -> None:
    setting = BY_FRAMES[name]
    local, framed = LocalFrameStepper(setting, 1, 2, source), FrameStepper(setting, 1, 2, source)
    for stepper in (local, framed):
        train_epochs(stepper, 2)
    assert can_compute(setting) == (name == "6") and local.curve.accuracy == framed.curve.accuracy
    assert local.curve.push_bytes == pytest.approx(framed.curve.push_bytes, rel=1e-3)  # rounding of the steps differs
    assert local.curve.pull_bytes == pytest.approx(framed.curve.pull_bytes, rel=1e-3)
    assert local.summary()["worker_accuracy"] == framed.summary()["worker_accuracy"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", BY_FRAMES)
def test_local_steps_as_graphs_train_like_frames_on_a_gpu(name: str) -> None:
    source = Source("digits", None, torch.device("cuda"))
    graphed, framed = LocalFrameStepper(BY_FRAMES[name], 1, 3, source), FrameStepper(BY_FRAMES[name], 1, 3, source)
    for stepper in (graphed, framed):
        train_epochs(stepper, 3)
    assert graphed.graph and graphed.curve.accuracy[-1] == pytest.approx(framed.curve.accuracy[-1], abs=5.0)
    assert graphed.curve.push_bytes == pytest.approx(framed.curve.push_bytes, rel=0.02)


@pytest.mark.parametrize("name", BY_FRAMES)
def test_local_run_with_real_frames_resumes_between_exchanges(source: Source, name: str) -> None:
    check_resuming(*(LocalFrameStepper(BY_FRAMES[name], 0, 4, source) for _ in range(3)))


@pytest.mark.parametrize("method, computed", [("1", True), ("laconic", True), ("6", True), ("adaptive", False)])
def test_methods_that_can_be_computed(method: str, computed: bool) -> None:
    assert can_compute(setting_of("vgg11", method)) is computed
    assert not can_compute(setting_of("vgg11", method, mode="async"))


@pytest.mark.parametrize("method, kind", [
    ("1", ComputedStepper), ("laconic", LocalStepper), ("6", BestStepper), ("adaptive", LocalFrameStepper),
])  # fmt: skip
def test_stepper_follows_from_what_is_exchanged(source: Source, method: str, kind: type[Stepper]) -> None:
    unit = Unit("accuracy", setting_of("lenet5", method, data="digits"), 20, 0)
    assert type(make_stepper(unit, source)) is kind
    assert type(make_stepper(unit, source, frames=True)) is FrameStepper


@pytest.mark.parametrize("small, seed", [("none", 1), ("none", 2), ("bf16", 3)])
def test_best_stepper_trains_like_frames(source: Source, small: str, seed: int) -> None:
    setting = setting_of("lenet5", "6", data="digits", every=2, push="topk:0.1|qsgd:4,norm=l2", push_small=small)
    computed, framed = BestStepper(setting, seed, 4, source), FrameStepper(setting, seed, 4, source)
    for stepper in (computed, framed):
        train_epochs(stepper, 4)
    for name in ("accuracy", "held_loss", "push_bytes", "pull_bytes"):
        assert getattr(computed.curve, name) == getattr(framed.curve, name), name
    assert (computed.curve.frames_compared, computed.curve.frames_other) == (4 * 2 * 10, 0)
    assert computed.summary() == framed.summary()


@pytest.mark.parametrize("kind, setting", [
    (ComputedStepper, setting_of("lenet5", "2w", data="digits")), (LocalStepper, local("ef|topk:0.1|sign")),
    (BestStepper, setting_of("lenet5", "6", data="digits", every=2)),
])  # fmt: skip
def test_iterations_and_exchanges_can_be_captured_in_a_cuda_graph(
    source: Source, kind: type[ComputedStepper], setting: Setting
) -> None:
    stepper = kind(setting, 0, 2, source)
    stepper.begin_epoch()
    with host_transfers_forbidden():
        for stage in stepper._stages():
            stage()


def test_best_stepper_returns_frames_of_either_worker(source: Source) -> None:
    setting = setting_of("lenet5", "6", data="digits", every=2)
    best: set[int] = set()
    for seed in range(3):
        stepper = BestStepper(setting, seed, 2, source)
        for _ in range(2):
            stepper.begin_epoch()
            for _ in range(stepper.per_epoch):
                stepper.step()
            best |= set(stepper._best[: stepper._pending].tolist())
            stepper.end_epoch()
    assert best == {0, 1}


def test_methods_own_rate_applies_unless_another_is_given() -> None:
    rates = HYPER["vgg11"].rates
    assert setting_of("vgg11", "laconic").lr == rates["laconic"] > HYPER["vgg11"].lr == setting_of("vgg11", "1").lr
    assert setting_of("vgg11", "laconic", lr=0.01).lr == 0.01
    names = {setting.name for setting in experiments.frontier("vgg11", None)}
    assert "method 1, rate 0.08" in names  # method 1 is tried with our learning rate, too
