"""Experiments of kothari2021: steppers that agree, resumed runs, Records and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from steppers import train_epochs

from laconic.errors import ConfigError
from laconic.records import read
from laconic.train.methods import METHODS
from laconic_lab.studies import trainer
from laconic_lab.studies.deadline import Deadline, OutOfTimeError
from laconic_lab.studies.kothari2021 import STUDY, experiments, runner, scaling, sizes, trainings
from laconic_lab.studies.kothari2021.framed import FrameStepper, LocalFrameStepper
from laconic_lab.studies.kothari2021.settings import HYPER, Setting, setting_of
from laconic_lab.studies.kothari2021.stepper import ComputedStepper, Source, Stepper, can_compute

CPU = torch.device("cpu")


def small(method: str, **changes: Any) -> Setting:
    return setting_of("lenet5", method, data="digits", **changes)


MOMENTUM: dict[str, Any] = {
    "push": "momentum:0.9|topk:0.0012|sign", "pull": "ef|topk:0.0024|sign", "momentum": 0.0,
    "push_small": "momentum:0.9|qsgd:4,round=nearest", "pull_small": "ef|qsgd:4,round=nearest",
}  # fmt: skip
"""Momentum in the channel, exchanges in every iteration."""

WARM = {"warm": [[1, "momentum:0.9|topk:0.1|sign", "ef|topk:0.1|sign"]]}


@pytest.mark.parametrize("method, changes", [("2w", {}), ("4", {}), ("4", MOMENTUM | WARM)])
def test_computed_stepper_trains_like_frames(source: Source, method: str, changes: dict[str, Any]) -> None:
    setting = small(method, **changes)
    computed, framed = ComputedStepper(setting, 1, 2, source), FrameStepper(setting, 1, 2, source)
    for stepper in (computed, framed):
        train_epochs(stepper, 2)
    assert computed.curve.train_loss == pytest.approx(framed.curve.train_loss, rel=2e-3)
    for name in ("push_bytes", "pull_bytes"):  # rounding of the descent differs, and positions with it
        assert getattr(computed.curve, name) == pytest.approx(getattr(framed.curve, name), rel=2e-3)
    compared = computed.curve.frames_compared
    assert (compared, computed.curve.frames_other) == (4 * 3 * 10, 0)


@pytest.mark.parametrize(
    "kind, setting",
    [(ComputedStepper, small("2w")), (ComputedStepper, small("4", **MOMENTUM)), (FrameStepper, small("4"))],
)
def test_resumed_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, source: Source, kind: type[Stepper], setting: Setting
) -> None:
    unit = trainer.Unit("accuracy", setting, 3, 0)
    whole, first, second = (kind(unit.setting, 0, 3, source) for _ in range(3))
    train_epochs(whole, 3)
    train_epochs(first, 2)
    trainer.save(unit, first, tmp_path)
    trainer.resume(unit, second, tmp_path)
    assert second.done == 2
    train_epochs(second, 1)
    assert second.curve.accuracy == whole.curve.accuracy and second.curve.push_bytes == whole.curve.push_bytes
    again, wanted = second.state(), whole.state()
    assert again.keys() == wanted.keys() and all(again[name].equal(wanted[name]) for name in wanted)


def test_recorded_runs_are_not_trained_again(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "Source", lambda *arguments: source)
    reported: list[tuple[str, int, int]] = []
    settings = [small("1"), small("5")]

    def go() -> list[Any]:
        return STUDY.run(
            settings=settings, seeds=[0], epochs=1, records=tmp_path, device="cpu",
            progress=lambda *one: reported.append(one),
        )  # fmt: skip

    first = go()
    assert [record.values["name"] for record in first] == ["1", "5"]
    assert [record.values["iterations"] for record in first] == [3, 3]
    assert len(read(tmp_path / "accuracy.jsonl")) == 2 and reported[-1] == ("accuracy", 2, 2)
    monkeypatch.setattr(runner, "train", None)
    assert [record.to_json() for record in go()] == [record.to_json() for record in first]
    assert not list((tmp_path).glob("partial/*"))


def test_run_that_is_out_of_time_is_kept_and_continues(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "Source", lambda *arguments: source)
    passed = iter([False, True])  # asked when the run begins and after its first epoch

    class Expired(Deadline):
        passed = property(lambda self: next(passed, True))

    def go(deadline: Deadline | None) -> list[Any]:
        return STUDY.run(
            settings=[small("4")], seeds=[0], epochs=2, device="cpu", records=tmp_path, deadline=deadline
        )  # fmt: skip

    with pytest.raises(OutOfTimeError, match="all that was done is kept"):
        go(Expired())
    (saved,) = (json.loads(path.read_text()) for path in tmp_path.glob("partial/*.json"))
    assert saved["done"] == 1 and saved["seconds"] > 0 and not (tmp_path / "accuracy.jsonl").exists()
    (record,) = go(Deadline(60))
    assert len(record.values["accuracy"]) == 2 and record.values["seconds"] > saved["seconds"]
    (whole,) = STUDY.run(settings=[small("4")], seeds=[0], epochs=2, device="cpu")
    assert record.values["accuracy"] == whole.values["accuracy"]


def test_stepper_with_frames_is_made_on_request(source: Source) -> None:
    unit = trainer.Unit("accuracy", small("1"), 1, 0)
    assert isinstance(runner.make_stepper(unit, source), ComputedStepper)
    assert isinstance(runner.make_stepper(unit, source, frames=True), FrameStepper)
    assert not can_compute(small("adaptive"))
    weights = trainer.Unit("accuracy", small("adaptive", every=2), 1, 0)
    assert isinstance(runner.make_stepper(weights, source), LocalFrameStepper)
    assert isinstance(runner.make_stepper(weights, source, frames=True), FrameStepper)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_run_with_many_workers_counts_staleness(mode: str) -> None:
    changes = {"returns": "delta"} if mode != "sync" else {}
    ticks: list[int] = []
    values = scaling.train(small("5", workers=3, mode=mode, batch=128, **changes), 0, 1, None, ticks.append)
    assert ticks == [1] and not values["diverged"] and values["push_bytes"][0] > 0
    assert (values["staleness_most"] > 0) == (mode != "sync")


def test_changes_without_rounds_are_rounded_to_nearest() -> None:
    chosen = {(s.name, s.workers, s.mode): s for s in experiments.settings_of("workers", ["lenet5"], None, None)}
    changed = chosen["5", 8, "async"].options
    assert (changed["returns"], changed["pull"]) == ("delta", "topk:0.01|qsgd:4,round=nearest")
    assert chosen["5, changes by the same codec", 4, "async"].options["pull"] == METHODS["5"][1]["pull"]
    assert chosen["4", 4, "sync"].options == METHODS["4"][1] and "returns" in chosen["1", 4, "async"].options
    assert {mode for name, _, mode in chosen if name in ("6", "adaptive")} == {"sync"}  # best and mean are of a round
    assert {(name, 8, "async") for name in ("1", "2", "2w", "3", "4", "laconic", "laconic-min")} <= chosen.keys()


def test_every_setting_makes_a_valid_job() -> None:
    for experiment in set(experiments.EXPERIMENTS) - set(
        trainings.EXPERIMENTS
    ):  # real processes have jobs of their own
        for setting in experiments.settings_of(experiment, list(HYPER), None, None):
            setting.job(0)
            json.loads(setting.key(experiment, 1, 0))
    names = [s.name for s in experiments.settings_of("accuracy", ["vgg11"], None, None)]
    assert set(names) <= set(METHODS) and len(experiments.seeds_of("accuracy", small("laconic"), None)) == 3


def test_warm_up_phases_follow_each_other() -> None:
    setting = small("laconic", warm=[[1, "a", "b"], [2, "c", "d"]])
    last = (setting.options["push"], setting.options["pull"])
    assert [setting.channels(epoch) for epoch in range(5)] == [("a", "b"), ("c", "d"), ("c", "d"), last, last]


def test_decay_is_ten_times_as_large_with_momentum_in_the_channel() -> None:
    dense, ours = setting_of("vgg11", "1").job(0), setting_of("vgg11", "4", **MOMENTUM).job(0)
    assert ours.momentum == 0 and ours.weight_decay == pytest.approx(dense.weight_decay / (1 - dense.momentum))


@pytest.mark.parametrize("arguments, words", [
    ({"models": ["resnet18"]}, "unknown model 'resnet18'"), ({"methods": ["7"]}, "unknown method '7'"),
    ({"epochs": 0}, "epochs must be at least 1"), ({"device": "tpu"}, "device must be auto, cpu or cuda"),
])  # fmt: skip
def test_invalid_arguments_raise_config_error(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        STUDY.run(**arguments)


def test_sizes_of_a_round_follow_from_the_method() -> None:
    both = [{"w": torch.randn(100, 100), "b": torch.randn(10)} for _ in range(2)]
    by_method = {name: sizes.measure(small(name), both, rounds=1) for name in ("1", "laconic", "adaptive")}
    assert by_method["1"]["bytes_per_iteration"] > 4 * 40_040
    assert by_method["laconic"]["bytes_per_iteration"] < by_method["1"]["bytes_per_iteration"] / 50
    assert by_method["adaptive"]["every"] == 20 and by_method["adaptive"]["encode_s"] > 0
