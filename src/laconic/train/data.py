"""Data sets: MNIST and CIFAR-10 from their publishers' files, any text, and ``digits``, which comes with the package.

``digits`` are 4,000 + 1,000 images of MNIST (Y. LeCun, C. Cortes and C. J. C. Burges; commonly redistributed as CC
BY-SA 3.0), as many of each class: enough to see a training run learn without a download. ``tools/make_digits.py`` says
which they are. They lie in ``digits.idx.gz`` as idx files one after the other.

Values are as in the files, bytes: ``examples`` normalises images, batch by batch.

Files come from outside. Whatever is wrong with one is a ``FileError`` in one line, and nothing is allocated that the
size of the file does not justify.
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

__all__ = ["DATA_DIR_VARIABLE", "Images", "Text", "load", "load_text"]

DATA_DIR_VARIABLE = "LACONIC_DATA"
"""The environment variable that names the folder of data sets."""

CLASSES = 10  # of every set here

EMBEDDED = "digits.idx.gz"

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MNIST_FOLDERS = ("", "mnist", "MNIST/raw")
MNIST_SIDE = 28

CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR10_FOLDERS = ("", "cifar-10-batches-bin")
CIFAR10_SHAPE = (3, 32, 32)

TEXT_FOLDERS = ("text", "")  # in this order: a data folder may well have a readme.txt
TEXT_TEST = 10  # one byte in so many is for the test

DEFLATE_LIMIT = 1032
"""Deflate makes at most so many bytes of one: a header that declares more lies."""

STEP = 1 << 20

INSTEAD = "the set 'digits' needs no files"


@dataclass(frozen=True, eq=False)
class Images:
    """A data set: images are uint8, N x 28 x 28 or N x 3 x 32 x 32; labels are int64, from 0 to ``num_classes`` - 1."""

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
        name: ``digits`` (comes with the package), ``mnist`` (idx files, plain or .gz) or ``cifar10`` (binary version).
        data_dir: The folder of files that do not come with the package; by default the one that the environment
            variable ``LACONIC_DATA`` names.

    >>> load("digits").train_images.shape
    torch.Size([4000, 28, 28])
    """
    if name == "digits":
        return _digits()
    readers: dict[str, Callable[[Path | None], Images]] = {"mnist": _mnist, "cifar10": _cifar10}
    if name not in readers:
        raise ConfigError(f"unknown data set {name!r}: take digits, {' or '.join(readers)}")
    return readers[name](_folder(data_dir))


def load_text(data_dir: Path | None = None) -> Text:
    """Read the .txt file in ``text``, or else the one in the folder itself; the folder is named as for ``load``."""
    data_dir = _folder(data_dir)
    if data_dir is None:
        raise FileError(f"text is read from a .txt file: name its folder by data_dir or {DATA_DIR_VARIABLE}; {INSTEAD}")
    places = [data_dir / folder for folder in TEXT_FOLDERS]
    for place in places:
        found = sorted(path for path in place.glob("*.txt") if path.is_file())
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise FileError(f"text is read from the only .txt file of a folder, and {place} has {len(found)}: {names}")
        if found:
            return _read_text(found[0])
    where = ", ".join(str(place) for place in places)
    raise FileError(f"text is read from a .txt file, and there is none in {where}; {INSTEAD}")


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
            if stream.read(1):  # asking for more is also what makes gzip compare its checksum
                raise FileError("bytes follow the last label")
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{EMBEDDED} of the package is missing or damaged, install laconic again: {error}") from None
    return Images("digits", *_paired(parts, EMBEDDED))


# -------------------------------------------------------------------------------------------------------------- files


