"""The C++ core: the bytes of ``reference``, at the speed of memory.

The core takes addresses, so this file is where tensors are checked. Threads: as many as ``torch.get_num_threads()``.
"""

from __future__ import annotations

import logging
import math
import os
import struct
from typing import Final

import torch
from torch import Tensor

from laconic import _core
from laconic.errors import FrameError, InputError
from laconic.kernels import random, reference
from laconic.kernels.interface import (
    ALL,
    CHUNK,
    GROUP,
    LANE_BLOCK,
    MAX_ALPHABET,
    NONFINITE,
    POSITIONS_HEADER,
    Grid,
    LaneCoding,
    LinearGrid,
    PositionHeader,
    PositionPlan,
    coded_limit,
    lane_values,
    lanes_nbytes,
    num_buckets,
    packed_nbytes,
    read_positions_header,
    read_seed,
    symbol_bits,
    symbol_dtype,
    trits_nbytes,
    write_bytes,
    write_seed,
)
from laconic.kernels.reference.positions import grown
from laconic.kernels.reference.sums import read_floats

log = logging.getLogger("laconic")

_EXPONENT: Final = {
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
}
if os.environ.get("LACONIC_ISA", _core.isa) != _core.isa:
    log.warning("LACONIC_ISA=%s cannot be had here: %s serves", os.environ["LACONIC_ISA"], _core.isa)

_STORE: Final = math.nan
"""The core's word for "store, do not accumulate"."""


def _threads() -> int:
    return torch.get_num_threads()


def _floats(x: Tensor) -> int:
    """Address of a flat float32 tensor."""
    assert x.dtype == torch.float32 and x.dim() == 1 and x.is_contiguous() and x.is_cpu, x
    return x.data_ptr()


def _bytes(section: Tensor, nbytes: int) -> int:
    """Address of a section of exactly so many bytes."""
    assert section.dtype == torch.uint8 and section.is_contiguous() and section.numel() == nbytes, (section, nbytes)
    return section.data_ptr()


def _weight(weight: float | None) -> float:
    return _STORE if weight is None else weight


def _refuse(valid: bool, what: str) -> None:
    if not valid:
        raise FrameError(f"the frame holds {what}")


# ---------------------------------------------------------------------------------------------------------- packing


def pack(symbols: Tensor, bits: int, out: Tensor) -> None:
    symbols = symbols.to(torch.int32).contiguous()
    n = symbols.numel()
    _core.pack(symbols.data_ptr(), n, bits, _bytes(out, packed_nbytes(n, bits)))


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    out = torch.empty(n, dtype=torch.int32)
    _core.unpack(_bytes(packed, packed_nbytes(n, bits)), n, bits, out.data_ptr())
    return out


# ------------------------------------------------------------------------------------------------------------ casts


def all_finite(x: Tensor) -> bool:
    if x.dtype != torch.float32 or not x.is_contiguous() or not x.numel():
        return reference.all_finite(x)
    return _core.largest_key(x.data_ptr(), x.numel(), _threads()) < NONFINITE


def add_momentum(x: Tensor, momentum: float, velocity: Tensor, residual: Tensor) -> None:
    _core.add_momentum(_floats(x), x.numel(), momentum, _floats(velocity), _floats(residual), _threads())


def copy_finite(x: Tensor, out: Tensor) -> bool:
    nbytes = x.numel() * x.element_size()
    if x.dtype not in _EXPONENT:
        return reference.copy_finite(x, out)
    return _core.copy_finite(x.data_ptr(), _bytes(out, nbytes), nbytes, x.element_size(), _EXPONENT[x.dtype])


def raw_decode(section: Tensor, dtype: torch.dtype, out: Tensor, weight: float | None) -> None:
    if dtype not in _EXPONENT or (weight is not None and dtype != torch.float32):
        reference.raw_decode(section, dtype, out, weight)
        return
    nbytes = out.numel() * dtype.itemsize
    if weight is None:
        finite = _core.copy_finite(_bytes(section, nbytes), out.data_ptr(), nbytes, dtype.itemsize, _EXPONENT[dtype])
    else:
        finite = _core.add_raw(_bytes(section, nbytes), _floats(out), out.numel(), weight, _threads())
    _refuse(finite, "a value that is not finite")


def cast_encode(x: Tensor, to: str, out: Tensor) -> tuple[int, int]:
    return _core.cast_encode(_floats(x), x.numel(), to == "fp16", _bytes(out, 2 * x.numel()), _threads())


