"""Kernels in phases: each begins when the one before has ended everywhere, and nobody waits on the host in between.

A phase's work is cut into parts. Where a part begins it finds out by itself, from what the parts before it counted:
they are few, and a scan would be a launch of its own. Of large tensors each phase is a launch, which takes no time
while the device is busy with the one before. Of small ones all phases are one launch, with barriers between: there
launches are what costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from laconic.kernels.interface import num_buckets

__all__ = [
    "BARRIER",
    "MOST",
    "PARTS",
    "SMALL",
    "STATE",
    "Known",
    "before",
    "cut",
    "launch",
    "remembered",
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
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


Known = dict[tuple[Any, ...], list[tuple[Callable[..., None], tuple[Any, ...]]]]
"""Launches of one kernel for one size, by the kinds of its tensors: what starts each, and what follows its arguments.

Triton works out for each launch which of a kernel's compiled forms serves, which takes longer than the launch itself.
"""


@lru_cache(maxsize=1024)
def remembered(*size: Any) -> Known:
    """What is known of a kernel for a size, which must settle all of its numbers that Triton compiles for."""
    return {}


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
    key = (device, *[(each.dtype, each.data_ptr() % 16 == 0) for each in tensors])
    found = known.get(key)
    if found is not None:
        for start, rest in found:
            start(*tensors, *numbers, *rest)
        return
    if together and device.type == "cuda":
        count = _multiprocessors(device)
        whole = {"FIRST": 0, "LAST": len(grids) - 1, "num_warps": WARPS, "launch_cooperative_grid": True}
        launches = [(count, {**constants, **whole})]
    else:
        launches = [
            (count, {**constants, "FIRST": phase, "LAST": phase, "num_warps": warps[phase]})
            for phase, count in enumerate(grids)
            if count
        ]
    made = []
    for count, options in launches:
        compiled = kernel[(count,)](*tensors, *numbers, **options)
        if isinstance(compiled, CompiledKernel):  # not where launches are interpreted, or compiled alone
            names = kernel.arg_names[len(tensors) + len(numbers) :]
            made.append((compiled[(count, 1, 1)], tuple(options[name] for name in names)))
    if len(made) == len(launches):
        known[key] = made
