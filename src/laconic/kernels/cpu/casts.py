"""Plain values, and casts to 16 bits."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels import random, reference
from laconic.kernels.cpu.pointers import bytes_at, floats_at, require_valid, threads, weight_of
from laconic.kernels.interface import NONFINITE

_EXPONENT: Final = {
    torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80,
}  # fmt: skip


def all_finite(x: Tensor) -> bool:
    if x.dtype != torch.float32 or not x.is_contiguous() or not x.numel():
        return reference.all_finite(x)
    return _core.amax_bits(x.data_ptr(), x.numel(), threads()) < NONFINITE


def add_momentum(x: Tensor, momentum: float, velocity: Tensor, residual: Tensor) -> None:
    _core.add_momentum(floats_at(x), x.numel(), momentum, floats_at(velocity), floats_at(residual), threads())


def stochastic_bf16(x: Tensor, seed: int, out: Tensor) -> None:
    key = random.key(seed, random.RESIDUALS)
    _core.stochastic_bf16(floats_at(x), x.numel(), key, bytes_at(out.view(torch.uint8), 2 * x.numel()), threads())


def copy_finite(x: Tensor, out: Tensor) -> bool:
    nbytes = x.numel() * x.element_size()
    if x.dtype not in _EXPONENT:
        return reference.copy_finite(x, out)
    return _core.copy_finite(x.data_ptr(), bytes_at(out, nbytes), nbytes, x.element_size(), _EXPONENT[x.dtype])


def raw_decode(section: Tensor, dtype: torch.dtype, out: Tensor, weight: float | None) -> None:
    if dtype not in _EXPONENT or (weight is not None and dtype != torch.float32):
        reference.raw_decode(section, dtype, out, weight)
        return
    nbytes = out.numel() * dtype.itemsize
    if weight is None:
        finite = _core.copy_finite(bytes_at(section, nbytes), out.data_ptr(), nbytes, dtype.itemsize, _EXPONENT[dtype])
    else:
        finite = _core.add_raw(bytes_at(section, nbytes), floats_at(out), out.numel(), weight, threads())
    require_valid(finite, "a value that is not finite")


def cast_encode(x: Tensor, to: str, out: Tensor) -> tuple[int, int]:
    return _core.cast_encode(floats_at(x), x.numel(), to == "fp16", bytes_at(out, 2 * x.numel()), threads())


def cast_decode(section: Tensor, source: str, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    finite = _core.cast_decode(
        bytes_at(section, 2 * n), source == "fp16", floats_at(out), n, weight_of(weight), threads()
    )
    require_valid(finite, f"a {source} value that is not finite")
