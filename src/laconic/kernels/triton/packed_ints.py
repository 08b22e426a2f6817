"""shared and thc: scales, rotation, integers in lanes, their sums, and error feedback, each in one pass."""

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
    packed_nbytes,
)
from laconic.kernels.triton.packing import Packed
from laconic.kernels.triton.tile import (
    exact,
    factors,
    halves,
    keep,
    load_tile,
    noise_tile,
    pairwise,
    period,
    read_symbols,
    signs_of,
    store_groups,
    store_symbols,
    words_of,
)

__all__ = [
    "SHRINK",
    "block_scales",
    "hadamard",
    "lane_tile",
    "load_clips",
    "packed_int_accumulate",
    "packed_int_add",
    "packed_int_decode",
    "packed_int_encode",
    "packed_int_max",
    "packed_int_repack",
    "rotate",
]

BLOCKS = WARPS = 1
"""Of a program: a warp holds a block of 1,024, and its butterflies need no barrier."""

_LARGE = tl.constexpr(2.0**90)
_TINY = tl.constexpr(2.0**-90)
_UP = tl.constexpr(2.0**64)
_DOWN = tl.constexpr(2.0**-64)
SHRINK = tl.constexpr(2.0**-5)
_UNIT = tl.constexpr(2.0**-24)
_CLIP_LIMIT = tl.constexpr(CLIP_LIMIT)
_FLOAT32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
_INFINITE = tl.constexpr(float("inf"))


@triton.jit
def _places(BLOCKS: tl.constexpr):
    return tl.arange(0, BLOCKS)[:, None] * 1024 + tl.arange(0, 1024)[None, :]


