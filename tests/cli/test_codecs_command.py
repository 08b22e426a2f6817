from __future__ import annotations

import json

from cli_runner import Run
from laconic.codecs import registry


def test_table_names_every_stage(run: Run) -> None:
    result = run("codecs")
    assert result.exit_code == 0
    for name in registry.names():
        assert f" {name} " in result.stdout
    assert "momentum:0.9|topk:0.001|qsgd:4" in result.stdout


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