def _find(name: str, data_dir: Path | None, files: tuple[str, ...], folders: tuple[str, ...], gz: bool) -> list[Path]:
    """The files of a set, all from the first folder that has every one."""
    expected = f"{name} is read from {', '.join(files)}{' (each plain or .gz)' if gz else ''}"
    if data_dir is None:
        raise FileError(f"{expected}: name their folder by data_dir or {DATA_DIR_VARIABLE}; {INSTEAD}")
    places = [data_dir / folder for folder in folders]
    missing: list[str] = []
    for place in places:
        found = [_plain_or_gz(place / file) if gz else place / file for file in files]
        absent = [file for file, path in zip(files, found, strict=True) if not path.is_file()]
        if not absent:
            return found
        if len(absent) < len(files):  # this is the folder that was meant
            missing.append(f"{place} has no {', '.join(absent)}")
    where = "; ".join(missing) or f"there are none in {', '.join(str(place) for place in places)}"
    raise FileError(f"{expected}, and {where}; {INSTEAD}")


def _plain_or_gz(path: Path) -> Path:
    return path if path.is_file() else path.with_name(f"{path.name}.gz")


def _take(stream: BinaryIO, nbytes: int) -> bytearray:
    """The next bytes of a stream, fewer at its end; memory grows only as they come."""
    found = bytearray()
    while len(found) < nbytes and (part := stream.read(min(STEP, nbytes - len(found)))):
        found += part
    return found


def _whole(path: Path) -> tuple[bytearray, int]:
    """A file's bytes, and the size that it says it has: one that grows is read one byte further."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _take(file, size + 1), size
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None


def _check_labels(labels: Tensor, where: object) -> None:
    if int(labels.max()) >= CLASSES:
        raise FileError(f"{where}: labels are from 0 to {CLASSES - 1}, found {int(labels.max())}")


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
    """One idx file of bytes: two zeros, the type (8), the dimensions' number, each as 4 bytes big-endian, the values.

    Args:
        stream: Where it begins.
        dims: 3 for images, 1 for labels.
        where: Named in errors.
        limit: Bytes that the stream can hold at most, header included.
        alone: Whether the stream must end with it.
    """
    header = _take(stream, 4 + 4 * dims)
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
    values = _take(stream, nbytes + alone)
    if len(values) != nbytes:
        more = len(values) > nbytes
        raise FileError(
            f"{where}: the header says {shape}, {nbytes} bytes, and {'more' if more else len(values)} follow"
        )
    found = torch.frombuffer(values, dtype=torch.uint8).view(shape)
    if dims == 1:
        _check_labels(found, where)
    return found


def _paired(parts: list[Tensor], where: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels for training and test, as many of one as of the other."""
    for images, labels in (parts[:2], parts[2:]):
        if len(images) != len(labels):
            raise FileError(f"{where}: {len(images)} images and {len(labels)} labels do not belong together")
    return parts[0], parts[1].long(), parts[2], parts[3].long()


# ----------------------------------------------------------------------------------------------------------- CIFAR-10


def _cifar10(data_dir: Path | None) -> Images:
    paths = _find("cifar10", data_dir, CIFAR10_FILES, CIFAR10_FOLDERS, gz=False)
    batches = [_read_batch(path) for path in paths]
    images, labels = (torch.cat([batch[i] for batch in batches[:-1]]) for i in (0, 1))
    return Images("cifar10", images, labels, *batches[-1])


def _read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """A file of the binary version: per image a label byte, then red, green and blue, row by row."""
    record = 1 + CIFAR10_SHAPE[0] * CIFAR10_SHAPE[1] * CIFAR10_SHAPE[2]
    values, size = _whole(path)
    if not size or size % record or len(values) != size:
        raise FileError(f"{path}: expected {record} bytes an image (a label, 3 x 32 x 32 values), got {size} in all")
    rows = torch.frombuffer(values, dtype=torch.uint8).view(-1, record)
    _check_labels(rows[:, 0], path)
    return rows[:, 1:].reshape(-1, *CIFAR10_SHAPE), rows[:, 0].long()


# --------------------------------------------------------------------------------------------------------------- text


def _read_text(path: Path) -> Text:
    values, size = _whole(path)
    if size < TEXT_TEST or len(values) != size:
        raise FileError(f"{path}: expected a text of at least {TEXT_TEST} bytes, got {size}")
    corpus = torch.frombuffer(values, dtype=torch.uint8)
    train = size - size // TEXT_TEST
    return Text("text", corpus[:train], corpus[train:])
