"""Many tensors in one launch: where they are small, launches and waits are all that encoding them costs.

A *table* on the device has a row for each tensor: the addresses of what belongs to it, its size, its key. Which
tensor a program works on, and on which part of it, is in a second table, which depends on sizes alone and is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import Addresses, PackedIntSum, QsgdCoding, Tensors
from laconic.kernels.sections import GROUP, SUM_BLOCK, num_buckets
from laconic.kernels.triton.buckets import magnitudes, tile
from laconic.kernels.triton.packed_ints import SHRINK, WARPS, hadamard, lane_tile, load_clips
from laconic.kernels.triton.packing import BYTES, pack_tail
from laconic.kernels.triton.qsgd import FEEDBACK_TILE, QSGD_TILE, decode_part, encode_part
from laconic.kernels.triton.sign import sign_decode_part, sign_encode_part, sign_shape
from laconic.kernels.triton.tile import TILE, exact, halves, load_tile, period, signs_of

__all__ = [
    "amax_bits_all",
    "gather_blocks",
    "packed_int_decode_all",
    "qsgd_decode_all",
    "qsgd_encode_all",
    "sign_decode_all",
    "sign_encode_all",
]

FIELDS = tl.constexpr(8)
"""Of a tensor: values, residual, numbers, packed symbols, tail, size, low and high half of a random key."""

_GROUP = tl.constexpr(GROUP)


@lru_cache(maxsize=64)
def _parts(sizes: tuple[int, ...], span: int, device: torch.device) -> Tensor:
    """For each program: the tensor it works on, and on which of its parts."""
    each = torch.tensor([num_buckets(size, span) for size in sizes])
    slot = torch.repeat_interleave(each)
    first = torch.repeat_interleave(each.cumsum(0) - each, each)
    found = torch.stack([slot, torch.arange(slot.numel()) - first], 1).to(torch.int32).contiguous()
    return found.to(device)  # and waits: it is kept for all streams


class _Many(NamedTuple):
    """What a launch for many tensors is given."""

    table: Tensor
    parts: Tensor
    aligned: bool
    """Whether vectors of four can be read at all addresses of values and residuals."""
    tails: Tensor
    """Room that the table points to: it must live as long."""

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        span: int,
        *,
        residuals: Sequence[Tensor | None] = (),
        floats: Sequence[int] = (),
        packed: Sequence[int] = (),
        keys: Sequence[int] = (),
        tails: bool = False,
    ) -> _Many:
        """Each cut into parts of ``span`` values; sections are addresses, multiples of 16."""
        device, rows, vectors = tensors[0].device, [], 0
        room = torch.empty(len(tensors) * GROUP if tails else 0, dtype=torch.int32, device=device)
        for i, x in enumerate(tensors):
            left, key = residuals[i] if residuals else None, keys[i] if keys else 0
            values, residual = x.data_ptr(), 0 if left is None else left.data_ptr()
            numbers, symbols = (floats[i], packed[i]) if floats else (0, 0)
            tail = room.data_ptr() + 4 * GROUP * i if tails else 0
            rows += [values, residual, numbers, symbols, tail, x.numel(), key & random.M32, key >> 32]
            assert (numbers | symbols) % 16 == 0
            vectors |= values | residual
        table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
        return cls(table, _parts(tuple(x.numel() for x in tensors), span, device), vectors % 16 == 0, room)

    @property
    def grid(self) -> tuple[int]:
        return (self.parts.shape[0],)


@triton.jit
def _address(row, FIELD: tl.constexpr, ALIGNED: tl.constexpr):
    place = tl.load(row + FIELD).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def _mine(table, parts):
    """A program's tensor, the row of it, and which of its parts."""
    number = tl.program_id(0)
    slot = tl.load(parts + 2 * number)
    return slot, table + slot * FIELDS, tl.load(parts + 2 * number + 1).to(tl.int64)


