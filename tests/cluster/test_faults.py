"""Real processes killed at a step of the run: it ends with the same weights and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import train

from laconic.cluster import checkpoint
from laconic.cluster.job import Job
from laconic.errors import ConfigError, FileError, LaconicError
from laconic.train.launch import launch
from laconic.train.methods import method_options
from laconic.train.run import CHECKPOINTS, EVENTS, SERVER, Config

ITERATIONS = 60


WITH_RESIDUALS = {
    "push": "momentum:0.9|topk:0.005|sign", "pull": "ef|topk:0.01|sign", "push_small": "momentum:0.9|bf16",
    "pull_small": "ef|bf16", "returns": "gradients", "momentum": 0.0,
}  # fmt: skip
"""An exchange after every iteration, and residuals on both sides that must be restored."""


def config_of(method: str = "custom", **options: Any) -> Config:
    preset = WITH_RESIDUALS if method == "custom" else method_options(method)
    job = Job(**{"workers": 2, "lr": 0.05} | preset | options)
    return Config(model="mlp", data="digits", batch=32, iterations=ITERATIONS, method=method, job=job)


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / EVENTS
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.load_latest(run_dir / CHECKPOINTS)
    assert newest is not None and newest.meta["version"] == ITERATIONS
    return {name: x for name, x in newest.tensors.items() if name.startswith("parameter/")}


def at_version(run_dir: Path, version: int, act: Any) -> threading.Thread:
    """Act as soon as the event log contains that version."""

    def watch() -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if any(event.get("version", -1) >= version for event in events_of(run_dir)):
                act()
                return
            time.sleep(0.002)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def pids(role: str, run_dir: Path) -> list[int]:
    """Return the processes of a run whose command line contains a role."""
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(run_dir).encode() in command and role.encode() in command:
                result.append(int(entry.name))
    return result


def kill(role: str, run_dir: Path, which: int = 0) -> None:
    os.kill(sorted(pids(role, run_dir))[which], signal.SIGKILL)


def check_weights(run_dir: Path, config: Config) -> None:
    """Compare a run's weights with those of the same run without a fault, in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes of a run
    expected = train(config.job, config.exchanges)[0].parameters
    torch.set_num_threads(threads)
    weights = weights_of(run_dir)
    assert len(weights) == len(expected)
    for name, x in expected.items():
        assert torch.equal(x, weights[f"parameter/{name}"]), name


def applied_once(run_dir: Path, workers: int = 2) -> None:
    """Check P1 over all processes of the server: only updates that were not undone count."""
    counts: Counter[tuple[int, int]] = Counter()
    for event in events_of(run_dir):
        if event["event"] in ("resumed", "rewound"):  # later updates are made again
            counts = Counter({key: n for key, n in counts.items() if key[1] < event["version"]})
        elif event["event"] == "applied":
            counts[event["worker"], event["sequence"]] += 1
    assert set(counts.values()) == {1} and len(counts) == workers * ITERATIONS


def test_killed_worker_and_server_restart_and_the_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    killers = [
        at_version(run_dir, 25, lambda: kill("worker", run_dir, 1)),
        at_version(run_dir, 47, lambda: kill("server", run_dir)),
    ]
    launch({run_dir: config_of()})
    for killer in killers:
        killer.join(1)
    events = events_of(run_dir)
    incarnations = {(event["worker"], event["incarnation"]) for event in events if event["event"] == "welcome"}
    assert sorted(Counter(worker for worker, _ in incarnations).values()) == [1, 2]
    resumed = [event["version"] for event in events if event["event"] == "resumed"]
    assert resumed == [40]  # P2: fewer than 20 iterations were lost
    applied_once(run_dir)
    check_weights(run_dir, config_of())
    assert pids("worker", run_dir) == pids("server", run_dir) == []


def test_interrupted_run_resumes_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    run_dir, config = tmp_path / "run", config_of(workers=1)
    flags = [word for name, value in WITH_RESIDUALS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    arguments = [*flags, "--iterations", str(ITERATIONS), "--batch", "32", "--workers", "1"]
    arguments += ["--run-dir", str(run_dir)]
    command = [sys.executable, "-m", "laconic", "train", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    at_version(run_dir, 33, lambda: os.killpg(process.pid, signal.SIGINT)).join(120)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in stderr, stderr
    assert pids("worker", run_dir) == pids("server", run_dir) == []
    stopped = events_of(run_dir)[-1]
    assert stopped["event"] == "stopped" and stopped["version"] >= 33
    launch({run_dir: config}, resume=True)
    applied_once(run_dir, workers=1)
    check_weights(run_dir, config)
    # On a busy machine the signal may end the worker before it has saved what belongs to checkpoint 40, which is then
    # made again from 20 on.
    checkpoints = [event["version"] for event in events_of(run_dir) if event["event"] == "checkpoint"]
    assert checkpoints in ([20, 40, 60], [20, 40, 40, 60])
    assert json.loads((run_dir / SERVER).read_text()) == {"done": True}
    with pytest.raises(FileError, match="--resume"):
        launch({run_dir: config})
    with pytest.raises(ConfigError, match="another configuration"):
        launch({run_dir: config_of("4")}, resume=True)


@pytest.mark.slow
def test_worker_that_is_stopped_for_a_while_changes_no_bit(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def pause() -> None:
        (pid,) = sorted(pids("worker", run_dir))[:1]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(5)
        os.kill(pid, signal.SIGCONT)

    at_version(run_dir, 20, pause)
    launch({run_dir: config_of()})
    applied_once(run_dir)
    check_weights(run_dir, config_of())


@pytest.mark.slow
def test_worker_that_dies_repeatedly_ends_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    script = tmp_path / "build.py"
    script.write_text(
        "import os, sys, torch\n"
        "def build():\n"
        "    if 'worker' in sys.argv:\n"
        "        os._exit(3)\n"
        "    pairs = torch.randn(64, 4), torch.zeros(64, dtype=torch.long)\n"
        "    return torch.nn.Linear(4, 2), pairs, pairs, torch.nn.functional.cross_entropy\n"
    )
    with pytest.raises(LaconicError, match=r"worker . has died 2 times, the last time with exit code 3"):
        launch({run_dir: replace(config_of(), script=f"{script}:build")}, restarts=1)
    assert pids("worker", run_dir) == pids("server", run_dir) == []
