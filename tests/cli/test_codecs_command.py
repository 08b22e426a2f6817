from __future__ import annotations

import json
import sys

import pytest

from cli_runner import Run
from laconic.codecs import registry


def test_table_names_every_stage(run: Run) -> None:
    result = run("codecs")
    assert result.exit_code == 0
    for name in registry.names():
        assert f" {name} " in result.stdout
    assert "momentum:0.9|topk:0.001|qsgd:4" in run("codecs", "--wide").stdout


def test_table_fits_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("codecs").stdout.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 50
    shown = {line.split()[0]: line.split()[1:4] for line in lines if line.strip()}
    assert shown["shared"][2] == "biased", "it rounds to nearest by default"
    assert (shown["qsgd"][2], shown["rans"][2]) == ("unbiased", "exact")


def test_bits_of_powersgd_depend_on_the_shape(run: Run) -> None:
    stages = {stage["name"]: stage for stage in json.loads(run("codecs", "--json").stdout)["stages"]}
    bits = stages["powersgd"]["bits_by_shape"]
    assert bits["65536"] > 32 and 1 < bits["256x256"] < 1.02 and 0.25 < bits["1024x1024"] < 0.26
    assert stages["powersgd"]["bits_per_value"] == bits["256x256"] and stages["qsgd"]["bits_by_shape"] == {}
    assert "powersgd: bits by shape: 256x256 1" in run("codecs").stdout


def test_stage_without_its_package_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    result = run("codecs")
    assert result.exit_code == 0 and "pip install zstandard" in result.stdout


def test_json_describes_every_stage(run: Run) -> None:
    stages = {stage["name"]: stage for stage in json.loads(run("codecs", "--json").stdout)["stages"]}
    assert sorted(stages) == registry.names()
    assert stages["qsgd"]["arguments"] == {"bits": 4, "bucket": 512, "norm": "max", "round": "stochastic"}
    assert 4.06 < stages["qsgd"]["bits_per_value"] < 4.08
    assert stages["terngrad"]["bias"] == "unbiased" and stages["none"]["bias"] == "exact"
    assert stages["qsgd"]["bias"] == "unbiased; biased only with round=nearest"
    assert stages["randk"]["bias"] == "unbiased; biased only with scale=false"
    assert stages["ef"]["kind"] == "channel" and stages["ef"]["bits_per_value"] is None
    for name in ("huffman", "rans", "deflate", "zstd"):
        assert stages[name]["kind"] == "coder" and stages[name]["bias"] == "exact"
        assert stages[name]["bits_per_value"] < stages["uniform"]["bits_per_value"], "shown behind a quantizer"
    assert stages["adaptive"]["kind"] == "quantizer" and stages["adaptive"]["arguments"]["f"] == 0.03
