"""The corpus: Python sources of the running interpreter, or text files of a folder, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from laconic.errors import FileError

__all__ = ["Corpus", "load_corpus"]

HELD_OUT = 32
"""Every so many files one is held out for validation."""
MAX_FILE = 1 << 20
"""Longer files are mostly tables of data."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes, split by file.

    Args:
        digest: SHA-256 of all bytes in order, which identifies the corpus in Records.
    """

    train: Tensor
    validation: Tensor
    files: int
    digest: str


def load_corpus(folder: Path | None = None, *, max_bytes: int = 160_000_000) -> Corpus:
    """Read the ``.py`` files of the interpreter, or the ``.py``, ``.txt`` and ``.md`` files below a folder.

    Files are sorted by the hash of their path below the folder, so that every split holds files of all packages.
    """
    if folder is None:
        roots, suffixes = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")], {".py"}
    else:
        roots, suffixes = [folder], {".py", ".txt", ".md"}
    sort_keys: dict[Path, bytes] = {}
    for root in dict.fromkeys(roots):
        for path in root.rglob("*"):
            name = path.relative_to(root).parts[0]
            if folder is None and name.startswith("laconic"):
                continue  # the corpus must not change with the library
            if path.suffix in suffixes and path.is_file() and path.stat().st_size <= MAX_FILE:
                sort_keys[path] = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    digest, total = hashlib.sha256(), 0
    ordered = sorted(sort_keys, key=lambda path: (sort_keys[path], path))
    for index, path in enumerate(ordered):
        content = path.read_bytes()
        total += len(content)
        if total > max_bytes:
            break
        digest.update(content)
        splits[index % HELD_OUT == 0].append(content)
    joined = [b"".join(split) for split in splits]
    if min(map(len, joined)) < 1 << 16:
        where = folder or "the interpreter's folders"
        raise FileError(f"expected at least 2 MB of text below {where}, got {total} bytes in {len(ordered)} files")
    train, validation = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in joined)
    return Corpus(train, validation, len(ordered), digest.hexdigest())
