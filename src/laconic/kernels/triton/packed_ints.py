"""Packed integers of ``shared`` and ``thc``: scales, rotation, encoding with error feedback, decoding, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import CLIP_LIMIT, IntRounding, PackedIntSum
from laconic.kernels.sections import (
    GROUP,
    SUM_BLOCK,
    PackedIntCoding,
    num_buckets,
    packed_int_count,
    packed_ints_nbytes,
)
from laconic.kernels.triton.counter_hash import rotation_signs, rounding_noise_tile, row_factors
from laconic.kernels.triton.launch_args import exact_options, packing_period, split64, word_aligned
from laconic.kernels.triton.packing import PackedSection
from laconic.kernels.triton.tile import load_symbols, load_tile, pairwise_sum, store_or_add, store_symbols

__all__ = [
    "ROTATION_SCALE", "block_scales", "hadamard", "load_clips", "load_words", "packed_int_decode", "packed_int_encode",
    "packed_int_tile", "rotate",
]  # fmt: skip

BLOCKS = WARPS = 1
"""Blocks and warps per program: a warp holds a block of 1,024, and its butterflies need no barrier."""

_LARGE = tl.constexpr(2.0**90)
_TINY = tl.constexpr(2.0**-90)
_UP = tl.constexpr(2.0**64)
_DOWN = tl.constexpr(2.0**-64)
ROTATION_SCALE = tl.constexpr(2.0**-5)
_UNIT = tl.constexpr(2.0**-24)
_CLIP_LIMIT = tl.constexpr(CLIP_LIMIT)
_FLOAT32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
_INFINITE = tl.constexpr(float("inf"))


@triton.jit
def _block_offsets(BLOCKS: tl.constexpr):
    return tl.arange(0, BLOCKS)[:, None] * 1024 + tl.arange(0, 1024)[None, :]


@triton.jit
def hadamard(v, BLOCKS: tl.constexpr):
    """Multiply each row of 1,024 by the Hadamard matrix, butterflies from neighbours to halves."""
    for stage in tl.static_range(10):
        pairs = tl.permute(tl.reshape(v, (BLOCKS * 1024 // (2 << stage), 2, 1 << stage)), (0, 2, 1))
        low, high = tl.split(pairs)
        v = tl.permute(tl.join(low + high, low - high), (0, 2, 1))
    return tl.reshape(v, (BLOCKS, 1024))


@triton.jit
def _amax_bits(v):
    return tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _squares(x, begin, n, BLOCKS: tl.constexpr):
    """Compute ``reference.pairwise_sum`` of each block's squares.

    A sum of two has only one order, so the first three of ten stages run within a thread, on eight neighbouring vectors
    of 16.
    """
    offsets = tl.arange(0, BLOCKS * 8)[:, None] * 128 + tl.arange(0, 16)[None, :]
    vectors = ()
    for r in tl.static_range(8):
        v = load_tile(x, offsets + 16 * r, begin, n, BLOCKS * 1024).to(tl.float64)
        vectors = vectors + (v * v,)  # type: ignore[assignment]
    low = (vectors[0] + vectors[1]) + (vectors[2] + vectors[3])  # type: ignore[misc]
    v = low + ((vectors[4] + vectors[5]) + (vectors[6] + vectors[7]))  # type: ignore[misc]
    return pairwise_sum(tl.reshape(v, (BLOCKS, 8, 16)), BLOCKS, 128, 3)


@triton.jit
def _scales(x, begin, n, largest, RMS: tl.constexpr, BLOCKS: tl.constexpr):
    if RMS:
        scale = (tl.sqrt(_squares(x, begin, n, BLOCKS)) * ROTATION_SCALE).to(tl.float32)
    else:
        scale = largest.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _block_scales(x, out, n, count, RMS: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    begin = program * (BLOCKS * 1024)
    largest = _amax_bits(load_tile(x, _block_offsets(BLOCKS), begin, n, BLOCKS * 1024))
    scale = tl.where(largest >= 0x7F800000, _INFINITE, _scales(x, begin, n, largest, RMS, BLOCKS))
    block = program * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(out + block, scale, mask=block < count)


def block_scales(x: Tensor, rms: bool) -> Tensor:
    n, count = x.numel(), num_buckets(x.numel(), SUM_BLOCK)
    out = torch.empty(count, dtype=torch.float32, device=x.device)
    if n:
        _block_scales[(num_buckets(count, BLOCKS),)](
            x, out, n, count, RMS=rms, BLOCKS=BLOCKS, **exact_options(num_warps=WARPS)
        )
    return out


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _rotate(x, addend, out, n, total, key_low, key_high, ADD: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    begin = program * (BLOCKS * 1024)
    offsets = _block_offsets(BLOCKS)
    v = load_tile(x, offsets, begin, n, BLOCKS * 1024)
    v = hadamard(
        v * ROTATION_SCALE * rotation_signs(offsets, (program * (BLOCKS * 4)).to(tl.int32), key_low, key_high), BLOCKS
    )
    valid = begin + offsets < total
    if ADD:
        v = tl.load(addend + begin + offsets, mask=valid, other=0.0) + v
    tl.store(out + begin + offsets, v, mask=valid)


def rotate(x: Tensor, seed: int, addend: Tensor | None, out: Tensor) -> None:
    n, total = x.numel(), packed_int_count(x.numel(), True)
    assert out.numel() == total and (addend is None or addend.numel() == total), (x, addend, out)
    if n:
        _rotate[(num_buckets(total, BLOCKS * SUM_BLOCK),)](
            x, out if addend is None else addend, out, n, total, *split64(random.key(seed, random.ROTATION)),
            ADD=addend is not None, BLOCKS=BLOCKS, **exact_options(num_warps=WARPS),
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ encode and decode


@triton.jit
def _program_blocks(program, BLOCKS: tl.constexpr):
    """Return a program's first value, the offsets of its values, its first group, and the numbers of its blocks."""
    block = program * BLOCKS + tl.arange(0, BLOCKS)
    return program * (BLOCKS * 1024), _block_offsets(BLOCKS), (program * (BLOCKS * 4)).to(tl.int32), block


