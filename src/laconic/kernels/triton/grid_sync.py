"""Kernels in phases: each begins when the one before has ended everywhere, and nobody waits on the host in between.

A phase's work is cut into parts. Where a part begins it finds out by itself, from what the parts before it counted:
they are few, and a scan would be a launch of its own. Of large tensors each phase is a launch, which takes no time
while the device is busy with the one before. Of small ones all phases are one launch, with barriers between: there
launches are what costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import num_buckets
from laconic.kernels.triton import launch_cache
from laconic.kernels.triton.launch_cache import Known

__all__ = [
    "BARRIER",
    "MOST",
    "PARTS",
    "SMALL",
    "STATE",
    "before",
    "cut",
    "launch",
    "wait_for_all",
]

MOST = (1 << 31) - (1 << 16)
"""What can be counted in 32 bits, a tile past the end included."""

PARTS = 2048

SMALL = 1 << 22
"""Up to so many values all phases are one launch."""

STATE = 16
"""Numbers that phases tell each other and the host; zeros at first."""

BARRIER = tl.constexpr(STATE - 1)
"""The one that counts arrivals."""

WARPS = 16
"""Of a program that runs all phases: one of these fits a multiprocessor, whatever registers it takes."""


def cut(count: int, tile: int) -> tuple[int, int]:
    """Of so many: how many a part holds, in whole tiles, and how many parts that makes."""
    span = num_buckets(num_buckets(count, tile), PARTS) * tile
    return span, num_buckets(count, span)


@triton.jit
def before(counts, part, PARTS: tl.constexpr):
    """What the parts before this one hold together."""
    others = tl.arange(0, PARTS)
    return tl.sum(tl.load(counts + others, mask=others < part, other=0), 0)


@triton.jit
def wait_for_all(arrived, wanted):
    """Until so many programs have come here: what they wrote before can then be read. All must be running."""
    tl.debug_barrier()
    seen = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    while seen < wanted:
        seen = tl.atomic_add(arrived, 0, sem="acquire")
    tl.debug_barrier()


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    """How many programs can wait for each other."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 0


def launch(
    kernel: Any,
    device: torch.device,
    tensors: Sequence[Tensor],
    numbers: Sequence[int | float],
    constants: Mapping[str, Any],
    grids: Sequence[int],
    warps: Sequence[int],
    *,
    together: bool,
    known: Known,
) -> None:
    """All phases of a kernel: in one launch, where the device can hold all of its programs, or one after the other."""

    def launches() -> list[tuple[int, dict[str, Any]]]:
        at_once = _multiprocessors(device) if together else 0
        if at_once:
            whole = {"FIRST": 0, "LAST": len(grids) - 1, "num_warps": WARPS, "launch_cooperative_grid": True}
            return [(at_once, {**constants, **whole})]
        return [
            (programs, {**constants, "FIRST": phase, "LAST": phase, "num_warps": warps[phase]})
            for phase, programs in enumerate(grids)
            if programs
        ]

    launch_cache.launch(kernel, tensors, numbers, known, launches)
