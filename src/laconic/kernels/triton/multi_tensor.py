"""Multi-tensor kernels: many tensors in one launch, because small tensors mostly cost launches and synchronization.

``skip`` holds the amax bits of each tensor, on the device: a tensor that is not finite is left alone, with its residual
and its sections, and the host need not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import NONFINITE, BinCoding, PackedIntSum, QsgdCoding
from laconic.kernels.multi_tensor_interface import Addresses, Tensors
from laconic.kernels.sections import GROUP, SUM_BLOCK
from laconic.kernels.triton.bins import BINS_TILE, bins_constants, bins_decode_part
from laconic.kernels.triton.buckets import magnitude_bits, tile_shape
from laconic.kernels.triton.counter_hash import rotation_signs
from laconic.kernels.triton.launch_args import TILE, exact_options, packing_period, split64
from laconic.kernels.triton.packed_ints import ROTATION_SCALE, WARPS, hadamard, load_clips, packed_int_tile
from laconic.kernels.triton.packing import BYTES, pack_tail
from laconic.kernels.triton.qsgd import FEEDBACK_TILE, QSGD_TILE, decode_part, encode_part
from laconic.kernels.triton.sign import sign_decode_part, sign_encode_part, sign_tile_shape
from laconic.kernels.triton.tensor_table import (
    FIELDS,
    TensorTable,
    inputs,
    load_pointer,
    outputs,
    program_part,
    size_unless_skipped,
)
from laconic.kernels.triton.tile import load_tile

__all__ = [
    "add_all", "amax_bits_all", "bins_decode_all", "bins_encode_all", "copy_all", "fill_all", "gather_blocks",
    "packed_int_decode_all", "qsgd_decode_all", "qsgd_encode_all", "scale_all", "sign_decode_all",
    "sign_encode_all",
]  # fmt: skip

_GROUP = tl.constexpr(GROUP)
_NONFINITE = tl.constexpr(NONFINITE)


@triton.jit
def _decode_buckets(
    table, parts, flag, skip, weight,
    DECODE: tl.constexpr, CODING: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, ADD: tl.constexpr,
    SKIP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    slot, row, program = program_part(table, parts)
    scales, packed, out, n, full, count = inputs(row, slot, skip, BUCKET, SKIP, ALIGNED)
    DECODE(program, scales, packed, out, flag, n, full, count, weight, CODING, BUCKET, BUCKETS, ADD)


def _launch_decode(
    decode: Any, coding: int, outs: Tensors, scales: Addresses, packed: Addresses, weight: float | None,
    skip: Tensor | None, *, bucket: int, tile: int = TILE,
) -> Tensor:  # fmt: skip
    """Launch a codec's decoder over tensors and sections at addresses, multiples of 16; return its flag."""
    buckets, warps = tile_shape(bucket, tile)
    table_args = TensorTable.of(outs, buckets * bucket, scale_addresses=scales, packed=packed)
    flag = torch.zeros(1, dtype=torch.int32, device=outs[0].device)
    _decode_buckets[table_args.grid](
        table_args.table, table_args.parts, flag, flag if skip is None else skip, weight or 0.0, DECODE=decode,
        CODING=coding, BUCKET=bucket, BUCKETS=buckets, ADD=weight is not None, SKIP=skip is not None,
        ALIGNED=table_args.aligned, **exact_options(num_warps=warps),
    )  # fmt: skip
    return flag


# ------------------------------------------------------------------------------------------------------------- amax


@triton.jit
def _largest(table, parts, amax_bits, only, ONLY: tl.constexpr, ALIGNED: tl.constexpr, SPAN: tl.constexpr):
    slot, row, part = program_part(table, parts)
    n = tl.load(row + 5)
    if ONLY:
        n = tl.where(tl.load(only + slot) < _NONFINITE, 0, n)
    if n > 0:
        v = load_tile(load_pointer(row, 0, ALIGNED), tl.arange(0, SPAN), part * SPAN, n, SPAN)
        tl.atomic_max(amax_bits + slot, tl.max(magnitude_bits(v), 0), sem="relaxed")


