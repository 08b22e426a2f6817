"""The examples for Ray Train, a worker's death included; needs Ray."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ray"


def run(name: str, folder: Path) -> dict:
    """Return the metrics that an example prints last."""
    pytest.importorskip("ray", reason="no ray")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "250"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(folder)], capture_output=True, text=True, timeout=280,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return ast.literal_eval(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_attach_example_resumes_with_residuals_after_a_worker_died(tmp_path):
    metrics = run("ray_attach.py", tmp_path)
    assert (tmp_path / "died").exists()
    assert (metrics["start"], metrics["step"], metrics["residual_resets"]) == (20, 60, 0)
    assert metrics["accuracy"] > 60 and metrics["wire_bytes"] > 0


@pytest.mark.slow
def test_local_sgd_example_trains(tmp_path):
    metrics = run("ray_local_sgd.py", tmp_path)
    assert metrics["step"] == 100 and metrics["accuracy"] > 60 and metrics["bytes_sent"] > 0


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_example_says_how_to_run_it(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 75 and f"examples/ray/{script.name}" in text.split('"""')[1]
