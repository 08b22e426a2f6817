"""Checkpoints of a server: what is saved comes back, and the newest complete one loads whatever happened meanwhile.

Crashes are real: this file, run as a script, imports torch once and forks a writer for each of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
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
from torch import Tensor

from laconic.cluster import checkpoint
from laconic.cluster.checkpoint import load, load_latest, save
from laconic.errors import ConfigError, FileError, InputError

SIZE = 3000
"""Values of the tensor that the writers below save: a few pages."""


def tensors(step: int) -> dict[str, Tensor]:
    """Every value says which step it is of, so that a mixture would show."""
    return {"w": torch.full((SIZE,), float(step)), "opt/w": torch.full((30, 100), step, dtype=torch.int64)}


def is_of(found: checkpoint.Checkpoint | None, step: int) -> bool:
    if found is None or found.step != step or found.meta != {"step": step} or found.tensors.keys() != tensors(0).keys():
        return False
    return all(torch.equal(found.tensors[name], x) for name, x in tensors(step).items())


def put(folder: Path, step: int, **more: Any) -> Path:
    return save(folder, step, tensors(step), {"step": step}, **more)


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def one_line(error: pytest.ExceptionInfo[Exception], *words: str) -> None:
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


# -------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", checkpoint._DTYPES, ids=str)
def test_every_dtype_comes_back_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 2 if dtype == torch.bool else 256, (6, 64), dtype=torch.uint8, generator=g)
    x = noise.view(dtype)  # any bits: infinities, NaNs of every kind
    wanted = {
        "matrix": x,
        "strided": x.t()[1:],
        "scalar": x[0, 0],
        "empty": x[:0],
        "no columns": x[:, :0],
        "same memory": x,
    }
    save(tmp_path, 0, wanted, {})
    found = load_latest(tmp_path)
    assert found is not None and list(found.tensors) and found.tensors.keys() == wanted.keys()
    for name, y in found.tensors.items():
        x = wanted[name]
        assert (y.dtype, y.shape) == (x.dtype, x.shape), name
        assert y.contiguous().reshape(-1).view(torch.uint8).equal(x.contiguous().reshape(-1).view(torch.uint8)), name


def test_meta_steps_and_odd_names_come_back(tmp_path: Path) -> None:
    meta = {"ünï": [1, 2.5, -0.0, None, True, {"a": {}}], "seed": 2**63 + 1, "": "\ud800", "tiny": 5e-324}
    x = torch.randn(3, requires_grad=True)
    path = save(
        tmp_path / "deep" / "down",
        7,
        {"ünï/cødé": x, "": torch.tensor(1), "a b\n": torch.ones(2).cfloat().conj()},
        meta,
    )
    found = load(path)
    assert (found.step, found.meta, found.path) == (7, meta, path)
    assert torch.equal(found.tensors["ünï/cødé"], x) and found.tensors["a b\n"].eq(1).all()
    assert save(tmp_path, 0, {}, {}) and load_latest(tmp_path) == checkpoint.Checkpoint(
        0, {}, {}, tmp_path / "00000001-step-0"
    )


def test_what_was_loaded_outlives_its_files(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    found = load(path)
    for file in path.iterdir():
        file.write_bytes(b"")  # a view of the mapped file would now be a crash
    found.tensors["w"] += 1
    assert found.tensors["w"].eq(2).all()


def test_files_are_what_others_can_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = put(tmp_path, 820)
    assert listed(tmp_path) == ["00000001-step-820", "latest"] and listed(path) == [
        "manifest.json",
        "tensors.safetensors",
    ]
    assert (tmp_path / (tmp_path / "latest").read_text().strip()) == path
    assert load_file(path / "tensors.safetensors")["w"].eq(820).all()
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["version"], manifest["step"], manifest["meta"]) == (1, 820, {"step": 820})
    data = (path / "tensors.safetensors").read_bytes()
    entry = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert manifest["files"] == {"tensors.safetensors": entry}


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None and load_latest(tmp_path / "nowhere") is None
    for step in range(0, 240, 20):
        path = put(tmp_path, step, keep=2)
        assert is_of(load_latest(tmp_path), step) and len(listed(tmp_path)) == min(2, step // 20 + 1) + 1
    assert (tmp_path / "latest").read_text() == f"{path.name}\n"
    put(tmp_path, 240, keep=1)
    assert listed(tmp_path) == ["00000013-step-240", "latest"]


def test_newer_is_what_was_written_later(tmp_path: Path) -> None:
    """After going back to step 20, what was written before must not win by its higher step, nor outlive new ones."""
    for step in (20, 40, 60, 80, 30, 40):
        put(tmp_path, step, keep=3)
        assert is_of(load_latest(tmp_path), step)
    assert listed(tmp_path) == ["00000004-step-80", "00000005-step-30", "00000006-step-40", "latest"]


@pytest.mark.parametrize(
    "changed, error, words",
    [
        ({"step": -1}, ConfigError, "step must be"),
        ({"step": 1.0}, ConfigError, "step must be"),
        ({"keep": 0}, ConfigError, "keep must be"),
        ({"meta": {"loss": float("nan")}}, InputError, "plain JSON"),
        ({"meta": {1: 2}}, InputError, "plain JSON"),
        ({"meta": {"a": (1, 2)}}, InputError, "plain JSON"),
        ({"meta": {"a": torch.ones(1)}}, InputError, "plain JSON"),
        ({"meta": [1]}, InputError, "plain JSON"),
        ({"tensors": {"a": [1.0]}}, InputError, "got list under 'a'"),
        ({"tensors": {"__metadata__": torch.ones(1)}}, InputError, "'__metadata__'"),
        ({"tensors": {"a": torch.ones(2, dtype=torch.complex128)}}, InputError, "'a': torch.complex128"),
        ({"tensors": {"a": torch.eye(2).to_sparse()}}, InputError, "'a'"),
        ({"tensors": {"a": torch.empty(2, device="meta")}}, InputError, "'a'"),
        ({"tensors": {"\ud800": torch.ones(2)}}, InputError, "cannot hold these tensors"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, changed: dict[str, Any], error: type[Exception], words: str) -> None:
    put(tmp_path, 1)
    before = listed(tmp_path)
    with pytest.raises(error) as caught:
        save(tmp_path, **({"step": 2, "tensors": tensors(2), "meta": {}} | changed))
    one_line(caught, words)
    assert listed(tmp_path) == before and is_of(load_latest(tmp_path), 1)


# -------------------------------------------------------------------------------------------------------- damage


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        put(tmp_path, step)
    return tmp_path


def damages(data: bytes) -> Iterator[bytes]:
    g = random.Random(0)
    for end in {0, 1, 7, 8, len(data) // 2, len(data) - 1}:
        yield data[:end]
    for at in {0, 1, len(data) - 1, *(g.randrange(len(data)) for _ in range(60))}:
        yield data[:at] + bytes([data[at] ^ 1 << g.randrange(8)]) + data[at + 1 :]
    yield data + b" "
    yield bytes(len(data))


@pytest.mark.parametrize("name", ["tensors.safetensors", "manifest.json"])
def test_a_damaged_file_is_told_and_passed_over(three: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    newest = three / "00000003-step-30"
    whole = (newest / name).read_bytes()
    for bad in damages(whole):
        (newest / name).write_bytes(bad)
        with pytest.raises(FileError) as error:
            load(newest)
        one_line(error, str(newest), name)
        caplog.clear()
        assert is_of(load_latest(three), 20)
        assert "passing over" in caplog.text and name in caplog.text
    (newest / name).unlink()
    assert is_of(load_latest(three), 20)
    (newest / name).mkdir()
    assert is_of(load_latest(three), 20)
    (newest / name).rmdir()
    (newest / name).write_bytes(whole)
    assert is_of(load_latest(three), 30)


def test_every_bit_of_a_manifest_counts(three: Path) -> None:
    whole = (three / "00000003-step-30" / "manifest.json").read_bytes()
    assert checkpoint._open_sealed(whole)
    for at in range(len(whole)):
        for bit in range(8):
            assert checkpoint._open_sealed(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]) is None


def test_latest_is_for_people(three: Path) -> None:
    for text in ("", "00000001-step-10", "../../etc", "\0"):
        (three / "latest").write_text(text)
        assert is_of(load_latest(three), 30)
    (three / "latest").unlink()
    assert is_of(load_latest(three), 30)
    put(three, 40)
    assert (three / "latest").read_text() == "00000004-step-40\n"


def test_one_is_enough_and_none_is_an_error(three: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, step in ((3, 30), (2, 20)):
        (three / f"0000000{number}-step-{step}" / "manifest.json").write_text("{}")
        assert is_of(load_latest(three), 10 * (number - 1))
    shutil.rmtree(three / "00000001-step-10")
    (three / "00000001-step-10").touch()
    with pytest.raises(FileError) as error:
        load_latest(three)
    one_line(error, "none of the 3 checkpoints", "00000003-step-30")
    assert put(three, 50).name == "00000004-step-50" and is_of(load_latest(three), 50)


def seal(path: Path, **changes: Any) -> None:
    """Change a manifest and give it the right SHA-256: damage is one thing, a lie another."""
    body = json.loads((path / "manifest.json").read_bytes()) | changes
    body = {key: value for key, value in body.items() if value is not ... and key != "sha256"}
    digest = hashlib.sha256(checkpoint._dump(body)).hexdigest()
    (path / "manifest.json").write_bytes(checkpoint._dump(body | {"sha256": digest}))


def entry_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize(
    "lie, words",
    [
        ({"version": 2}, "version 2, expected 'laconic checkpoint' of version 1"),
        ({"version": ...}, "version None"),
        ({"format": "other"}, "'other'"),
        ({"step": -1}, "must hold a step"),
        ({"step": "1"}, "must hold a step"),
        ({"step": ...}, "must hold a step"),
        ({"meta": []}, "must hold a step"),
        ({"files": ...}, "and of nothing else"),
        ({"files": {}}, "and of nothing else"),
        ({"files": {"../../secret": {"nbytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}}}, "nothing else"),
        ({"files": {"/etc/passwd": {"nbytes": 6, "sha256": ""}}}, "and of nothing else"),
        ({"files": {"tensors.safetensors": {"nbytes": 6, "sha256": "", "a": 1}, "b": {}}}, "and of nothing else"),
        ({"files": {"tensors.safetensors": {"nbytes": 6, "sha256": ""}}}, "should have 6 bytes"),
        ({"files": {"tensors.safetensors": {"nbytes": "6", "sha256": ""}}}, "nothing else"),
        ({"files": {"tensors.safetensors": [6]}}, "nothing else"),
    ],
)
def test_lies_are_told(three: Path, lie: dict[str, Any], words: str) -> None:
    newest = three / "00000003-step-30"
    seal(newest, **lie)
    with pytest.raises(FileError) as error:
        load(newest)
    one_line(error, words)
    assert is_of(load_latest(three), 20)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,4294967296]}}',
        b'{"a":{"dtype":"Q7","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F8_E8M0","shape":[8],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    ],
)
def test_tensors_that_are_none_are_told(three: Path, header: bytes) -> None:
    newest = three / "00000003-step-30"
    (newest / "tensors.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    seal(newest, files={"tensors.safetensors": entry_of(newest / "tensors.safetensors")})
    if b"F8_E8M0" in header or b"F4" in header:  # which we do not write, and torch has
        assert load(newest).tensors["a"].nbytes == 8
        return
    with pytest.raises(FileError) as error:
        load(newest)
    one_line(error, "tensors.safetensors is not a safetensors file")
    assert is_of(load_latest(three), 20)


def test_a_manifest_may_not_be_endless(three: Path) -> None:
    file = three / "00000003-step-30" / "manifest.json"
    with file.open("wb") as out:
        out.truncate(1 << 40)
    assert is_of(load_latest(three), 20)
    file.write_bytes(b"[" * 100_000)
    assert is_of(load_latest(three), 20)


def test_what_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for call in (load, load_latest, lambda folder: put(folder, 1), lambda folder: put(folder / "below", 1)):
        with pytest.raises(FileError) as error:
            call(tmp_path / "file")
        one_line(error, "file")
    with pytest.raises(FileError, match="is not a checkpoint: it has no manifest"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------- failing writes

CALLS = ("fsync", "mkdir", "rename", "replace", "open", "unlink", "rmdir")


@contextlib.contextmanager
def on_call(number: int, act: Callable[[], None]) -> Iterator[list[str]]:
    """Let ``act`` happen before the numbered call that changes the disk; yields the calls so far."""
    seen: list[str] = []
    originals = {name: getattr(os, name) for name in CALLS}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) - 1 == number:
                act()
            return originals[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_any_call_may_fail(tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture) -> None:
    """The folder is then as it was, or the new checkpoint is in it; nothing half written is."""

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    template, outcomes, number = tmp_path / "template", [], 0
    for step in (10, 20, 30):
        put(template, step)
    while True:
        folder, said, seen = Path(shutil.copytree(template, tmp_path / str(number))), "", list[str]()
        caplog.clear()
        try:
            with on_call(number, fail) as seen:
                put(folder, 40)
        except FileError as error:
            said = str(error)
        found, left = load_latest(folder), [name for name in listed(folder) if name.startswith(".")]
        if said:
            assert os.strerror(code) in said and "\n" not in said and not left
            assert {"00000001-step-10", "00000002-step-20", "00000003-step-30"} <= set(listed(folder))
            assert is_of(found, 40) or is_of(found, 30)
        else:
            assert is_of(found, 40) and (not left or "cannot remove old" in caplog.text)
        outcomes.append("saved" if not said else "new" if is_of(found, 40) else "old")
        put(folder, 50)  # what one failure left behind, if anything, the next success takes away
        assert is_of(load_latest(folder), 50)
        assert len(listed(folder)) == 4 and not [name for name in listed(folder) if name.startswith(".")]
        if number >= len(seen):
            break
        number += 1
    assert outcomes == sorted(outcomes, key=["old", "new", "saved"].index) and outcomes.count("old") > 6


def test_leftovers_of_a_killed_writer_go(three: Path) -> None:
    (three / ".00000004-step-40.partial").mkdir()
    (three / ".00000004-step-40.partial" / "tensors.safetensors").write_bytes(b"half")
    (three / ".latest.partial").write_bytes(b"half")
    (three / ".mine").touch()
    assert is_of(load_latest(three), 30)
    put(three, 40)
    assert listed(three) == [".mine", "00000002-step-20", "00000003-step-30", "00000004-step-40", "latest"]


@pytest.mark.skipif(os.geteuid() == 0, reason="runs as root")
def test_unwritable_folder(three: Path) -> None:
    three.chmod(0o500)
    with pytest.raises(FileError) as error:
        put(three, 40)
    three.chmod(0o700)
    one_line(error, "Permission denied", "older ones are intact")
    assert is_of(load_latest(three), 30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB, which only root can make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no mount (needs root)")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_full_and_read_only_disks(small_disk: Path) -> None:
    folder = small_disk / "run"
    for step in (10, 20, 30, 40):  # 36 kB each: old ones make room
        put(folder, step, keep=3)
    before = listed(folder)
    with pytest.raises(FileError) as error:
        save(folder, 50, {"w": torch.zeros(40_000)}, {})
    one_line(error, "No space left on device", "older ones are intact")
    assert listed(folder) == before and is_of(load_latest(folder), 40)
    put(folder, 50)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(FileError) as error:
        put(folder, 60)
    one_line(error, "Read-only file system")
    assert is_of(load_latest(folder), 50)


# ---------------------------------------------------------------------------------------------------- real crashes


def fork(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(2)
        os._exit(0)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def crash_at_every_call(folder: Path, leftovers: bool) -> dict[str, int]:
    """A writer ends before its nth call that changes the disk, for every n."""
    template, counts = folder / "template", {"old": 0, "new": 0}
    for step in (1, 2, 3):
        put(template, step)
    if leftovers:
        shutil.copytree(template / "00000003-step-3", template / ".00000004-step-4.partial")
        shutil.copy(template / "latest", template / ".latest.partial")
    for number in range(1000):
        here = Path(shutil.copytree(template, folder / str(number)))

        def write(number: int = number, here: Path = here) -> None:
            with on_call(number, lambda: os._exit(9)):
                put(here, 4)

        code, found = exit_code(fork(write)), load_latest(here)
        if code == 0:
            assert is_of(found, 4)
            return counts
        assert code == 9 and (is_of(found, 3) or is_of(found, 4)), (number, code)
        counts["new" if is_of(found, 4) else "old"] += 1
        assert all(load(path) for path in here.glob("0*"))  # not one that is half removed
        put(here, 5)
        assert is_of(load_latest(here), 5) and not [name for name in listed(here) if name.startswith(".")]
    raise AssertionError("the writer never came to its end")


def crash_at_every_page(folder: Path) -> dict[str, int]:
    """A writer is killed as its file grows past each page; then the same again with an error instead."""
    put(folder, 0)
    killed = refused = 0
    for number, action in ((-signal.SIGXFSZ, signal.SIG_DFL), (3, signal.SIG_IGN)):
        for nbytes in range(0, 40_000, 4096):

            def write(nbytes: int = nbytes, action: Any = action) -> None:
                signal.signal(signal.SIGXFSZ, action)
                resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
                try:
                    put(folder, 1)
                except FileError as error:
                    os._exit(3 if "File too large" in str(error) else 4)

            code = exit_code(fork(write))
            assert code in (0, number), code
            if code == 0:  # the file is smaller than that
                break
            assert is_of(load_latest(folder), 0), nbytes
            if code == 3:
                assert listed(folder) == ["00000001-step-0", "latest"]
            killed, refused = killed + (code < 0), refused + (code == 3)
        shutil.rmtree(folder)
        put(folder, 0)
    return {"killed": killed, "refused": refused}


def kill_at_random(folder: Path, times: int, seed: int) -> dict[str, int]:
    """A writer that saves without end is killed; what it had been told is safe must be there."""
    g, step, mid_write = random.Random(seed), 0, 0
    for _ in range(times):
        receive, send = os.pipe()

        def write(step: int = step, send: int = send) -> None:
            while True:
                step += 1
                put(folder, step)
                os.write(send, f"{step}\n".encode())

        pid = fork(write)
        os.close(send)
        assert select.select([receive], [], [], 20)[0]  # it is under way
        time.sleep(g.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        assert exit_code(pid) == -signal.SIGKILL
        with os.fdopen(receive) as told:
            acknowledged = int(told.read().split()[-1])
        mid_write += any(name.startswith(".") for name in listed(folder))
        found = load_latest(folder)
        assert found is not None and is_of(found, found.step), acknowledged
        assert found.step in (acknowledged, acknowledged + 1), (found.step, acknowledged)
        step = found.step
    return {"mid_write": mid_write, "step": step}


def campaign(folder: Path) -> None:
    torch.set_num_threads(1)  # no thread may hold a lock while we fork
    print(
        json.dumps(
            {
                "calls": crash_at_every_call(folder / "calls", leftovers=False),
                "calls again": crash_at_every_call(folder / "calls again", leftovers=True),
                "pages": crash_at_every_page(folder / "pages"),
                "random": kill_at_random(folder / "random", times=50, seed=int(sys.argv[2])),
            }
        )
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_whenever_it_dies_the_newest_complete_one_loads(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["calls"]["old"] > 6 and found["calls"]["new"] > 8  # 4 of them while the oldest is removed
    assert found["calls again"]["old"] > found["calls"]["old"] and found["calls again"]["new"] == found["calls"]["new"]
    assert found["pages"]["killed"] == found["pages"]["refused"] > 8
    assert found["random"]["mid_write"] > 10 and found["random"]["step"] > 50


if __name__ == "__main__":
    campaign(Path(sys.argv[1]))