def amax_bits_all(tensors: Tensors, only: Tensor | None = None) -> Tensor:
    """Return amax_bits of each tensor; 0 for those whose bits in ``only`` are finite, which are not read."""
    table_args = TensorTable.of(tensors, TILE)
    amax_bits = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    _largest[table_args.grid](
        table_args.table, table_args.parts, amax_bits, amax_bits if only is None else only, ONLY=only is not None,
        ALIGNED=table_args.aligned, SPAN=TILE, **exact_options(num_warps=2),
    )  # fmt: skip
    return amax_bits


@triton.jit
def _fill(table, parts, flags, value, SPAN: tl.constexpr):
    slot, row, part = program_part(table, parts)
    if tl.load(flags + slot) >= _NONFINITE:
        at = part * SPAN + tl.arange(0, SPAN)
        filled = tl.full((SPAN,), 1.0, tl.float32) * value
        tl.store(load_pointer(row, 0, False) + at, filled, mask=at < tl.load(row + 5))


def fill_all(tensors: Tensors, amax_bits: Tensor, value: float) -> None:
    """Fill the tensors whose amax bits are not finite with one value."""
    table_args = TensorTable.of(tensors, TILE)
    _fill[table_args.grid](
        table_args.table, table_args.parts, amax_bits, value, SPAN=TILE, **exact_options(num_warps=2)
    )


@triton.jit
def _copy(table, parts, skip, SPAN: tl.constexpr, ALIGNED: tl.constexpr):
    slot, row, part = program_part(table, parts)
    n = size_unless_skipped(row, slot, skip, True)
    at = part * SPAN + tl.arange(0, SPAN)
    v = load_tile(load_pointer(row, 0, ALIGNED), tl.arange(0, SPAN), part * SPAN, n, SPAN)
    tl.store(load_pointer(row, 1, ALIGNED) + at, v, mask=at < n)


def copy_all(tensors: Tensors, targets: Tensors, skip: Tensor) -> None:
    """Copy each tensor to its target."""
    table_args = TensorTable.of(tensors, TILE, residuals=targets)
    _copy[table_args.grid](
        table_args.table, table_args.parts, skip, SPAN=TILE, ALIGNED=table_args.aligned, **exact_options(num_warps=2)
    )


@triton.jit
def _scale(table, parts, skip, factor, SPAN: tl.constexpr, ALIGNED: tl.constexpr):
    slot, row, part = program_part(table, parts)
    n = size_unless_skipped(row, slot, skip, True)
    offsets = tl.arange(0, SPAN)
    x = load_pointer(row, 0, ALIGNED)
    v = load_tile(x, offsets, part * SPAN, n, SPAN)
    at = part * SPAN + offsets
    tl.store(x + at, v * factor, mask=at < n)


def scale_all(tensors: Tensors, factor: float, skip: Tensor) -> None:
    """Multiply each tensor by a factor."""
    table_args = TensorTable.of(tensors, TILE)
    _scale[table_args.grid](
        table_args.table, table_args.parts, skip, factor, SPAN=TILE, ALIGNED=table_args.aligned,
        **exact_options(num_warps=2),
    )  # fmt: skip


@triton.jit
def _add(table, parts, skip, SPAN: tl.constexpr, SKIP: tl.constexpr, ALIGNED: tl.constexpr):
    slot, row, part = program_part(table, parts)
    n = size_unless_skipped(row, slot, skip, SKIP)
    offsets = tl.arange(0, SPAN)
    total = load_pointer(row, 1, ALIGNED)
    v = load_tile(total, offsets, part * SPAN, n, SPAN) + load_tile(
        load_pointer(row, 0, ALIGNED), offsets, part * SPAN, n, SPAN
    )
    at = part * SPAN + offsets
    tl.store(total + at, v, mask=at < n)


