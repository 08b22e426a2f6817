"""Data sets: MNIST and CIFAR-10 from their original files, any text, and ``digits``, which is part of the package.

``digits`` are 4,000 + 1,000 images of MNIST (Y. LeCun, C. Cortes and C. J. C. Burges; commonly redistributed as CC
BY-SA 3.0), with equally many of each class: enough to see a model learn without a download. ``tools/make_digits.py``
selects them. The package contains them as ``digits.idx.gz``, four idx files one after the other.

Images stay bytes, as in the files; ``examples`` normalises them batch by batch.

Files come from outside: a damaged one raises ``FileError`` with one line, and never more memory is allocated than the
size of the file justifies.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from laconic.errors import ConfigError, FileError
from laconic.fsync import os_error_as_file_error

__all__ = ["DATA_DIR_VARIABLE", "Images", "Text", "load", "load_text"]

DATA_DIR_VARIABLE = "LACONIC_DATA"
"""The environment variable that names the folder of data sets."""

CLASSES = 10  # of every data set

EMBEDDED = "digits.idx.gz"

MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
MNIST_FOLDERS = ("", "mnist", "MNIST/raw")
MNIST_SIDE = 28

CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR10_FOLDERS = ("", "cifar-10-batches-bin")
CIFAR10_SHAPE = (3, 32, 32)

TEXT_FOLDERS = ("text", "")  # in this order: a data folder may contain a readme.txt
TEST_SHARE = 10  # one byte in ten is for the test

DEFLATE_LIMIT = 1032
"""Largest expansion factor of deflate: a header that declares more is wrong."""

READ_SIZE = 1 << 20

ALTERNATIVE = "the set 'digits' needs no files"


@dataclass(frozen=True, eq=False)
class Images:
    """Images (uint8, N x 28 x 28 or N x 3 x 32 x 32) and labels (int64, from 0 to ``num_classes`` - 1)."""

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    num_classes: int = CLASSES


@dataclass(frozen=True, eq=False)
class Text:
    """A corpus of bytes (uint8): the first nine tenths are for training, the rest for the test."""

    name: str
    train: Tensor
    test: Tensor


def load(name: str, data_dir: Path | None = None) -> Images:
    """Read a set of images.

    Args:
        name: ``digits`` (part of the package), ``mnist`` (idx files, plain or .gz) or ``cifar10`` (binary version).
        data_dir: The folder of the files; default: the environment variable ``LACONIC_DATA``.

    >>> load("digits").train_images.shape
    torch.Size([4000, 28, 28])
    """
    if name == "digits":
        return _digits()
    readers: dict[str, Callable[[Path | None], Images]] = {"mnist": _mnist, "cifar10": _cifar10}
    if name not in readers:
        raise ConfigError(f"unknown data set {name!r}: use digits, {' or '.join(readers)}")
    return readers[name](_folder(data_dir))


def load_text(data_dir: Path | None = None) -> Text:
    """Read the only .txt file of the folder ``text`` in the data folder, or of the data folder itself."""
    data_dir = _folder(data_dir)
    if data_dir is None:
        raise FileError(
            f"text is read from a .txt file: set its folder with data_dir or {DATA_DIR_VARIABLE}; {ALTERNATIVE}"
        )
    folders = [data_dir / folder for folder in TEXT_FOLDERS]
    for folder in folders:
        paths = sorted(path for path in folder.glob("*.txt") if path.is_file())
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise FileError(f"text is read from the only .txt file of a folder, and {folder} has {len(paths)}: {names}")
        if paths:
            return _read_text(paths[0])
    where = ", ".join(map(str, folders))
    raise FileError(f"text is read from a .txt file, and there is none in {where}; {ALTERNATIVE}")


def _folder(data_dir: Path | None) -> Path | None:
    if data_dir is None and os.environ.get(DATA_DIR_VARIABLE):
        return Path(os.environ[DATA_DIR_VARIABLE])
    return data_dir


def _digits() -> Images:
    try:
        with (
            resources.files("laconic.train").joinpath(EMBEDDED).open("rb") as file,
            gzip.open(cast(BinaryIO, file)) as stream,
        ):
            parts = [_read_idx(cast(BinaryIO, stream), dims, EMBEDDED) for dims in (3, 1, 3, 1)]
            if stream.read(1):  # reading to the end also makes gzip verify its checksum
                raise FileError("bytes follow the last label")
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{EMBEDDED} of the package is missing or damaged, install laconic again: {error}") from None
    return Images("digits", *_paired(parts, EMBEDDED))


# -------------------------------------------------------------------------------------------------------------- files


def _find(name: str, data_dir: Path | None, files: tuple[str, ...], folders: tuple[str, ...], gz: bool) -> list[Path]:
    """Return the files of a data set, from the first folder that has all of them."""
    expected = f"{name} is read from {', '.join(files)}{' (each plain or .gz)' if gz else ''}"
    if data_dir is None:
        raise FileError(f"{expected}: set data_dir or {DATA_DIR_VARIABLE}; {ALTERNATIVE}")
    candidates = [data_dir / folder for folder in folders]
    incomplete: list[str] = []
    for folder in candidates:
        paths = [_plain_or_gz(folder / file) if gz else folder / file for file in files]
        absent = [file for file, path in zip(files, paths, strict=True) if not path.is_file()]
        if not absent:
            return paths
        if len(absent) < len(files):
            incomplete.append(f"{folder} has no {', '.join(absent)}")
    where = "; ".join(incomplete) or f"there are none in {', '.join(map(str, candidates))}"
    raise FileError(f"{expected}, and {where}; {ALTERNATIVE}")


def _plain_or_gz(path: Path) -> Path:
    return path if path.is_file() else path.with_name(f"{path.name}.gz")


def _read_bytes(stream: BinaryIO, nbytes: int) -> bytearray:
    """Read the next bytes of a stream, fewer at its end; memory grows only as bytes arrive."""
    data = bytearray()
    while len(data) < nbytes and (part := stream.read(min(READ_SIZE, nbytes - len(data)))):
        data += part
    return data


def _read_file(path: Path) -> tuple[bytearray, int]:
    """Read a file; return its bytes and its size when it was opened. One byte more is read, to detect growth."""
    with os_error_as_file_error(f"read {path}"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return _read_bytes(file, size + 1), size


def _check_labels(labels: Tensor, where: object) -> None:
    if int(labels.max()) >= CLASSES:
        raise FileError(f"{where}: labels must be from 0 to {CLASSES - 1}, got {int(labels.max())}")


# ---------------------------------------------------------------------------------------------------------- idx files


def _mnist(data_dir: Path | None) -> Images:
    paths = _find("mnist", data_dir, MNIST_FILES, MNIST_FOLDERS, gz=True)
    parts = [_open_idx(path, dims) for path, dims in zip(paths, (3, 1, 3, 1), strict=True)]
    return Images("mnist", *_paired(parts, paths[0].parent))


def _open_idx(path: Path, dims: int) -> Tensor:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if path.suffix != ".gz":
                return _read_idx(file, dims, path, limit=size, alone=True)
            with gzip.open(file) as stream:
                return _read_idx(cast(BinaryIO, stream), dims, path, limit=DEFLATE_LIMIT * size, alone=True)
    except FileError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"cannot read {path}: {error}") from None


def _read_idx(stream: BinaryIO, dims: int, where: object, *, limit: int | None = None, alone: bool = False) -> Tensor:
    """Read one idx file: 00 00, type 08, number of dimensions, each dimension in 4 bytes big-endian, the values.

    Args:
        stream: A stream at the start of the file.
        dims: 3 for images, 1 for labels.
        where: The file's name for errors.
        limit: Largest possible size of the stream in bytes, header included.
        alone: Whether the stream must end with this file.
    """
    header = _read_bytes(stream, 4 + 4 * dims)
    if bytes(header[:4]) != bytes((0, 0, 8, dims)):
        raise FileError(
            f"{where}: an idx file of {dims}-dimensional bytes begins with 00 00 08 {dims:02x}, this one with "
            f"{header[:4].hex(' ') or 'nothing'}"
        )
    shape = [int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4)]
    if len(header) < 4 + 4 * dims or shape[0] == 0 or shape[1:] != [MNIST_SIDE] * (dims - 1):
        sides = f" of {MNIST_SIDE} x {MNIST_SIDE}" if dims == 3 else ""
        raise FileError(f"{where}: expected {'images' if dims == 3 else 'labels'}{sides}, the header says {shape}")
    nbytes = shape[0] * MNIST_SIDE ** (dims - 1)
    if limit is not None and len(header) + nbytes > limit:
        raise FileError(f"{where}: the header says {shape}, {nbytes} bytes, more than the file can hold: it is cut")
    values = _read_bytes(stream, nbytes + alone)
    if len(values) != nbytes:
        more = len(values) > nbytes
        raise FileError(
            f"{where}: the header says {shape}, {nbytes} bytes, and {'more' if more else len(values)} follow"
        )
    tensor = torch.frombuffer(values, dtype=torch.uint8).view(shape)
    if dims == 1:
        _check_labels(tensor, where)
    return tensor


def _paired(parts: list[Tensor], where: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check that there are as many labels as images; return images and labels for training and test."""
    for images, labels in (parts[:2], parts[2:]):
        if len(images) != len(labels):
            raise FileError(f"{where}: {len(images)} images but {len(labels)} labels")
    return parts[0], parts[1].long(), parts[2], parts[3].long()


