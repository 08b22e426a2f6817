"""A checkpoint broken off at every page and before every call: the newest complete one loads, and the run goes on.

Crashes are real: this file, run as a script, imports torch once, and forks a run for each place to kill it at.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import core_of, open_session
from torch import Tensor

from laconic.cluster import checkpoint
from laconic.cluster.checkpoint import Folder, load_latest, save
from laconic.cluster.job import Job
from laconic.errors import FileError
from laconic.frames import encode

PAGE = 4096
BEFORE, TORN, EXCHANGES = 2, 4, 6
"""A run has a checkpoint, is killed in the next, and goes on to its end."""
CALLS = ("fsync", "mkdir", "open", "rename", "replace", "rmdir", "unlink")


class Disk:
    """A disk on which something happens at a certain moment: before a call, or between two bytes of a file.

    Args:
        stop: The moment, counted from 0: each call that changes the disk is one, so is each page of a file, and each
            first and last byte of what is written at once.
        act: What happens then.
        page: Bytes between two moments within a file.
    """

    def __init__(self, stop: int, act: Callable[[Disk], None], page: int = PAGE) -> None:
        self.moments: list[str] = []
        self.files: dict[int, Path] = {}
        """Open ones, by descriptor."""
        self.unsynced: list[Path] = []
        """Files that a power cut may take."""
        self.renamed: list[tuple[Path, Path]] = []
        """Not yet synced either."""
        self._stop, self._act, self._page = stop, act, page

    def __enter__(self) -> Disk:
        self._originals = {name: getattr(os, name) for name in CALLS}
        self._open = Path.open
        for name in CALLS:
            setattr(os, name, self._wrapped(name))
        disk = self
        Path.open = lambda path, mode="r", *args, **kwargs: (  # type: ignore[method-assign, assignment]
            _File(disk, path, mode) if mode == "xb" else disk._open(path, mode, *args, **kwargs)
        )
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(os, name, original)
        Path.open = self._open  # type: ignore[method-assign]

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.moment(name)
            result = self._originals[name](*args, **kwargs)
            if name == "fsync" and args[0] in self.files:
                self.unsynced.remove(self.files[args[0]])
            elif name == "fsync":
                self.renamed.clear()  # a folder
            elif name == "rename":
                source, target = map(Path, args)
                self.renamed.append((source, target))
                self.unsynced = [target / path.name if path.parent == source else path for path in self.unsynced]
            return result

        return call

    def moment(self, what: str) -> None:
        self.moments.append(what)
        if len(self.moments) - 1 == self._stop:
            self._act(self)

    def pieces(self, at: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """What is written from a place of a file, cut at pages."""
        cuts = {0, 1, nbytes - 1, nbytes, *range(-at % self._page, nbytes, self._page)}
        inside = sorted(cut for cut in cuts if 0 <= cut <= nbytes)
        yield from itertools.pairwise(inside)


class _File:
    """A file whose bytes are all with the system as soon as they are written."""

    def __init__(self, disk: Disk, path: Path, mode: str) -> None:
        self._disk = disk
        disk.moment("create")
        self._raw = disk._open(path, mode, buffering=0)
        disk.files[self._raw.fileno()] = path
        disk.unsynced.append(path)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start, end in self._disk.pieces(self._raw.tell(), len(view)):
            self._disk.moment("write")
            self._raw.write(view[start:end])
        return len(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        del self._disk.files[self._raw.fileno()]
        self._raw.close()


# ------------------------------------------------------------------------------------------------------------- a run


def run(folder: Path, size: int, *, to: int = EXCHANGES, disk: Disk | None = None) -> str:
    """A job of one worker, from its newest checkpoint on; the SHA-256 of its weights.

    Args:
        folder: Of its checkpoints.
        size: Values of its model.
        to: Exchanges at which it ends.
        disk: On which the second checkpoint is written.
    """
    job = Job(workers=1, lr=0.1, momentum=0.9, checkpoint_every=2)
    checkpoint_store = Folder(folder, keep=2)
    core = core_of(job, {"w": torch.zeros(size)}, exchanges=EXCHANGES, checkpoint_store=checkpoint_store)
    found = load_latest(folder)
    if found is None:
        checkpoint_store.save(0, *core.state())
    else:
        core.load(found.tensors, found.meta)

    def keep(version: int) -> None:
        if version % 2 == 0:
            with disk if disk is not None and version == TORN else contextlib.nullcontext():
                checkpoint_store.save(version, *core.state())

    core.on_update(keep)
    incarnation = 1 + core.version  # any that is new
    open_session(core, 0, incarnation)
    g = torch.Generator()
    for sequence in range(core.version, to):
        frame = encode(torch.randn(size, generator=g.manual_seed(sequence)), "none")
        core.exchange(0, incarnation, sequence, [frame], deadline=time.monotonic() + 30)
    core.settle()
    assert core.version == to and core.failure is None, core.failure
    return hashlib.sha256(core.parameters["w"].numpy().tobytes()).hexdigest()


def forked(act: Callable[[], None]) -> int:
    """How a child ended that did so."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def told(act: Callable[[], Any]) -> Any:
    """What a child found out."""
    receive, send = os.pipe()
    assert forked(lambda: os.write(send, json.dumps(act()).encode()) and None) == 0  # type: ignore[func-returns-value]
    os.close(send)
    with os.fdopen(receive) as lines:
        return json.loads(lines.read())


