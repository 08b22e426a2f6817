"""Kills of a run while it writes a checkpoint: at every page and call, with and without a power cut.

Kills are real: this module, run as a program, imports torch once and forks a run for each moment to kill it at. Every
killed run is resumed and must end with the same weights.
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

import torch

from laconic.cluster.checkpoint import Folder, load_latest
from laconic.cluster.core import Core
from laconic.cluster.job import Job
from laconic.cluster.rejoin import Offer
from laconic.errors import ConfigError
from laconic.frames import encode
from laconic.optim import SGD, Schedule
from laconic_lab.faults.disk import PAGE, Disk, exit_code, fork
from laconic_lab.faults.invariants import InvariantError

__all__ = ["KINDS", "kill_checkpoints"]

BEFORE, KILLED_IN, EXCHANGES = 2, 4, 6
"""Exchanges: a run has the checkpoint of the first, is killed in that of the second, resumes and ends at the third."""
KINDS = ("killed", "cut")
"""The process is killed; and a power cut takes what was not synced, too."""
BATCH = 32
"""Killed runs that one process resumes."""


def kill_checkpoints(folder: Path, sizes: list[int], *, page: int = PAGE, seed: int = 0) -> list[dict[str, Any]]:
    """Kill a run at each moment of a checkpoint; return for each size and kind how often the old one was the newest.

    Args:
        folder: An empty folder, best in memory: thousands of files are synced.
        sizes: Numbers of parameters.
        page: Bytes between two moments within a file.
        seed: Chooses what a power cut keeps.

    Raises:
        InvariantError: A killed run could not be resumed, or ended with other weights.
    """
    if not hasattr(os, "fork"):
        raise ConfigError("kills of checkpoints need a system with fork")
    arguments = [str(folder), json.dumps(sizes), str(page), str(seed)]
    command = [sys.executable, *(["-S"] if sys.flags.no_site else []), "-m", __name__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InvariantError(f"P6: {done.stderr.strip().splitlines()[-1]}" if done.stderr.strip() else "P6: no answer")
    outcomes: list[dict[str, Any]] = json.loads(done.stdout)
    return outcomes


def _run(folder: Path, size: int, *, to: int = EXCHANGES, disk: Disk | None = None) -> str:
    """Run a job of one worker from its newest checkpoint on; return the SHA-256 of its weights.

    Args:
        folder: The folder of its checkpoints.
        size: Number of parameters.
        to: Exchange at which it ends.
        disk: The disk on which the second checkpoint is written.
    """
    job = Job(workers=1, lr=0.1, momentum=0.9, checkpoint_every=2)
    store = Folder(folder, keep=2)
    core = Core(
        job, {"w": torch.zeros(size)}, SGD(momentum=job.momentum), Schedule(job.lr), exchanges=EXCHANGES,
        checkpoint_store=store,
    )  # fmt: skip
    newest = load_latest(folder)
    if newest is None:
        store.save(0, *core.state())
    else:
        core.load(newest.tensors, newest.meta)

    def keep(version: int) -> None:
        if version % 2 == 0:
            with disk if disk is not None and version == KILLED_IN else contextlib.nullcontext():
                store.save(version, *core.state())

    core.on_update(keep)
    incarnation = 1 + core.version  # a new one
    answer = core.welcome(0, incarnation, core.slots.fingerprint)
    core.offer(0, incarnation, 0, Offer(frozenset(answer["versions"])))
    g = torch.Generator()
    for sequence in range(core.version, to):
        frame = encode(torch.randn(size, generator=g.manual_seed(sequence)), "none")
        core.exchange(0, incarnation, sequence, [frame], deadline=time.monotonic() + 30)
    core.settle()
    _require(core.version == to and core.failure is None, f"a run ended at exchange {core.version}: {core.failure}")
    return hashlib.sha256(core.parameters["w"].numpy().tobytes()).hexdigest()


def _in_child(act: Callable[[], Any]) -> Any:
    """Return a function's result from a forked process, through JSON."""
    receive, send = os.pipe()
    _require(exit_code(fork(lambda: os.write(send, json.dumps(act()).encode()))) == 0, "a run failed")
    os.close(send)
    with os.fdopen(receive) as lines:
        return json.loads(lines.read())


def _kill(_: Disk) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _power_cut(seed: int) -> Callable[[Disk], None]:
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
                disk.rename(target, source)
        _kill(disk)

    return cut


def _check_resumed(killed: list[Path], size: int, wanted: str) -> None:
    """Check that killed runs end with the expected weights and leave nothing half written."""
    ended = _in_child(lambda: [_run(folder, size) for folder in killed])
    _require(set(ended) <= {wanted}, f"runs of {size} parameters ended with other weights: {ended} for {wanted}")
    for folder in killed:
        left = [path.name for path in folder.iterdir()]
        _require(len(left) == 3 and not any(name.startswith(".") for name in left), f"files are left: {left}")
        shutil.rmtree(folder)
    killed.clear()


def _campaign(folder: Path, size: int, page: int, seed: int) -> dict[str, Any]:
    """Kill a run at each moment of a checkpoint, with and without a power cut, and resume it each time."""
    template = folder / "template"
    _in_child(lambda: _run(template, size, to=BEFORE + 1))
    wanted = _in_child(lambda: _run(folder / "clean", size))
    counts = {kind: {"old": 0, "new": 0} for kind in KINDS}
    killed: list[Path] = []
    for kind in KINDS:
        for stop in range(100_000):
            here = Path(shutil.copytree(template, folder / f"{kind}-{stop}"))
            # After a power cut all data since the last sync may be lost: it need not be tried at each page.
            disk = Disk(stop, _kill, page) if kind == "killed" else Disk(stop, _power_cut(seed + stop), 16 * page)
            code = exit_code(fork(lambda here=here, disk=disk: _run(here, size, to=KILLED_IN, disk=disk)))  # type: ignore[misc]
            newest = load_latest(here)
            where = f"at moment {stop} ({kind}) of {size} parameters"
            if newest is None:
                raise InvariantError(f"no checkpoint can be loaded after a kill {where}")
            if code == 0:
                _require(newest.step == KILLED_IN, f"a run without a kill saved step {newest.step}")
                shutil.rmtree(here)
                break
            _require(
                code == -signal.SIGKILL and newest.step in (BEFORE, KILLED_IN),
                f"a run ended with {code} and step {newest.step} {where}",
            )
            counts[kind]["old" if newest.step == BEFORE else "new"] += 1
            killed.append(here)
            if len(killed) == BATCH:
                _check_resumed(killed, size, wanted)
        if killed:
            _check_resumed(killed, size, wanted)
    return {"size": size, "page": page, "seed": seed, **counts}


def _require(holds: bool, observed: str) -> None:
    if not holds:
        raise InvariantError(observed)


if __name__ == "__main__":
    torch.set_num_threads(1)  # no thread may hold a lock during a fork
    encode(torch.zeros(1), "none")  # loads what is loaded once
    root, all_sizes, page_size, first_seed = Path(sys.argv[1]), json.loads(sys.argv[2]), *map(int, sys.argv[3:5])
    print(json.dumps([_campaign(root / str(size), size, page_size, first_seed) for size in all_sizes]))