# ----------------------------------------------------------------------------------------------------------- CIFAR-10


def _cifar10(data_dir: Path | None) -> Images:
    paths = _find("cifar10", data_dir, CIFAR10_FILES, CIFAR10_FOLDERS, gz=False)
    batches = [_read_batch(path) for path in paths]
    images, labels = (torch.cat([batch[i] for batch in batches[:-1]]) for i in (0, 1))
    return Images("cifar10", images, labels, *batches[-1])


def _read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Read a file of the binary version: for each image one label byte, then red, green and blue, row by row."""
    record = 1 + CIFAR10_SHAPE[0] * CIFAR10_SHAPE[1] * CIFAR10_SHAPE[2]
    values, size = _read_file(path)
    if not size or size % record or len(values) != size:
        raise FileError(f"{path}: expected {record} bytes per image (a label, 3 x 32 x 32 values), got {size} in total")
    rows = torch.frombuffer(values, dtype=torch.uint8).view(-1, record)
    _check_labels(rows[:, 0], path)
    return rows[:, 1:].reshape(-1, *CIFAR10_SHAPE), rows[:, 0].long()


# --------------------------------------------------------------------------------------------------------------- text


def _read_text(path: Path) -> Text:
    values, size = _read_file(path)
    if size < TEST_SHARE or len(values) != size:
        raise FileError(f"{path}: expected a text of at least {TEST_SHARE} bytes, got {size}")
    corpus = torch.frombuffer(values, dtype=torch.uint8)
    train = size - size // TEST_SHARE
    return Text("text", corpus[:train], corpus[train:])
