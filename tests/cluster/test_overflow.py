"""Weights that overflow: the job ends with one line, and the newest checkpoint stays finite and can be resumed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Events, core_of, job_of, open_session

from laconic.cluster import checkpoint
from laconic.cluster.core import Core
from laconic.cluster.replies import RefusedError
from laconic.errors import FileError
from laconic.frames import encode
from laconic.optim import TorchOptimizer
from laconic.train.run import CHECKPOINTS
from waiting import in_threads

TIMEOUT = 10.0
JOBS: list[dict[str, Any]] = [
    {}, {"pull": "qsgd:4"}, {"returns": "delta", "pull": "qsgd:4"}, {"returns": "gradients"},
    {"returns": "gradients", "pull": "topk:0.5"}, {"returns": "gradients", "momentum": 0.9},
    {"returns": "gradients", "backup": 1}, {"returns": "gradients", "every": 2, "sends": "changes", "after": "best"},
    {"mode": "async"}, {"mode": "async", "returns": "delta"},
    {"mode": "bounded:2"}, {"mode": "async", "every": 2, "sends": "changes"},
]  # fmt: skip


def job_core(options: dict[str, Any], folder: checkpoint.Folder, events: Events | None = None) -> Core:
    """Return a core that saves a checkpoint after every update and before the first."""
    core = core_of(job_of(lr=10.0, **options), {"w": torch.zeros(4), "b": torch.zeros(2)}, events, exchanges=9)
    latest = checkpoint.load_latest(folder.path)
    if latest is None:
        folder.save(0, *core.state())
    else:
        core.load(latest.tensors, latest.meta)
    core.on_update(lambda version: folder.save(version, *core.state()))
    return core


def train_until_refused(core: Core, worker: int, value: float, exchanges: int) -> str:
    """Push a value in every exchange; return the reason of the refusal, or an empty text."""
    try:
        at = core.snapshot(worker, 0, deadline=time.monotonic() + TIMEOUT).sequence
        for _ in range(exchanges):
            frames = [encode(torch.full((numel,), value), "none") for numel in (4, 2)]
            at = core.exchange(worker, 0, at, frames, deadline=time.monotonic() + TIMEOUT).sequence
    except RefusedError as error:
        return error.reason
    return ""


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("options", [{}, {"returns": "gradients"}, {"mode": "async"}], ids=str)
def test_moments_that_overflow_end_the_job_like_weights(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Infinite second moments would make all later steps zero, though the weights stay finite."""
    folder = checkpoint.Folder(tmp_path)
    job = job_of(workers=1, lr=0.01, **options)

    def core() -> Core:
        return Core(job, {"w": torch.zeros(4), "b": torch.zeros(2)}, TorchOptimizer(kind), lambda _: 0.01, exchanges=9)

    first = core()
    first.on_update(lambda version: folder.save(version, *first.state()))
    open_session(first, 0)
    assert train_until_refused(first, 0, 0.1, 2) == ""
    assert train_until_refused(first, 0, 1e25, 1) == "diverged"
    assert "exp_avg_sq" in (first.failure or "") and "--lr" in (first.failure or "")
    latest = checkpoint.load_latest(tmp_path)
    assert latest is not None and latest.step == 2
    assert all(bool(x.isfinite().all()) for x in latest.tensors.values())
    resumed = core()
    resumed.load(latest.tensors, latest.meta)
    open_session(resumed, 0)
    before = resumed.parameters["w"].clone()
    assert train_until_refused(resumed, 0, 0.1, 1) == "" and not torch.equal(resumed.parameters["w"], before)


@pytest.mark.parametrize("key", ["parameter/w", "optimizer/exp_avg_sq/w"])
@pytest.mark.parametrize("value", [torch.tensor(float("nan")), torch.tensor(1e300, dtype=torch.float64)], ids=str)
def test_checkpoint_with_values_that_are_not_finite_is_refused(key: str, value: torch.Tensor) -> None:
    core = Core(job_of(workers=1), {"w": torch.zeros(4)}, TorchOptimizer("adamw"), lambda _: 0.01)
    tensors, meta = core.state()
    tensors |= {"optimizer/step/w": torch.tensor(1.0), "optimizer/exp_avg/w": torch.zeros(4)}
    tensors[key] = value.expand(4).clone()
    with pytest.raises(FileError, match=f"holds {key.partition('/')[0]} .* with values that are not finite"):
        core.load(tensors, meta)
    assert core.version == 0 and not core.parameters["w"].any()


