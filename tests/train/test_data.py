"""Data sets: the embedded digits, reading of files, and one-line errors for damaged files."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import re
import resource
from pathlib import Path

import pytest
import torch

from laconic.errors import ConfigError, FileError
from laconic.train import data, load, load_text

CONTENTS = "683f48c38d0d072e8aa2f41c72cc9e7e8c17227621f45382c907914e722762d4"
EMBEDDED = Path(data.__file__).with_name(data.EMBEDDED)


def idx(values: torch.Tensor) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes((0, 0, 8, values.dim())) + sizes + values.numpy().tobytes()


def sample(n: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(n)
    labels = torch.arange(n) % 10
    return torch.randint(256, (n, *shape), generator=rng, dtype=torch.uint8), labels.to(torch.uint8)


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A folder with a small set in MNIST's format: plain files for training, .gz ones for the test."""
    for prefix, n in (("train", 30), ("t10k", 20)):
        for kind, values in zip(("images-idx3", "labels-idx1"), sample(n, 28, 28), strict=True):
            file = f"{prefix}-{kind}-ubyte"
            if prefix == "train":
                (tmp_path / file).write_bytes(idx(values))
            else:
                (tmp_path / f"{file}.gz").write_bytes(gzip.compress(idx(values)))
    return tmp_path


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    for at, name in enumerate(data.CIFAR10_FILES):
        images, labels = sample(10 + at, 3072)
        (tmp_path / name).write_bytes(torch.cat([labels[:, None], images], 1).numpy().tobytes())
    return tmp_path


