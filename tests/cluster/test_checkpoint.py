"""Checkpoints: what is saved is loaded bit by bit, and damaged files are skipped with one line of text."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic import counters
from laconic.cluster import checkpoint
from laconic.cluster.checkpoint import load, load_latest, save
from laconic.errors import ConfigError, FileError, InputError

SIZE = 3000
"""Values of a tensor that takes a few pages."""


def tensors(step: int) -> dict[str, Tensor]:
    """Return tensors whose values are the step, so that a mixture of two checkpoints shows."""
    return {"w": torch.full((SIZE,), float(step)), "opt/w": torch.full((30, 100), step, dtype=torch.int64)}


def is_of(loaded: checkpoint.Checkpoint | None, step: int) -> bool:
    if (
        loaded is None
        or loaded.step != step
        or loaded.meta != {"step": step}
        or loaded.tensors.keys() != tensors(0).keys()
    ):
        return False
    return all(torch.equal(loaded.tensors[name], x) for name, x in tensors(step).items())


def put(folder: Path, step: int, **more: Any) -> Path:
    return save(folder, step, tensors(step), {"step": step}, **more)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check_one_line(error: pytest.ExceptionInfo[Exception], *words: str) -> None:
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("dtype", checkpoint._DTYPES, ids=str)
def test_every_dtype_is_restored_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 2 if dtype == torch.bool else 256, (6, 64), dtype=torch.uint8, generator=g)
    x = noise.view(dtype)  # arbitrary bits, NaNs included
    expected = {
        "matrix": x, "strided": x.t()[1:], "scalar": x[0, 0], "empty": x[:0], "no columns": x[:, :0], "same memory": x,
    }  # fmt: skip
    save(tmp_path, 0, expected, {})
    loaded = load_latest(tmp_path)
    assert loaded is not None and list(loaded.tensors) and loaded.tensors.keys() == expected.keys()
    for name, y in loaded.tensors.items():
        x = expected[name]
        assert (y.dtype, y.shape) == (x.dtype, x.shape), name
        assert y.contiguous().reshape(-1).view(torch.uint8).equal(x.contiguous().reshape(-1).view(torch.uint8)), name


def test_meta_step_and_unusual_names_are_restored(tmp_path: Path) -> None:
    meta = {"ünï": [1, 2.5, -0.0, None, True, {"a": {}}], "seed": 2**63 + 1, "": "\ud800", "tiny": 5e-324}
    x = torch.randn(3, requires_grad=True)
    path = save(
        tmp_path / "deep" / "down",
        7,
        {"ünï/cødé": x, "": torch.tensor(1), "a b\n": torch.ones(2).cfloat().conj()},
        meta,
    )
    loaded = load(path)
    assert (loaded.step, loaded.meta, loaded.path) == (7, meta, path)
    assert torch.equal(loaded.tensors["ünï/cødé"], x) and loaded.tensors["a b\n"].eq(1).all()
    assert save(tmp_path, 0, {}, {}) and load_latest(tmp_path) == checkpoint.Checkpoint(
        0, {}, {}, tmp_path / "00000001-step-0"
    )


def test_loaded_tensors_do_not_depend_on_the_files(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    loaded = load(path)
    for file in path.iterdir():
        file.write_bytes(b"")  # a view of the mapped file would crash now
    loaded.tensors["w"] += 1
    assert loaded.tensors["w"].eq(2).all()


def test_files_are_readable_by_other_programs(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = put(tmp_path, 820)
    assert names_in(tmp_path) == ["00000001-step-820", "latest"] and names_in(path) == [
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


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None and load_latest(tmp_path / "nowhere") is None
    for step in range(0, 240, 20):
        path = put(tmp_path, step, keep=2)
        assert is_of(load_latest(tmp_path), step) and len(names_in(tmp_path)) == min(2, step // 20 + 1) + 1
    assert (tmp_path / "latest").read_text() == f"{path.name}\n"
    put(tmp_path, 240, keep=1)
    assert names_in(tmp_path) == ["00000013-step-240", "latest"]


def test_newest_is_the_one_written_last(tmp_path: Path) -> None:
    """After going back to step 20, an older checkpoint of a higher step must not be loaded, nor kept instead."""
    for step in (20, 40, 60, 80, 30, 40):
        put(tmp_path, step, keep=3)
        assert is_of(load_latest(tmp_path), step)
    assert names_in(tmp_path) == ["00000004-step-80", "00000005-step-30", "00000006-step-40", "latest"]


@pytest.mark.parametrize("changed, error, words", [
    ({"step": -1}, ConfigError, "step must be"), ({"step": 1.0}, ConfigError, "step must be"),
    ({"keep": 0}, ConfigError, "keep must be"), ({"meta": {"loss": float("nan")}}, InputError, "plain JSON"),
    ({"meta": {1: 2}}, InputError, "plain JSON"), ({"meta": {"a": (1, 2)}}, InputError, "plain JSON"),
    ({"meta": {"a": torch.ones(1)}}, InputError, "plain JSON"), ({"meta": [1]}, InputError, "plain JSON"),
    ({"tensors": {"a": [1.0]}}, InputError, "got list under 'a'"),
    ({"tensors": {"__metadata__": torch.ones(1)}}, InputError, "'__metadata__'"),
    ({"tensors": {"a": torch.ones(2, dtype=torch.complex128)}}, InputError, "'a': torch.complex128"),
    ({"tensors": {"a": torch.eye(2).to_sparse()}}, InputError, "'a'"),
    ({"tensors": {"a": torch.empty(2, device="meta")}}, InputError, "'a'"),
    ({"tensors": {"\ud800": torch.ones(2)}}, InputError, "cannot hold these tensors"),
])  # fmt: skip
def test_invalid_arguments_are_refused_and_change_nothing(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], words: str
) -> None:
    put(tmp_path, 1)
    before = names_in(tmp_path)
    with pytest.raises(error) as caught:
        save(tmp_path, **({"step": 2, "tensors": tensors(2), "meta": {}} | changed))
    check_one_line(caught, words)
    assert names_in(tmp_path) == before and is_of(load_latest(tmp_path), 1)


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
def test_damaged_file_is_logged_and_skipped(three: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    newest = three / "00000003-step-30"
    whole = (newest / name).read_bytes()
    for bad in damages(whole):
        (newest / name).write_bytes(bad)
        with pytest.raises(FileError) as error:
            load(newest)
        check_one_line(error, str(newest), name)
        caplog.clear()
        assert is_of(load_latest(three), 20)
        assert "skipping a checkpoint" in caplog.text and name in caplog.text
    (newest / name).unlink()
    assert is_of(load_latest(three), 20)
    (newest / name).mkdir()
    assert is_of(load_latest(three), 20)
    (newest / name).rmdir()
    (newest / name).write_bytes(whole)
    assert is_of(load_latest(three), 30)


def test_every_flipped_bit_of_a_manifest_is_found(three: Path) -> None:
    whole = (three / "00000003-step-30" / "manifest.json").read_bytes()
    assert checkpoint._read_sealed(whole)
    for at in range(len(whole)):
        for bit in range(8):
            assert checkpoint._read_sealed(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]) is None


def test_file_latest_is_not_needed_for_loading(three: Path) -> None:
    for text in ("", "00000001-step-10", "../../etc", "\0"):
        (three / "latest").write_text(text)
        assert is_of(load_latest(three), 30)
    (three / "latest").unlink()
    assert is_of(load_latest(three), 30)
    put(three, 40)
    assert (three / "latest").read_text() == "00000004-step-40\n"


def test_one_undamaged_checkpoint_is_enough_and_none_is_an_error(three: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, step in ((3, 30), (2, 20)):
        (three / f"0000000{number}-step-{step}" / "manifest.json").write_text("{}")
        assert is_of(load_latest(three), 10 * (number - 1))
    shutil.rmtree(three / "00000001-step-10")
    (three / "00000001-step-10").touch()
    with pytest.raises(FileError) as error:
        load_latest(three)
    check_one_line(error, "none of the 3 checkpoints", "00000003-step-30")
    assert put(three, 50).name == "00000004-step-50" and is_of(load_latest(three), 50)


def seal(path: Path, **changes: Any) -> None:
    """Change a manifest and give it a valid SHA-256."""
    body = json.loads((path / "manifest.json").read_bytes()) | changes
    body = {key: value for key, value in body.items() if value is not ... and key != "sha256"}
    digest = hashlib.sha256(checkpoint._dump(body)).hexdigest()
    (path / "manifest.json").write_bytes(checkpoint._dump(body | {"sha256": digest}))


def entry_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize("changes, words", [
    ({"version": 2}, "version 2, expected 'laconic checkpoint' of version 1"), ({"version": ...}, "version None"),
    ({"format": "other"}, "'other'"), ({"step": -1}, "must hold a step"), ({"step": "1"}, "must hold a step"),
    ({"step": ...}, "must hold a step"), ({"meta": []}, "must hold a step"), ({"files": ...}, "and of nothing else"),
    ({"files": {}}, "and of nothing else"),
    ({"files": {"../../secret": {"nbytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}}}, "nothing else"),
    ({"files": {"/etc/passwd": {"nbytes": 6, "sha256": ""}}}, "and of nothing else"),
    ({"files": {"tensors.safetensors": {"nbytes": 6, "sha256": "", "a": 1}, "b": {}}}, "and of nothing else"),
    ({"files": {"tensors.safetensors": {"nbytes": 6, "sha256": ""}}}, "must have 6 bytes"),
    ({"files": {"tensors.safetensors": {"nbytes": "6", "sha256": ""}}}, "nothing else"),
    ({"files": {"tensors.safetensors": [6]}}, "nothing else"),
])  # fmt: skip
def test_invalid_manifest_with_a_valid_hash_is_refused(three: Path, changes: dict[str, Any], words: str) -> None:
    newest = three / "00000003-step-30"
    seal(newest, **changes)
    with pytest.raises(FileError) as error:
        load(newest)
    check_one_line(error, words)
    assert is_of(load_latest(three), 20)


@pytest.mark.parametrize("header", [
    b"", b"{", b"[]", b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}',
    b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,4294967296]}}',
    b'{"a":{"dtype":"Q7","shape":[2],"data_offsets":[0,8]}}',
    b'{"a":{"dtype":"F8_E8M0","shape":[8],"data_offsets":[0,8]}}',
    b'{"a":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}}',
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
])  # fmt: skip
def test_invalid_safetensors_file_is_refused(three: Path, header: bytes) -> None:
    newest = three / "00000003-step-30"
    (newest / "tensors.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    seal(newest, files={"tensors.safetensors": entry_of(newest / "tensors.safetensors")})
    if b"F8_E8M0" in header or b"F4" in header:  # dtypes that torch has and we do not write
        assert load(newest).tensors["a"].nbytes == 8
        return
    with pytest.raises(FileError) as error:
        load(newest)
    check_one_line(error, "tensors.safetensors is not a safetensors file")
    assert is_of(load_latest(three), 20)


def test_huge_manifest_is_not_read(three: Path) -> None:
    file = three / "00000003-step-30" / "manifest.json"
    with file.open("wb") as out:
        out.truncate(1 << 40)
    assert is_of(load_latest(three), 20)
    file.write_bytes(b"[" * 100_000)
    assert is_of(load_latest(three), 20)


def test_path_that_is_not_a_checkpoint_folder_is_a_file_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for call in (load, load_latest, lambda folder: put(folder, 1), lambda folder: put(folder / "below", 1)):
        with pytest.raises(FileError) as error:
            call(tmp_path / "file")
        check_one_line(error, "file")
    with pytest.raises(FileError, match="is not a checkpoint: it has no manifest"):
        load(tmp_path)


@pytest.mark.parametrize("target", [".", "nowhere", "00000001-step-1"])
def test_link_named_like_a_checkpoint_does_not_stop_saving(tmp_path: Path, target: str) -> None:
    save(tmp_path, 1, tensors(1), {"step": 1}, keep=2)
    (tmp_path / "00000000-step-9").symlink_to(target)
    (tmp_path / ".00000007-step-7.partial").symlink_to(target)
    for step in (2, 3):
        save(tmp_path, step, tensors(step), {"step": step}, keep=2)
    assert is_of(load_latest(tmp_path), 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002-step-2", "00000003-step-3", "latest"]


def test_folder_with_a_huge_number_is_ignored_and_counted(tmp_path: Path) -> None:
    put(tmp_path, 4)
    for name in ("9" * 240 + "-step-0", "00000009-step-" + "9" * 200):
        (tmp_path / name).mkdir()
    before = counters.counts().get("huge checkpoint numbers", 0)
    assert put(tmp_path, 8).name == "00000002-step-8" and is_of(load_latest(tmp_path), 8)
    assert checkpoint.Folder(tmp_path).versions() == [4, 8]
    assert counters.counts()["huge checkpoint numbers"] > before
    (tmp_path / f"{checkpoint._MAX_NUMBER}-step-0").mkdir()
    with pytest.raises(FileError, match="has a checkpoint with the largest possible number") as error:
        put(tmp_path, 12)
    check_one_line(error, "remove it")


@pytest.mark.parametrize("keep", [1, 3])
def test_run_that_is_stopped_again_and_again_keeps_its_regular_checkpoints(tmp_path: Path, keep: int) -> None:
    folder = checkpoint.Folder(tmp_path, keep=keep)

    def save_at_stop(step: int) -> None:
        folder.save_at_stop(step, tensors(step), {"step": step})

    for step in (0, 20, 40, 60):
        folder.save(step, tensors(step), {"step": step})
    regular = [20, 40, 60][-keep:]
    save_at_stop(60)  # nothing has happened since
    assert folder.versions() == regular
    for step in range(61, 70):
        save_at_stop(step)
        assert folder.versions() == [*regular, step] and is_of(load_latest(tmp_path), step)
    folder.save(80, tensors(80), {"step": 80})
    assert folder.versions() == [20, 40, 60, 80][-keep:] and is_of(load_latest(tmp_path), 80)
