"""Text for the GPT benchmark: sources of the interpreter's standard library, as bytes, split by file."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from laconic_lab.bench.corpus import Corpus, read_corpus

__all__ = ["Text", "load_text"]

HELD_OUT = 16
"""Every so many files one is held out."""
MAX_FILE = 1 << 18
"""Longer files are mostly tables of data."""


class Text(Corpus):
    """A corpus with the windows of the benchmark."""

    def windows(self, context: int, batch: int, steps: int, seed: int) -> Tensor:
        """Return the starts [steps, batch] of training windows of ``context + 1`` bytes."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.train.numel() - context, (steps, batch), generator=generator)

    def batch(self, starts: Tensor, context: int) -> Tensor:
        """Return the windows that begin at ``starts``, as int64 [batch, context + 1]."""
        return self.train[starts[:, None] + torch.arange(context + 1)].long()

    def evaluation(self, context: int, count: int) -> Tensor:
        """Return held-out windows at equal distances, as int64 [count, context + 1]."""
        starts = torch.linspace(0, self.validation.numel() - context - 1, count).long()
        return self.validation[starts[:, None] + torch.arange(context + 1)].long()


def load_text(folder: Path | None = None) -> Text:
    """Read the ``.py`` files of the standard library, or of a folder, without those of installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    paths = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    files = [path for path in paths if path.is_file() and path.stat().st_size <= MAX_FILE]
    return Text(**vars(read_corpus(files, str(root), held_out=HELD_OUT)))
