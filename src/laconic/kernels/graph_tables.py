"""Tables on a GPU that a CUDA graph reads: they must live as long as the graph, whatever caches drop meanwhile.

A graph holds addresses and no references. While one is recorded, every table that a launch takes from a cache is held,
and none is copied to the device: the copy would be part of the graph, and would read host memory that is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["held", "hold_tables", "to_device"]

T = TypeVar("T")

_recording = threading.local()


@contextmanager
def hold_tables() -> Iterator[list[object]]:
    """Collect the tables that launches of this thread use in the block."""
    tables: list[object] = []
    _recording.tables = tables
    try:
        yield tables
    finally:
        _recording.tables = None


def held(table: T) -> T:
    """Return a table from a cache, which a graph that is being recorded holds."""
    tables = getattr(_recording, "tables", None)
    if tables is not None:
        tables.append(table)
    return table


def to_device(table: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    """Copy a new table to a device; ``RuntimeError`` while a graph is recorded."""
    if getattr(_recording, "tables", None) is not None:
        raise RuntimeError("a launch needs a table that is not on the device yet")
    return table.to(device, non_blocking=non_blocking)
