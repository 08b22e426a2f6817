"""Launches without Triton's bookkeeping, where the same were made before.

Triton works out for each launch which of a kernel's compiled forms serves: by dtypes, by what is a multiple of 16 and
by options. That takes longer than the launch itself. Here it is remembered for a size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

__all__ = ["Known", "launch", "remembered"]

Known = dict[tuple[Any, ...], list[tuple[Callable[..., None], tuple[Any, ...]]]]
"""By the device and kinds of tensors: what starts each launch, and what follows its arguments."""


@lru_cache(maxsize=4096)
def remembered(*size: Any) -> Known:
    """What is known of a kernel for a size, which must settle all numbers that Triton compiles for, and constants."""
    return {}


def launch(
    kernel: Any,
    tensors: Sequence[Tensor],
    numbers: Sequence[int | float],
    known: Known,
    launches: Callable[[], Sequence[tuple[int, Mapping[str, Any]]]],
) -> None:
    """Launch a kernel once or several times: so many programs each, with constants and Triton's own options."""
    key = (tensors[0].device, *[(each.dtype, each.data_ptr() % 16 == 0) for each in tensors])
    found = known.get(key)
    if found is not None:
        for start, rest in found:
            start(*tensors, *numbers, *rest)
        return
    made = []
    for programs, options in launches():
        compiled = kernel[(programs,)](*tensors, *numbers, **options)
        if not isinstance(compiled, CompiledKernel):  # interpreted, or compiled and no more
            continue
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        made.append((compiled[(programs, 1, 1)], tuple(options[name] for name in names)))
    if made:
        known[key] = made