@triton.jit(do_not_specialize=["levels", "rotation_low", "rotation_high", "noise_low", "noise_high"])
def _packed_int_encode(
    x, clips, out, tail, amax_bits, row_factors, n, full, coded, count, levels, half, factor, rotation_low,
    rotation_high, noise_low, noise_high, WIDTH: tl.constexpr, PERIOD: tl.constexpr, DIRECT: tl.constexpr,
    SCALED: tl.constexpr, ROTATED: tl.constexpr, NOISY: tl.constexpr, FEEDBACK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Encode blocks: ``full`` values are in whole groups, ``coded`` in all; without DIRECT they go to ``tail``."""
    span: tl.constexpr = BLOCKS * 1024
    program = tl.program_id(0).to(tl.int64)
    begin, offsets, first_group, block = _program_blocks(program, BLOCKS)
    v = load_tile(x, offsets, begin, n, span)
    pointer = clips.to(tl.pointer_type(tl.float32)) + block
    if SCALED:
        block_amax_bits = _amax_bits(v)
        tl.store(amax_bits + program, tl.max(block_amax_bits, 0))
        clip = _scales(x, begin, n, block_amax_bits, ROTATED, BLOCKS) * factor
        clip = tl.where(clip < _CLIP_LIMIT, clip, _CLIP_LIMIT)
        tl.store(pointer, clip, mask=block < count)
    else:
        clip = tl.load(pointer, mask=block < count, other=0.0)
    prescale = tl.where(clip > _LARGE, _DOWN, tl.where(clip < _TINY, _UP, 1.0))
    if ROTATED:
        t = hadamard(
            v
            * (prescale * ROTATION_SCALE)[:, None]
            * rotation_signs(offsets, first_group, rotation_low, rotation_high),
            BLOCKS,
        )
    else:
        t = v * prescale[:, None]
    scaled_clip = clip * prescale
    inverse = tl.where(scaled_clip > 0, tl.div_rn(tl.zeros_like(scaled_clip) + half, scaled_clip), 0.0)
    offset = tl.where(scaled_clip > 0, half if NOISY else half + 0.5, 0.0)
    t = t * inverse[:, None] + offset[:, None]
    if NOISY:
        noise = rounding_noise_tile(first_group, row_factors, noise_low, noise_high, 24, span)
        t = t + tl.reshape(noise, (BLOCKS, 1024)).to(tl.float32) * _UNIT
    max_level = levels.to(tl.float32)
    t = tl.where(t > 0, t, 0.0)  # also a NaN
    symbols = tl.where(t < max_level, t, max_level).to(tl.int32)
    if FEEDBACK:
        step = tl.div_rn(clip, tl.zeros_like(clip) + max_level)
        residual = v - (2 * symbols - levels).to(tl.float32) * step[:, None]
        tl.store(x + begin + offsets, residual, mask=begin + offsets < n)
    symbols = tl.where(begin + offsets < coded, symbols, 0)
    if DIRECT:
        store_symbols(symbols, out, tail, begin, coded, full, WIDTH, PERIOD, span)
    else:
        tl.store(tail + begin + offsets, symbols, mask=begin + offsets < coded)


@triton.jit
def _write_words(symbols, out, n, words, WIDTH: tl.constexpr, PER_WORD: tl.constexpr, SPAN: tl.constexpr):
    """Pack PER_WORD integers per word: rows of 8 of each block of 1,024, one word per column."""
    vectors: tl.constexpr = (128 + PER_WORD - 1) // PER_WORD
    word = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    block = word // (vectors * 8)
    inside = word % (vectors * 8)
    value = tl.zeros((SPAN,), tl.uint32)
    for k in tl.static_range(PER_WORD):
        row = inside // 8 * PER_WORD + k
        offsets = block * 1024 + row * 8 + inside % 8
        symbol = tl.load(symbols + offsets, mask=(word < words) & (row < 128) & (offsets < n), other=0)
        value = value | (symbol.to(tl.uint32, bitcast=True) << (k * WIDTH))
    tl.store(out.to(tl.pointer_type(tl.int32)) + word, value.to(tl.int32, bitcast=True), mask=word < words)


def packed_int_encode(
    x: Tensor, coding: PackedIntCoding, rounding: IntRounding, *, feedback: bool, clips: Tensor, out: Tensor
) -> Tensor:
    """Encode x; return amax_bits by program if a clip factor is given, else an empty tensor."""
    factor, rotation_seed, rounding_seed = rounding
    assert not (feedback and rotation_seed is not None)
    n, count = x.numel(), num_buckets(x.numel(), SUM_BLOCK)
    coded, width = packed_int_count(n, rotation_seed is not None), coding.width
    assert clips.numel() == 4 * count and out.numel() == packed_ints_nbytes(coded, coding)
    aligned_clips, programs = word_aligned(clips), num_buckets(count, BLOCKS)
    direct = coding.packed or 32 % width == 0
    amax_bits = torch.empty(programs if factor is not None else 0, dtype=torch.int32, device=x.device)
    if coding.packed:
        section = PackedSection(out, coded, width)
        target, tail, full = section.target, section.tail, section.full
    else:  # words have no tail: missing integers are 0
        target, full = word_aligned(out), out.numel() // 4 * (32 // width)
        tail = torch.empty(0 if direct else coded, dtype=torch.int32, device=x.device)
    _packed_int_encode[(programs,)](
        x, aligned_clips, target, tail, amax_bits, row_factors(x.device), n, full, coded, count, coding.levels,
        coding.levels / 2, factor or 0.0, *split64(random.key(rotation_seed or 0, random.ROTATION)),
        *split64(random.key(rounding_seed or 0, random.ROUNDING)), WIDTH=width, PERIOD=packing_period(width),
        DIRECT=direct, SCALED=factor is not None, ROTATED=rotation_seed is not None, NOISY=rounding_seed is not None,
        FEEDBACK=feedback, BLOCKS=BLOCKS, **exact_options(num_warps=WARPS),
    )  # fmt: skip
    if coding.packed:
        section.finish()
    elif not direct:
        words = out.numel() // 4
        _write_words[(num_buckets(words, 1024),)](
            tail, target, coded, words, WIDTH=width, PER_WORD=32 // width, SPAN=1024, **exact_options(num_warps=4)
        )
    if not coding.packed and target is not out:
        out.copy_(target)
    if aligned_clips is not clips and factor is not None:
        clips.copy_(aligned_clips)
    return amax_bits


@triton.jit
def load_words(integers, offsets, begin, n, WIDTH: tl.constexpr):
    """Load integers packed in words; 0 past the end."""
    per_word: tl.constexpr = 32 // WIDTH
    vectors: tl.constexpr = (128 + per_word - 1) // per_word
    row = offsets % 1024 // 8
    word = (offsets // 1024 * vectors + row // per_word) * 8 + offsets % 8
    base = integers.to(tl.pointer_type(tl.int32)) + begin // 1024 * (vectors * 8)
    value = tl.load(base + word, mask=begin + offsets < n, other=0).to(tl.uint32, bitcast=True)
    mask: tl.constexpr = (1 << WIDTH) - 1
    return ((value >> (row % per_word * WIDTH).to(tl.uint32)) & mask).to(tl.int32, bitcast=True)


@triton.jit
def packed_int_tile(
    integers, out, flag, offsets, begin, n, coded, full, clip, total, first_group, rotation_low, rotation_high, weight,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, ROTATED: tl.constexpr, ADD: tl.constexpr, EDGE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    if PACKED:
        symbols = load_symbols(integers, offsets, begin, coded, full, WIDTH, EDGE)
    else:
        symbols = load_words(integers, offsets, begin, coded, WIDTH)
    tl.store(flag, 1, mask=tl.max(tl.max(symbols, 1), 0) > total)
    centred = (2 * symbols - total).to(tl.float32)
    if EDGE:
        centred = tl.where(begin + offsets < coded, centred, 0.0)
    whole = tl.zeros_like(clip) + total.to(tl.float32)
    if ROTATED:
        large = clip > _LARGE
        step = tl.div_rn(tl.where(large, clip * _DOWN, clip), whole) * ROTATION_SCALE
        values = hadamard(centred * step[:, None], BLOCKS)
        values = values * rotation_signs(offsets, first_group, rotation_low, rotation_high)
        clamped = tl.minimum(tl.maximum(values * _UP, -_FLOAT32_MAX), _FLOAT32_MAX)
        values = tl.where(large[:, None], clamped, values)
    else:
        values = centred * tl.div_rn(clip, whole)[:, None]
    store_or_add(out, offsets, begin, n, values, weight, ADD, EDGE)


@triton.jit
def load_clips(clips, block, count, flag):
    """Load the clip of each block; an invalid one sets the flag and reads as 0."""
    clip = tl.load(clips.to(tl.pointer_type(tl.float32)) + block, mask=block < count, other=0.0)
    accepted = (clip >= 0) & (clip <= _CLIP_LIMIT)
    tl.store(flag, 1, mask=tl.max((accepted == 0).to(tl.int32), 0) > 0)
    return tl.where(accepted, clip, 0.0)


@triton.jit(do_not_specialize=["total", "rotation_low", "rotation_high"])
def _packed_int_decode(
    integers, clips, out, flag, n, coded, full, count, total, rotation_low, rotation_high, weight,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, ROTATED: tl.constexpr, ADD: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    begin, offsets, group, block = _program_blocks(tl.program_id(0).to(tl.int64), BLOCKS)
    clip = load_clips(clips, block, count, flag)
    if begin + BLOCKS * 1024 <= tl.minimum(full, n):
        packed_int_tile(
            integers, out, flag, offsets, begin, n, coded, full, clip, total, group, rotation_low, rotation_high,
            weight, WIDTH, PACKED, ROTATED, ADD, False, BLOCKS,
        )  # fmt: skip
    else:
        packed_int_tile(
            integers, out, flag, offsets, begin, n, coded, full, clip, total, group, rotation_low, rotation_high,
            weight, WIDTH, PACKED, ROTATED, ADD, True, BLOCKS,
        )  # fmt: skip


def packed_int_decode(packed: PackedIntSum, *, rotation_seed: int | None, out: Tensor, weight: float | None) -> Tensor:
    integers, clips, coding, total = packed
    n, count = out.numel(), num_buckets(out.numel(), SUM_BLOCK)
    coded = packed_int_count(n, rotation_seed is not None)
    assert clips.numel() == 4 * count and integers.numel() == packed_ints_nbytes(coded, coding)
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    _packed_int_decode[(num_buckets(count, BLOCKS),)](
        word_aligned(integers), word_aligned(clips), out, flag, n, coded, coded // GROUP * GROUP, count, total,
        *split64(random.key(rotation_seed or 0, random.ROTATION)), weight or 0.0,
        WIDTH=coding.width, PACKED=coding.packed,
        ROTATED=rotation_seed is not None, ADD=weight is not None, BLOCKS=BLOCKS, **exact_options(num_warps=WARPS),
    )  # fmt: skip
    return flag
