"""Quantizers: qsgd, terngrad, uniform, sign, onebit, bins."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels import random
from laconic.kernels.interface import FLOAT32_MAX, NONFINITE, BinCoding, QsgdCoding
from laconic.kernels.reference.packing import pack, pack_trits, unpack, unpack_trits
from laconic.kernels.reference.reductions import (
    PIECE,
    amax_bits_of,
    in_buckets,
    pairwise_sum,
    put,
    read_floats,
    sum_of_squares,
    write_floats,
)
from laconic.kernels.sections import write_bytes


def _bucket_norms(rows: Tensor, l2: bool) -> Tensor:
    largest = rows.abs().amax(1)
    if not l2:
        return largest
    squares = rows.to(torch.float64).square()
    root = pairwise_sum(squares).sqrt().to(torch.float32)
    return torch.maximum(root, largest).clamp(max=FLOAT32_MAX)


def whole_norm(x: Tensor, l2: bool) -> Tensor:
    """Return the one norm of all values, as a tensor of one."""
    largest = x.abs().amax().view(1)
    if not l2:
        return largest
    return torch.maximum(sum_of_squares(x).sqrt().to(torch.float32).view(1), largest).clamp(max=FLOAT32_MAX)


def _stochastic_symbols(rows: Tensor, norms: Tensor, levels: int, fraction_bits: int, noise: Tensor) -> Tensor:
    """Return floor(levels * x / norm + noise) + levels, in fixed point with ``fraction_bits`` fractional bits."""
    tiny = norms < 2.0**-90  # the quotient below would overflow, so such a bucket is scaled up (exactly)
    up = torch.where(tiny, 2.0**64, 1.0).to(torch.float32)
    unit = torch.full_like(norms, float(levels << fraction_bits))  # no copy from the host: a CUDA graph can hold it
    # Slightly too small, so that rounding cannot move the largest value past the top level.
    scale = (unit / (norms * up)) * (1 - 2.0**-22)
    scale = torch.where(norms > 0, scale, 0.0)
    fixed = ((rows * up.unsqueeze(1)) * scale.unsqueeze(1)).to(torch.int32).to(torch.int64)
    return (fixed + noise + (levels << fraction_bits)) >> fraction_bits


def _noise(rows: Tensor, fraction_bits: int, stochastic: bool, seed: int) -> Tensor:
    if not stochastic:
        return torch.tensor(1 << (fraction_bits - 1), dtype=torch.int64, device=rows.device)
    return random.dither(rows.numel(), fraction_bits, random.key(seed, random.ROUNDING), rows.device).view_as(rows)


def _steps(norms: Tensor, levels: int) -> Tensor:
    """Return the distance between levels, slightly reduced where levels * step would overflow."""
    # Divide by a tensor: CUDA multiplies by the reciprocal of a plain number, which rounds differently.
    step = norms / torch.full_like(norms, levels)
    return torch.where(torch.isinf(step * levels), step * (1 - 2.0**-22), step)


def qsgd_encode(x: Tensor, coding: QsgdCoding, *, seed: int, norms: Tensor, packed: Tensor) -> int:
    bits, bucket, l2, stochastic = coding
    amax_bits = amax_bits_of(x)
    if amax_bits >= NONFINITE or x.numel() == 0:
        return amax_bits
    rows = in_buckets(x, bucket or PIECE)
    scale = _bucket_norms(rows, l2) if bucket else whole_norm(x, l2)
    fraction_bits, levels = 31 - bits, (1 << (bits - 1)) - 1
    noise = _noise(rows, fraction_bits, stochastic, seed)
    symbols = _stochastic_symbols(rows, scale, levels, fraction_bits, noise).view(-1)[: x.numel()]
    write_floats(scale, norms)
    pack(symbols, bits, packed)
    return amax_bits


def _dequantize(symbols: Tensor, norms: Tensor, levels: int, bucket: int) -> Tensor:
    centred = (symbols.to(torch.int64) - levels).clamp(max=levels)
    step = _steps(norms, levels).repeat_interleave(bucket or max(1, symbols.numel()))[: symbols.numel()]
    return centred.to(torch.float32) * step


def qsgd_decode(norms: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> None:
    symbols = unpack(packed, out.numel(), bits)
    put(out, _dequantize(symbols, read_floats(norms, "norm"), (1 << (bits - 1)) - 1, bucket), weight)


def qsgd_feedback(x: Tensor, residual: Tensor, coding: QsgdCoding, *, seed: int, norms: Tensor, packed: Tensor) -> int:
    residual.add_(x)
    amax_bits = qsgd_encode(residual, coding, seed=seed, norms=norms, packed=packed)
    if 0 < amax_bits < NONFINITE:
        qsgd_decode(norms, packed, bits=coding.bits, bucket=coding.bucket, out=residual, weight=-1.0)
    return amax_bits


def ternary_encode(x: Tensor, *, bucket: int, seed: int, norms: Tensor, packed: Tensor) -> int:
    amax_bits = amax_bits_of(x)
    if amax_bits >= NONFINITE or x.numel() == 0:
        return amax_bits
    rows = in_buckets(x, bucket)
    scale = _bucket_norms(rows, l2=False)
    symbols = _stochastic_symbols(rows, scale, 1, 29, _noise(rows, 29, True, seed)).view(-1)[: x.numel()]
    write_floats(scale, norms)
    pack_trits(symbols, packed)
    return amax_bits


def ternary_decode(norms: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    if packed.numel() and int(packed.max()) > 242:
        raise FrameError("the frame holds a byte of five ternary values above 242")
    put(out, _dequantize(unpack_trits(packed, out.numel()), read_floats(norms, "norm"), 1, bucket), weight)


def value_range(x: Tensor) -> tuple[float, float, int]:
    amax_bits = amax_bits_of(x)
    if amax_bits >= NONFINITE or x.numel() == 0:
        return 0.0, 0.0, amax_bits
    return float(x.min()), float(x.max()), amax_bits


def uniform_symbols(x: Tensor, low: float, high: float, levels: int) -> Tensor:
    """Return each value's bin over [low, high], in float64, so that no float32 range overflows or vanishes."""
    inverse = levels / (high - low)
    return ((x.to(torch.float64) - low) * inverse).to(torch.int64).clamp(max=levels - 1)


