"""Failing and interrupted writes of checkpoints: the newest complete one loads, and nothing half written remains.

Crashes are real: this file, run as a script, imports torch once and forks a writer for each of them.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import is_of, names_in, put

from laconic.cluster.checkpoint import load, load_latest
from laconic.errors import FileError
from laconic_lab.faults.disk import PAGE, Disk, exit_code, fork


def refusal(folder: Path, step: int) -> str:
    """Return the error of a failed save, or nothing."""
    try:
        put(folder, step)
    except FileError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_write_that_fails_at_any_page_or_call_keeps_the_older_checkpoints(
    memory_folder: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Disk) -> None:
        raise OSError(code, os.strerror(code))

    outcomes, template = [], memory_folder / "template"
    for step in (10, 20, 30):
        put(template, step)
    for stop in range(100_000):
        folder = Path(shutil.copytree(template, memory_folder / str(stop)))
        caplog.clear()
        with Disk(stop, fail) as disk:
            error = refusal(folder, 40)
        newest = load_latest(folder)
        hidden = [name for name in names_in(folder) if name.startswith(".")]
        if error:
            assert os.strerror(code) in error and "\n" not in error and "older checkpoints are intact" in error
            assert not hidden, disk.moments[-1]
            assert is_of(newest, 30) or (is_of(newest, 40) and disk.moments.count("rename")), disk.moments[-1]
            assert is_of(load(folder / "00000003-step-30"), 30)
        else:
            assert is_of(newest, 40) and (not hidden or "cannot remove old" in caplog.text)
        outcomes.append("saved" if not error else "new" if is_of(newest, 40) else "old")
        put(folder, 50)  # removes what a failure left behind
        assert is_of(load_latest(folder), 50) and len(names_in(folder)) == 4
        shutil.rmtree(folder)
        if stop >= len(disk.moments):
            break
    assert outcomes == sorted(outcomes, key=["old", "new", "saved"].index)
    assert outcomes.count("old") > 36_000 // PAGE + 10


def test_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        put(tmp_path, step)
    (tmp_path / ".00000004-step-40.partial").mkdir()
    (tmp_path / ".00000004-step-40.partial" / "tensors.safetensors").write_bytes(b"half")
    (tmp_path / ".latest.partial").write_bytes(b"half")
    (tmp_path / ".mine").touch()
    assert is_of(load_latest(tmp_path), 30)
    put(tmp_path, 40)
    assert names_in(tmp_path) == [".mine", "00000002-step-20", "00000003-step-30", "00000004-step-40", "latest"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_is_a_file_error(tmp_path: Path) -> None:
    put(tmp_path, 30)
    tmp_path.chmod(0o500)
    error = refusal(tmp_path, 40)
    tmp_path.chmod(0o700)
    assert "Permission denied" in error and "older checkpoints are intact" in error
    assert is_of(load_latest(tmp_path), 30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A function that remounts a small disk with other options; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")

    def remount(options: str) -> Path:
        subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
        return folder

    yield remount
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_full_and_read_only_disks_keep_the_older_checkpoint(small_disk: Callable[[str], Path]) -> None:
    """The disk gets one more page each time, until the checkpoint fits."""
    folder = small_disk("size=4m") / "checkpoints"
    put(folder, 10)
    used = os.statvfs(folder).f_blocks - os.statvfs(folder).f_bfree
    refused = 0
    while True:
        small_disk(f"size={(used + refused) * os.statvfs(folder).f_frsize}")
        if not (error := refusal(folder, 20)):
            break
        assert "No space left on device" in error and "\n" not in error
        assert is_of(load_latest(folder), 10) and names_in(folder) == ["00000001-step-10", "latest"], refused
        refused += 1
    assert is_of(load_latest(folder), 20) and refused > 36_000 // PAGE
    small_disk("ro")
    assert "Read-only file system; older checkpoints are intact" in refusal(folder, 30)
    assert is_of(load_latest(folder), 20)


def crash_at_every_call(folder: Path, *, leftovers: bool) -> dict[str, int]:
    """A writer ends before its nth call that changes the disk, for every n."""
    template, counts = folder / "template", {"old": 0, "new": 0}
    for step in (1, 2, 3):
        put(template, step)
    if leftovers:
        shutil.copytree(template / "00000003-step-3", template / ".00000004-step-4.partial")
        shutil.copy(template / "latest", template / ".latest.partial")
    for stop in range(1000):
        here = Path(shutil.copytree(template, folder / str(stop)))

        def write(stop: int = stop, here: Path = here) -> None:
            with Disk(stop, lambda _: os._exit(9), page=1 << 20):
                put(here, 4)

        code, newest = exit_code(fork(write)), load_latest(here)
        if code == 0:
            assert is_of(newest, 4)
            return counts
        assert code == 9 and (is_of(newest, 3) or is_of(newest, 4)), (stop, code)
        counts["new" if is_of(newest, 4) else "old"] += 1
        assert all(load(path) for path in here.glob("0*"))  # none is half removed
        put(here, 5)
        assert is_of(load_latest(here), 5) and not [name for name in names_in(here) if name.startswith(".")]
    raise AssertionError("the writer never ended")


def crash_at_every_page(folder: Path) -> dict[str, int]:
    """The system kills a writer as its file grows past each page; then it refuses the write instead."""
    put(folder, 0)
    killed = refused = 0
    for expected, action in ((-signal.SIGXFSZ, signal.SIG_DFL), (3, signal.SIG_IGN)):
        for nbytes in range(0, 40_000, 4096):

            def write(nbytes: int = nbytes, action: Any = action) -> None:
                signal.signal(signal.SIGXFSZ, action)
                resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
                try:
                    put(folder, 1)
                except FileError as error:
                    os._exit(3 if "File too large" in str(error) else 4)

            code = exit_code(fork(write))
            assert code in (0, expected), code
            if code == 0:  # the file is smaller
                break
            assert is_of(load_latest(folder), 0), nbytes
            if code == 3:
                assert names_in(folder) == ["00000001-step-0", "latest"]
            killed, refused = killed + (code < 0), refused + (code == 3)
        shutil.rmtree(folder)
        put(folder, 0)
    return {"killed": killed, "refused": refused}


MID_WRITE = 4
"""Random kills that must have come within a write."""


def kill_at_random(folder: Path, times: int, seed: int) -> dict[str, int]:
    """A writer that saves without end is killed; the last checkpoint that it acknowledged must be there.

    When a kill comes is chance, so up to five times as many are made, until enough of them came within a write.
    """
    rng, step, mid_write = random.Random(seed), 0, 0
    for number in range(5 * times):
        if number >= times and mid_write >= MID_WRITE:
            break
        receive, send = os.pipe()

        def write(step: int = step, send: int = send) -> None:
            while True:
                step += 1
                put(folder, step)
                os.write(send, f"{step}\n".encode())

        pid = fork(write)
        os.close(send)
        assert select.select([receive], [], [], 20)[0]
        time.sleep(rng.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        assert exit_code(pid) == -signal.SIGKILL
        with os.fdopen(receive) as lines:
            acknowledged = int(lines.read().split()[-1])
        mid_write += any(name.startswith(".") for name in names_in(folder))
        newest = load_latest(folder)
        assert newest is not None and is_of(newest, newest.step), acknowledged
        assert newest.step in (acknowledged, acknowledged + 1), (newest.step, acknowledged)
        step = newest.step
    return {"mid_write": mid_write, "step": step}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="crashes need fork")
def test_newest_complete_checkpoint_loads_after_a_crash_at_any_moment(memory_folder: Path) -> None:
    done = subprocess.run([sys.executable, __file__, memory_folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["calls"]["old"] > 6 and counts["calls"]["new"] > 8  # 4 of them while the oldest is removed
    assert counts["leftovers"]["old"] > counts["calls"]["old"]
    assert counts["leftovers"]["new"] == counts["calls"]["new"]
    assert counts["pages"]["killed"] == counts["pages"]["refused"] > 8
    assert counts["random"]["mid_write"] >= MID_WRITE and counts["random"]["step"] > 20


if __name__ == "__main__":
    torch.set_num_threads(1)  # no thread may hold a lock during a fork
    root = Path(sys.argv[1])
    result = {
        "calls": crash_at_every_call(root / "calls", leftovers=False),
        "leftovers": crash_at_every_call(root / "leftovers", leftovers=True),
        "pages": crash_at_every_page(root / "pages"),
        "random": kill_at_random(root / "random", times=20, seed=0),
    }
    print(json.dumps(result))
