"""Runs that are killed at every page and every call of a checkpoint resume and end with the same weights.

Crashes are real: this file, run as a script, imports torch once and forks a run for each place to kill it at.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_faults import PAGE, Disk, exit_code, fork
from helpers import core_of, open_session

from laconic.cluster.checkpoint import Folder, load_latest
from laconic.cluster.job import Job
from laconic.frames import encode

BEFORE, TORN, EXCHANGES = 2, 4, 6
"""A run has a checkpoint, is killed in the next one, resumes and ends."""


def run(folder: Path, size: int, *, to: int = EXCHANGES, disk: Disk | None = None) -> str:
    """Run a job of one worker from its newest checkpoint on; return the SHA-256 of its weights.

    Args:
        folder: The folder of its checkpoints.
        size: Number of parameters.
        to: Exchange at which it ends.
        disk: The disk on which the second checkpoint is written.
    """
    job = Job(workers=1, lr=0.1, momentum=0.9, checkpoint_every=2)
    checkpoint_store = Folder(folder, keep=2)
    core = core_of(job, {"w": torch.zeros(size)}, exchanges=EXCHANGES, checkpoint_store=checkpoint_store)
    newest = load_latest(folder)
    if newest is None:
        checkpoint_store.save(0, *core.state())
    else:
        core.load(newest.tensors, newest.meta)

    def keep(version: int) -> None:
        if version % 2 == 0:
            with disk if disk is not None and version == TORN else contextlib.nullcontext():
                checkpoint_store.save(version, *core.state())

    core.on_update(keep)
    incarnation = 1 + core.version  # a new one
    open_session(core, 0, incarnation)
    g = torch.Generator()
    for sequence in range(core.version, to):
        frame = encode(torch.randn(size, generator=g.manual_seed(sequence)), "none")
        core.exchange(0, incarnation, sequence, [frame], deadline=time.monotonic() + 30)
    core.settle()
    assert core.version == to and core.failure is None, core.failure
    return hashlib.sha256(core.parameters["w"].numpy().tobytes()).hexdigest()


def in_child(act: Callable[[], Any]) -> Any:
    """Return a function's result from a forked process, through JSON."""
    receive, send = os.pipe()
    assert exit_code(fork(lambda: os.write(send, json.dumps(act()).encode()))) == 0
    os.close(send)
    with os.fdopen(receive) as lines:
        return json.loads(lines.read())


def kill(_: Disk) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def power_cut(seed: int) -> Callable[[Disk], None]:
    """Keep, truncate or zero data that was not synced, and keep or undo renames that were not."""

    def cut(disk: Disk) -> None:
        rng = random.Random(seed)
        for path in disk.unsynced:
            if path.exists():
                whole = path.read_bytes()
                kept = rng.randrange(len(whole) + 1)
                path.write_bytes(whole[:kept] + bytes(rng.choice([0, len(whole) - kept])))
        for source, target in reversed(disk.renamed):
            if rng.random() < 0.5 and target.exists():
                disk._originals["rename"](target, source)
        kill(disk)

    return cut


def check_resumed(killed: list[Path], size: int, wanted: str) -> None:
    """Check that killed runs end with the expected weights and leave nothing half written."""
    assert set(in_child(lambda: [run(folder, size) for folder in killed])) <= {wanted}
    for folder in killed:
        left = [path.name for path in folder.iterdir()]
        assert len(left) == 3 and not [name for name in left if name.startswith(".")], left
        shutil.rmtree(folder)
    killed.clear()


def campaign(folder: Path, size: int, page: int, seed: int) -> dict[str, dict[str, int]]:
    """Kill a run at each moment of a checkpoint, with and without a power cut, and resume it each time."""
    template = folder / "template"
    assert in_child(lambda: run(template, size, to=BEFORE + 1))
    wanted = in_child(lambda: run(folder / "clean", size))
    counts = {kind: {"old": 0, "new": 0} for kind in ("killed", "cut")}
    killed: list[Path] = []
    for kind in counts:
        for stop in range(100_000):
            here = Path(shutil.copytree(template, folder / f"{kind}-{stop}"))
            # After a power cut all data since the last sync may be lost: it need not be tried at each page.
            disk = Disk(stop, kill, page) if kind == "killed" else Disk(stop, power_cut(seed + stop), 16 * page)
            code = exit_code(fork(lambda here=here, disk=disk: run(here, size, to=TORN, disk=disk)))
            newest = load_latest(here)
            assert newest is not None, stop
            if code == 0:
                assert newest.step == TORN
                break
            assert code == -signal.SIGKILL and newest.step in (BEFORE, TORN), (stop, kind, code, newest.step)
            counts[kind]["old" if newest.step == BEFORE else "new"] += 1
            killed.append(here)
            if len(killed) == 32:
                check_resumed(killed, size, wanted)
        check_resumed(killed, size, wanted)
    return counts


def run_campaign(folder: Path, sizes: list[int], page: int = PAGE) -> None:
    command = [sys.executable, __file__, str(folder), json.dumps(sizes), str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    for size, counts in zip(sizes, json.loads(done.stdout), strict=True):
        assert counts["killed"]["old"] > 2 * size * 4 // page + 10
        assert counts["cut"]["old"] > 20 and counts["killed"]["new"] > 7
        # A rename is permanent once its folder is synced, two calls later.
        assert counts["cut"]["new"] >= counts["killed"]["new"] - 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="crashes need fork")
def test_run_killed_at_any_page_of_a_checkpoint_ends_with_the_same_weights(memory_folder: Path) -> None:
    run_campaign(memory_folder, [25_000])  # 200 kB with the momentum


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="crashes need fork")
def test_run_killed_at_any_page_resumes_for_many_checkpoint_sizes(memory_folder: Path) -> None:
    run_campaign(memory_folder, [1, 500, 1024, 4096, 40_000, 100_000, 150_000])
    run_campaign(memory_folder / "finer", [8_000], page=256)


if __name__ == "__main__":
    torch.set_num_threads(1)  # no thread may hold a lock during a fork
    encode(torch.zeros(1), "none")  # loads what is loaded once
    root, all_sizes, page_size = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    print(json.dumps([campaign(root / str(size), size, page_size, seed=0) for size in all_sizes]))