def uniform_encode(x: Tensor, *, levels: int, bounds: Tensor, packed: Tensor) -> tuple[float, float, int]:
    low, high, amax_bits = value_range(x)
    low, high = low + 0.0, high + 0.0  # -0 becomes 0: which of the two is met first depends on the backend
    if 0 < amax_bits < NONFINITE:
        write_bytes(bounds, struct.pack("<2f", low, high))
        if low < high:
            pack(uniform_symbols(x, low, high, levels), (levels - 1).bit_length(), packed)
    return low, high, amax_bits


def uniform_decode(packed: Tensor, *, low: float, high: float, levels: int, out: Tensor, weight: float | None) -> None:
    index = unpack(packed, out.numel(), (levels - 1).bit_length()).clamp(max=levels - 1)
    width = (high - low) / levels
    put(out, (low + (index.to(torch.float64) + 0.5) * width).to(torch.float32), weight)


def sign_encode(x: Tensor, *, bucket: int, scales: Tensor, packed: Tensor) -> int:
    amax_bits = amax_bits_of(x)
    if amax_bits >= NONFINITE or x.numel() == 0:
        return amax_bits
    rows = in_buckets(x, bucket)
    counts = _counts(x.numel(), bucket, x.device)
    total = pairwise_sum(rows.abs() * (1.0 / bucket))  # scaled first, so that a sum of large values does not overflow
    write_floats((total * _quotient(bucket, counts)).clamp(max=FLOAT32_MAX), scales)
    pack((x.view(torch.int32) < 0), 1, packed)
    return amax_bits


def _quotient(a: int, b: Tensor) -> Tensor:
    return torch.full_like(b, a) / b


