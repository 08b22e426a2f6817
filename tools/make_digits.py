"""Rebuild the embedded digits from MNIST's four files: ``python tools/make_digits.py --data-dir DIR [--check]``.

Of the n images of a class those number floor(j n / count) are taken, j = 0, 1, ..., and stay in the order of the file:
every part of MNIST, whose test images get harder half-way, is there in proportion. The file is gzip's of idx files,
one after the other. Deflate is one format and many programs: these very bytes are zlib's (1.2 or 1.3), level 9; with
another library compare the contents, whose SHA-256 is printed and stands in tests/train/test_data.py.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from laconic.errors import LaconicError
from laconic.train import data

TARGET = Path(data.__file__).with_name(data.EMBEDDED)
TRAIN_OF_CLASS, TEST_OF_CLASS = 400, 100


def chosen(labels: Tensor, count: int) -> Tensor:
    """Positions of ``count`` images of each class."""
    indices = []
    for label in range(data.CLASSES):
        where = (labels == label).nonzero().view(-1)
        indices.append(where[torch.arange(count) * len(where) // count])
    return torch.cat(indices).sort().values


def idx(values: Tensor) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes((0, 0, 8, values.dim())) + sizes + values.numpy().tobytes()


def contents(mnist: data.Images) -> bytes:
    train, test = chosen(mnist.train_labels, TRAIN_OF_CLASS), chosen(mnist.test_labels, TEST_OF_CLASS)
    parts = (
        mnist.train_images[train], mnist.train_labels[train].to(torch.uint8),
        mnist.test_images[test], mnist.test_labels[test].to(torch.uint8),
    )  # fmt: skip
    return b"".join(idx(part) for part in parts)


def gzipped(raw: bytes) -> bytes:
    """Return gzip's bytes, without the gzip module, whose header depends on Python's version."""
    press = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return press.compress(raw) + press.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rebuild the embedded digits from MNIST.")
    parser.add_argument("--data-dir", type=Path, required=True, help="where MNIST's four files are")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the file differs")
    args = parser.parse_args(argv)
    try:
        raw = contents(data.load("mnist", args.data_dir))
        packed = gzipped(raw)
        print(f"contents {hashlib.sha256(raw).hexdigest()}, file {hashlib.sha256(packed).hexdigest()}")
        if args.check:
            same = args.target.read_bytes() == packed
            print(f"{args.target}: {'the same' if same else 'differs'}")
            return int(not same)
        args.target.write_bytes(packed)
    except (LaconicError, OSError) as error:
        print(f"make_digits: {error}", file=sys.stderr)
        return 1
    print(f"{args.target}: {len(packed)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
