"""Launches without Triton's bookkeeping, where a kernel was launched before with arguments of the same kinds.

Triton works out for each launch which of a kernel's compiled forms serves: by dtypes, by what is a multiple of 16, and
by options. With twenty arguments that takes longer than the launch itself. Here kinds are looked up by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction

__all__ = ["launch"]

_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels, and what follows their arguments, by kernel, kinds of arguments, and constants."""


def _kind(argument: Any) -> Any:
    """What Triton may have compiled a kernel for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0, argument.get_device()
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(1 << 31) <= argument < 1 << 31
    return type(argument)


def launch(kernel: Any, programs: int, arguments: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Launch so many programs; the first argument is a tensor, constants include Triton's own options."""
    if not isinstance(kernel, JITFunction):  # interpreted
        kernel[(programs,)](*arguments, **constants)
        return
    key = (id(kernel), *map(_kind, arguments), *constants.values())
    found = _known.get(key)
    if found is not None:
        compiled, rest = found
        compiled[(programs, 1, 1)](*arguments, *rest)
        return
    compiled = kernel[(programs,)](*arguments, **constants)
    if compiled is not None:  # it is where launches are made to compile alone
        _known[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