def _counts(n: int, bucket: int, device: torch.device) -> Tensor:
    counts = torch.full((-(-n // bucket),), bucket, dtype=torch.float32, device=device)
    counts[-1] = n - (counts.numel() - 1) * bucket
    return counts


def sign_decode(scales: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    negative = unpack(packed, out.numel(), 1) == 1
    scale = read_floats(scales, "scale").repeat_interleave(bucket)[: out.numel()]
    put(out, torch.where(negative, -scale, scale), weight)


def onebit_encode(x: Tensor, *, bucket: int, means: Tensor, packed: Tensor) -> int:
    amax_bits = amax_bits_of(x)
    if amax_bits >= NONFINITE or x.numel() == 0:
        return amax_bits
    rows = in_buckets(x, bucket)
    minus = rows.view(torch.int32) < 0
    counts = _counts(x.numel(), bucket, x.device)
    below = minus.sum(1).to(torch.float32)
    above = counts - below
    scaled = rows.abs() * (1.0 / bucket)
    plus_sum = pairwise_sum(torch.where(minus, 0.0, scaled))
    minus_sum = pairwise_sum(torch.where(minus, scaled, 0.0))
    plus = plus_sum * _quotient(bucket, above.clamp(min=1))
    minus_mean = minus_sum * _quotient(bucket, below.clamp(min=1))
    write_floats(torch.stack([plus, minus_mean], 1).view(-1).clamp(max=FLOAT32_MAX), means)
    pack(x.view(torch.int32) < 0, 1, packed)
    return amax_bits


def onebit_decode(means: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    negative = unpack(packed, out.numel(), 1) == 1
    pairs = read_floats(means, "mean").view(-1, 2)
    plus = pairs[:, 0].repeat_interleave(bucket)[: out.numel()]
    minus = pairs[:, 1].repeat_interleave(bucket)[: out.numel()]
    put(out, torch.where(negative, -minus, plus), weight)


def _bin_scales(largest: Tensor) -> Tensor:
    """Return the power of two that keeps sums and squares of a bucket's values in the range of float32."""
    down = torch.where(largest >= 2.0**40, 2.0**-96, 1.0)
    return torch.where(largest < 2.0**-40, 2.0**96, down).to(torch.float32)


def bins_encode(x: Tensor, coding: BinCoding, *, means: Tensor, packed: Tensor) -> int:
    bits, bucket, slope, offset = coding
    amax_bits = amax_bits_of(x)
    if amax_bits >= NONFINITE or x.numel() == 0:
        return amax_bits
    rows = in_buckets(x, bucket)
    counts = _counts(x.numel(), bucket, x.device)
    valid = torch.arange(bucket, device=x.device) < counts.unsqueeze(1)
    scale = _bin_scales(rows.abs().amax(1))
    values = rows * scale.unsqueeze(1)
    centred = torch.where(valid, values - (pairwise_sum(values) / counts).unsqueeze(1), 0.0)
    distance, half = centred.abs(), 1 << (bits - 1)
    mean = pairwise_sum(distance) / counts
    variance = pairwise_sum(distance * distance) / counts - mean * mean
    deviation = variance.clamp(min=0.0).sqrt()
    factor = torch.where(deviation > 0, torch.full_like(deviation, slope) / deviation, 0.0)
    level = (distance - mean.unsqueeze(1)) * factor.unsqueeze(1) + offset
    level = level.clamp(0.0, half - 1).to(torch.int64)
    symbols = torch.where(centred < 0, half - 1 - level, half + level)
    bin_means = []
    for symbol in range(1 << bits):
        inside = valid & (symbols == symbol)
        total = pairwise_sum(torch.where(inside, values, 0.0))
        bin_means.append(total / inside.sum(1).clamp(min=1).to(torch.float32))
    unscaled = torch.stack(bin_means, 1) * (1.0 / scale).unsqueeze(1)
    write_floats((unscaled.clamp(-FLOAT32_MAX, FLOAT32_MAX) + 0.0).view(-1), means)  # -0 becomes 0
    pack(symbols.view(-1)[: x.numel()], bits, packed)
    return amax_bits


def bins_decode(means: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> None:
    symbols = unpack(packed, out.numel(), bits).to(torch.int64)
    first = torch.arange(out.numel(), device=out.device) // bucket << bits  # of the means of a value's bucket
    put(out, read_floats(means, "mean", signed=True)[first + symbols], weight)
