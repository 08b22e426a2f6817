"""Training on a disk that is full, read-only or broken."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_faults import pids

from laconic.cluster import checkpoint
from laconic.train.run import CHECKPOINTS, EVENTS
from laconic.watch.events import read_events
from laconic_lab.faults.invariants import applied_once, lost_at_most

SCRIPT = """
import errno, os, subprocess, sys
from pathlib import Path
import torch

DISK, KIND = Path({disk!r}), {kind!r}
calls = [0]

def damage_disk():
    if KIND == "full":
        with open(DISK / "filler", "wb", buffering=0) as out:
            try:
                while True:
                    out.write(bytes(4096))
            except OSError:
                return
    for folder in (DISK / "run").glob("checkpoints"):
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)

def loss(outputs, targets):
    calls[0] += 1
    if calls[0] == 6 and KIND in ("full", "read-only") and "worker" in sys.argv:
        damage_disk()
    return torch.nn.functional.cross_entropy(outputs, targets)

def break_disk():
    sync, seen = os.fsync, [0]
    def fsync(handle):
        seen[0] += 1
        if seen[0] > {syncs}:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(handle)
    os.fsync = fsync

def build():
    torch.manual_seed(0)
    if KIND == "broken" and "server" in sys.argv:
        break_disk()
    pairs = torch.randn(64, 100), torch.randint(0, 2, (64,))
    model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2))
    return model, pairs, pairs, loss
"""
WITH_RESIDUALS = "ef|topk:0.1"
"""A push with residuals, which workers save on the same disk."""
ERRORS = {"full": "No space left on device", "read-only": "Read-only file system", "broken": "Input/output error"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", "--recursive", folder], check=True)


def train_until_it_fails(kind: str, push: str, disk: Path, tmp_path: Path) -> list[str]:
    """Train on a disk that fails: only the failure of the last checkpoint is an error. Return the command."""
    script, run_dir = tmp_path / "script.py", disk / "run"
    script.write_text(textwrap.dedent(SCRIPT).format(disk=str(disk), kind=kind, syncs=12))
    options = [
        *["train", "--workers", "1", "--iterations", "12", "--batch", "16", "--checkpoint-every", "4", "--push"],
        push,
    ]
    command = [sys.executable, "-m", "laconic", *options, "--script", f"{script}:build", "--run-dir", str(run_dir)]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=200)
    lines = failed.stderr.strip().splitlines()
    assert failed.returncode == 1 and "Traceback" not in failed.stderr, failed.stderr
    errors = [line for line in lines if line.startswith("laconic: ")]
    assert len(errors) == 2 and ERRORS[kind] in errors[0] and "checkpoint of step 12" in errors[0], failed.stderr
    assert errors[1] == lines[-1] and "server 0 has died with exit code 1: see its message above" in errors[1]
    assert not [*pids("server", run_dir), *pids("worker", run_dir)]
    kept = checkpoint.load_latest(run_dir / CHECKPOINTS)
    assert kept is not None and kept.step == 4
    return command


@pytest.mark.slow
@pytest.mark.parametrize("push", ["none", WITH_RESIDUALS])
@pytest.mark.parametrize("kind", list(ERRORS))
def test_run_resumes_after_its_disk_is_repaired(kind: str, push: str, disk: Path, tmp_path: Path) -> None:
    command = train_until_it_fails(kind, push, disk, tmp_path)
    script, run_dir = tmp_path / "script.py", disk / "run"
    if kind == "full":
        (disk / "filler").unlink()
    elif kind == "read-only":
        subprocess.run(["umount", run_dir / CHECKPOINTS], check=True)
    script.write_text(textwrap.dedent(SCRIPT).format(disk=str(disk), kind="none", syncs=0))
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    events = read_events(run_dir / EVENTS)
    assert [event["version"] for event in events if event["event"] == "resumed"] == [4]
    applied_once(events)
    lost_at_most(events, 12)
    newest = checkpoint.load_latest(run_dir / CHECKPOINTS)
    assert newest is not None and newest.step == 12


def test_truncated_event_log_stays_readable(tmp_path: Path) -> None:
    """A full disk ends it inside a line, and the next server process appends to it."""
    event_log = tmp_path / EVENTS
    event_log.write_text('{"at": 1.5, "event": "push"}\n{"at": 2.5, "ev{"at": 3.5, "event": "resumed"}\n{"at": 4.5, "e')
    assert [event["event"] for event in read_events(event_log)] == ["push", "resumed"]
