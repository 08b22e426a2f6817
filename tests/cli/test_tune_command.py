"""The command ``laconic tune``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runner import Run
from laconic.records import read

SCRIPT = """
import torch
def batch(number):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
    return x, (x[:, 0] > 0).long()
def build():
    model = torch.nn.Linear(16, 2)
    return {"model": model, "batches": batch, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
def nothing():
    return 7
def incomplete():
    return {"model": torch.nn.Linear(1, 1)}
"""


def test_script_is_tuned_into_a_file_that_plan_reads(run: Run, work_dir: Path) -> None:
    (work_dir / "my.py").write_text(SCRIPT)
    words = ("tune", "my.py:build", "--steps", "8", "--codec", "qsgd:8", "--bandwidth", "1mbit")
    result = run(*words, "-o", "mine.json", "--record", "mine.jsonl", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert [one["label"] for one in values["outcomes"]] == ["none", "none, other order", "qsgd:8"]
    assert values["settings"]["optimizer"] == "sgd" and values["plan"]["recommendation"]["codec"] in ("none", "qsgd:8")
    (record,) = read(work_dir / "mine.jsonl")
    assert record.kind == "tune.evidence" and record.values["codec"] == "qsgd:8"
    plan = ("plan", "--params", "100", "--step-time", "1", "--family", "mlp", "--optimizer", "sgd", "--codec", "qsgd:8")
    planned = json.loads(run(*plan, "--evidence", "mine.json", "--json").stdout)
    assert planned["rows"][-1]["evidence"]["source"] == "laconic tune"
    again = run(*words, "-o", "mine.json")
    assert again.exit_code == 0 and "recommended: " in again.stdout and "simulated workers" in again.stdout


def test_model_of_laconic_is_tuned(run: Run) -> None:
    result = run("tune", "--model", "mlp", "--data", "digits", "--steps", "8", "--codec", "qsgd:4", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["settings"]["held_out"] is True


def test_layers_are_shown_by_their_error_of_encoding(run: Run) -> None:
    words = ("--data", "digits", "--steps", "8", "--codec", "ef|sign", "--bandwidth", "1mbit", "--give-up", "90%")
    result = run("tune", "--model", "mlp", *words)
    assert result.exit_code == 0, result.output
    layers = [line for line in result.stdout.splitlines() if ".weight" in line]
    assert "ef|sign: layers by error of encoding" in result.stdout and len(layers) == 2  # head travels uncompressed
    assert layers[0].index("fc") > 0 and "ef|sign" in layers[0]


@pytest.mark.parametrize("words, message", [
    ((), "give a script FILE.py:FUNCTION or --model NAME"), (("my.py:nothing",), "must return (model, train, test"),
    (("my.py:incomplete",), "must have batches, optimizer, too"), (("no.py:build",), "there is no file"),
    (("--model", "mlp", "--optimizer", "lion"), "--optimizer must be one of sgd, momentum, adamw, muon, got 'lion'"),
])  # fmt: skip
def test_invalid_input_prints_one_line(run: Run, work_dir: Path, words: tuple[str, ...], message: str) -> None:
    (work_dir / "my.py").write_text(SCRIPT)
    result = run("tune", *words)
    assert result.exit_code in (1, 2) and message in result.stderr and len(result.stderr.strip().splitlines()) == 1
