"""The truth, in plain torch, on any device: what bytes a codec sends is what these functions write.

Written to be read, in vectors rather than element loops; docs/wire-format.md says the same in words. Sums that decide
bytes have a fixed order (``pairwise_sum``), so that thread count and backend cannot change a frame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels import random
from laconic.kernels.interface import (
    ALL,
    BITMAP,
    GROUP,
    MAX_LOW_BITS,
    NONFINITE,
    POSITIONS_HEADER,
    RICE,
    TRIT_LANES,
    PositionPlan,
    packed_nbytes,
    read_positions_header,
    write_bytes,
)

FLOAT32_MAX = float(torch.finfo(torch.float32).max)
FLOAT16_MAX = 65504.0
BFLOAT16_MAX = float(torch.finfo(torch.bfloat16).max)
SAMPLES = 65536
"""Values looked at by a sampled threshold."""

# --------------------------------------------------------------------------------------------------------- packing


def _bits_to_bytes(bits: Tensor) -> Tensor:
    """0/1 values, least significant first, to bytes."""
    padded = torch.zeros(-(-bits.numel() // 8) * 8, dtype=torch.int32, device=bits.device)
    padded[: bits.numel()] = bits
    weights = 1 << torch.arange(8, dtype=torch.int32, device=bits.device)
    return (padded.view(-1, 8) * weights).sum(1).to(torch.uint8)


def _bytes_to_bits(section: Tensor) -> Tensor:
    return (section.to(torch.int32).unsqueeze(1) >> torch.arange(8, dtype=torch.int32, device=section.device)).view(
        -1
    ) & 1


def pack(symbols: Tensor, bits: int, out: Tensor) -> None:
    """Write n symbols of ``bits`` bits (0 to 31).

    A full group of 256 is 32 rows of 8 lanes; each lane is a bit stream of its 32 values, least significant first, and
    word m of lane i is the group's 32-bit word 8 m + i. The tail is one plain bit stream.
    """
    n = symbols.numel()
    if bits == 0 or n == 0:
        return
    symbols = symbols.to(torch.int64)
    groups = n // GROUP
    if groups:
        rows = symbols[: groups * GROUP].view(groups, 32, 8)
        words = torch.zeros(groups, bits + 1, 8, dtype=torch.int64, device=symbols.device)
        for row in range(32):
            word, shift = divmod(row * bits, 32)
            words[:, word] |= (rows[:, row] << shift) & random.M32
            if shift + bits > 32:
                words[:, word + 1] |= rows[:, row] >> (32 - shift)
        signed = (words[:, :bits] ^ 0x80000000) - 0x80000000
        out[: groups * 32 * bits] = signed.to(torch.int32).contiguous().view(-1).view(torch.uint8)
    tail = symbols[groups * GROUP :]
    if tail.numel():
        each = (tail.unsqueeze(1) >> torch.arange(bits, device=tail.device)) & 1
        out[groups * 32 * bits :] = _bits_to_bytes(each.view(-1))


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    """The symbols back, as int32."""
    out = torch.zeros(n, dtype=torch.int64, device=packed.device)
    if bits == 0 or n == 0:
        return out.to(torch.int32)
    groups = n // GROUP
    mask = (1 << bits) - 1
    if groups:
        words = (
            packed[: groups * 32 * bits].clone().view(torch.int32).view(groups, bits, 8).to(torch.int64) & random.M32
        )
        rows = out[: groups * GROUP].view(groups, 32, 8)
        for row in range(32):
            word, shift = divmod(row * bits, 32)
            value = words[:, word] >> shift
            if shift + bits > 32:
                value = value | (words[:, word + 1] << (32 - shift))
            rows[:, row] = value & mask
    tail = n - groups * GROUP
    if tail:
        stream = _bytes_to_bits(packed[groups * 32 * bits :])[: tail * bits].view(tail, bits).to(torch.int64)
        out[groups * GROUP :] = (stream << torch.arange(bits, device=packed.device)).sum(1)
    return out.to(torch.int32)


def _pack_trits(symbols: Tensor, out: Tensor) -> None:
    """Five values of 0, 1, 2 a byte: in full groups byte i holds i, 64 + i, … 256 + i; in the tail neighbours."""
    n, span = symbols.numel(), 5 * TRIT_LANES
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int64, device=symbols.device)
    full = n // span * span
    grouped = symbols[:full].to(torch.int64).view(-1, 5, TRIT_LANES)
    head = (grouped * powers.view(1, 5, 1)).sum(1).view(-1)
    rest = torch.zeros(-(-(n - full) // 5) * 5, dtype=torch.int64, device=symbols.device)
    rest[: n - full] = symbols[full:]
    out[:] = torch.cat([head, (rest.view(-1, 5) * powers).sum(1)]).to(torch.uint8)


def _unpack_trits(packed: Tensor, n: int) -> Tensor:
    span = 5 * TRIT_LANES
    full = n // span * span
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int64, device=packed.device)
    wide = packed.to(torch.int64)
    head = (wide[: full // 5].view(-1, 1, TRIT_LANES) // powers.view(1, 5, 1) % 3).view(-1)
    tail = (wide[full // 5 :].unsqueeze(1) // powers % 3).view(-1)[: n - full]
    return torch.cat([head, tail])


# ----------------------------------------------------------------------------------------------- sums and magnitudes


def key_of(x: Tensor) -> int:
    """The largest magnitude in a float32 tensor, as a key (see ``interface``)."""
    return int((x.view(torch.int32) & 0x7FFFFFFF).max()) if x.numel() else 0


def _buckets(x: Tensor, bucket: int) -> Tensor:
    """x as rows of one bucket each, the last padded with zeros."""
    rows = -(-x.numel() // bucket)
    padded = torch.zeros(rows * bucket, dtype=x.dtype, device=x.device)
    padded[: x.numel()] = x
    return padded.view(rows, bucket)


def pairwise_sum(x: Tensor) -> Tensor:
    """Sum each row (length a power of two, at least 16) in the order every backend keeps.

    As rows of 16 lanes: neighbouring rows are added until one is left, then the lanes are folded in half four times.
    """
    t = x.view(x.shape[0], -1, 16)
    while t.shape[1] > 1:
        t = t[:, 0::2] + t[:, 1::2]
    t = t[:, 0]
    for lanes in (8, 4, 2, 1):
        t = t[:, :lanes] + t[:, lanes:]
    return t[:, 0]


def _put(out: Tensor, values: Tensor, weight: float | None) -> None:
    if weight is None:
        out.copy_(values)
    else:
        out.add_(values * torch.tensor(weight, dtype=torch.float32, device=out.device))


def _floats(section: Tensor, what: str, *, signed: bool = False) -> Tensor:
    values = section.clone().view(torch.float32)
    if not bool(torch.isfinite(values).all()) or (not signed and bool((values < 0).any())):
        raise FrameError(f"a {what} in the frame is not a finite{'' if signed else ', non-negative'} number")
    return values


def _store_floats(values: Tensor, section: Tensor) -> None:
    section.copy_(values.to(torch.float32).contiguous().view(torch.uint8))


# ------------------------------------------------------------------------------------------------------------ casts


def all_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def copy_finite(x: Tensor, out: Tensor) -> bool:
    """Copy the bytes of x; False when one of its floats is not finite (the copy is then not to be used)."""
    if x.is_floating_point() and not all_finite(x):
        return False
    out.copy_(x.view(torch.uint8))
    return True


def raw_decode(section: Tensor, dtype: torch.dtype, out: Tensor, weight: float | None) -> None:
    """Values as they were: stored into ``out`` of the same dtype, or weighted and added to a float32 one."""
    if dtype == torch.bool and bool((section > 1).any()):
        raise FrameError("a boolean in the frame is neither 0 nor 1")
    values = section.clone().view(dtype)
    if dtype.is_floating_point and not all_finite(values):
        raise FrameError(f"a {str(dtype).removeprefix('torch.')} value in the frame is not finite")
    _put(out, values if weight is None else values.to(torch.float32), weight)


def cast_encode(x: Tensor, to: str, out: Tensor) -> tuple[int, int]:
    """Round float32 to 16 bits, saturating; returns the key and how many values saturated."""
    key = key_of(x)
    limit, dtype = (FLOAT16_MAX, torch.float16) if to == "fp16" else (BFLOAT16_MAX, torch.bfloat16)
    out.copy_(x.clamp(-limit, limit).to(dtype).view(torch.uint8))
    return key, int((x.abs() > limit).sum())


def cast_decode(section: Tensor, source: str, out: Tensor, weight: float | None) -> None:
    values = section.clone().view(torch.float16 if source == "fp16" else torch.bfloat16)
    if not all_finite(values):
        raise FrameError(f"a {source} value in the frame is not finite")
    _put(out, values.to(torch.float32), weight)


# ------------------------------------------------------------------------------------------------------- quantizers


def _bucket_norms(rows: Tensor, l2: bool) -> Tensor:
    largest = rows.abs().amax(1)
    if not l2:
        return largest
    squares = rows.to(torch.float64).square()
    root = pairwise_sum(squares).sqrt().to(torch.float32)
    return torch.maximum(root, largest).clamp(max=FLOAT32_MAX)


def _stochastic_symbols(rows: Tensor, norms: Tensor, levels: int, fraction_bits: int, noise: Tensor) -> Tensor:
    """floor(levels * x / norm + noise) + levels, in fixed point with ``fraction_bits`` bits after the point."""
    tiny = norms < 2.0**-90  # the quotient below would overflow: shift such a bucket up, exactly
    up = torch.where(tiny, 2.0**64, 1.0).to(torch.float32)
    unit = torch.tensor(float(levels << fraction_bits), dtype=torch.float32, device=rows.device)
    # A hair less than exact, so that rounding can never lift the largest value past the top level.
    scale = (unit / (norms * up)) * torch.tensor(1 - 2.0**-22, dtype=torch.float32, device=rows.device)
    scale = torch.where(norms > 0, scale, 0.0)
    fixed = ((rows * up.unsqueeze(1)) * scale.unsqueeze(1)).to(torch.int32).to(torch.int64)
    return (fixed + noise + (levels << fraction_bits)) >> fraction_bits


def _noise(rows: Tensor, fraction_bits: int, stochastic: bool, seed: int) -> Tensor:
    if not stochastic:
        return torch.tensor(1 << (fraction_bits - 1), dtype=torch.int64, device=rows.device)
    return random.dither(rows.numel(), fraction_bits, random.key(seed, random.ROUNDING), rows.device).view_as(rows)


def _steps(norms: Tensor, levels: int) -> Tensor:
    """The distance between levels; a hair less where levels * step would leave float32."""
    # By a tensor: CUDA divides by a plain number as multiplication with its reciprocal, which rounds differently.
    step = norms / torch.full_like(norms, levels)
    return torch.where(torch.isinf(step * levels), step * (1 - 2.0**-22), step)


def qsgd_encode(
    x: Tensor, *, bits: int, bucket: int, l2: bool, stochastic: bool, seed: int, norms: Tensor, packed: Tensor
) -> int:
    key = key_of(x)
    if key >= NONFINITE or x.numel() == 0:
        return key
    rows = _buckets(x, bucket)
    scale = _bucket_norms(rows, l2)
    fraction_bits, levels = 31 - bits, (1 << (bits - 1)) - 1
    noise = _noise(rows, fraction_bits, stochastic, seed)
    symbols = _stochastic_symbols(rows, scale, levels, fraction_bits, noise).view(-1)[: x.numel()]
    _store_floats(scale, norms)
    pack(symbols, bits, packed)
    return key


def _dequantize(symbols: Tensor, norms: Tensor, levels: int, bucket: int) -> Tensor:
    centred = (symbols.to(torch.int64) - levels).clamp(max=levels)
    step = _steps(norms, levels).repeat_interleave(bucket)[: symbols.numel()]
    return centred.to(torch.float32) * step


def qsgd_decode(norms: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> None:
    symbols = unpack(packed, out.numel(), bits)
    _put(out, _dequantize(symbols, _floats(norms, "norm"), (1 << (bits - 1)) - 1, bucket), weight)


def ternary_encode(x: Tensor, *, bucket: int, seed: int, norms: Tensor, packed: Tensor) -> int:
    key = key_of(x)
    if key >= NONFINITE or x.numel() == 0:
        return key
    rows = _buckets(x, bucket)
    scale = _bucket_norms(rows, l2=False)
    symbols = _stochastic_symbols(rows, scale, 1, 29, _noise(rows, 29, True, seed)).view(-1)[: x.numel()]
    _store_floats(scale, norms)
    _pack_trits(symbols, packed)
    return key


def ternary_decode(norms: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    if packed.numel() and int(packed.max()) > 242:
        raise FrameError("a byte of five ternary values is above 242")
    _put(out, _dequantize(_unpack_trits(packed, out.numel()), _floats(norms, "norm"), 1, bucket), weight)


def value_range(x: Tensor) -> tuple[float, float, int]:
    """Smallest and largest value, and the key."""
    key = key_of(x)
    if key >= NONFINITE or x.numel() == 0:
        return 0.0, 0.0, key
    return float(x.min()), float(x.max()), key


def uniform_encode(x: Tensor, *, low: float, high: float, levels: int, packed: Tensor) -> None:
    """Index of the bin of equal width over [low, high], in float64, so that no float32 range overflows or vanishes."""
    inverse = levels / (high - low)
    index = ((x.to(torch.float64) - low) * inverse).to(torch.int64).clamp(max=levels - 1)
    pack(index, (levels - 1).bit_length(), packed)


def uniform_decode(packed: Tensor, *, low: float, high: float, levels: int, out: Tensor, weight: float | None) -> None:
    index = unpack(packed, out.numel(), (levels - 1).bit_length()).clamp(max=levels - 1)
    width = (high - low) / levels
    _put(out, (low + (index.to(torch.float64) + 0.5) * width).to(torch.float32), weight)


def sign_encode(x: Tensor, *, bucket: int, scales: Tensor, packed: Tensor) -> int:
    """Sign bits, and the mean magnitude of each bucket."""
    key = key_of(x)
    if key >= NONFINITE or x.numel() == 0:
        return key
    rows = _buckets(x, bucket)
    counts = _counts(x.numel(), bucket, x.device)
    total = pairwise_sum(rows.abs() * (1.0 / bucket))  # scaled first: a sum of large values must not overflow
    _store_floats((total * _quotient(bucket, counts)).clamp(max=FLOAT32_MAX), scales)
    pack((x.view(torch.int32) < 0), 1, packed)
    return key


def _quotient(a: int, b: Tensor) -> Tensor:
    return torch.full_like(b, a) / b


def _counts(n: int, bucket: int, device: torch.device) -> Tensor:
    counts = torch.full((-(-n // bucket),), bucket, dtype=torch.float32, device=device)
    counts[-1] = n - (counts.numel() - 1) * bucket
    return counts


def sign_decode(scales: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    negative = unpack(packed, out.numel(), 1) == 1
    each = _floats(scales, "scale").repeat_interleave(bucket)[: out.numel()]
    _put(out, torch.where(negative, -each, each), weight)


def onebit_encode(x: Tensor, *, bucket: int, means: Tensor, packed: Tensor) -> int:
    """Sign bits, and per bucket the mean of its non-negative and of its negative values (two numbers)."""
    key = key_of(x)
    if key >= NONFINITE or x.numel() == 0:
        return key
    rows = _buckets(x, bucket)
    minus = rows.view(torch.int32) < 0
    counts = _counts(x.numel(), bucket, x.device)
    below = minus.sum(1).to(torch.float32)
    above = counts - below
    scaled = rows.abs() * (1.0 / bucket)
    plus_sum = pairwise_sum(torch.where(minus, 0.0, scaled))
    minus_sum = pairwise_sum(torch.where(minus, scaled, 0.0))
    plus = plus_sum * _quotient(bucket, above.clamp(min=1))
    minus_mean = minus_sum * _quotient(bucket, below.clamp(min=1))
    _store_floats(torch.stack([plus, minus_mean], 1).view(-1).clamp(max=FLOAT32_MAX), means)
    pack(x.view(torch.int32) < 0, 1, packed)
    return key


def onebit_decode(means: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    negative = unpack(packed, out.numel(), 1) == 1
    pairs = _floats(means, "mean").view(-1, 2)
    plus = pairs[:, 0].repeat_interleave(bucket)[: out.numel()]
    minus = pairs[:, 1].repeat_interleave(bucket)[: out.numel()]
    _put(out, torch.where(negative, -minus, plus), weight)


# -------------------------------------------------------------------------------------------------------- selectors


def _magnitudes(x: Tensor) -> Tensor:
    """Order-preserving integers: the bits of |x|. (bf16 and fp16 take the road over float32, which is exact.)"""
    if x.dtype == torch.float64:
        return x.view(torch.int64) & 0x7FFFFFFFFFFFFFFF
    return x.to(torch.float32).view(torch.int32) & 0x7FFFFFFF


def key_of_any(x: Tensor) -> int:
    """The key of a tensor of any float dtype; a float64 beyond float32 stays finite here."""
    if not x.numel():
        return 0
    if not all_finite(x):
        return NONFINITE
    largest = float(x.abs().max())
    if largest == 0.0:
        return 0
    nearest = torch.tensor(min(max(largest, 2.0**-149), FLOAT32_MAX), dtype=torch.float32)
    return int(nearest.view(torch.int32))


def _index_dtype(n: int) -> torch.dtype:
    return torch.int32 if n <= 1 << 31 else torch.int64


def _selected(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, int]:
    values = x[positions]
    return positions.to(_index_dtype(x.numel())), values, key_of_any(values)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor, int]:
    """Positions (ascending) and values of the k entries of largest magnitude; of equal ones the lowest index wins.

    The returned key is that of the values: they hold the largest magnitude of all, and any value that is not finite.
    """
    order = torch.sort(_magnitudes(x), descending=True, stable=True).indices[:k]
    return _selected(x, order.sort().values)


def topk_sampled(x: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor, int]:
    """About k entries: all that reach the k/n quantile of 65,536 sampled magnitudes; exact where that goes astray."""
    n = x.numel()
    if n <= SAMPLES:
        return topk(x, k)
    slot = torch.arange(SAMPLES, dtype=torch.int64, device=x.device)
    start = slot * n // SAMPLES
    span = (slot + 1) * n // SAMPLES - start
    noise = random.hash32(slot, random.key(seed, random.SAMPLING))
    magnitudes = _magnitudes(x)
    sampled = magnitudes[start + (noise * span >> 32)]
    rank = max(1, min(SAMPLES, (k * SAMPLES + n // 2) // n))
    threshold = sampled.sort(descending=True).values[rank - 1]
    positions = torch.nonzero(magnitudes >= threshold).view(-1)
    if int(threshold) == 0 or positions.numel() > 2 * k + 16:
        return topk(x, k)
    return _selected(x, positions)


def above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, int]:
    """All entries of magnitude at least ``threshold`` (rounded to the tensor's precision)."""
    limit = torch.tensor([threshold], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    at_least = _magnitudes(x) >= _magnitudes(limit).to(x.device)
    return _selected(x, torch.nonzero(at_least).view(-1))


def random_positions(n: int, k: int, seed: int, like: Tensor) -> Tensor:
    """k of n positions, ascending: those with the smallest hash, the lower index first where hashes are equal."""
    hashes = random.hash32(torch.arange(n, dtype=torch.int64, device=like.device), random.key(seed, random.POSITIONS))
    order = torch.sort(hashes, stable=True).indices[:k]
    return order.sort().values.to(_index_dtype(n))


def gather(x: Tensor, positions: Tensor) -> tuple[Tensor, int]:
    """The values there, and the key of all of x: what is not sent must be finite, too."""
    return x[positions.long()], key_of_any(x)


# -------------------------------------------------------------------------------------------------------- positions


def _gaps(positions: Tensor) -> Tensor:
    wide = positions.to(torch.int64)
    previous = torch.cat([torch.full((1,), -1, dtype=torch.int64, device=wide.device), wide[:-1]])
    return wide - previous - 1


def low_bits_candidates(n: int, k: int) -> list[int]:
    """Rice parameters worth trying: around log2(0.69 n / k), where a geometric gap is coded best."""
    middle = min(MAX_LOW_BITS, max(1, 69 * n // (100 * k)).bit_length() - 1)
    return [r for r in (middle - 1, middle, middle + 1) if 0 <= r <= MAX_LOW_BITS]


def positions_plan(positions: Tensor, n: int) -> PositionPlan:
    """The smaller of Rice-coded gaps and a bitmap; of several Rice parameters the first that is smallest."""
    k = positions.numel()
    if k == n:
        return PositionPlan(ALL, 0, POSITIONS_HEADER)
    gaps = _gaps(positions)
    plans = []
    for low_bits in low_bits_candidates(n, k):
        unary = k + int((gaps >> low_bits).sum())
        nbytes = POSITIONS_HEADER + packed_nbytes(k, low_bits) + -(-unary // 8)
        plans.append(PositionPlan(RICE, low_bits, nbytes))
    plans.append(PositionPlan(BITMAP, 0, POSITIONS_HEADER + -(-n // 8)))
    return min(plans, key=lambda plan: plan.nbytes)


def positions_write(positions: Tensor, n: int, plan: PositionPlan, out: Tensor) -> None:
    """Header (mode, Rice parameter, count), then the low bits of the gaps, then their high parts in unary."""
    k = positions.numel()
    header = plan.mode | plan.low_bits << 8 | k << 16
    write_bytes(out[:8], header.to_bytes(8, "little"))
    if plan.mode == BITMAP:
        bits = torch.zeros(n, dtype=torch.int32, device=out.device)
        bits[positions.long()] = 1
        out[8:] = _bits_to_bytes(bits)
    elif plan.mode == RICE:
        gaps = _gaps(positions)
        low_end = 8 + packed_nbytes(k, plan.low_bits)
        pack(gaps & ((1 << plan.low_bits) - 1), plan.low_bits, out[8:low_end])
        ends = ((gaps >> plan.low_bits) + 1).cumsum(0) - 1
        bits = torch.zeros(int(ends[-1]) + 1, dtype=torch.int32, device=out.device)
        bits[ends] = 1
        out[low_end:] = _bits_to_bytes(bits)


def positions_read(section: Tensor, n: int) -> Tensor:
    mode, low_bits, k = read_positions_header(section, n)
    dtype = _index_dtype(n)
    if mode == ALL:
        return torch.arange(n, dtype=dtype, device=section.device)
    if mode == BITMAP:
        bits = _bytes_to_bits(section[8:])
        positions = torch.nonzero(bits).view(-1)
        if positions.numel() != k or (k and int(positions[-1]) >= n):
            raise FrameError(f"a bitmap of {n} positions promises {k} and marks {positions.numel()}")
        return positions.to(dtype)
    low_end = 8 + packed_nbytes(k, low_bits)
    ends = torch.nonzero(_bytes_to_bits(section[low_end:])).view(-1)
    if ends.numel() != k or int(ends[-1]) < (section.numel() - low_end - 1) * 8:
        raise FrameError(f"coded positions promise {k} and hold {ends.numel()}")
    high = torch.cat([ends[:1], ends[1:] - ends[:-1] - 1])
    gaps = (high << low_bits) | unpack(section[8:low_end], k, low_bits).to(torch.int64)
    positions = (gaps + 1).cumsum(0) - 1
    if int(positions[-1]) >= n:
        raise FrameError(f"a coded position is {int(positions[-1])}, past the end of {n} values")
    return positions.to(dtype)


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
    """Values at their positions and zeros elsewhere; with a weight, added to what is there."""
    where = positions.long()
    if weight is None:
        out.zero_()
        out[where] = values
    else:
        factor = torch.tensor(weight, dtype=torch.float32, device=out.device)
        out[where] = out[where] + values * factor
