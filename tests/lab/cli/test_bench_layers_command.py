"""``laconic bench layers``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from cli_runner import Run
from laconic_lab.cli.bench_layers import EXAMPLES


def test_bench_layers(run: Run, work_dir: Path) -> None:
    flags = ("bench", "layers", "linear 128-128", "--scheme", "lowrank:0.2", "--repeat", "3")
    result = run(*flags, "--record", "layers.jsonl")
    assert result.exit_code == 0 and "linear 128-128" in result.stdout and "lowrank:0.2" in result.stdout
    assert len(Path("layers.jsonl").read_text().splitlines()) == 1
    values = json.loads(run(*flags, "--json").stdout)
    assert values["command"].endswith("--repeat 3") and values["records"][0]["scheme"] == "lowrank:0.2"
    for example in EXAMPLES[1:]:
        assert run(*shlex.split(example)[1:]).exit_code == 0
    wrong = run("bench", "layers", "nothing")
    assert wrong.exit_code == 2 and len(wrong.stderr.strip().splitlines()) == 1
