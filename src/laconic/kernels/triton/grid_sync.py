"""Kernels of several phases: a phase begins when all programs have finished the one before, without the host.

The work of a phase is cut into parts. A part computes where it begins from the counts of the parts before it: they are
few, and a scan would need its own launch. For large tensors each phase is a launch, which costs nothing while the
device works on the one before. For small ones all phases are one cooperative launch with grid barriers in between,
because there the launches dominate.
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
from laconic.kernels.triton.launch_cache import CompiledLaunches

__all__ = [
    "MAX_NUMEL", "PARTS", "SINGLE_LAUNCH_NUMEL", "STATE_WORDS", "end_phase", "launch", "split_into_parts", "sum_before",
]  # fmt: skip

MAX_NUMEL = (1 << 31) - (1 << 16)
"""Largest number of values that 32 bits can count, including a tile past the end."""

PARTS = 2048

SINGLE_LAUNCH_NUMEL = 1 << 22
"""Up to this many values all phases run in one launch."""

STATE_WORDS = 16
"""Words of the state that phases share with each other and the host; zero at first."""

_BARRIER_WORD = tl.constexpr(STATE_WORDS - 1)
"""Index of the state word that counts arrivals at barriers."""

WARPS = 16
"""Warps of a program that runs all phases: one such program fits a multiprocessor, whatever registers it needs."""


def split_into_parts(count: int, tile: int) -> tuple[int, int]:
    """Return the size of a part, in whole tiles, and the number of parts."""
    span = num_buckets(num_buckets(count, tile), PARTS) * tile
    return span, num_buckets(count, span)


@triton.jit
def sum_before(counts, part, PARTS: tl.constexpr):
    """Sum the counts of all parts before this one."""
    parts = tl.arange(0, PARTS)
    return tl.sum(tl.load(counts + parts, mask=parts < part, other=0), 0)


@triton.jit
def _grid_barrier(arrived, expected):
    """Wait until ``expected`` programs have arrived; their earlier writes are visible then. All must be running."""
    tl.debug_barrier()
    arrivals = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    while arrivals < expected:
        arrivals = tl.atomic_add(arrived, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def end_phase(state, programs, PHASE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Wait for all programs after a phase, unless it is the last one of this launch."""
    if PHASE < LAST:
        _grid_barrier(state + _BARRIER_WORD, programs * (PHASE - FIRST + 1))


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    """Return how many programs can run at once, one per multiprocessor; 0 without a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 0


def launch(
    kernel: Any, device: torch.device, tensors: Sequence[Tensor], numbers: Sequence[int | float],
    constants: Mapping[str, Any], grids: Sequence[int], warps: Sequence[int], *, single_launch: bool,
    cache: CompiledLaunches,
) -> None:  # fmt: skip
    """Launch all phases of a kernel: in one cooperative launch if all programs fit, else one after the other."""

    def launches() -> list[tuple[int, dict[str, Any]]]:
        programs_at_once = _multiprocessors(device) if single_launch else 0
        if programs_at_once:
            all_phases = {"FIRST": 0, "LAST": len(grids) - 1, "num_warps": WARPS, "launch_cooperative_grid": True}
            return [(programs_at_once, {**constants, **all_phases})]
        return [
            (programs, {**constants, "FIRST": phase, "LAST": phase, "num_warps": warps[phase]})
            for phase, programs in enumerate(grids)
            if programs
        ]

    launch_cache.launch(kernel, tensors, numbers, cache, launches)