def add_all(tensors: Tensors, totals: Tensors, skip: Tensor | None = None) -> None:
    """Add each tensor to its total."""
    table_args = TensorTable.of(tensors, TILE, residuals=totals)
    _add[table_args.grid](
        table_args.table, table_args.parts, table_args.table if skip is None else skip, SPAN=TILE,
        SKIP=skip is not None, ALIGNED=table_args.aligned, **exact_options(num_warps=2),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- qsgd


@triton.jit
def _encode(
    table, parts, amax_bits, skip, keys,
    BITS: tl.constexpr, PERIOD: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr, SKIP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    slot, row, program = program_part(table, parts)
    x = load_pointer(row, 0, ALIGNED)
    residual = load_pointer(row, 1, ALIGNED)
    norms, packed, tail, n, full, count = outputs(row, slot, skip, BUCKET, SKIP)
    key_low = tl.load(keys + 2 * slot)
    key_high = tl.load(keys + 2 * slot + 1)
    part_amax_bits = encode_part(
        program, x, residual, norms, packed, tail, n, full, count, key_low, key_high,
        BITS, PERIOD, BUCKET, BUCKETS, STOCHASTIC, FEEDBACK,
    )  # fmt: skip
    tl.atomic_max(amax_bits + slot, part_amax_bits, sem="relaxed")


@triton.jit
def _pack_tails(table, skip, BITS: tl.constexpr, BYTES: tl.constexpr, SKIP: tl.constexpr):
    row = table + tl.program_id(0) * FIELDS
    n = size_unless_skipped(row, tl.program_id(0), skip, SKIP)
    full = n // _GROUP * _GROUP
    if full < n:
        symbols = tl.load(row + 4).to(tl.pointer_type(tl.int32))
        out = tl.load(row + 3).to(tl.pointer_type(tl.uint8)) + full // 8 * BITS
        pack_tail(symbols, out, (n - full).to(tl.int32), 0, BITS, BYTES)


def _launch_encode(
    kernel: Any, tensors: Tensors, table_args: TensorTable, skip: Tensor | None, bits: int, warps: int, *keys: Tensor,
    **constants: Any,
) -> Tensor:  # fmt: skip
    """Launch an encoder over tensors, and pack the values after the last full group of each; return amax_bits."""
    amax_bits = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    flags, skips = amax_bits if skip is None else skip, skip is not None
    kernel[table_args.grid](
        table_args.table, table_args.parts, amax_bits, flags, *keys, SKIP=skips, ALIGNED=table_args.aligned,
        **constants, **exact_options(num_warps=warps),
    )  # fmt: skip
    if any(x.numel() % GROUP for x in tensors):
        _pack_tails[(len(tensors),)](table_args.table, flags, BITS=bits, BYTES=BYTES, SKIP=skips)
    return amax_bits


def qsgd_encode_all(
    tensors: Tensors, residuals: Tensors | None, coding: QsgdCoding, *, seeds: Sequence[int] | Tensor, norms: Addresses,
    packed: Addresses, skip: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Encode each tensor by its largest magnitude, with 2, 4 or 8 bits, to addresses; return amax_bits."""
    bits, bucket, _, stochastic = coding
    buckets, warps = tile_shape(bucket, QSGD_TILE if residuals is None else FEEDBACK_TILE)
    table_args = TensorTable.of(
        tensors, buckets * bucket, residuals=tensors if residuals is None else residuals, scale_addresses=norms,
        packed=packed, tails=True,
    )  # fmt: skip
    keys = seeds
    if not isinstance(keys, Tensor):
        keys = random.keys(keys, random.ROUNDING).to(tensors[0].device, non_blocking=True)
    return _launch_encode(
        _encode, tensors, table_args, skip, bits, warps, keys, BITS=bits, PERIOD=packing_period(bits), BUCKET=bucket,
        BUCKETS=buckets, STOCHASTIC=stochastic, FEEDBACK=residuals is not None,
    )  # fmt: skip


def qsgd_decode_all(
    norms: Addresses, packed: Addresses, *, bits: int, bucket: int, outs: Tensors, weight: float | None,
    skip: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Decode into each tensor from sections at addresses, multiples of 16; return the flag."""
    return _launch_decode(decode_part, bits, outs, norms, packed, weight, skip, bucket=bucket, tile=QSGD_TILE)


# --------------------------------------------------------------------------------------------------- sign and bins


@triton.jit
def _encode_buckets(
    table, parts, amax_bits, skip,
    ENCODE: tl.constexpr, CODING: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STAGES: tl.constexpr,
    SKIP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    slot, row, program = program_part(table, parts)
    x = load_pointer(row, 0, ALIGNED)
    scales, packed, tail, n, full, count = outputs(row, slot, skip, BUCKET, SKIP)
    part_amax_bits = ENCODE(program, x, scales, packed, tail, n, full, count, CODING, BUCKET, BUCKETS, STAGES)
    tl.atomic_max(amax_bits + slot, part_amax_bits, sem="relaxed")


def _launch_encode_buckets(
    tensors: Tensors, bucket: int, buckets: int, warps: int, bits: int, means: Addresses, packed: Addresses,
    skip: Tensor | None, **constants: Any,
) -> Tensor:  # fmt: skip
    """Launch an encoder that reads so many buckets at once; return amax_bits."""
    table_args = TensorTable.of(tensors, buckets * bucket, scale_addresses=means, packed=packed, tails=True)
    return _launch_encode(
        _encode_buckets, tensors, table_args, skip, bits, warps, BUCKET=bucket, BUCKETS=buckets, **constants
    )


def sign_encode_all(
    tensors: Tensors, *, bucket: int, sides: int, means: Addresses, packed: Addresses, skip: Tensor | None = None
) -> Tensor:
    """Encode each tensor by ``sign`` or, with two sides, ``onebit``, in buckets of at least 256; return amax_bits."""
    buckets, warps, stages = sign_tile_shape(bucket)
    return _launch_encode_buckets(
        tensors, bucket, buckets, warps, 1, means, packed, skip, ENCODE=sign_encode_part, CODING=sides, STAGES=stages
    )


def sign_decode_all(
    means: Addresses, packed: Addresses, *, bucket: int, sides: int, outs: Tensors, weight: float | None,
    skip: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Decode ``sign`` or ``onebit`` into each tensor from sections at addresses, multiples of 16; return the flag."""
    return _launch_decode(sign_decode_part, sides, outs, means, packed, weight, skip, bucket=bucket)


def bins_encode_all(
    tensors: Tensors, coding: BinCoding, *, means: Addresses, packed: Addresses, skip: Tensor | None = None
) -> Tensor:
    """Encode each tensor by ``bins`` to addresses; return amax_bits."""
    buckets, warps = tile_shape(coding.bucket, BINS_TILE)
    return _launch_encode_buckets(
        tensors, coding.bucket, buckets, warps, coding.bits, means, packed, skip, **bins_constants(coding)
    )


def bins_decode_all(
    means: Addresses, packed: Addresses, *, bits: int, bucket: int, outs: Tensors, weight: float | None,
    skip: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Decode ``bins`` into each tensor from sections at addresses, multiples of 16; return the flag."""
    return _launch_decode(bins_decode_part, bits, outs, means, packed, weight, skip, bucket=bucket)


# --------------------------------------------------------------------------------------------------- packed integers
#
# Scales, integers and residuals belong to blocks, whatever tensor a block is from. Blocks of many tensors in one buffer
# are one tensor to all kernels except those that gather and scatter them.


@triton.jit
def _program_block(table, parts):
    """Return a program's number, the row of its tensor, its block, that block's begin and offsets, and the size."""
    number = tl.program_id(0)
    row = table + tl.load(parts + 2 * number) * FIELDS
    block = tl.load(parts + 2 * number + 1)
    begin = block.to(tl.int64) * 1024
    offsets = tl.arange(0, 1024)[None, :]
    n = tl.load(row + 5)
    return number, row, block, begin, offsets, n


@triton.jit(do_not_specialize=["rotation_low", "rotation_high"])
def _gather(table, parts, out, decay, rotation_low, rotation_high, ROTATED: tl.constexpr, ALIGNED: tl.constexpr):
    number, row, block, begin, offsets, n = _program_block(table, parts)
    v = load_tile(load_pointer(row, 0, ALIGNED), offsets, begin, n, 1024)
    if ROTATED:
        v = hadamard(v * ROTATION_SCALE * rotation_signs(offsets, block * 4, rotation_low, rotation_high), 1)
    if tl.load(row + 1) != 0:
        residual = load_pointer(row, 1, False) + begin + offsets
        if ROTATED:  # a rotated block's residual extends to its end
            v = tl.load(residual) * decay + v
        else:
            v = tl.load(residual, mask=begin + offsets < n, other=0.0) * decay + v
    tl.store(out + number.to(tl.int64) * 1024 + offsets, v)


def gather_blocks(
    tensors: Sequence[Tensor], residuals: Sequence[Tensor | None], decay: float, rotation_seed: int | None, out: Tensor
) -> None:
    """Gather the blocks of all tensors, rotated if a seed is given, plus their decayed residuals; pad with zeros."""
    table_args = TensorTable.of(tensors, SUM_BLOCK, residuals=residuals)
    assert out.numel() == table_args.grid[0] * SUM_BLOCK
    _gather[table_args.grid](
        table_args.table, table_args.parts, out, decay, *split64(random.key(rotation_seed or 0, random.ROTATION)),
        ROTATED=rotation_seed is not None, ALIGNED=table_args.aligned, **exact_options(num_warps=WARPS),
    )  # fmt: skip


@triton.jit(do_not_specialize=["total", "rotation_low", "rotation_high"])
def _scatter(
    table, parts, integers, clips, flag, total, rotation_low, rotation_high,
    WIDTH: tl.constexpr, ROTATED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    number, row, block, begin, offsets, n = _program_block(table, parts)
    coded = n
    if ROTATED:
        coded = (n + 1023) // 1024 * 1024
    clip = load_clips(clips, number + tl.arange(0, 1), number + 1, flag)
    per_word: tl.constexpr = 32 // WIDTH
    words: tl.constexpr = (128 + per_word - 1) // per_word * 8
    integers = integers.to(tl.pointer_type(tl.int32)) + (number - block).to(tl.int64) * words
    out = load_pointer(row, 0, ALIGNED)
    if begin + 1024 <= n:
        packed_int_tile(
            integers, out, flag, offsets, begin, n, coded, coded, clip, total, block * 4, rotation_low, rotation_high,
            0.0, WIDTH, False, ROTATED, False, False, 1,
        )  # fmt: skip
    else:
        packed_int_tile(
            integers, out, flag, offsets, begin, n, coded, coded, clip, total, block * 4, rotation_low, rotation_high,
            0.0, WIDTH, False, ROTATED, False, True, 1,
        )  # fmt: skip


def packed_int_decode_all(packed: PackedIntSum, *, rotation_seed: int | None, outs: Tensors) -> Tensor:
    """Decode packed integers of all blocks and scatter them to their tensors; return the flag."""
    integers, clips, coding, total = packed
    table_args = TensorTable.of(outs, SUM_BLOCK)
    flag = torch.zeros(1, dtype=torch.int32, device=integers.device)
    assert not coding.packed and clips.numel() == table_args.grid[0] and integers.data_ptr() % 4 == 0
    _scatter[table_args.grid](
        table_args.table, table_args.parts, integers, clips, flag, total,
        *split64(random.key(rotation_seed or 0, random.ROTATION)), WIDTH=coding.width,
        ROTATED=rotation_seed is not None, ALIGNED=table_args.aligned, **exact_options(num_warps=WARPS),
    )  # fmt: skip
    return flag