@triton.jit
def hadamard(v, BLOCKS: tl.constexpr):
    """Each row of 1,024 times the Hadamard matrix, butterflies from neighbours to halves."""
    for stage in tl.static_range(10):
        pairs = tl.permute(tl.reshape(v, (BLOCKS * 1024 // (2 << stage), 2, 1 << stage)), (0, 2, 1))
        low, high = tl.split(pairs)
        v = tl.permute(tl.join(low + high, low - high), (0, 2, 1))
    return tl.reshape(v, (BLOCKS, 1024))


@triton.jit
def _largest(v):
    return tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _squares(x, begin, n, BLOCKS: tl.constexpr):
    """``reference.pairwise_sum`` of each block's squares. A sum of two has but one order, so the first three of ten
    stages happen within a thread: it takes eight vectors of 16 that follow one another, from memory nearby.
    """
    at = tl.arange(0, BLOCKS * 8)[:, None] * 128 + tl.arange(0, 16)[None, :]
    vectors = ()
    for r in tl.static_range(8):
        v = load_tile(x, at + 16 * r, begin, n, BLOCKS * 1024).to(tl.float64)
        vectors = vectors + (v * v,)  # type: ignore[assignment]
    low = (vectors[0] + vectors[1]) + (vectors[2] + vectors[3])  # type: ignore[misc]
    v = low + ((vectors[4] + vectors[5]) + (vectors[6] + vectors[7]))  # type: ignore[misc]
    return pairwise(tl.reshape(v, (BLOCKS, 8, 16)), BLOCKS, 128, 3)


@triton.jit
def _scales(x, begin, n, largest, RMS: tl.constexpr, BLOCKS: tl.constexpr):
    if RMS:
        scale = (tl.sqrt(_squares(x, begin, n, BLOCKS)) * SHRINK).to(tl.float32)
    else:
        scale = largest.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _block_scales(x, out, n, count, RMS: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    begin = program * (BLOCKS * 1024)
    largest = _largest(load_tile(x, _places(BLOCKS), begin, n, BLOCKS * 1024))
    scale = tl.where(largest >= 0x7F800000, _INFINITE, _scales(x, begin, n, largest, RMS, BLOCKS))
    block = program * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(out + block, scale, mask=block < count)


def block_scales(x: Tensor, rms: bool) -> Tensor:
    n, count = x.numel(), num_buckets(x.numel(), SUM_BLOCK)
    out = torch.empty(count, dtype=torch.float32, device=x.device)
    if n:
        _block_scales[(num_buckets(count, BLOCKS),)](x, out, n, count, RMS=rms, BLOCKS=BLOCKS, **exact(num_warps=WARPS))
    return out


@triton.jit(do_not_specialize=["low_key", "high_key"])
def _rotate(x, more, out, n, total, low_key, high_key, ADD: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    begin = program * (BLOCKS * 1024)
    at = _places(BLOCKS)
    v = load_tile(x, at, begin, n, BLOCKS * 1024)
    v = hadamard(v * SHRINK * signs_of(at, (program * (BLOCKS * 4)).to(tl.int32), low_key, high_key), BLOCKS)
    there = begin + at < total
    if ADD:
        v = tl.load(more + begin + at, mask=there, other=0.0) + v
    tl.store(out + begin + at, v, mask=there)


def rotate(x: Tensor, seed: int, addend: Tensor | None, out: Tensor) -> None:
    n, total = x.numel(), packed_int_count(x.numel(), True)
    assert out.numel() == total and (addend is None or addend.numel() == total), (x, addend, out)
    if n:
        _rotate[(num_buckets(total, BLOCKS * SUM_BLOCK),)](
            x, out if addend is None else addend, out, n, total, *halves(random.key(seed, random.ROTATION)),
            ADD=addend is not None, BLOCKS=BLOCKS, **exact(num_warps=WARPS),
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ encode and decode


@triton.jit(do_not_specialize=["levels", "turn0", "turn1", "noise0", "noise1"])
def _lane_encode(
    x,
    clips,
    out,
    tail,
    keys,
    factors,
    n,
    full,
    coded,
    count,
    levels,
    half,
    factor,
    turn0,
    turn1,
    noise0,
    noise1,
    WIDTH: tl.constexpr,
    PERIOD: tl.constexpr,
    DIRECT: tl.constexpr,
    SCALED: tl.constexpr,
    ROTATED: tl.constexpr,
    NOISY: tl.constexpr,
    FEEDBACK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """``full`` values lie in whole groups, ``coded`` in the section; without DIRECT all go to ``tail`` as int32."""
    span: tl.constexpr = BLOCKS * 1024
    program = tl.program_id(0).to(tl.int64)
    begin = program * span
    at = _places(BLOCKS)
    first_group = (program * (BLOCKS * 4)).to(tl.int32)
    block = program * BLOCKS + tl.arange(0, BLOCKS)
    v = load_tile(x, at, begin, n, span)
    place = clips.to(tl.pointer_type(tl.float32)) + block
    if SCALED:
        largest = _largest(v)
        tl.store(keys + program, tl.max(largest, 0))
        clip = _scales(x, begin, n, largest, ROTATED, BLOCKS) * factor
        clip = tl.where(clip < _CLIP_LIMIT, clip, _CLIP_LIMIT)
        tl.store(place, clip, mask=block < count)
    else:
        clip = tl.load(place, mask=block < count, other=0.0)
    lift = tl.where(clip > _LARGE, _DOWN, tl.where(clip < _TINY, _UP, 1.0))
    if ROTATED:
        t = hadamard(v * (lift * SHRINK)[:, None] * signs_of(at, first_group, turn0, turn1), BLOCKS)
    else:
        t = v * lift[:, None]
    lifted = clip * lift
    inverse = tl.where(lifted > 0, tl.div_rn(tl.zeros_like(lifted) + half, lifted), 0.0)
    offset = tl.where(lifted > 0, half if NOISY else half + 0.5, 0.0)
    t = t * inverse[:, None] + offset[:, None]
    if NOISY:
        noise = noise_tile(first_group, factors, noise0, noise1, 24, span)
        t = t + tl.reshape(noise, (BLOCKS, 1024)).to(tl.float32) * _UNIT
    most = levels.to(tl.float32)
    t = tl.where(t > 0, t, 0.0)  # a NaN, too
    symbols = tl.where(t < most, t, most).to(tl.int32)
    if FEEDBACK:
        step = tl.div_rn(clip, tl.zeros_like(clip) + most)
        left = v - (2 * symbols - levels).to(tl.float32) * step[:, None]
        tl.store(x + begin + at, left, mask=begin + at < n)
    symbols = tl.where(begin + at < coded, symbols, 0)
    if DIRECT:
        store_symbols(symbols, out, tail, begin, coded, full, WIDTH, PERIOD, span)
    else:
        tl.store(tail + begin + at, symbols, mask=begin + at < coded)


@triton.jit
def _write_lanes(symbols, out, n, words, WIDTH: tl.constexpr, LANES: tl.constexpr, SPAN: tl.constexpr):
    """LANES symbols a word: rows of 8 of each block of 1,024, a word for each column."""
    vectors: tl.constexpr = (128 + LANES - 1) // LANES
    word = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    block = word // (vectors * 8)
    inside = word % (vectors * 8)
    value = tl.zeros((SPAN,), tl.uint32)
    for lane in tl.static_range(LANES):
        row = inside // 8 * LANES + lane
        at = block * 1024 + row * 8 + inside % 8
        symbol = tl.load(symbols + at, mask=(word < words) & (row < 128) & (at < n), other=0)
        value = value | (symbol.to(tl.uint32, bitcast=True) << (lane * WIDTH))
    tl.store(out.to(tl.pointer_type(tl.int32)) + word, value.to(tl.int32, bitcast=True), mask=word < words)


def packed_int_encode(
    x: Tensor, coding: PackedIntCoding, rounding: IntRounding, *, feedback: bool, clips: Tensor, out: Tensor
) -> Tensor | None:
    """The keys of x by program, where its scales were asked for."""
    factor, rotation_seed, rounding_seed = rounding
    assert not (feedback and rotation_seed is not None)
    n, count = x.numel(), num_buckets(x.numel(), SUM_BLOCK)
    coded, width = packed_int_count(n, rotation_seed is not None), coding.width
    assert clips.numel() == 4 * count and out.numel() == packed_ints_nbytes(coded, coding)
    numbers, programs = words_of(clips), num_buckets(count, BLOCKS)
    direct = coding.packed or 32 % width == 0
    keys = torch.empty(programs if factor is not None else 0, dtype=torch.int32, device=x.device)
    if coding.packed:
        into = Packed(out, coded, width)
        target, tail, full = into.target, into.tail, into.full
    else:  # words of lanes have no tail: what is not there is 0
        target, full = words_of(out), out.numel() // 4 * (32 // width)
        tail = torch.empty(0 if direct else coded, dtype=torch.int32, device=x.device)
    _lane_encode[(programs,)](
        x, numbers, target, tail, keys, factors(x.device), n, full, coded, count,
        coding.levels, coding.levels / 2, factor or 0.0,
        *halves(random.key(rotation_seed or 0, random.ROTATION)),
        *halves(random.key(rounding_seed or 0, random.ROUNDING)),
        WIDTH=width, PERIOD=period(width), DIRECT=direct, SCALED=factor is not None, ROTATED=rotation_seed is not None,
        NOISY=rounding_seed is not None, FEEDBACK=feedback, BLOCKS=BLOCKS, **exact(num_warps=WARPS),
    )  # fmt: skip
    if coding.packed:
        into.finish()
    elif not direct:
        words = out.numel() // 4
        _write_lanes[(num_buckets(words, 1024),)](
            tail, target, coded, words, WIDTH=width, LANES=32 // width, SPAN=1024, **exact(num_warps=4)
        )
    if not coding.packed and target is not out:
        out.copy_(target)
    if numbers is not clips and factor is not None:
        clips.copy_(numbers)
    return keys if factor is not None else None


@triton.jit
def _read_lanes(lanes, at, begin, n, WIDTH: tl.constexpr):
    """Symbols in words of lanes; 0 past the end."""
    each: tl.constexpr = 32 // WIDTH
    vectors: tl.constexpr = (128 + each - 1) // each
    row = at % 1024 // 8
    word = (at // 1024 * vectors + row // each) * 8 + at % 8
    base = lanes.to(tl.pointer_type(tl.int32)) + begin // 1024 * (vectors * 8)
    value = tl.load(base + word, mask=begin + at < n, other=0).to(tl.uint32, bitcast=True)
    mask: tl.constexpr = (1 << WIDTH) - 1
    return ((value >> (row % each * WIDTH).to(tl.uint32)) & mask).to(tl.int32, bitcast=True)


@triton.jit
def lane_tile(
    lanes,
    out,
    flag,
    at,
    begin,
    n,
    coded,
    full,
    clip,
    total,
    first_group,
    turn0,
    turn1,
    weight,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    ROTATED: tl.constexpr,
    ADD: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    if PACKED:
        symbols = read_symbols(lanes, at, begin, coded, full, WIDTH, EDGE)
    else:
        symbols = _read_lanes(lanes, at, begin, coded, WIDTH)
    tl.store(flag, 1, mask=tl.max(tl.max(symbols, 1), 0) > total)
    centred = (2 * symbols - total).to(tl.float32)
    if EDGE:
        centred = tl.where(begin + at < coded, centred, 0.0)
    whole = tl.zeros_like(clip) + total.to(tl.float32)
    if ROTATED:
        large = clip > _LARGE
        step = tl.div_rn(tl.where(large, clip * _DOWN, clip), whole) * SHRINK
        values = hadamard(centred * step[:, None], BLOCKS)
        values = values * signs_of(at, first_group, turn0, turn1)
        cut = tl.minimum(tl.maximum(values * _UP, -_FLOAT32_MAX), _FLOAT32_MAX)
        values = tl.where(large[:, None], cut, values)
    else:
        values = centred * tl.div_rn(clip, whole)[:, None]
    keep(out, at, begin, n, values, weight, ADD, EDGE)


@triton.jit
def load_clips(clips, block, count, flag):
    """The clip of each block; 0 in place of what no encoder writes, which is told."""
    clip = tl.load(clips.to(tl.pointer_type(tl.float32)) + block, mask=block < count, other=0.0)
    good = (clip >= 0) & (clip <= _CLIP_LIMIT)
    tl.store(flag, 1, mask=tl.max((good == 0).to(tl.int32), 0) > 0)
    return tl.where(good, clip, 0.0)


@triton.jit(do_not_specialize=["total", "turn0", "turn1"])
def _lane_decode(
    lanes,
    clips,
    out,
    flag,
    n,
    coded,
    full,
    count,
    total,
    turn0,
    turn1,
    weight,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    ROTATED: tl.constexpr,
    ADD: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    span: tl.constexpr = BLOCKS * 1024
    program = tl.program_id(0).to(tl.int64)
    begin = program * span
    at = _places(BLOCKS)
    group = (program * (BLOCKS * 4)).to(tl.int32)
    block = program * BLOCKS + tl.arange(0, BLOCKS)
    clip = load_clips(clips, block, count, flag)
    if begin + span <= tl.minimum(full, n):
        lane_tile(
            lanes, out, flag, at, begin, n, coded, full, clip, total, group, turn0, turn1, weight,
            WIDTH, PACKED, ROTATED, ADD, False, BLOCKS,
        )  # fmt: skip
    else:
        lane_tile(
            lanes, out, flag, at, begin, n, coded, full, clip, total, group, turn0, turn1, weight,
            WIDTH, PACKED, ROTATED, ADD, True, BLOCKS,
        )  # fmt: skip


def packed_int_decode(packed: PackedIntSum, *, rotation_seed: int | None, out: Tensor, weight: float | None) -> Tensor:
    lanes, clips, coding, total = packed
    n, count = out.numel(), num_buckets(out.numel(), SUM_BLOCK)
    coded = packed_int_count(n, rotation_seed is not None)
    assert clips.numel() == 4 * count and lanes.numel() == packed_ints_nbytes(coded, coding)
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    _lane_decode[(num_buckets(count, BLOCKS),)](
        words_of(lanes), words_of(clips), out, flag, n, coded, coded // GROUP * GROUP, count, total,
        *halves(random.key(rotation_seed or 0, random.ROTATION)), weight or 0.0,
        WIDTH=coding.width, PACKED=coding.packed,
        ROTATED=rotation_seed is not None, ADD=weight is not None, BLOCKS=BLOCKS, **exact(num_warps=WARPS),
    )  # fmt: skip
    return flag


# ------------------------------------------------------------------------------------------------------------- sums


def packed_int_add(other: Tensor, total: Tensor) -> None:
    """Words of lanes as 32-bit integers: torch adds them as fast as memory goes."""
    assert other.numel() == total.numel() and total.numel() % 4 == 0
    total.view(torch.int32).add_(words_of(other).view(torch.int32))


@triton.jit
def _read_sum(total, at, begin, LANE: tl.constexpr):
    """Sums in lanes of 8, 16 or 32 bits, packed vertically but for 32: all groups are whole."""
    words = total.to(tl.pointer_type(tl.int32)) + begin // 32 * LANE
    if LANE == 32:
        value = tl.load(words + at).to(tl.uint32, bitcast=True)
    else:
        bit = at // 8 % 32 * LANE
        value = tl.load(words + at // 256 * (8 * LANE) + bit // 32 * 8 + at % 8).to(tl.uint32, bitcast=True)
        value = (value >> (bit % 32).to(tl.uint32)) & ((1 << LANE) - 1)
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _add_group(
    packed,
    total,
    at,
    begin,
    n,
    full,
    WIDTH: tl.constexpr,
    LANE: tl.constexpr,
    PERIOD: tl.constexpr,
    EDGE: tl.constexpr,
):
    added = _read_sum(total, at, begin, LANE) + read_symbols(packed, at, begin, n, full, WIDTH, EDGE)
    if LANE == 32:
        tl.store(total.to(tl.pointer_type(tl.int32)) + begin + at, added)
    else:
        store_groups(added, total, begin, begin + 256, LANE, PERIOD, 256)


@triton.jit
def _accumulate(packed, total, n, full, WIDTH: tl.constexpr, LANE: tl.constexpr, PERIOD: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * 256
    at = tl.arange(0, 256)
    if begin + 256 <= full:
        _add_group(packed, total, at, begin, n, full, WIDTH, LANE, PERIOD, False)
    else:
        _add_group(packed, total, at, begin, n, full, WIDTH, LANE, PERIOD, True)


def packed_int_accumulate(packed: Tensor, n: int, width: int, lane: int, total: Tensor) -> None:
    groups = num_buckets(n, GROUP)
    assert packed.numel() == packed_nbytes(n, width) and total.numel() == groups * 32 * lane
    assert total.data_ptr() % 4 == 0
    if n:
        _accumulate[(groups,)](
            words_of(packed), total, n, n // GROUP * GROUP, WIDTH=width, LANE=lane, PERIOD=32 // lane,
            **exact(num_warps=1),
        )  # fmt: skip


@triton.jit
def _pack_sum(total, out, tail, n, full, WIDTH: tl.constexpr, LANE: tl.constexpr, PERIOD: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * 256
    at = tl.arange(0, 256)
    symbols = _read_sum(total, at, begin, LANE)
    store_symbols(symbols, out, tail, begin, n, full, WIDTH, PERIOD, 256)


def packed_int_repack(total: Tensor, n: int, lane: int, width: int, out: Tensor) -> None:
    groups = num_buckets(n, GROUP)
    assert total.numel() == groups * 32 * lane and total.data_ptr() % 4 == 0
    if n:
        into = Packed(out, n, width)
        _pack_sum[(groups,)](
            total, into.target, into.tail, n, into.full, WIDTH=width, LANE=lane, PERIOD=period(width),
            **exact(num_warps=1),
        )  # fmt: skip
        into.finish()


@triton.jit
def _lane_largest(lanes, found, n, full, WIDTH: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    begin = program * SPAN
    at = tl.arange(0, SPAN)
    if PACKED:
        symbols = read_symbols(lanes, at, begin, n, full, WIDTH, True)
    else:
        symbols = _read_lanes(lanes, at, begin, n, WIDTH)
    tl.store(found + program, tl.max(symbols, 0))


def packed_int_max(lanes: Tensor, n: int, coding: PackedIntCoding) -> Tensor:
    """The largest integer of each program."""
    assert lanes.numel() == packed_ints_nbytes(n, coding)
    programs = num_buckets(n, 2048)
    found = torch.empty(programs, dtype=torch.int32, device=lanes.device)
    _lane_largest[(programs,)](
        words_of(lanes), found, n, n // GROUP * GROUP, WIDTH=coding.width, PACKED=coding.packed, SPAN=2048,
        **exact(num_warps=4),
    )  # fmt: skip
    return found
