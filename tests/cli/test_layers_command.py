"""``laconic train --layers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_runner import Run, assert_error, file_names
from laconic.train.run import Config

pytest.importorskip("grpc")


def test_train_prints_the_gain_of_layers(run: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Config] = []
    summary = {
        "method": "3", "codec_push": "none", "codec_pull": "none", "iterations": 20, "accuracy": 90.0, "compute_s": 1.0,
        "encode_s": 0.1, "communication_s": 1.0, "total_s": 2.0, "wire_bytes_per_iteration": 1e6,
    }  # fmt: skip

    def launch(runs: dict[Path, Config], **_: Any) -> list[dict[str, Any]]:
        ((folder, config),) = runs.items()
        config.save(folder)
        launched.append(config)
        return [summary | {"layers": config.layers}]

    monkeypatch.setattr("laconic.train.launch.launch", launch)
    for name, value in (("MAX_VARIATION", 1e9), ("TURNS", 3), ("BUDGET_S", 0.5)):
        monkeypatch.setattr(f"laconic.train.break_even.{name}", value)
    flags = ("train", "--method", "3", "--iterations", "20", "--layers", "subspace:0.1,T=50")
    result = run(*flags, "--run-dir", "one")
    assert result.exit_code == 0, result.output
    for words in ("subspace:0.1,T=50", "rho 0.103 by layers", "at 1 Gbit/s", "times as fast as one node"):
        assert words in " ".join(result.stdout.split())
    values = json.loads(run(*flags, "--run-dir", "two", "--bandwidth", "100mbit", "--json").stdout)
    assert values["bandwidth_bit_s"] == 1e8 and values["h"] > 0 and values["r_min"] > values["h"]
    assert {"rho_layers", "rho", "slope", "r_min_dense", "speedup_over_dense", "exempt", "run_dir"} <= values.keys()
    assert json.loads(Path("two/summary.json").read_text())["r_min"] == values["r_min"]
    assert [config.layers for config in launched] == 2 * ["subspace:0.1,T=50"]


@pytest.mark.parametrize("flags, words", [
    (["--layers", "monarc:0.1"], "unknown scheme 'monarc' in 'monarc:0.1'"),
    (["--layers", "monarch:2"], "rho must be in (0, 1), got 2"),
    (["--layers", "monarch:0.1", "--layers-init", "zero"], "layers_init must be project or fresh"),
    (["--layers", "subspace:0.1", "--mode", "async"], "give mode sync"),
    (["--layers", "subspace:0.1", "--bundled"], "give --layerwise"),
    (["--layers", "monarch:0.1", "--bandwidth", "fast"], "a rate is a number and one of"),
])  # fmt: skip
def test_invalid_layers_are_one_line_and_start_nothing(
    run: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert_error(run("train", "--iterations", "3", *flags), 2, words)
    assert file_names() == []
