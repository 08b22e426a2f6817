"""Repeated launches without Triton's dispatch.

For each launch Triton determines which compiled variant of a kernel applies, by dtypes, by divisibility by 16 and by
options. This takes longer than the launch itself, so it is cached here by size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

__all__ = ["CompiledLaunches", "launch", "launches_for"]

CompiledLaunches = dict[tuple[Any, ...], list[tuple[Callable[..., None], tuple[Any, ...]]]]
"""By device, dtypes and alignment of the tensors: the compiled launches and the constants that follow their arguments.
"""


@lru_cache(maxsize=4096)
def launches_for(*size: Any) -> CompiledLaunches:
    """Return the cache of a kernel for a size; the size must determine all specialized numbers and constants."""
    return {}


def launch(
    kernel: Any, tensors: Sequence[Tensor], numbers: Sequence[int | float], cache: CompiledLaunches,
    launches: Callable[[], Sequence[tuple[int, Mapping[str, Any]]]],
) -> None:  # fmt: skip
    """Launch a kernel once or several times: ``launches()`` returns programs, constants and options of each launch."""
    key = (tensors[0].device, *[(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors])
    compiled_launches = cache.get(key)
    if compiled_launches is not None:
        for launch_compiled, constants in compiled_launches:
            launch_compiled(*tensors, *numbers, *constants)
        return
    new = []
    for programs, options in launches():
        compiled = kernel[(programs,)](*tensors, *numbers, **options)
        if not isinstance(compiled, CompiledKernel):  # the interpreter ran it, or it was only compiled
            continue
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        new.append((compiled[(programs, 1, 1)], tuple(options[name] for name in names)))
    if new:
        cache[key] = new
