"""The corpus: Python sources of the running interpreter, or text files of a folder, as bytes."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path

from laconic_lab.bench.corpus import Corpus, read_corpus

__all__ = ["load_corpus"]

HELD_OUT = 32
"""Every so many files one is held out for validation."""
MAX_FILE = 1 << 20
"""Longer files are mostly tables of data."""


def load_corpus(folder: Path | None = None, *, max_bytes: int = 160_000_000) -> Corpus:
    """Read the ``.py`` files of the interpreter, or the ``.py``, ``.txt`` and ``.md`` files below a folder.

    Files are sorted by the hash of their path below the folder, so that every split holds files of all packages.
    """
    if folder is None:
        # Packages of all environments on the path: one made with --system-site-packages has few of its own.
        packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        roots, suffixes = [Path(path) for path in (sysconfig.get_paths()["stdlib"], *packages)], {".py"}
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
    paths = sorted(sort_keys, key=lambda path: (sort_keys[path], path))
    return read_corpus(paths, str(folder or "the interpreter"), held_out=HELD_OUT, max_bytes=max_bytes)