def kill(_: Disk) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def power_cut(seed: int) -> Callable[[Disk], None]:
    """What was not synced may be there, or in part, or as zeros; and so may a new name."""

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


def all_go_on(killed: list[Path], size: int, wanted: str) -> None:
    """Runs that were killed end with the weights that they would have ended with, and with nothing half written."""
    assert set(told(lambda: [run(folder, size) for folder in killed])) <= {wanted}
    for folder in killed:
        left = [path.name for path in folder.iterdir()]
        assert len(left) == 3 and not [name for name in left if name.startswith(".")], left
        shutil.rmtree(folder)
    killed.clear()


def campaign(folder: Path, size: int, page: int, seed: int) -> dict[str, dict[str, int]]:
    """A run is killed at each moment of a checkpoint, with the power on and off, and each time goes on to its end."""
    template = folder / "template"
    assert told(lambda: run(template, size, to=BEFORE + 1))
    wanted = told(lambda: run(folder / "clean", size))
    counts = {kind: {"old": 0, "new": 0} for kind in ("killed", "cut")}
    killed: list[Path] = []
    for kind in counts:
        for stop in range(100_000):
            here = Path(shutil.copytree(template, folder / f"{kind}-{stop}"))
            # What is written between two syncs is as good as lost when the power fails: no need to look at each page.
            disk = Disk(stop, kill, page) if kind == "killed" else Disk(stop, power_cut(seed + stop), 16 * page)
            code = forked(lambda here=here, disk=disk: run(here, size, to=TORN, disk=disk) and None)
            found = load_latest(here)
            assert found is not None, stop
            if code == 0:
                assert found.step == TORN
                break
            assert code == -signal.SIGKILL and found.step in (BEFORE, TORN), (stop, kind, code, found.step)
            counts[kind]["old" if found.step == BEFORE else "new"] += 1
            killed.append(here)
            if len(killed) == 32:
                all_go_on(killed, size, wanted)
        all_go_on(killed, size, wanted)
    return counts