@pytest.mark.parametrize("options", JOBS, ids=str)
def test_newest_checkpoint_stays_finite_and_the_job_resumes_from_it(options: dict[str, Any], tmp_path: Path) -> None:
    events: Events = []
    folder = checkpoint.Folder(tmp_path)
    core = job_core(options, folder, events)
    for worker in range(2):
        open_session(core, worker)
    reasons = in_threads(*(lambda w=w: train_until_refused(core, w, 3e38, 5) for w in range(2)))
    assert "diverged" in reasons and set(reasons) <= {"diverged", "stale"}, reasons
    assert core.failure is not None and "--lr" in core.failure and "\n" not in core.failure
    assert [e["event"] for e in events].count("diverged") == 1
    with pytest.raises(RefusedError, match="--lr"):  # nobody gets the weights of the failed update
        core.snapshot(0, 0, deadline=time.monotonic() + TIMEOUT)
    newest = checkpoint.load_latest(tmp_path)
    assert newest is not None and newest.meta["version"] == core.version == max(folder.versions())
    assert all(bool(torch.isfinite(x).all()) for x in newest.tensors.values())

    resumed = job_core(options, folder)
    for worker in range(2):
        open_session(resumed, worker, attempt=1)
    before = resumed.version
    assert in_threads(*(lambda w=w: train_until_refused(resumed, w, 0.0, 1) for w in range(2))) == ["", ""]
    assert resumed.version > before and resumed.failure is None


DIVERGING = """
import torch


def build():
    model = torch.nn.Linear(8, 2, bias=False)
    torch.nn.init.constant_(model.weight, -3.39e38)  # overflows after seven steps of 2e35
    examples = torch.full((256, 8), 0.1), torch.zeros(256)
    return model, examples, examples, lambda outputs, targets: 0.02 * outputs.mean()
"""


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "laconic", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "flags",
    ["--returns gradients", "--returns weights", "--returns delta --pull qsgd:4", "--mode async", "--mode bounded:2",
     "--method homomorphic --push thc:4 --push-small shared:8"],
)  # fmt: skip
def test_diverging_run_ends_with_one_line_and_can_be_resumed(flags: str, tmp_path: Path) -> None:
    script, run_dir = tmp_path / "div.py", tmp_path / "run"
    script.write_text(DIVERGING)
    command = [
        "train", "--script", f"{script}:build", *flags.split(), "--lr", "2e38", "--momentum", "0", "--iterations", "60",
        "--checkpoint-every", "2", "--run-dir", run_dir,
    ]  # fmt: skip
    ended = train(*command)
    assert ended.returncode != 0 and "Traceback" not in ended.stderr, ended.stderr
    assert "overflowed" in ended.stderr and "--lr" in ended.stderr, ended.stderr
    newest = checkpoint.load_latest(run_dir / CHECKPOINTS)
    assert newest is not None and newest.meta["version"] >= 4
    assert all(bool(torch.isfinite(x).all()) for x in newest.tensors.values())
    again = train(*command, "--resume")  # with the same rate it overflows again, from the last good checkpoint
    assert again.returncode != 0 and "Traceback" not in again.stderr and "overflowed" in again.stderr, again.stderr


@pytest.mark.parametrize("options", [{}, {"mode": "async"}], ids=str)
def test_push_that_was_arriving_does_not_change_the_weights_of_a_failed_job(options: dict[str, Any]) -> None:
    """Finite weights would replace those that overflowed, and become a version."""
    core = core_of(job_of(workers=1, every=2, sends="weights", **options), {"w": torch.zeros(2)})
    open_session(core, 0)
    core.snapshot(0, 0, deadline=time.monotonic() + TIMEOUT)
    with core.receive(0, 0, 0) as receiver:
        receiver.add(0, encode(torch.ones(2), "none"), deadline=time.monotonic() + TIMEOUT)
        core._shared.fail("the weights overflowed")
        with pytest.raises(RefusedError, match="overflowed"):
            receiver.finish(deadline=time.monotonic() + TIMEOUT)
    assert core.version == 0 and not core.parameters["w"].any()
