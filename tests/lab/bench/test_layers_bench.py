"""The bench of layers: Records, goals, tables, and settings that say what was run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from laconic.errors import ConfigError, WrongResultError
from laconic.records import Record
from laconic_lab.bench import layers
from laconic_lab.bench.layers import CASES, LayerSettings, layer_table, run_layers

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return run_layers(LayerSettings(cases=("linear 256-128", "mlp"), schemes=("monarch:0.2", "subspace:0.1"), repeat=3))


def test_each_scheme_of_each_case_gives_a_record(records: list[Record]) -> None:
    assert [(r.values["case"], r.values["scheme"]) for r in records] == [
        (case, scheme) for case in ("linear 256-128", "mlp") for scheme in ("monarch:0.2", "subspace:0.1")
    ]
    for record in records:
        values = record.values
        assert record.kind == "bench.layers" and Record.from_json(record.to_json()) == record
        assert values["dense_s"] > 0 and 0 < values["rho"] < 0.25 and values["turns"] == 3
        assert values["clock"] == "cpu" and values["goal"] is None
    assert records[-1].values["exempt"]["head.weight"] == "is the output layer's"
    assert torch.get_num_threads() >= 1


def test_goals_are_judged(records: list[Record]) -> None:
    good, bad = ({**records[0].values, "h": h, "goal": 0.25} for h in (0.2, 0.3))
    table = layer_table([Record("bench.layers", good), Record("bench.layers", bad)])
    assert [met for met, _ in table.verdicts] == [True, False] and "missed" in table.verdicts[1][1]
    busy = layer_table([Record("bench.layers", {**good, "h": None})])
    assert busy.rows[0][3] == "varies" and not busy.verdicts[0][0]
    assert "laconic bench layers 'linear 256-128' mlp --scheme monarch:0.2" in table.notes


def test_unsteady_timings_leave_h_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MAX_VARIATION", -1.0)
    (record,) = run_layers(LayerSettings(cases=("linear 128-128",), schemes=("lowrank:0.2",), repeat=3))
    assert record.values["h"] is None


def test_wrong_layer_raises_before_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "expand", lambda model: torch.nn.Linear(128, 128))
    with pytest.raises(WrongResultError, match=r"linear 128-128 by lowrank:0\.2: the expanded layer differs"):
        run_layers(LayerSettings(cases=("linear 128-128",), schemes=("lowrank:0.2",), repeat=3))


def test_settings_are_checked_and_give_the_command_line() -> None:
    assert LayerSettings().command() == "laconic bench layers" and LayerSettings().judges
    assert not LayerSettings(threads=2).judges and not LayerSettings(batch=3).judges
    assert {goal for case in CASES for _, goal in case.schemes} >= {0.25, 0.12, 0.45, 1.15}
    for options, words in (
        ({"cases": ("nothing",)}, "unknown case 'nothing'"),
        ({"cases": ("linear 0-4",)}, "unknown case"),
        ({"repeat": 2}, "--repeat must be at least 3"),
        ({"device": "nope"}, "there is no device 'nope'"),
    ):
        with pytest.raises(ConfigError, match=words):
            LayerSettings(**options)  # type: ignore[arg-type]