def cast_decode(section: Tensor, source: str, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    finite = _core.cast_decode(_bytes(section, 2 * n), source == "fp16", _floats(out), n, _weight(weight), _threads())
    _refuse(finite, f"a {source} value that is not finite")


# ------------------------------------------------------------------------------------------------------- quantizers


def qsgd_encode(
    x: Tensor, *, bits: int, bucket: int, l2: bool, stochastic: bool, seed: int, norms: Tensor, packed: Tensor
) -> int:
    n = x.numel()
    return _core.qsgd_encode(
        _floats(x),
        n,
        bits,
        bucket,
        l2,
        stochastic,
        random.key(seed, random.ROUNDING),
        _bytes(norms, 4 * num_buckets(n, bucket)),
        _bytes(packed, packed_nbytes(n, bits)),
        _threads(),
    )


def qsgd_decode(norms: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    valid = _core.qsgd_decode(
        _bytes(norms, 4 * num_buckets(n, bucket)),
        _bytes(packed, packed_nbytes(n, bits)),
        bits,
        bucket,
        _floats(out),
        n,
        _weight(weight),
        _threads(),
    )
    _refuse(valid, "a norm that is not a finite, non-negative number")


def qsgd_feedback(
    x: Tensor,
    residual: Tensor,
    *,
    bits: int,
    bucket: int,
    l2: bool,
    stochastic: bool,
    seed: int,
    norms: Tensor,
    packed: Tensor,
) -> int:
    residual.add_(x)
    key = qsgd_encode(
        residual, bits=bits, bucket=bucket, l2=l2, stochastic=stochastic, seed=seed, norms=norms, packed=packed
    )
    if 0 < key < NONFINITE:
        qsgd_decode(norms, packed, bits=bits, bucket=bucket, out=residual, weight=-1.0)
    return key


def ternary_encode(x: Tensor, *, bucket: int, seed: int, norms: Tensor, packed: Tensor) -> int:
    n = x.numel()
    return _core.ternary_encode(
        _floats(x),
        n,
        bucket,
        random.key(seed, random.ROUNDING),
        _bytes(norms, 4 * num_buckets(n, bucket)),
        _bytes(packed, trits_nbytes(n)),
        _threads(),
    )


def ternary_decode(norms: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    valid = _core.ternary_decode(
        _bytes(norms, 4 * num_buckets(n, bucket)),
        _bytes(packed, trits_nbytes(n)),
        bucket,
        _floats(out),
        n,
        _weight(weight),
        _threads(),
    )
    _refuse(valid, "a byte that is not five ternary values, or a scale that is not a finite, non-negative number")


def value_range(x: Tensor) -> tuple[float, float, int]:
    return _core.value_range(_floats(x), x.numel(), _threads()) if x.numel() else (0.0, 0.0, 0)


def uniform_encode(x: Tensor, *, levels: int, bounds: Tensor, packed: Tensor) -> tuple[float, float, int]:
    low, high, key = value_range(x)
    low, high = low + 0.0, high + 0.0  # whichever of -0 and +0 was met first
    if not 0 < key < NONFINITE:
        return low, high, key
    write_bytes(bounds, struct.pack("<2f", low, high))
    n, bits = x.numel(), (levels - 1).bit_length()
    if low < high:
        _core.uniform_encode(_floats(x), n, low, high, levels, bits, _bytes(packed, packed_nbytes(n, bits)), _threads())
    return low, high, key


def uniform_decode(packed: Tensor, *, low: float, high: float, levels: int, out: Tensor, weight: float | None) -> None:
    n, bits = out.numel(), (levels - 1).bit_length()
    _core.uniform_decode(
        _bytes(packed, packed_nbytes(n, bits)), low, high, levels, bits, _floats(out), n, _weight(weight), _threads()
    )


def sign_encode(x: Tensor, *, bucket: int, scales: Tensor, packed: Tensor) -> int:
    n = x.numel()
    return _core.sign_encode(
        _floats(x),
        n,
        bucket,
        _bytes(scales, 4 * num_buckets(n, bucket)),
        _bytes(packed, packed_nbytes(n, 1)),
        _threads(),
    )


def sign_decode(scales: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    valid = _core.sign_decode(
        _bytes(scales, 4 * num_buckets(n, bucket)),
        _bytes(packed, packed_nbytes(n, 1)),
        bucket,
        _floats(out),
        n,
        _weight(weight),
        _threads(),
    )
    _refuse(valid, "a scale that is not a finite, non-negative number")


def onebit_encode(x: Tensor, *, bucket: int, means: Tensor, packed: Tensor) -> int:
    n = x.numel()
    return _core.onebit_encode(
        _floats(x),
        n,
        bucket,
        _bytes(means, 8 * num_buckets(n, bucket)),
        _bytes(packed, packed_nbytes(n, 1)),
        _threads(),
    )


def onebit_decode(means: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    valid = _core.onebit_decode(
        _bytes(means, 8 * num_buckets(n, bucket)),
        _bytes(packed, packed_nbytes(n, 1)),
        bucket,
        _floats(out),
        n,
        _weight(weight),
        _threads(),
    )
    _refuse(valid, "a mean that is not a finite, non-negative number")


# -------------------------------------------------------------------------------------------------------- selectors


def _index(n: int, count: int) -> tuple[bool, Tensor]:
    """Whether positions need 64 bits, and room for so many."""
    wide = n > 1 << 31
    return wide, torch.empty(count, dtype=torch.int64 if wide else torch.int32)


def _is_wide(positions: Tensor) -> bool:
    assert positions.dtype in (torch.int32, torch.int64) and positions.is_contiguous()
    return positions.dtype == torch.int64


def _as_float32(x: Tensor) -> Tensor:
    """float16 and bfloat16 order the same in float32, exactly."""
    return x if x.dtype == torch.float32 else x.to(torch.float32)


def _key(values: Tensor) -> int:
    return _core.largest_key(values.data_ptr(), values.numel(), _threads()) if values.numel() else 0


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor, int]:
    n = x.numel()
    wide, positions = _index(n, k)
    if x.dtype == torch.float64:
        values = torch.empty(k, dtype=torch.float64)
        _core.topk_double(x.data_ptr(), n, k, wide, positions.data_ptr(), values.data_ptr())
        return positions, values, reference.key_of_any(values)
    flat = _as_float32(x)  # held by name: an address does not keep its tensor alive
    values = torch.empty(k, dtype=torch.float32)
    key = _core.topk(_floats(flat), n, k, wide, positions.data_ptr(), values.data_ptr(), _threads())
    return positions, values if x is flat else values.to(x.dtype), key


def topk_write(x: Tensor, k: int, out: Tensor) -> tuple[int, Tensor, int]:
    positions, values, key = topk(x, k)
    return positions_code(positions, x.numel(), out), values, key


def topk_sampled(x: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor, int]:
    n = x.numel()
    if x.dtype == torch.float64:
        return reference.topk_sampled(x, k, seed)
    flat = _as_float32(x)
    room = 2 * k + 16
    wide, positions = _index(n, room)
    values = torch.empty(room, dtype=torch.float32)
    count = _core.topk_sampled(
        _floats(flat),
        n,
        k,
        random.key(seed, random.SAMPLING),
        wide,
        positions.data_ptr(),
        values.data_ptr(),
        _threads(),
    )
    if count < 0:
        return topk(x, k)
    values = values[:count]
    return positions[:count], values if x is flat else values.to(x.dtype), _key(values)


def above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, int]:
    if x.dtype == torch.float64:
        return reference.above(x, threshold)
    n, flat = x.numel(), _as_float32(x)
    (limit,) = struct.unpack("<I", struct.pack("<f", threshold))
    count = _core.count_above(_floats(flat), n, limit, _threads())
    wide, positions = _index(n, count)
    values = torch.empty(count, dtype=torch.float32)
    found = _core.above(_floats(flat), n, limit, wide, positions.data_ptr(), values.data_ptr(), count)
    if found < count:
        positions, values = positions[:found], values[:found]
    return positions, values if x is flat else values.to(x.dtype), _key(values)


def random_positions(n: int, k: int, seed: int, like: Tensor) -> Tensor:
    wide, positions = _index(n, k)
    if k:
        _core.random_positions(n, k, random.key(seed, random.POSITIONS), wide, positions.data_ptr(), _threads())
    return positions


def draw(x: Tensor, k: int, seed: int, section: Tensor) -> tuple[Tensor, int]:
    write_seed(section, seed)
    key = _key(x) if x.dtype == torch.float32 else reference.key_of_any(x)
    positions = random_positions(x.numel(), k, seed, x)
    values = torch.empty(k, dtype=x.dtype)
    _core.gather(
        x.data_ptr(), x.element_size(), positions.data_ptr(), k, _is_wide(positions), values.data_ptr(), _threads()
    )
    return values, key


# -------------------------------------------------------------------------------------------------------- positions


def positions_plan(positions: Tensor, n: int) -> PositionPlan:
    return PositionPlan(*_core.plan_positions(positions.data_ptr(), positions.numel(), _is_wide(positions), n))


def positions_write(positions: Tensor, n: int, plan: PositionPlan, out: Tensor) -> None:
    mode, low_bits, nbytes = plan
    address, k = positions.data_ptr(), positions.numel()
    _core.write_positions(address, k, _is_wide(positions), mode, low_bits, nbytes, _bytes(out, nbytes))


def positions_code(positions: Tensor, n: int, out: Tensor) -> int:
    plan = positions_plan(positions, n)
    positions_write(positions, n, plan, out[: plan.nbytes])
    return plan.nbytes


def positions_read(section: Tensor, n: int, header: PositionHeader) -> Tensor:
    mode, low_bits, k = header
    wide, positions = _index(n, k)
    if mode == ALL:
        return torch.arange(n, dtype=positions.dtype)
    body, nbytes = section.data_ptr() + POSITIONS_HEADER, section.numel() - POSITIONS_HEADER
    valid = _core.read_positions(body, nbytes, mode, low_bits, k, n, wide, positions.data_ptr())
    _refuse(valid, f"positions that are not {k} ascending ones below {n}")
    return positions


def place(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    header = read_positions_header(section, out.numel())
    if header.kept != values.numel():
        return False
    positions = positions_read(section, out.numel(), header)
    _refuse(all_finite(values), "a value that is not finite")
    scatter(positions, values if weight is None else values.to(torch.float32), out, weight)
    return True


def _grown(values: Tensor, gain: float) -> tuple[Tensor, bool]:
    """Values times a gain, and whether all are finite."""
    if values.dtype != torch.float32 or gain == 1.0:
        return grown(values, gain), all_finite(values)
    out = torch.empty_like(values)
    return out, _core.grow(_floats(values), values.numel(), gain, out.data_ptr())


def place_drawn(section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> None:
    values, finite = _grown(values, gain)
    _refuse(finite, "a value that is not finite")
    positions = random_positions(out.numel(), values.numel(), read_seed(section), out)
    scatter(positions, values if weight is None else values.to(torch.float32), out, weight)


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
    if out.dtype != torch.float32:
        reference.scatter(positions, values, out, weight)
        return
    k = positions.numel()
    assert values.numel() == k
    _core.scatter(
        positions.data_ptr(),
        _floats(values),
        k,
        _is_wide(positions),
        _floats(out),
        out.numel(),
        _weight(weight),
        _threads(),
    )


# --------------------------------------------------------------------------------------------------- linear grids


def linear_encode(x: Tensor, grid: LinearGrid, packed: Tensor) -> None:
    n = x.numel()
    bits = symbol_bits(grid.levels)
    _core.linear_encode(_floats(x), n, *grid, bits, _bytes(packed, packed_nbytes(n, bits)), _threads())


def table_decode(packed: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    n, bits = out.numel(), symbol_bits(table.numel())
    full = reference.full_table(table)  # symbols beyond the last level read as the last
    address = _bytes(packed, packed_nbytes(n, bits))
    _core.table_decode(address, bits, _floats(full), _floats(out), n, _weight(weight), _threads())


def sample(x: Tensor, count: int, seed: int) -> Tensor:
    if count == x.numel():
        return x
    out = torch.empty(count)
    _core.sample(_floats(x), x.numel(), count, random.key(seed, random.SAMPLING), out.data_ptr(), _threads())
    return out


def histogram(x: Tensor, grid: LinearGrid) -> Tensor:
    counts = torch.empty(grid.levels, dtype=torch.int64)
    _core.histogram(_floats(x), x.numel(), *grid, counts.data_ptr(), _threads())
    return counts


def range_histogram(x: Tensor, *, bins: int, zero: bool, count: int, seed: int) -> tuple[float, float, int, list[int]]:
    low, high, key = value_range(x)
    low, high = low + 0.0, high + 0.0  # whichever of -0 and +0 was met first
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high or key >= NONFINITE:
        return low, high, key, []
    return low, high, key, histogram(sample(x, count, seed), LinearGrid.over(low, high, bins)).tolist()


# ---------------------------------------------------------------------------------------------------------- coders


def _symbols(symbols: Tensor, alphabet: int) -> int:
    """Address of ready-made symbols: a byte each where the alphabet fits one, two bytes otherwise."""
    assert symbols.dtype == symbol_dtype(alphabet) and symbols.is_contiguous() and symbols.is_cpu, symbols
    return symbols.data_ptr()


def unpack_symbols(packed: Tensor, n: int, alphabet: int, trits: bool) -> Tensor:
    symbols = torch.empty(n, dtype=symbol_dtype(alphabet))
    nbytes = trits_nbytes(n) if trits else packed_nbytes(n, symbol_bits(alphabet))
    _core.unpack_symbols(_bytes(packed, nbytes), n, alphabet, trits, symbols.data_ptr())
    return symbols


def pack_symbols(symbols: Tensor, alphabet: int, trits: bool, out: Tensor) -> None:
    n = symbols.numel()
    nbytes = trits_nbytes(n) if trits else packed_nbytes(n, symbol_bits(alphabet))
    _core.pack_symbols(_symbols(symbols, alphabet), n, alphabet, trits, _bytes(out, nbytes))


def code_symbols(symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> int:
    n = symbols.numel()
    room = _bytes(out, coded_limit(n, alphabet))
    return _core.code_symbols(_symbols(symbols, alphabet), n, alphabet, coding, room, _threads())


def make_symbols(x: Tensor, grid: Grid) -> Tensor:
    out = torch.empty(x.numel(), dtype=symbol_dtype(grid.levels))
    if isinstance(grid, LinearGrid):
        _core.linear_symbols(_floats(x), x.numel(), *grid, out.data_ptr(), _threads())
    else:
        _core.uniform_symbols(_floats(x), x.numel(), *grid, out.data_ptr(), _threads())
    return out


def code_values(x: Tensor, grid: Grid, coding: int, out: Tensor) -> int:
    n = x.numel()
    room = _bytes(out, coded_limit(n, grid.levels))
    if isinstance(grid, LinearGrid):
        return _core.code_linear(_floats(x), n, *grid, coding, room, _threads())
    return _core.code_uniform(_floats(x), n, *grid, coding, room, _threads())


def decode_symbols(section: Tensor, n: int, alphabet: int) -> Tensor:
    symbols = torch.empty(n, dtype=symbol_dtype(alphabet))
    valid = _core.decode_symbols(section.data_ptr(), section.numel(), n, alphabet, symbols.data_ptr(), _threads())
    _refuse(valid, f"{n} symbols of {alphabet} that no coder wrote")
    return symbols


def decode_values(section: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    n, alphabet, nbytes = out.numel(), table.numel(), section.numel()
    valid = _core.decode_values(
        section.data_ptr(), nbytes, alphabet, _floats(table), _floats(out), n, _weight(weight), _threads()
    )
    _refuse(valid, f"{n} symbols of {alphabet} that no coder wrote")


def coded_modes(section: Tensor, n: int) -> Tensor:
    modes = torch.empty(-(-n // CHUNK), dtype=torch.uint8)
    _refuse(_core.coded_modes(section.data_ptr(), section.numel(), n, modes.data_ptr()), "chunks that do not fit")
    return modes


def huffman_nbytes(counts: Tensor) -> Tensor:
    """Bytes of the coded section of one chunk, for each row of symbol counts (at most 2^19 symbols in all)."""
    if counts.dim() != 2 or not 1 <= counts.shape[1] <= MAX_ALPHABET:
        raise InputError(f"expected counts of [batch, 1 to {MAX_ALPHABET} symbols], got {list(counts.shape)}")
    if counts.numel() and (int(counts.min()) < 0 or int(counts.sum(1).max()) > CHUNK):
        raise InputError(f"expected counts of 0 to {CHUNK} symbols in all")
    rows = counts.to(device="cpu", dtype=torch.int32).contiguous()
    out = torch.empty(rows.shape[0], dtype=torch.int64)
    _core.huffman_nbytes(rows.data_ptr(), rows.shape[0], rows.shape[1], out.data_ptr(), _threads())
    return out


# ------------------------------------------------------------------------------------------------------------ lanes


def block_scales(x: Tensor, rms: bool) -> Tensor:
    scales = torch.empty(num_buckets(x.numel(), LANE_BLOCK), dtype=torch.float32)
    _core.block_scales(_floats(x), x.numel(), rms, scales.data_ptr(), _threads())
    return scales


def rotate(x: Tensor, seed: int, more: Tensor | None, out: Tensor) -> None:
    rotated = lane_values(x.numel(), True)
    assert out.numel() == rotated and (more is None or more.numel() == rotated), (x, more, out)
    add = 0 if more is None else _floats(more)
    _core.rotate_blocks(_floats(x), x.numel(), random.key(seed, random.ROTATION), add, _floats(out), _threads())


def lane_encode(
    x: Tensor,
    coding: LaneCoding,
    *,
    factor: float | None,
    rotation: int | None,
    noise: int | None,
    feedback: bool,
    clips: Tensor,
    out: Tensor,
) -> int:
    n = x.numel()
    assert not (feedback and rotation is not None)
    return _core.lane_encode(
        _floats(x),
        n,
        *coding,
        math.nan if factor is None else factor,
        rotation is not None,
        random.key(rotation or 0, random.ROTATION),
        noise is not None,
        random.key(noise or 0, random.ROUNDING),
        _bytes(clips, 4 * num_buckets(n, LANE_BLOCK)),
        _bytes(out, lanes_nbytes(lane_values(n, rotation is not None), coding)),
        feedback,
        _threads(),
    )


def lane_decode(
    lanes: Tensor,
    clips: Tensor,
    coding: LaneCoding,
    *,
    total: int,
    rotation: int | None,
    out: Tensor,
    weight: float | None,
) -> None:
    n = out.numel()
    valid = _core.lane_decode(
        _bytes(lanes, lanes_nbytes(lane_values(n, rotation is not None), coding)),
        _bytes(clips, 4 * num_buckets(n, LANE_BLOCK)),
        *coding,
        total,
        rotation is not None,
        random.key(rotation or 0, random.ROTATION),
        _floats(out),
        n,
        _weight(weight),
        _threads(),
    )
    _refuse(valid, f"a scale that is not a finite, non-negative number, or a sum above {total}")


def lane_add(other: Tensor, total: Tensor) -> None:
    nbytes = total.numel()
    assert nbytes % 4 == 0
    _core.lane_add(_bytes(other, nbytes), _bytes(total, nbytes), nbytes, _threads())


def lane_accumulate(packed: Tensor, n: int, width: int, lane: int, total: Tensor) -> None:
    room = _bytes(total, num_buckets(n, GROUP) * 32 * lane)
    _core.lane_accumulate(_bytes(packed, packed_nbytes(n, width)), n, width, lane, room, _threads())


def lane_pack(total: Tensor, n: int, lane: int, width: int, out: Tensor) -> None:
    room = _bytes(total, num_buckets(n, GROUP) * 32 * lane)
    _core.lane_pack(room, n, lane, width, _bytes(out, packed_nbytes(n, width)), _threads())


def lane_largest(lanes: Tensor, n: int, coding: LaneCoding) -> int:
    return _core.lane_largest(_bytes(lanes, lanes_nbytes(n, coding)), n, coding.width, coding.packed, _threads())


# --------------------------------------------------------------------------------------------------------- low rank


def project_rows(x: Tensor, q: Tensor) -> Tensor:
    (rows, columns), rank = x.shape, q.shape[0]
    assert q.shape == (rank, columns) and q.is_contiguous() and x.is_contiguous(), (x.shape, q.shape)
    out = torch.empty(rows, rank)
    _core.project_rows(x.data_ptr(), rows, columns, rank, q.data_ptr(), out.data_ptr(), _threads())
    return out


def project_columns(x: Tensor, p: Tensor) -> Tensor:
    (rows, columns), rank = x.shape, p.shape[1]
    assert p.shape == (rows, rank) and p.is_contiguous() and x.is_contiguous(), (x.shape, p.shape)
    out = torch.empty(rank, columns)
    _core.project_columns(x.data_ptr(), rows, columns, rank, p.data_ptr(), out.data_ptr(), _threads())
    return out


def lowrank_decode(
    p: Tensor, q: Tensor, *, rows: int, columns: int, rank: int, out: Tensor, weight: float | None
) -> None:
    assert out.numel() == rows * columns
    for factor in (p, q):
        read_floats(factor, "factor", signed=True)
    _core.lowrank_fill(
        _bytes(p, 4 * rows * rank),
        _bytes(q, 4 * rank * columns),
        rows,
        columns,
        rank,
        _floats(out),
        _weight(weight),
        _threads(),
    )