@triton.jit
def _written(row, BUCKET: tl.constexpr):
    """Where an encoder writes: numbers, symbols and tail; and how many values, of full groups and in buckets."""
    tail = tl.load(row + 4).to(tl.pointer_type(tl.int32))
    n = tl.load(row + 5)
    return _address(row, 2, True), _address(row, 3, True), tail, n, n // _GROUP * _GROUP, (n + BUCKET - 1) // BUCKET


# ------------------------------------------------------------------------------------------------------------- keys


@triton.jit
def _largest(table, parts, keys, ALIGNED: tl.constexpr, SPAN: tl.constexpr):
    slot, row, part = _mine(table, parts)
    v = load_tile(_address(row, 0, ALIGNED), tl.arange(0, SPAN), part * SPAN, tl.load(row + 5), SPAN)
    tl.atomic_max(keys + slot, tl.max(magnitudes(v), 0), sem="relaxed")


def amax_bits_all(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each, as a key."""
    many = _Many.of(tensors, TILE)
    keys = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    _largest[many.grid](many.table, many.parts, keys, ALIGNED=many.aligned, SPAN=TILE, **exact(num_warps=2))
    return keys


# ------------------------------------------------------------------------------------------------------------- qsgd


@triton.jit
def _encode(
    table,
    parts,
    keys,
    BITS: tl.constexpr,
    PERIOD: tl.constexpr,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    slot, row, program = _mine(table, parts)
    x = _address(row, 0, ALIGNED)
    residual = _address(row, 1, ALIGNED)
    norms, packed, tail, n, full, count = _written(row, BUCKET)
    low_key = tl.load(row + 6).to(tl.int32)
    high_key = tl.load(row + 7).to(tl.int32)
    key = encode_part(
        program, x, residual, norms, packed, tail, n, full, count, low_key, high_key,
        BITS, PERIOD, BUCKET, BUCKETS, STOCHASTIC, FEEDBACK,
    )  # fmt: skip
    tl.atomic_max(keys + slot, key, sem="relaxed")


@triton.jit
def _pack_tails(table, BITS: tl.constexpr, BYTES: tl.constexpr):
    row = table + tl.program_id(0) * FIELDS
    n = tl.load(row + 5)
    full = n // _GROUP * _GROUP
    if full < n:
        symbols = tl.load(row + 4).to(tl.pointer_type(tl.int32))
        out = tl.load(row + 3).to(tl.pointer_type(tl.uint8)) + full // 8 * BITS
        pack_tail(symbols, out, (n - full).to(tl.int32), 0, BITS, BYTES)


def _finish(tensors: Sequence[Tensor], many: _Many, bits: int) -> None:
    """What lies behind the last full group of each."""
    if any(x.numel() % GROUP for x in tensors):
        _pack_tails[(len(tensors),)](many.table, BITS=bits, BYTES=BYTES)


def qsgd_encode_all(
    tensors: Tensors, residuals: Tensors | None, coding: QsgdCoding, *, seeds: Sequence[int], norms: Addresses,
    packed: Addresses,
) -> Tensor:  # fmt: skip
    """``qsgd_encode`` of each by the largest magnitude, at 2, 4 or 8 bits, to addresses (multiples of 16); the keys."""
    bits, bucket, _, stochastic = coding
    buckets, warps = tile(bucket, QSGD_TILE if residuals is None else FEEDBACK_TILE)
    many = _Many.of(
        tensors, buckets * bucket, residuals=tensors if residuals is None else residuals, floats=norms, packed=packed,
        keys=[random.key(seed, random.ROUNDING) for seed in seeds], tails=True,
    )  # fmt: skip
    keys = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    _encode[many.grid](
        many.table, many.parts, keys, BITS=bits, PERIOD=period(bits), BUCKET=bucket, BUCKETS=buckets,
        STOCHASTIC=stochastic, FEEDBACK=residuals is not None, ALIGNED=many.aligned, **exact(num_warps=warps),
    )  # fmt: skip
    _finish(tensors, many, bits)
    return keys


@triton.jit
def _decode(
    table,
    parts,
    flag,
    weight,
    BITS: tl.constexpr,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    _, row, program = _mine(table, parts)
    packed = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.uint8)), 16)
    n = tl.load(row + 5)
    decode_part(
        program, _address(row, 2, True), packed, _address(row, 0, ALIGNED), flag, n, n // _GROUP * _GROUP,
        (n + BUCKET - 1) // BUCKET, weight, BITS, BUCKET, BUCKETS, ADD,
    )  # fmt: skip


def qsgd_decode_all(
    norms: Sequence[int], packed: Sequence[int], *, bits: int, bucket: int, outs: Sequence[Tensor], weight: float | None
) -> Tensor:
    """``qsgd_decode`` into each, from sections at these addresses, multiples of 16; the flag."""
    buckets, warps = tile(bucket, QSGD_TILE)
    many = _Many.of(outs, buckets * bucket, floats=norms, packed=packed)
    flag = torch.zeros(1, dtype=torch.int32, device=outs[0].device)
    _decode[many.grid](
        many.table, many.parts, flag, weight or 0.0, BITS=bits, BUCKET=bucket, BUCKETS=buckets,
        ADD=weight is not None, ALIGNED=many.aligned, **exact(num_warps=warps),
    )  # fmt: skip
    return flag


# ----------------------------------------------------------------------------------------------------------- signs


@triton.jit
def _encode_signs(
    table,
    parts,
    keys,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    STAGES: tl.constexpr,
    SIDES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    slot, row, program = _mine(table, parts)
    x = _address(row, 0, ALIGNED)
    means, packed, tail, n, full, count = _written(row, BUCKET)
    key = sign_encode_part(program, x, means, packed, tail, n, full, count, BUCKET, BUCKETS, STAGES, SIDES)
    tl.atomic_max(keys + slot, key, sem="relaxed")


def sign_encode_all(
    tensors: Sequence[Tensor], *, bucket: int, sides: int, means: Sequence[int], packed: Sequence[int]
) -> Tensor:
    """``sign_encode`` of each, or with two sides ``onebit_encode``, in buckets of 256 or more; the keys."""
    buckets, warps, stages = sign_shape(bucket)
    many = _Many.of(tensors, buckets * bucket, floats=means, packed=packed, tails=True)
    keys = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    _encode_signs[many.grid](
        many.table, many.parts, keys, BUCKET=bucket, BUCKETS=buckets, STAGES=stages, SIDES=sides,
        ALIGNED=many.aligned, **exact(num_warps=warps),
    )  # fmt: skip
    _finish(tensors, many, 1)
    return keys


@triton.jit
def _decode_signs(
    table,
    parts,
    flag,
    weight,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    SIDES: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    _, row, program = _mine(table, parts)
    packed = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.uint8)), 16)
    n = tl.load(row + 5)
    sign_decode_part(
        program, _address(row, 2, True), packed, _address(row, 0, ALIGNED), flag, n, n // _GROUP * _GROUP,
        (n + BUCKET - 1) // BUCKET, weight, BUCKET, BUCKETS, SIDES, ADD,
    )  # fmt: skip


def sign_decode_all(
    means: Sequence[int],
    packed: Sequence[int],
    *,
    bucket: int,
    sides: int,
    outs: Sequence[Tensor],
    weight: float | None,
) -> Tensor:
    """``sign_decode`` or ``onebit_decode`` into each, from sections at these addresses, multiples of 16; the flag."""
    buckets, warps = tile(bucket)
    many = _Many.of(outs, buckets * bucket, floats=means, packed=packed)
    flag = torch.zeros(1, dtype=torch.int32, device=outs[0].device)
    _decode_signs[many.grid](
        many.table, many.parts, flag, weight or 0.0, BUCKET=bucket, BUCKETS=buckets, SIDES=sides,
        ADD=weight is not None, ALIGNED=many.aligned, **exact(num_warps=warps),
    )  # fmt: skip
    return flag


# ------------------------------------------------------------------------------------------------------------ lanes
#
# Scales, integers and what is left over are of blocks, and a block does not care whose it is: blocks of many tensors,
# one behind the other, are one tensor to all kernels but those that gather and scatter them.


@triton.jit(do_not_specialize=["turn0", "turn1"])
def _gather(table, parts, out, turn0, turn1, ROTATED: tl.constexpr, ALIGNED: tl.constexpr):
    number = tl.program_id(0)
    row = table + tl.load(parts + 2 * number) * FIELDS
    block = tl.load(parts + 2 * number + 1)
    begin = block.to(tl.int64) * 1024
    at = tl.arange(0, 1024)[None, :]
    n = tl.load(row + 5)
    v = load_tile(_address(row, 0, ALIGNED), at, begin, n, 1024)
    if ROTATED:
        v = hadamard(v * SHRINK * signs_of(at, block * 4, turn0, turn1), 1)
    if tl.load(row + 1) != 0:
        residual = _address(row, 1, False) + begin + at
        if ROTATED:  # what is left over of a rotated block goes to its end
            v = tl.load(residual) + v
        else:
            v = tl.load(residual, mask=begin + at < n, other=0.0) + v
    tl.store(out + number.to(tl.int64) * 1024 + at, v)


def gather_blocks(
    tensors: Sequence[Tensor], residuals: Sequence[Tensor | None], rotation_seed: int | None, out: Tensor
) -> None:
    """Blocks of all tensors, rotated if asked for, with the residuals that there are; zeros where a last one ends."""
    many = _Many.of(tensors, SUM_BLOCK, residuals=residuals)
    assert out.numel() == many.grid[0] * SUM_BLOCK
    _gather[many.grid](
        many.table, many.parts, out, *halves(random.key(rotation_seed or 0, random.ROTATION)),
        ROTATED=rotation_seed is not None, ALIGNED=many.aligned, **exact(num_warps=WARPS),
    )  # fmt: skip


@triton.jit(do_not_specialize=["total", "turn0", "turn1"])
def _scatter(
    table,
    parts,
    lanes,
    clips,
    flag,
    total,
    turn0,
    turn1,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    number = tl.program_id(0)
    row = table + tl.load(parts + 2 * number) * FIELDS
    block = tl.load(parts + 2 * number + 1)
    begin = block.to(tl.int64) * 1024
    at = tl.arange(0, 1024)[None, :]
    n = tl.load(row + 5)
    coded = n
    if ROTATED:
        coded = (n + 1023) // 1024 * 1024
    clip = load_clips(clips, number + tl.arange(0, 1), number + 1, flag)
    each: tl.constexpr = 32 // WIDTH
    words: tl.constexpr = (128 + each - 1) // each * 8
    lanes = lanes.to(tl.pointer_type(tl.int32)) + (number - block).to(tl.int64) * words
    out = _address(row, 0, ALIGNED)
    if begin + 1024 <= n:
        lane_tile(
            lanes, out, flag, at, begin, n, coded, coded, clip, total, block * 4, turn0, turn1, 0.0,
            WIDTH, False, ROTATED, False, False, 1,
        )  # fmt: skip
    else:
        lane_tile(
            lanes, out, flag, at, begin, n, coded, coded, clip, total, block * 4, turn0, turn1, 0.0,
            WIDTH, False, ROTATED, False, True, 1,
        )  # fmt: skip


def packed_int_decode_all(packed: PackedIntSum, *, rotation_seed: int | None, outs: Tensors) -> Tensor:
    """What words of lanes of all blocks stand for, to where they belong; the flag."""
    lanes, clips, coding, total = packed
    many = _Many.of(outs, SUM_BLOCK)
    flag = torch.zeros(1, dtype=torch.int32, device=lanes.device)
    assert not coding.packed and clips.numel() == many.grid[0] and lanes.data_ptr() % 4 == 0
    _scatter[many.grid](
        many.table, many.parts, lanes, clips, flag, total, *halves(random.key(rotation_seed or 0, random.ROTATION)),
        WIDTH=coding.width, ROTATED=rotation_seed is not None, ALIGNED=many.aligned, **exact(num_warps=WARPS),
    )  # fmt: skip
    return flag
