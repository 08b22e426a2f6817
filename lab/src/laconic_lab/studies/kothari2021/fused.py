"""Kernels for a GPU: what a quantizer decodes to, in one pass over the values of all slots, and sizes of positions.

They are made of the device functions of laconic's own encoders, so that sums and roundings have the same order, but
write decoded values instead of sections.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codecs.qsgd import QSGD
from laconic.codecs.sign import Sign
from laconic.kernels.reference.reductions import PIECE, pairwise_sum
from laconic.kernels.triton.buckets import FLOAT32_MAX, magnitude_bits, quantization_scale, step_size, tile_shape
from laconic.kernels.triton.counter_hash import rounding_noise_tile, row_factors
from laconic.kernels.triton.launch_args import exact_options
from laconic.kernels.triton.tile import load_tile
from laconic.kernels.triton.tile import pairwise_sum as pairwise_tile_sum
from laconic.kernels.triton.topk_batched import Selector

__all__ = ["Gaps", "RoundTrip", "Selector"]

TILE = 1024
"""Values of a program, unless a bucket has more."""
SQUARES = 4096
"""Values whose squares a program sums: a power of two below ``PIECE``."""
GAPS = 2048


@triton.jit
def _bucket_norms(v, largest, L2: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STAGES: tl.constexpr):
    norm = largest.to(tl.float32, bitcast=True)
    if L2:
        wide = tl.reshape(v.to(tl.float64), (BUCKETS, BUCKET // 16, 16))
        root = tl.sqrt(pairwise_tile_sum(wide * wide, BUCKETS, BUCKET, STAGES)).to(tl.float32)
        norm = tl.minimum(tl.maximum(root, norm), FLOAT32_MAX)
    return norm


@triton.jit
def _qsgd_round_trip(
    x, out, symbols_out, begins, ends, slots, groups, keys, row_factors, norms, amax_bits,
    BITS: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STAGES: tl.constexpr, L2: tl.constexpr,
    STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Quantize a program's buckets as ``kernels.triton.qsgd`` does; with WHOLE a slot has one norm, in ``norms``."""
    span: tl.constexpr = BUCKETS * BUCKET
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    fraction_bits: tl.constexpr = 31 - BITS
    program = tl.program_id(0)
    begin = tl.load(begins + program)
    end = tl.load(ends + program)
    slot = tl.load(slots + program)
    offsets = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    v = load_tile(x, offsets, begin, end, span)
    largest = tl.max(magnitude_bits(v), 1)
    tl.atomic_max(amax_bits + slot, tl.max(largest, 0), sem="relaxed")
    if WHOLE:
        norm = tl.zeros((BUCKETS,), tl.float32) + tl.load(norms + slot)
    else:
        norm = _bucket_norms(v, largest, L2, BUCKET, BUCKETS, STAGES)
    upscale, scale = quantization_scale(norm, levels << fraction_bits, BUCKETS)
    symbols = ((v * upscale[:, None]) * scale[:, None]).to(tl.int32)
    if STOCHASTIC:
        key_low = tl.load(keys + 2 * slot).to(tl.int32)
        key_high = tl.load(keys + 2 * slot + 1).to(tl.int32)
        noise = rounding_noise_tile(tl.load(groups + program), row_factors, key_low, key_high, fraction_bits, span)
        symbols = tl.reshape(tl.reshape(symbols, (span // 256, 32, 8)) + noise, (BUCKETS, BUCKET))
    else:
        symbols += 1 << (fraction_bits - 1)
    symbols = (symbols + (levels << fraction_bits)) >> fraction_bits
    centred = tl.minimum(symbols - levels, levels).to(tl.float32)
    valid = begin + offsets < end
    tl.store(out + begin + offsets, centred * step_size(norm, levels, BUCKETS)[:, None], mask=valid)
    if CODED:
        tl.store(symbols_out + begin + offsets, symbols.to(tl.uint8), mask=valid)


@triton.jit
def _sign_round_trip(
    x, out, symbols_out, begins, ends, slots, amax_bits,
    BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STAGES: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Replace values by the mean magnitude of their bucket with their sign, as ``kernels.triton.sign`` does."""
    span: tl.constexpr = BUCKETS * BUCKET
    program = tl.program_id(0)
    begin = tl.load(begins + program)
    end = tl.load(ends + program)
    row = tl.arange(0, BUCKETS)
    offsets = row[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    v = load_tile(x, offsets, begin, end, span)
    tl.atomic_max(amax_bits + tl.load(slots + program), tl.max(tl.max(magnitude_bits(v), 1), 0), sem="relaxed")
    negative = v.to(tl.int32, bitcast=True) < 0
    scaled = tl.abs(v) * (1.0 / BUCKET)  # before summing, so that a sum of large values does not overflow
    total = pairwise_tile_sum(tl.reshape(scaled, (BUCKETS, BUCKET // 16, 16)), BUCKETS, BUCKET, STAGES)
    size = tl.minimum(end - (begin + row * BUCKET), BUCKET).to(tl.float32)
    mean = total * tl.div_rn(tl.full((BUCKETS,), BUCKET, tl.float32), tl.maximum(size, 1.0))
    mean = tl.minimum(mean, FLOAT32_MAX)[:, None]
    valid = begin + offsets < end
    tl.store(out + begin + offsets, tl.where(negative, mean * -1.0, mean), mask=valid)
    if CODED:
        tl.store(symbols_out + begin + offsets, negative.to(tl.uint8), mask=valid)


@triton.jit
def _square_sums(x, begins, ends, slots, places, sums, amax_bits, SPAN: tl.constexpr, STAGES: tl.constexpr):
    """Sum a tile's squares to one vector of 16, where ``reference.sum_of_squares`` continues with whole vectors."""
    program = tl.program_id(0)
    v = load_tile(x, tl.arange(0, SPAN), tl.load(begins + program), tl.load(ends + program), SPAN)
    tl.atomic_max(amax_bits + tl.load(slots + program), tl.max(magnitude_bits(v), 0), sem="relaxed")
    wide = v.to(tl.float64)
    total = tl.reshape(wide * wide, (SPAN // 16, 16))
    for stage in tl.static_range(STAGES):
        total = tl.sum(tl.reshape(total, (SPAN // (32 << stage), 2, 16)), 1)
    column = tl.arange(0, 16)
    tl.store(sums + tl.load(places + program) * 16 + column, tl.reshape(total, (16,)))


@triton.jit
def _high_sums(positions, begins, ends, slots, firsts, low, totals, NUM: tl.constexpr, SPAN: tl.constexpr):
    """Add up the gaps between a slot's positions without their low bits, for each of three numbers of low bits."""
    program = tl.program_id(0)
    slot = tl.load(slots + program)
    at = tl.load(begins + program) + tl.arange(0, SPAN)
    valid = at < tl.load(ends + program)
    first = tl.load(firsts + 2 * slot)
    before = tl.load(positions + at - 1, mask=valid & (at > first), other=0)
    before = tl.where(at > first, before, tl.load(firsts + 2 * slot + 1) - 1)
    gaps = tl.load(positions + at, mask=valid, other=0) - before - 1
    for candidate in tl.static_range(3):
        high = tl.where(valid, gaps >> tl.load(low + candidate * NUM + slot), 0)
        tl.atomic_add(totals + candidate * NUM + slot, tl.sum(high, 0), sem="relaxed")


class _Tiles:
    """Parts of at most ``span`` values, of which every slot begins a new one, in a flat tensor of all slots."""

    def __init__(self, counts: Sequence[int], span: int, device: torch.device) -> None:
        begins, ends, slots, groups, first = [], [], [], [], 0
        for slot, count in enumerate(counts):
            for at in range(0, count, span):
                begins.append(first + at)
                ends.append(first + count)
                slots.append(slot)
                groups.append(at // 256)
            first += count
        self.begins, self.ends = (torch.tensor(values, dtype=torch.int64, device=device) for values in (begins, ends))
        self.slots, self.groups = (torch.tensor(values, dtype=torch.int32, device=device) for values in (slots, groups))
        self.grid = (len(begins),)


class RoundTrip:
    """What a quantizer's frames of several slots decode to; the slots follow one another in a flat tensor.

    Args:
        counts: Number of values of each slot.
        coded: Whether the symbols are returned, too.
    """

    def __init__(self, counts: Sequence[int], quantizer: QSGD | Sign, device: torch.device, coded: bool) -> None:
        self._counts, self._quantizer, self._device, self._coded = list(counts), quantizer, device, coded
        self._whole = not quantizer.bucket
        self._bucket = quantizer.bucket or TILE
        self._buckets, self._warps = tile_shape(self._bucket, TILE)
        self._tiles = _Tiles(counts, self._bucket * self._buckets, device)
        if self._whole:
            self._squares = _Tiles(counts, SQUARES, device)
            pieces = max(16, 1 << (-(-max(counts) // PIECE) - 1).bit_length())
            self._shape = (len(counts), pieces, PIECE)
            tiles = [-(-count // SQUARES) for count in counts]
            places = [slot * (pieces * PIECE // SQUARES) + i for slot, num in enumerate(tiles) for i in range(num)]
            self._places = torch.tensor(places, dtype=torch.int64, device=device)
        row_factors(device)  # made here, because a CUDA graph cannot hold its copy from the host

    def __call__(self, x: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return decoded values, whether each slot has a value other than zero, and the symbols (uint8).

        Args:
            keys: Two words for each slot, int64 below 2^32; None where nothing is random.
        """
        x, out = x.contiguous(), torch.empty_like(x)
        amax_bits = torch.zeros(len(self._counts), dtype=torch.int32, device=self._device)
        symbols = torch.empty(x.numel() if self._coded else 1, dtype=torch.uint8, device=self._device)
        tiles, quantizer = self._tiles, self._quantizer
        tables = (x, out, symbols, tiles.begins, tiles.ends, tiles.slots)
        options = exact_options(
            BUCKET=self._bucket, BUCKETS=self._buckets, STAGES=self._bucket.bit_length() - 5, CODED=self._coded,
            num_warps=self._warps,
        )  # fmt: skip
        if isinstance(quantizer, Sign):
            _sign_round_trip[tiles.grid](*tables, amax_bits, **options)
        else:
            l2 = quantizer.norm == "l2"
            norms = self._slot_norms(x, l2) if self._whole else x
            _qsgd_round_trip[tiles.grid](
                *tables, tiles.groups, tiles.begins if keys is None else keys, row_factors(self._device), norms,
                amax_bits, BITS=quantizer.bits, L2=l2, STOCHASTIC=keys is not None, WHOLE=self._whole, **options,
            )  # fmt: skip
        return out, amax_bits > 0, symbols if self._coded else None

    def _slot_norms(self, x: Tensor, l2: bool) -> Tensor:
        """Return the norm of each slot, as ``reference.whole_norm`` computes it."""
        slots, pieces, _ = self._shape
        tiles = self._squares
        sums = torch.zeros(slots * pieces * (PIECE // SQUARES), 16, dtype=torch.float64, device=self._device)
        amax_bits = torch.zeros(slots, dtype=torch.int32, device=self._device)
        _square_sums[tiles.grid](
            x, tiles.begins, tiles.ends, tiles.slots, self._places, sums, amax_bits, SPAN=SQUARES,
            STAGES=SQUARES.bit_length() - 5, **exact_options(num_warps=4),
        )  # fmt: skip
        largest = amax_bits.view(torch.float32)
        if not l2:
            return largest
        by_piece = pairwise_sum(sums.view(slots * pieces, -1)).view(slots, pieces)
        root = pairwise_sum(by_piece).sqrt().to(torch.float32)
        return torch.maximum(root, largest).clamp(max=float(torch.finfo(torch.float32).max))


class Gaps:
    """The gaps between the kept positions of each slot, on which the sizes of coded positions depend.

    Args:
        spans: Begin and end of each slot in the flat tensor.
        counts: Number of positions of each slot.
        low: Numbers of low bits by candidate and slot, int64.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], counts: Sequence[int], low: Tensor) -> None:
        self._tiles, self._low = _Tiles(counts, GAPS, low.device), low
        heads = [sum(counts[:slot]) for slot in range(len(counts))]
        firsts = [[head, begin] for head, (begin, _) in zip(heads, spans, strict=True)]
        self._firsts = torch.tensor(firsts, dtype=torch.int64, device=low.device)

    def high_sums(self, positions: Tensor) -> Tensor:
        """Return the sums (int64) of the gaps without their low bits, by candidate and slot."""
        totals, tiles = torch.zeros_like(self._low), self._tiles
        _high_sums[tiles.grid](
            positions, tiles.begins, tiles.ends, tiles.slots, self._firsts, self._low, totals,
            NUM=totals.shape[1], SPAN=GAPS, num_warps=4,
        )  # fmt: skip
        return totals
