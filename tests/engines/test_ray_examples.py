"""The examples for Ray Train, a worker's death included; needs Ray."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ray"


CLUSTER = """
import os, subprocess, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster

script, folder = sys.argv[1], Path(sys.argv[2])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
other = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
environment = os.environ | {"RAY_ADDRESS": cluster.address}
run = subprocess.Popen([sys.executable, script, str(folder)], env=environment)
while run.poll() is None and not [*folder.rglob("rank1.pt")]:
    time.sleep(0.2)
time.sleep(5)  # Ray takes note of a checkpoint within seconds
cluster.remove_node(other, allow_graceful=False)
code = run.wait()
cluster.shutdown()
sys.exit(code)
"""
"""Runs a script on two nodes of one core each, and removes one of them after the first checkpoint."""


def run(*command: str | Path, start_s: int = 250, limit_s: int = 280) -> dict:
    """Return the metrics that an example prints last.

    Args:
        start_s: How long Ray waits for workers before it tries again, perhaps with fewer.
    """
    pytest.importorskip("ray", reason="no ray")
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=limit_s,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(start_s)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return next(ast.literal_eval(line) for line in reversed(done.stdout.splitlines()) if line.startswith("{"))


@pytest.mark.slow
def test_attach_example_resumes_with_residuals_after_a_worker_died(tmp_path):
    metrics = run(EXAMPLES / "ray_attach.py", tmp_path)
    assert (tmp_path / "died").exists()
    assert (metrics["start"], metrics["step"], metrics["residual_resets"]) == (20, 60, 0)
    assert metrics["accuracy"] > 60 and metrics["wire_bytes"] > 0


@pytest.mark.slow
def test_local_sgd_example_trains(tmp_path):
    metrics = run(EXAMPLES / "ray_local_sgd.py", tmp_path)
    assert metrics["step"] == 100 and metrics["accuracy"] > 60 and metrics["bytes_sent"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_local_sgd_goes_on_with_the_worker_that_is_left_when_a_node_is_lost(tmp_path):
    script, cluster = tmp_path / "waits.py", tmp_path / "cluster.py"
    wait = "time.sleep(600 if local.steps == SAVE_EVERY and ray.train.get_context().get_world_size() == 2 else 0)"
    example = (EXAMPLES / "ray_local_sgd.py").read_text()
    text = example.replace("import sys\n", "import sys\nimport time\n")
    script.write_text(text.replace("        local.zero_grad()\n", f"        {wait}\n        local.zero_grad()\n"))
    assert script.read_text().count("time.sleep") == 1
    cluster.write_text(CLUSTER)
    metrics = run(cluster, script, tmp_path, start_s=60, limit_s=540)
    assert (metrics["step"], metrics["workers"]) == (100, 1) and metrics["accuracy"] > 60


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_example_says_how_to_run_it(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 75 and f"examples/ray/{script.name}" in text.split('"""')[1]
