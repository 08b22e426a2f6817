"""Inputs of the fuzz targets: values, and a temporary folder."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def ramp(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values in (-1, 1), most of them small."""
    unit = ((torch.arange(1, n + 1) * 2654435761 % 2**32).double() - 2**31) / 2**31
    return (unit**3).to(dtype)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Yield a temporary folder, in memory if the system has /dev/shm, because files are synced."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="laconic-fuzz-", dir=shm if shm.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)
