"""Stochastic rounding to bfloat16, of one tensor and of many: how residuals are kept in half of the memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.multi_tensor_interface import Addresses, Tensors
from laconic.kernels.sections import num_buckets
from laconic.kernels.triton.counter_hash import hash32
from laconic.kernels.triton.launch_args import TILE, exact_options, split64
from laconic.kernels.triton.launch_cache import launch, launches_for
from laconic.kernels.triton.tensor_table import TensorTable, load_pointer, program_part
from laconic.kernels.triton.tile import load_tile

__all__ = ["stochastic_bf16", "stochastic_bf16_all"]


@triton.jit
def _rounded(v, index, key_low, key_high):
    """Return the upper 16 bits of values plus random bits below them; what would become infinite is cut alone."""
    bits = v.to(tl.uint32, bitcast=True)
    summed = bits + (hash32(index, key_low, key_high) >> 16)
    infinite = ((bits & 0x7F800000) == 0x7F800000) | ((summed & 0x7F800000) == 0x7F800000)
    return (tl.where(infinite, bits, summed) >> 16).to(tl.int16)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _stochastic_bf16(x, out, n, key_low, key_high, SPAN: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    offsets = tl.arange(0, SPAN)
    at = begin + offsets
    short = _rounded(load_tile(x, offsets, begin, n, SPAN), at, key_low, key_high)
    tl.store(out + at, short, mask=at < n)


def stochastic_bf16(x: Tensor, seed: int, out: Tensor) -> None:
    n, key = x.numel(), random.key(seed, random.RESIDUALS)
    if n:
        launch(
            _stochastic_bf16, (x, out.view(torch.int16)), (n, *split64(key)), launches_for("stochastic", n),
            lambda: [(num_buckets(n, TILE), exact_options(SPAN=TILE, num_warps=4))],
        )  # fmt: skip


@triton.jit
def _stochastic_bf16_all(table, parts, keys, SPAN: tl.constexpr, ALIGNED: tl.constexpr):
    slot, row, part = program_part(table, parts)
    n, begin, offsets = tl.load(row + 5), part * SPAN, tl.arange(0, SPAN)
    at = begin + offsets
    v = load_tile(load_pointer(row, 0, ALIGNED), offsets, begin, n, SPAN)
    short = _rounded(v, at, tl.load(keys + 2 * slot), tl.load(keys + 2 * slot + 1))
    tl.store(tl.load(row + 2).to(tl.pointer_type(tl.int16)) + at, short, mask=at < n)


def stochastic_bf16_all(tensors: Tensors, keys: Tensor, outs: Addresses) -> None:
    """Round each tensor to addresses, multiples of 16, with the two int32 of its key."""
    table_args = TensorTable.of(tensors, TILE, scale_addresses=outs)
    _stochastic_bf16_all[table_args.grid](
        table_args.table, table_args.parts, keys, SPAN=TILE, ALIGNED=table_args.aligned, **exact_options(num_warps=4)
    )
