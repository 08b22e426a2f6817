"""Real processes, killed at a step of the run: it ends as if nothing had happened, and leaves nothing behind."""

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

from laconic.cluster import checkpoint
from laconic.cluster.job import Job
from laconic.errors import ConfigError, FileError, LaconicError
from laconic.train.launch import launch
from laconic.train.methods import method_options
from laconic.train.run import CHECKPOINTS, EVENTS, SERVER, Config

ITERATIONS = 60


REMEMBERING = {
    "push": "momentum:0.9|topk:0.005|sign", "pull": "ef|topk:0.01|sign", "push_small": "momentum:0.9|bf16",
    "pull_small": "ef|bf16", "returns": "gradients", "momentum": 0.0,
}  # fmt: skip
"""An exchange after every iteration, and memories on both sides that must survive."""


def config_of(method: str = "custom", **options: Any) -> Config:
    preset = REMEMBERING if method == "custom" else method_options(method)
    job = Job(**{"workers": 2, "lr": 0.05} | preset | options)
    return Config(model="mlp", data="digits", batch=32, iterations=ITERATIONS, method=method, job=job)


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / EVENTS
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.load_latest(run_dir / CHECKPOINTS)
    assert found is not None and found.meta["version"] == ITERATIONS
    return {name: x for name, x in found.tensors.items() if name.startswith("parameter/")}


def at_version(run_dir: Path, version: int, act: Any) -> threading.Thread:
    """Act as soon as the history tells of that update."""

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


def pids(word: str, run_dir: Path) -> list[int]:
    """Processes of this run whose command line has that word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(run_dir).encode() in command and word.encode() in command:
                found.append(int(entry.name))
    return found


def kill(word: str, run_dir: Path, which: int = 0) -> None:
    os.kill(sorted(pids(word, run_dir))[which], signal.SIGKILL)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without a fault."""
    run_dir = tmp_path_factory.mktemp("clean") / "run"
    launch({run_dir: config_of()})
    return run_dir


def same_weights(a: Path, b: Path) -> None:
    one, other = weights_of(a), weights_of(b)
    assert set(one) == set(other)
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


def applied_once(run_dir: Path) -> None:
    """P1 over all lives of the server: what an update counts is what remained of it after the last resumption."""
    counts: Counter[tuple[int, int]] = Counter()
    for event in events_of(run_dir):
        if event["event"] in ("resumed", "rewound"):  # later updates were undone, and are made again
            counts = Counter({key: n for key, n in counts.items() if key[1] < event["version"]})
        elif event["event"] == "applied":
            counts[event["worker"], event["sequence"]] += 1
    assert set(counts.values()) == {1} and len(counts) == 2 * ITERATIONS


def test_a_clean_run_applies_every_push_once(clean: Path) -> None:
    applied_once(clean)
    assert pids("worker", clean) == pids("server", clean) == []
    kept = [event["version"] for event in events_of(clean) if event["event"] == "checkpoint"]
    assert kept == [20, 40, 60]


def test_a_killed_worker_is_started_again_and_the_run_ends_the_same(tmp_path: Path, clean: Path) -> None:
    run_dir = tmp_path / "run"
    killer = at_version(run_dir, 25, lambda: kill("worker", run_dir, 1))
    launch({run_dir: config_of()})
    killer.join(1)
    lives = Counter(event["worker"] for event in events_of(run_dir) if event["event"] == "welcome")
    assert sorted(lives.values()) == [1, 2]
    applied_once(run_dir)
    same_weights(run_dir, clean)
    assert pids("worker", run_dir) == []


def test_a_killed_server_is_started_again_and_the_run_ends_the_same(tmp_path: Path, clean: Path) -> None:
    run_dir = tmp_path / "run"
    killer = at_version(run_dir, 33, lambda: kill("server", run_dir))
    launch({run_dir: config_of()})
    killer.join(1)
    resumed = [event["version"] for event in events_of(run_dir) if event["event"] == "resumed"]
    assert resumed == [20]  # P2: fewer than 20 iterations were lost
    applied_once(run_dir)
    same_weights(run_dir, clean)
    assert pids("worker", run_dir) == pids("server", run_dir) == []


def test_ctrl_c_leaves_a_run_that_can_be_resumed_and_ends_the_same(tmp_path: Path, clean: Path) -> None:
    run_dir = tmp_path / "run"
    config_of().save(run_dir)
    flags = [word for name, value in REMEMBERING.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    arguments = [*flags, "--iterations", str(ITERATIONS), "--batch", "32", "--run-dir", str(run_dir)]
    (run_dir / "config.json").unlink()
    command = [sys.executable, "-m", "laconic", "train", *arguments]
    train = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    at_version(run_dir, 33, lambda: os.killpg(train.pid, signal.SIGINT)).join(120)
    _, said = train.communicate(timeout=60)
    assert train.returncode == 130 and "--resume" in said, said
    assert pids("worker", run_dir) == pids("server", run_dir) == []
    stopped = events_of(run_dir)[-1]
    assert stopped["event"] == "stopped" and stopped["version"] >= 33
    launch({run_dir: config_of()}, resume=True)
    applied_once(run_dir)
    same_weights(run_dir, clean)


@pytest.mark.slow
def test_a_worker_that_is_stopped_for_a_while_changes_nothing(tmp_path: Path, clean: Path) -> None:
    run_dir = tmp_path / "run"

    def pause() -> None:
        (pid,) = sorted(pids("worker", run_dir))[:1]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(5)
        os.kill(pid, signal.SIGCONT)

    at_version(run_dir, 20, pause)
    launch({run_dir: config_of()})
    applied_once(run_dir)
    same_weights(run_dir, clean)


@pytest.mark.slow
def test_a_worker_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
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


def test_folders_are_not_mixed_up(tmp_path: Path, clean: Path) -> None:
    with pytest.raises(FileError, match="--resume"):
        launch({clean: config_of()})
    with pytest.raises(ConfigError, match="another configuration"):
        launch({clean: config_of("4")}, resume=True)
    with pytest.raises(FileError, match="no run folder"):
        Config.load(tmp_path)
    assert json.loads((clean / SERVER).read_text()) == {"done": True}
