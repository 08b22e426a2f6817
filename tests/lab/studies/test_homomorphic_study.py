"""Runs with summed gradients equal those with real frames, can be resumed, and are recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from steppers import host_transfers_forbidden, train_epochs

from laconic.errors import ConfigError
from laconic.records import Record, read
from laconic_lab.studies import trainer
from laconic_lab.studies.homomorphic import STUDY, runner, speed, tables
from laconic_lab.studies.homomorphic.computed import Round
from laconic_lab.studies.homomorphic.experiments import EXPERIMENTS, RHOS, SCHEMES, TRAINED, seeds_of, settings_of
from laconic_lab.studies.homomorphic.framed import FramedRound
from laconic_lab.studies.homomorphic.results import KIND, Results
from laconic_lab.studies.homomorphic.settings import HYPER, Setting, setting_of
from laconic_lab.studies.homomorphic.stepper import SummedStepper
from laconic_lab.studies.stepper import Source

COMMITTED = Path(__file__).resolve().parents[3] / "results" / "homomorphic"


def small(layers: str | None = None, codec: str = "none", **changes: Any) -> Setting:
    return replace(setting_of("mlp", layers, codec, workers=2, data="digits", **changes), batch=50)


SETTINGS = [
    small(None, "ef|thc:2"), small(None, "ef|thc:1", carry=False, decay=1e-3), small(None, "shared:4"),
    small("subspace:0.1,T=2", "ef|thc:1", small="ef|shared:8", decay=1e-3),
    small("subspace:0.1,T=2", "ef|thc:1", at_renewal="forget"), small("monarch:0.2", "ef|shared:3"),
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.name}, {setting.at_renewal}")
def test_computed_sums_equal_sums_of_frames(source: Source, setting: Setting) -> None:
    computed = SummedStepper(setting, 1, 2, source, computed=True)
    framed = SummedStepper(setting, 1, 2, source, computed=False)
    for stepper in (computed, framed):
        train_epochs(stepper, 2)
    assert computed.weights.equal(framed.weights)
    assert computed.curve.train_loss == framed.curve.train_loss
    assert computed.curve.frames_compared > 0 and computed.curve.frames_other == 0
    assert computed.summary() == framed.summary()


@pytest.mark.parametrize("computed", [True, False], ids=["computed", "framed"])
def test_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path, source: Source, computed: bool) -> None:
    setting = small("subspace:0.1,T=4", "ef|thc:1", decay=1e-3)
    unit = trainer.Unit("products", setting, 3, 0)
    whole, first, second = (SummedStepper(setting, 0, 3, source, computed=computed) for _ in range(3))
    train_epochs(whole, 3)
    train_epochs(first, 2)
    trainer.save(unit, first, tmp_path)
    trainer.resume(unit, second, tmp_path)
    train_epochs(second, 1)
    again, wanted = second.state(), whole.state()
    assert again.keys() == wanted.keys() and all(again[name].equal(wanted[name]) for name in wanted)
    assert second.curve.accuracy == whole.curve.accuracy


def test_wrong_sum_is_counted_as_a_differing_frame(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = SummedStepper(small(None, "ef|thc:2"), 0, 1, source, computed=True)
    right = Round.mean
    monkeypatch.setattr(Round, "mean", lambda self, values: right(self, values) * 1.0001)
    train_epochs(stepper, 1)
    assert stepper.curve.frames_other > 0


def test_carried_scales_give_the_sums_of_frames() -> None:
    shapes = {"a": (40, 60), "b": (7,)}
    rows = torch.randn(3, 2407, generator=torch.Generator().manual_seed(0))
    one = Round(shapes, "ef:0.9|thc:2", 3, torch.device("cpu"), carry=True)
    other = FramedRound(shapes, "ef:0.9|thc:2", 3, carry=True)
    for turn in range(4):
        assert one.mean(rows * (turn + 1)).equal(other.mean(rows * (turn + 1)))
    one.forget("a")
    other.forget("a")
    assert one.mean(rows).equal(other.mean(rows))


@pytest.mark.parametrize("spec", ["ef|thc:2", "shared:4"])
def test_computed_round_can_be_captured_in_a_cuda_graph(spec: str) -> None:
    group = Round({"a": (40, 60)}, spec, 2, torch.device("cpu"), carry=True)
    values = torch.ones(2, 2400)
    with host_transfers_forbidden():
        group.mean(values)


def test_unsupported_setting_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="round to nearest"):
        Round({"a": (8,)}, "thc:2,round=stochastic", 2, torch.device("cpu"), carry=False)
    with pytest.raises(ConfigError, match="evenly"):
        setting_of("mlp", workers=3)
    with pytest.raises(ConfigError, match="unknown model"):
        list(settings_of("sums", ["resnet"]))


def test_recorded_runs_are_not_trained_again(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "Source", lambda *arguments: source)
    settings = [small("hashed:0.1"), small(None, "ef|thc:4")]

    def go() -> list[Record]:
        return runner.run("sums", epochs=1, seeds=[0], settings=settings, device="cpu", records=tmp_path)

    first = go()
    monkeypatch.setattr(runner, "train", None)
    assert [one.values for one in go()] == [one.values for one in first]
    values = first[1].values
    assert values["rho"] == values["push_nbytes"] / (4 * values["numel_dense"]) and 0.125 < values["rho"] < 0.14
    assert sum(values["push_bytes"]) == values["iterations"] * values["workers"] * values["push_nbytes"]


def test_speed_times_a_step_and_a_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "TURNS", 3)
    monkeypatch.setattr(speed, "CODED", 1 << 16)
    monkeypatch.setattr(speed, "BUDGET_S", 1.0)
    step = speed._step(speed.Case("mlp", "subspace:0.1"), torch.device("cpu"))
    assert step["compressed_s"] > 0 and step["rho"] == pytest.approx(0.103, abs=0.001)
    round_ = speed._codec("ef|thc:4", torch.device("cpu"))
    assert round_["encode_s"] > 0 and round_["decode_s"] > 0 and 0.08 < round_["error"] < 0.12
    assert len(list(speed.cases())) == (5 * len(SCHEMES) - 1) * len(RHOS) + 3 + 6


def run_of(layers: str | None, codec: str, top1: float, *, part: str = "sums", **values: Any) -> Record:
    setting = setting_of("vgg11", layers, codec).values()
    rho = 1.0 if codec == "none" else int(codec[-1]) / 32
    known = {"part": part, "epochs": 20, "seed": 0, "accuracy": [50.0, top1], "held_loss": [1.0, 0.5], "rho": rho,
             "rho_layers": 1.0, "numel": 9_231_114, "numel_dense": 9_231_114, "frames_compared": 4,
             "frames_other": 0}  # fmt: skip
    return Record(KIND, setting | known | values)


def test_goals_compare_means_with_dense_ones() -> None:
    records = [run_of(None, "none", 86.0), run_of(None, "none", 86.4, seed=1)]
    records += [run_of(None, "ef|thc:2", 86.05), run_of(None, "ef|thc:1", 85.8, seed=1)]
    findings = {one.claim.key: one for one in STUDY.findings(Results(records))}
    assert findings["vgg_2"].evidence.interval.mean == pytest.approx(0.15)
    assert findings["vgg_1"].evidence.interval.mean == pytest.approx(0.4)
    assert (findings["vgg_2"].verdict, findings["vgg_1"].verdict) == ("yes, one run", "no, one run")


def test_step_in_one_launch_replaces_the_older_record_and_is_marked() -> None:
    step = {"case": "alexnet", "device": "cuda", "scheme": "monarch:0.2", "rho": 0.2, "h": 1.5, "dense_s": 1.0,
            "numel": 100, "numel_compressed": 20}  # fmt: skip

    def shown(*steps: dict[str, Any]) -> Any:
        results = STUDY.results([Record(speed.STEP_KIND, one) for one in steps])
        (table,) = (one for one in STUDY.all_tables(results) if one.title == "What a step costs")
        return table.rows[0][3]

    launched = step | {"h": 0.9, "graph": True}
    assert (shown(step), shown(step, launched), shown(launched | {"h": None})) == ("– / 1.50", "– / 0.90°", "– / –")


def test_bound_equals_the_planners() -> None:
    step = {"part": "speed", "device": "cpu", "case": "vgg11", "scheme": "lowrank:0.1", "dense_s": 1.0,
            "compressed_s": 0.5, "h": 0.5, "rho": 0.1, "numel": 9_231_114, "numel_compressed": 923_111}  # fmt: skip
    codec = {"part": "speed", "device": "cpu", "codec": "ef|thc:1", "values": 9_231_114, "encode_s": 0.03,
             "decode_s": 0.02, "error": 0.6}  # fmt: skip
    records = [run_of(None, "none", 86.0), run_of(None, "ef|thc:1", 86.0), Record(speed.STEP_KIND, step)]
    table = tables._bounds(Results([*records, Record(speed.CODEC_KIND, codec)]))
    rows = {row[1]: row for row in table.rows}
    # 16 * 36.92 MB / (1 s * 125 MB/s) = 4.727 of the ideal time for the exchange, and 1 for computing: four workers
    # are not faster than one.
    assert rows["dense × float32"][4] == "(5.73)"
    # A bit a value takes 1/32 of it; 0.05 s of coding are a fifth of the quarter of a second that a step takes then.
    assert rows["dense × ef|thc:1"][4] == "1.35"


def test_committed_records_belong_to_the_experiments() -> None:
    for experiment in TRAINED:
        keys = {
            setting.key(experiment, HYPER[setting.model].epochs, seed)
            for setting in settings_of(experiment, tuple(HYPER))
            for seed in seeds_of(experiment, setting, None)
        }
        records = read(COMMITTED / f"{experiment}.jsonl")
        assert {record.values["key"] for record in records} <= keys
        assert all(record.values["frames_other"] == 0 for record in records)


def test_key_holds_everything_about_a_run() -> None:
    experiment, epochs, seed, values = json.loads(small(None, "ef|thc:2").key("sums", 3, 7))
    assert (experiment, epochs, seed) == ("sums", 3, 7) and values["codec"] == "ef|thc:2" and values["rules"] == []
    assert set(EXPERIMENTS) - set(TRAINED) == {"speed"}