def in_a_process(folder: Path, sizes: list[int], page: int = PAGE) -> None:
    command = [sys.executable, __file__, str(folder), json.dumps(sizes), str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    for size, found in zip(sizes, json.loads(done.stdout), strict=True):
        assert found["killed"]["old"] > 2 * size * 4 // page + 10
        assert found["cut"]["old"] > 20 and found["killed"]["new"] > 7
        # A new name is there for good once its folder is synced, two calls later, and so is what it stands for.
        assert found["cut"]["new"] >= found["killed"]["new"] - 2


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is such a thing: syncing thousands of files on a disk would take minutes."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_run_killed_at_any_page_of_a_checkpoint_goes_on_and_ends_the_same(memory: Path) -> None:
    in_a_process(memory, [25_000])  # 200 kB with the momentum


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_run_killed_at_any_page_of_checkpoints_of_many_sizes_goes_on(memory: Path) -> None:
    in_a_process(memory, [1, 500, 1024, 4096, 40_000, 100_000, 150_000])
    in_a_process(memory / "finer", [8_000], page=256)


# --------------------------------------------------------------------------------------------------- failing writes


def tensors(step: int) -> dict[str, Tensor]:
    return {"w": torch.full((10_000,), float(step)), "v": torch.full((5_000,), step, dtype=torch.int64)}


def is_of(found: checkpoint.Checkpoint | None, step: int) -> bool:
    return (
        found is not None
        and found.step == step
        and all(torch.equal(x, found.tensors[name]) for name, x in tensors(step).items())
    )


def refusal(folder: Path, step: int) -> str:
    """Why a checkpoint could not be written; nothing when it could."""
    try:
        save(folder, step, tensors(step), {})
    except FileError as error:
        return str(error)
    return ""


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_any_write_may_fail_half_way(memory: Path, code: int) -> None:
    """At every page of a file and before every call: older checkpoints stay, nothing half written does."""

    def fail(_: Disk) -> None:
        raise OSError(code, os.strerror(code))

    outcomes, template = [], memory / "template"
    for step in (10, 20, 30):
        save(template, step, tensors(step), {})
    for stop in range(100_000):
        folder = Path(shutil.copytree(template, memory / str(stop)))
        with Disk(stop, fail) as disk:
            said = refusal(folder, 40)
        found = load_latest(folder)
        if said:
            assert os.strerror(code) in said and "\n" not in said and "older ones are intact" in said
            assert not [name for name in listed(folder) if name.startswith(".")], disk.moments[-1]
            assert is_of(found, 30) or (is_of(found, 40) and disk.moments.count("rename")), disk.moments[-1]
            assert is_of(checkpoint.load(folder / "00000003-step-30"), 30)
        else:
            assert is_of(found, 40)
        outcomes.append("saved" if not said else "new" if is_of(found, 40) else "old")
        save(folder, 50, tensors(50), {})
        assert is_of(load_latest(folder), 50) and len(listed(folder)) == 4
        shutil.rmtree(folder)
        if stop >= len(disk.moments):
            break
    assert outcomes == sorted(outcomes, key=["old", "new", "saved"].index)
    assert outcomes.count("old") > 80_000 // PAGE + 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A disk that can be made larger, smaller and read-only, which only root can make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no mount (needs root)")

    def remount(options: str) -> Path:
        subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
        return folder

    yield remount
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_may_be_full_after_any_page(small_disk: Callable[[str], Path]) -> None:
    """A real one: room for one page more each time, until the checkpoint fits."""
    folder = small_disk("size=4m") / "checkpoints"
    save(folder, 10, tensors(10), {})
    used = os.statvfs(folder).f_blocks - os.statvfs(folder).f_bfree
    refused = 0
    while True:
        small_disk(f"size={(used + refused) * os.statvfs(folder).f_frsize}")
        if not (said := refusal(folder, 20)):
            break
        assert "No space left on device" in said and "\n" not in said
        assert is_of(load_latest(folder), 10) and listed(folder) == ["00000001-step-10", "latest"], refused
        refused += 1
    assert is_of(load_latest(folder), 20) and refused > 80_000 // PAGE
    small_disk("ro")
    with pytest.raises(FileError, match="Read-only file system; older ones are intact"):
        save(folder, 30, tensors(30), {})
    assert is_of(load_latest(folder), 20)


if __name__ == "__main__":
    torch.set_num_threads(1)  # no thread may hold a lock while we fork
    encode(torch.zeros(1), "none")  # all that is read but once
    place, all_sizes, each = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    print(json.dumps([campaign(place / str(size), size, each, seed=0) for size in all_sizes]))
