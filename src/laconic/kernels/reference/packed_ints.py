"""Packed integers that can be added without decoding, their scales, and the rotation before them."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels import random
from laconic.kernels.interface import CLIP_LIMIT, FLOAT32_MAX, NONFINITE, IntRounding, PackedIntSum
from laconic.kernels.reference.packing import pack, unpack
from laconic.kernels.reference.reductions import amax_bits_of, in_buckets, pairwise_sum, put, read_floats, write_floats
from laconic.kernels.sections import SUM_BLOCK, PackedIntCoding, packed_int_count, packed_ints_nbytes

_LARGE, _TINY = 2.0**90, 2.0**-90
"""Clips beyond these limits are scaled by a power of two before divisions and sums."""


def _like(value: float, tensor: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=tensor.device)


def hadamard(rows: Tensor) -> Tensor:
    """Multiply each row by the (unnormalised) Hadamard matrix of its length: butterflies from neighbours to halves."""
    length, distance = rows.shape[1], 1
    while distance < length:
        pairs = rows.view(rows.shape[0], -1, 2, distance)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack([low + high, low - high], 2).view(rows.shape[0], length)
        distance *= 2
    return rows


def rotation_signs(n: int, seed: int, device: torch.device) -> Tensor:
    """Return ±1 for each value: a bit, chosen by its row, of the hash of its lane in its group of 256."""
    element = torch.arange(n, dtype=torch.int64, device=device)
    word = random.hash32(((element >> 8) << 3) | (element & 7), random.key(seed, random.ROTATION))
    return (1 - 2 * (word >> ((element >> 3) & 31) & 1)).to(torch.float32)


def rotate(x: Tensor, seed: int, addend: Tensor | None, out: Tensor) -> None:
    rows = in_buckets(x, SUM_BLOCK)
    signs = rotation_signs(rows.numel(), seed, x.device).view_as(rows)
    rotated = hadamard(rows * _like(2.0**-5, x) * signs).view(-1)
    out.copy_(rotated if addend is None else addend + rotated)


def rotate_back(rotated: Tensor, seed: int) -> Tensor:
    """Return what ``rotate`` was given, up to rounding and padded to whole blocks."""
    rows = in_buckets(rotated, SUM_BLOCK)
    signs = rotation_signs(rows.numel(), seed, rotated.device).view_as(rows)
    return (hadamard(rows * _like(2.0**-5, rotated)) * signs).view(-1)


def write_words(symbols: Tensor, width: int, out: Tensor) -> None:
    """Write 32 // width symbols per word. A block of 1,024 is rows of 8; each column fills its own words."""
    rows = in_buckets(symbols.to(torch.int64), SUM_BLOCK)
    per_word = 32 // width
    vectors = -(-(SUM_BLOCK // 8) // per_word)
    padded = torch.zeros(rows.shape[0], vectors * per_word * 8, dtype=torch.int64, device=rows.device)
    padded[:, :SUM_BLOCK] = rows
    shifts = (torch.arange(per_word, device=rows.device) * width).view(1, 1, per_word, 1)
    words = (padded.view(-1, vectors, per_word, 8) << shifts).sum(2).view(-1)
    signed = ((words ^ 0x80000000) - 0x80000000).to(torch.int32)
    out.copy_(signed.view(torch.uint8)[: out.numel()])


def read_words(packed: Tensor, n: int, width: int) -> Tensor:
    per_word = 32 // width
    vectors = -(-(SUM_BLOCK // 8) // per_word)
    blocks = -(-n // SUM_BLOCK)
    whole = torch.zeros(blocks * vectors * 32, dtype=torch.uint8, device=packed.device)
    whole[: packed.numel()] = packed
    words = (whole.view(torch.int32).to(torch.int64) & random.M32).view(blocks, vectors, 1, 8)
    shifts = (torch.arange(per_word, device=packed.device) * width).view(1, 1, per_word, 1)
    rows = (words >> shifts & ((1 << width) - 1)).view(blocks, -1)[:, :SUM_BLOCK]
    return rows.reshape(-1)[:n]


def _write(symbols: Tensor, coding: PackedIntCoding, out: Tensor) -> None:
    if coding.packed:
        pack(symbols, coding.width, out)
    else:
        write_words(symbols, coding.width, out)


def _read(integers: Tensor, n: int, coding: PackedIntCoding) -> Tensor:
    return unpack(integers, n, coding.width).to(torch.int64) if coding.packed else read_words(integers, n, coding.width)


def block_scales(x: Tensor, rms: bool) -> Tensor:
    rows = in_buckets(x, SUM_BLOCK)
    largest = (rows.view(torch.int32) & 0x7FFFFFFF).amax(1)
    if rms:
        scales = (pairwise_sum(rows.to(torch.float64).square()).sqrt() * 2.0**-5).to(torch.float32)
    else:
        scales = rows.abs().amax(1)
    return torch.where(largest >= NONFINITE, _like(float("inf"), x), scales)


def _levels_of(rows: Tensor, clips: Tensor, levels: int, noise: Tensor | None) -> Tensor:
    """Return trunc(v * (levels / 2 / clip) + levels / 2 + u), clamped to [0, levels]; 0 if the clip is 0."""
    half = levels / 2
    inverse = torch.where(clips > 0, _like(half, rows) / clips, 0.0).unsqueeze(1)
    offset = torch.where(clips > 0, half + (0.5 if noise is None else 0.0), 0.0).to(torch.float32).unsqueeze(1)
    t = rows * inverse + offset
    if noise is not None:
        t = t + noise.view_as(rows).to(torch.float32) * _like(2.0**-24, rows)
    t = torch.where(t > 0, t, 0.0)  # a NaN, too
    return torch.where(t < levels, t, float(levels)).to(torch.int64)


def packed_int_encode(
    x: Tensor, coding: PackedIntCoding, rounding: IntRounding, *, feedback: bool, clips: Tensor, out: Tensor
) -> int:
    factor, rotation_seed, rounding_seed = rounding
    amax_bits = amax_bits_of(x) if factor is not None else 0
    if amax_bits >= NONFINITE or x.numel() == 0:
        return amax_bits
    if factor is not None:
        scales = block_scales(x, rotation_seed is not None) * _like(factor, x)
        write_floats(torch.where(scales < CLIP_LIMIT, scales, CLIP_LIMIT), clips)
    clip = clips.clone().view(torch.float32)
    prescale = torch.where(clip > _LARGE, 2.0**-64, torch.where(clip < _TINY, 2.0**64, 1.0)).to(torch.float32)
    rows, n = in_buckets(x, SUM_BLOCK), x.numel()
    if rotation_seed is None:
        rows = rows * prescale.unsqueeze(1)
    else:
        signs = rotation_signs(rows.numel(), rotation_seed, x.device).view_as(rows)
        rows, n = hadamard(rows * (prescale * 2.0**-5).unsqueeze(1) * signs), rows.numel()
    dither = None
    if rounding_seed is not None:
        dither = random.dither(rows.numel(), 24, random.key(rounding_seed, random.ROUNDING), x.device)
    symbols = _levels_of(rows, clip * prescale, coding.levels, dither)
    if feedback:
        step = (clip / _like(float(coding.levels), x)).unsqueeze(1)
        x.sub_(((2 * symbols - coding.levels).to(torch.float32) * step).view(-1)[: x.numel()])
    _write(symbols.view(-1)[:n], coding, out)
    return amax_bits


def read_clips(clips: Tensor) -> Tensor:
    values = read_floats(clips, "scale")
    if bool((values > CLIP_LIMIT).any()):
        raise FrameError("the frame holds a scale above the largest that is written")
    return values


def packed_int_decode(packed: PackedIntSum, *, rotation_seed: int | None, out: Tensor, weight: float | None) -> None:
    n, clip, total = packed_int_count(out.numel(), rotation_seed is not None), read_clips(packed.clips), packed.total
    symbols = _read(packed.integers, n, packed.coding)
    if int(symbols.max()) > total:
        raise FrameError(f"the frame holds a sum above {total}, the maximum of its workers")
    whole = torch.full_like(clip, float(total))
    centred = in_buckets((2 * symbols - total).to(torch.float32), SUM_BLOCK)
    if rotation_seed is None:
        values = centred * (clip / whole).unsqueeze(1)
    else:
        large = clip > _LARGE
        step = (torch.where(large, clip * 2.0**-64, clip) / whole) * _like(2.0**-5, clip)
        values = hadamard(centred * step.unsqueeze(1))
        values = values * rotation_signs(n, rotation_seed, out.device).view_as(values)
        values = torch.where(
            large.unsqueeze(1), (values * _like(2.0**64, values)).clamp(-FLOAT32_MAX, FLOAT32_MAX), values
        )
    put(out, values.view(-1)[: out.numel()], weight)


def packed_int_add(other: Tensor, total: Tensor) -> None:
    total.copy_((total.clone().view(torch.int32) + other.clone().view(torch.int32)).view(torch.uint8))


def _sum_of(total: Tensor, sum_width: int) -> Tensor:
    n = total.numel() * 8 // sum_width
    return total.view(torch.int32).to(torch.int64) if sum_width == 32 else unpack(total, n, sum_width).to(torch.int64)


def packed_int_accumulate(packed: Tensor, n: int, width: int, sum_width: int, total: Tensor) -> None:
    added = _sum_of(total, sum_width)
    added[:n] += unpack(packed, n, width)
    if sum_width == 32:
        total.copy_(added.to(torch.int32).view(torch.uint8))
    else:
        pack(added, sum_width, total)


def packed_int_repack(total: Tensor, n: int, sum_width: int, width: int, out: Tensor) -> None:
    pack(_sum_of(total, sum_width)[:n], width, out)


def packed_int_max(integers: Tensor, n: int, coding: PackedIntCoding) -> int:
    assert integers.numel() == packed_ints_nbytes(n, coding)
    return int(_read(integers, n, coding).max()) if n else 0
