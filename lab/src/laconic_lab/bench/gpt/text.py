"""Text for the GPT benchmark: sources of the interpreter's standard library, as bytes, split by file."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from laconic.errors import FileError

__all__ = ["Text", "load_text"]

HELD_OUT = 16
"""Every so many files one is held out."""
MAX_FILE = 1 << 18
"""Longer files are mostly tables of data."""
MIN_BYTES = 1 << 20


@dataclass(frozen=True)
class Text:
    """Training and held-out bytes.

    Args:
        digest: SHA-256 of all bytes in order, which identifies the text in Records.
    """

    train: Tensor
    held_out: Tensor
    digest: str

    def windows(self, context: int, batch: int, steps: int, seed: int) -> Tensor:
        """Return the starts [steps, batch] of training windows of ``context + 1`` bytes."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.train.numel() - context, (steps, batch), generator=generator)

    def batch(self, starts: Tensor, context: int) -> Tensor:
        """Return the windows that begin at ``starts``, as int64 [batch, context + 1]."""
        return self.train[starts[:, None] + torch.arange(context + 1)].long()

    def evaluation(self, context: int, count: int) -> Tensor:
        """Return held-out windows at equal distances, as int64 [count, context + 1]."""
        starts = torch.linspace(0, self.held_out.numel() - context - 1, count).long()
        return self.held_out[starts[:, None] + torch.arange(context + 1)].long()


def load_text(folder: Path | None = None) -> Text:
    """Read the ``.py`` files of the standard library, or of a folder, without those of installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    paths = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    digest = hashlib.sha256()
    files = [path for path in paths if path.is_file() and path.stat().st_size <= MAX_FILE]
    for index, path in enumerate(files):
        content = path.read_bytes()
        digest.update(content)
        splits[index % HELD_OUT == HELD_OUT - 1].append(content)
    train, held_out = (bytearray(b"".join(split)) for split in splits)
    if len(train) < MIN_BYTES or not held_out:
        raise FileError(
            f"expected at least {MIN_BYTES} bytes of .py files below {root}, got {len(train)} in {len(files)} files: "
            "install the sources of the standard library"
        )
    return Text(
        torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8), digest.hexdigest()
    )
