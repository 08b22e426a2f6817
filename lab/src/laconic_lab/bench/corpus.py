"""Corpus: the bytes of text files, split by file into training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from laconic.errors import FileError

__all__ = ["Corpus", "read_corpus"]

LEAST_VALIDATION = 1 << 16


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes.

    Args:
        files: Number of files.
        digest: SHA-256 of all bytes in order, which identifies the text in Records.
    """

    train: Tensor
    validation: Tensor
    files: int
    digest: str


def read_corpus(paths: Sequence[Path], where: str, *, held_out: int, max_bytes: int | None = None) -> Corpus:
    """Read files in the given order; the first of every ``held_out`` files is for validation.

    Args:
        where: Names the folders in the message about too little text.
        max_bytes: Reading stops before the file that would exceed this.
    """
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    digest, total = hashlib.sha256(), 0
    for index, path in enumerate(paths):
        content = path.read_bytes()
        total += len(content)
        if max_bytes is not None and total > max_bytes:
            break
        digest.update(content)
        splits[index % held_out == 0].append(content)
    joined = [b"".join(split) for split in splits]
    if min(map(len, joined)) < LEAST_VALIDATION:
        least = LEAST_VALIDATION * held_out // 10**6
        raise FileError(f"expected at least {least} MB of text below {where}, got {total} bytes in {len(paths)} files")
    train, validation = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in joined)
    return Corpus(train, validation, len(paths), digest.hexdigest())