def error_of(name: str, data_dir: Path | None) -> str:
    with pytest.raises(FileError) as caught:
        load(name, data_dir)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def test_digits_are_balanced_and_in_range() -> None:
    digits = load("digits")
    assert digits.name == "digits" and digits.num_classes == 10
    for images, labels, n in (
        (digits.train_images, digits.train_labels, 4000),
        (digits.test_images, digits.test_labels, 1000),
    ):
        assert images.shape == (n, 28, 28) and images.dtype == torch.uint8 and images.is_contiguous()
        assert labels.shape == (n,) and labels.dtype == torch.int64
        assert labels.bincount().tolist() == [n // 10] * 10
        assert int(images.min()) == 0 and int(images.max()) == 255
        # Images and labels match if a "1" has the least ink.
        ink = torch.stack([images[labels == label].float().mean() for label in range(10)])
        assert int(ink.argmin()) == 1 and int(ink.argmax()) == 0


def test_digits_have_the_committed_contents() -> None:
    digits = load("digits")
    parts = (digits.train_images, digits.train_labels.byte(), digits.test_images, digits.test_labels.byte())
    assert hashlib.sha256(b"".join(idx(part) for part in parts)).hexdigest() == CONTENTS
    assert EMBEDDED.stat().st_size <= 1_500_000


def test_nearest_neighbour_classifies_digits() -> None:
    """Images and labels match: the nearest of 4,000 images has the right label for more than 90 %."""
    digits = load("digits")
    train, test = (part.view(-1, 784).float() for part in (digits.train_images, digits.test_images[:300]))
    nearest = torch.cdist(test, train).argmin(1)
    assert float((digits.train_labels[nearest] == digits.test_labels[:300]).float().mean()) > 0.9


def test_each_load_returns_new_tensors() -> None:
    first, second = load("digits"), load("digits")
    first.train_images.zero_()
    assert bool(second.train_images.any())


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "more"])
def test_damaged_embedded_file_raises_file_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str) -> None:
    raw = bytearray(EMBEDDED.read_bytes())
    if damage == "cut":
        del raw[len(raw) // 2 :]
    elif damage == "flipped":
        raw[-6] ^= 1  # in the checksum
    elif damage == "more":
        raw += gzip.compress(b"x")
    if damage != "missing":
        (tmp_path / data.EMBEDDED).write_bytes(raw)
    monkeypatch.setattr(data.resources, "files", lambda package: tmp_path)
    assert "install laconic again" in error_of("digits", None)


def test_make_digits_selects_evenly() -> None:
    path = Path(__file__).resolve().parents[2] / "tools" / "make_digits.py"
    spec = importlib.util.spec_from_file_location("make_digits", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    labels = torch.arange(10).repeat(7)
    indices = script.chosen(labels, 3)
    assert labels[indices].bincount().tolist() == [3] * 10 and bool((indices.diff() > 0).all())
    assert indices[labels[indices] == 4].tolist() == [4, 24, 44]  # members 0, 2 and 4 of seven
    assert gzip.decompress(script.gzipped(b"abc")) == b"abc"
    assert script.idx(torch.zeros(2, 3, dtype=torch.uint8)) == bytes.fromhex("00000802 00000002 00000003 000000000000")


@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
def test_mnist_is_read_plain_and_compressed(mnist: Path, tmp_path_factory: pytest.TempPathFactory, folder: str) -> None:
    root = tmp_path_factory.mktemp("data")
    (root / folder).mkdir(parents=True, exist_ok=True)
    for path in mnist.iterdir():
        path.rename(root / folder / path.name)
    loaded = load("mnist", root)
    for images, labels, n in (
        (loaded.train_images, loaded.train_labels, 30),
        (loaded.test_images, loaded.test_labels, 20),
    ):
        wanted, numbers = sample(n, 28, 28)
        assert torch.equal(images, wanted) and torch.equal(labels, numbers.long()) and labels.dtype == torch.int64


def test_folder_from_the_environment(mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(data.DATA_DIR_VARIABLE, str(mnist))
    assert len(load("mnist").train_images) == 30
    assert "there are none in" in error_of("mnist", mnist / "elsewhere")  # an argument overrides the environment


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-bin"])
def test_cifar10_is_read(cifar10: Path, tmp_path_factory: pytest.TempPathFactory, folder: str) -> None:
    root = tmp_path_factory.mktemp("data")
    (root / folder).mkdir(exist_ok=True)
    for path in cifar10.iterdir():
        path.rename(root / folder / path.name)
    loaded = load("cifar10", root)
    assert loaded.train_images.shape == (60, 3, 32, 32) and loaded.test_images.shape == (15, 3, 32, 32)
    images, labels = (torch.cat(parts) for parts in zip(*(sample(10 + at, 3072) for at in range(5)), strict=True))
    assert torch.equal(loaded.train_images, images.view(-1, 3, 32, 32)) and torch.equal(
        loaded.train_labels, labels.long()
    )
    assert torch.equal(loaded.test_images, sample(15, 3072)[0].view(-1, 3, 32, 32))
    assert loaded.train_images.is_contiguous() and loaded.train_images.dtype == torch.uint8


def test_unknown_data_set_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown data set 'imagenet': use digits, mnist or cifar10"):
        load("imagenet")


@pytest.mark.parametrize("name, file", [("mnist", "t10k-labels-idx1-ubyte"), ("cifar10", "data_batch_3.bin")])
def test_missing_files_raise_file_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest, name: str, file: str
) -> None:
    monkeypatch.delenv(data.DATA_DIR_VARIABLE, raising=False)
    nowhere, empty = error_of(name, None), error_of(name, tmp_path)
    assert "data_dir or LACONIC_DATA" in nowhere and "there are none in" in empty and str(tmp_path) in empty
    folder = request.getfixturevalue(name)
    next(folder.glob(f"{file}*")).unlink()
    part = error_of(name, folder)
    assert f"{folder} has no {file}" in part
    for text in (nowhere, empty, part):
        assert file in text and "'digits' needs no files" in text


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("file, change, words", [
    (IMAGES, lambda raw: b"", "begins with 00 00 08 03, this one with nothing"),
    (IMAGES, lambda raw: raw[:3], "this one with 00 00 08"), (IMAGES, lambda raw: raw[:4], r"header says \[\]"),
    (IMAGES, lambda raw: raw[:14], "header says"), (IMAGES, lambda raw: b"\x01" + raw[1:], "this one with 01 00 08 03"),
    (IMAGES, lambda raw: raw[:2] + b"\x0d" + raw[3:], "this one with 00 00 0d 03"),
    (IMAGES, lambda raw: raw[:3] + b"\x01" + raw[4:], "this one with 00 00 08 01"),
    (IMAGES, lambda raw: raw[:8] + (14).to_bytes(4, "big") + raw[12:], r"images of 28 x 28, the header says \[30, 14"),
    (IMAGES, lambda raw: raw[:4] + bytes(4) + raw[8:], r"header says \[0, 28, 28\]"),
    (IMAGES, lambda raw: raw[:4] + b"\xff" * 4 + raw[8:], "more than the file can hold"),
    (IMAGES, lambda raw: raw[:-1], "cut|follow"), (IMAGES, lambda raw: raw + b"x", "and more follow"),
    (IMAGES, lambda raw: raw[:4] + (29).to_bytes(4, "big") + raw[8:-784], "29 images but 30 labels"),
    (LABELS, lambda raw: raw[:-1] + b"\x0a", "labels must be from 0 to 9, got 10"),
    (LABELS, lambda raw: raw[:4] + bytes(4), r"expected labels, the header says \[0\]"),
    (LABELS, lambda raw: raw[:3] + b"\x03" + raw[4:], "begins with 00 00 08 01, this one with 00 00 08 03"),
])  # fmt: skip
def test_malformed_idx_raises_file_error(mnist: Path, file: str, change, words: str, packed: bool) -> None:  # type: ignore[no-untyped-def]
    path = mnist / file
    raw = change(path.read_bytes())
    path.unlink()
    if packed:
        path = path.with_name(f"{file}.gz")
        raw = gzip.compress(raw)
    path.write_bytes(raw)
    text = error_of("mnist", mnist)
    assert re.search(words, text) and str(mnist) in text


@pytest.mark.parametrize("change", [
    lambda raw: b"", lambda raw: raw[:-9], lambda raw: raw[:40] + b"\0" * 40 + raw[80:],
    lambda raw: raw[:-8] + bytes(8), lambda raw: b"PK" + raw, lambda raw: raw + b"rest",
])  # fmt: skip
def test_malformed_gzip_raises_file_error(mnist: Path, change) -> None:  # type: ignore[no-untyped-def]
    path = mnist / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(change(path.read_bytes()))
    assert str(path) in error_of("mnist", mnist)


def test_gzip_bomb_is_read_up_to_its_declared_size(mnist: Path) -> None:
    """256 MB of zeros, packed into one, behind a header of twenty images."""
    path = mnist / "t10k-images-idx3-ubyte.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(idx(sample(20, 28, 28)[0]))
        for _ in range(256):
            file.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "more follow" in error_of("mnist", mnist)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.mark.parametrize("change, words", [
    (lambda raw: b"", "got 0 in total"), (lambda raw: raw[:-1], "expected 3073 bytes per image"),
    (lambda raw: raw + b"x", "expected 3073 bytes per image"),
    (lambda raw: raw[:3073] + b"\xff" + raw[3074:], "labels must be from 0 to 9, got 255"),
])  # fmt: skip
def test_malformed_cifar10_raises_file_error(cifar10: Path, change, words: str) -> None:  # type: ignore[no-untyped-def]
    path = cifar10 / "data_batch_2.bin"
    path.write_bytes(change(path.read_bytes()))
    text = error_of("cifar10", cifar10)
    assert words in text and str(path) in text


@pytest.mark.skipif(os.geteuid() == 0, reason="runs as root")
@pytest.mark.parametrize("name, file", [("mnist", IMAGES), ("cifar10", "test_batch.bin")])
def test_unreadable_file_raises_file_error(request: pytest.FixtureRequest, name: str, file: str) -> None:
    folder = request.getfixturevalue(name)
    (folder / file).chmod(0)
    assert "cannot read" in error_of(name, folder)


def test_fifo_is_not_opened(mnist: Path) -> None:
    """Opening a FIFO would block."""
    (mnist / IMAGES).unlink()
    os.mkfifo(mnist / IMAGES)
    assert f"has no {IMAGES}" in error_of("mnist", mnist)


def test_text_is_split_nine_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "play.txt").write_bytes(bytes(range(256)))
    monkeypatch.setenv(data.DATA_DIR_VARIABLE, str(tmp_path))
    for loaded in (load_text(), load_text(tmp_path)):
        assert loaded.train.tolist() == list(range(231)) and loaded.test.tolist() == list(range(231, 256))
        assert loaded.train.dtype == torch.uint8


def test_text_folder_precedes_a_readme(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_bytes(b"not this one")
    (tmp_path / "text").mkdir()
    assert bytes(load_text(tmp_path).train) == b"not this on"
    (tmp_path / "text" / "play.txt").write_bytes(b"First Citizen:")
    assert bytes(load_text(tmp_path).train) == b"First Citizen"


def test_missing_or_invalid_text_raises_file_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(data.DATA_DIR_VARIABLE, raising=False)

    def text_error(folder: Path | None) -> str:
        with pytest.raises(FileError) as caught:
            load_text(folder)
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value)

    assert "data_dir or LACONIC_DATA" in text_error(None) and "'digits' needs no files" in text_error(None)
    assert f"there is none in {tmp_path / 'text'}, {tmp_path};" in text_error(tmp_path)
    assert "there is none" in text_error(tmp_path / "elsewhere")
    (tmp_path / "a.txt").write_bytes(b"too short")
    assert "at least 10 bytes, got 9" in text_error(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"which of the two")
    assert f"{tmp_path} has 2: a.txt, b.txt" in text_error(tmp_path)
