"""``adaptive``: the number of levels follows from the entropy of the values."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic import counters
from laconic._core import level_table
from laconic.codecs import checks
from laconic.codecs.base import PackedSymbols, Quantizer, SymbolReader, Symbols, add_weighted, require_finite
from laconic.codecs.positional import encode_positions
from laconic.errors import FrameError, InputError
from laconic.kernels.interface import FLOAT32_MAX, Kernels, LinearGrid, nearest_float32, safe_prescale
from laconic.kernels.reference import pairwise_sum
from laconic.kernels.sections import (
    MAX_ALPHABET,
    POSITIONS_HEADER,
    packed_nbytes,
    read_bytes,
    read_positions_header,
    symbol_bits,
    write_bytes,
)
from laconic.packet import Arena

__all__ = ["Adaptive"]

_HEADER = 16
_MIN_SAMPLE = 1024


def _next_up(value: float) -> float:
    """Return the next float32 above a non-negative float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<I", bits + 1))[0])


def _sum_of_squares(x: Tensor) -> float:
    """Return the sum of squares in float64 and in a fixed order, so that every device computes the same levels."""
    values = x.reshape(-1).to(torch.float64).square()
    while values.numel() > 1:
        values = pairwise_sum(torch.nn.functional.pad(values, (0, -values.numel() % 1024)).view(-1, 1024))
    return float(values)


class Levels(NamedTuple):
    """The bins of a packet: ``num_levels`` bins of [first, second], or multiples of a step.

    The fields are those of the packet's header.
    """

    first: float
    """The lower end of the range; or the step."""
    second: float | int
    """The upper end of the range; or the first multiple."""
    num_levels: int
    measure: float
    """What the count was computed from: an entropy in bits, or the RMS of the gradient."""
    zero: bool
    """Whether levels are multiples of a step, so that zero is a level."""

    def to_bytes(self) -> bytes:
        return struct.pack("<fiIf" if self.zero else "<ffIf", *self[:4])

    @classmethod
    def from_bytes(cls, header: bytes, zero: bool) -> Levels:
        first, second, count, measure = struct.unpack("<fiIf" if zero else "<ffIf", header)
        if not (math.isfinite(first) and math.isfinite(second) and math.isfinite(measure)):
            raise FrameError("an adaptive header must be finite")
        if not 1 <= count <= MAX_ALPHABET:
            raise FrameError(f"an adaptive header must declare 1 to {MAX_ALPHABET} levels, got {count}")
        if zero:
            outermost = max(abs(second), abs(second + count - 1))
            # The outermost centre may be half a step beyond the largest value; it is then clamped to float32's range.
            if outermost > MAX_ALPHABET or abs(first) * (outermost - 1) > FLOAT32_MAX:
                raise FrameError(f"{count} multiples of {first}, starting with {second}, are out of range")
        elif first > second or (first < second) == (count == 1):
            raise FrameError(f"the range [{first}, {second}] cannot have {count} levels")
        return cls(first, second, count, measure, zero)

    def grid(self) -> LinearGrid:
        if self.zero:
            step = self.first
            pre = safe_prescale(step * self.num_levels)
            base, inverse = nearest_float32((self.second - 0.5) * step * pre), nearest_float32(1 / (step * pre))
            return LinearGrid(pre, base, inverse, self.num_levels)
        return LinearGrid.over(self.first, self.second, self.num_levels)

    def table(self) -> Tensor:
        """Return the value of each level."""
        table = torch.empty(self.num_levels, dtype=torch.float32)
        if self.zero:
            level_table(self.num_levels, None, self.second, self.first, table.data_ptr())
        else:
            width = (self.second - self.first) / self.num_levels
            level_table(self.num_levels, self.first, 0.5, width, table.data_ptr())
        return table


@dataclass(frozen=True)
class Adaptive(Quantizer):
    """2^(H + c) bins of equal width over [min, max], decoded to their centres; H is the entropy of the values.

    Øland and Raj 2015: H is the entropy in bits of a coarse histogram, of 2^m bins, of a random sample of the layer.
    Bins are counted from the smallest value, the largest value belongs to the last bin, and the number of levels need
    not be a power of two: with a coder (``|huffman``) fractions of bits cost nothing.

    A few large values widen every bin until nearly all values fall into the bin around zero. Its centre is not zero, so
    they all decode with the same error: ``zero=true`` makes zero a level, at the same size.

    Args:
        c: Bits beyond the entropy.
        m: The coarse histogram has 2^m bins.
        f: Fraction of the values in its sample (at least 1,024 values).
        integer: Round the bits up to an integer, as a sender without a coder must.
        by: ``entropy``; or ``grad``: (G + c0) 2^c levels, where G is the RMS of the gradient passed to ``encode``.
        c0: Added to G.
        zero: Zero is the centre of a bin.
        tail: Fraction of the values, those of largest magnitude, that are sent exactly; bins cover the other values.
    """

    c: float = 5.0
    m: int = 4
    f: float = 0.03
    integer: bool = False
    by: str = "entropy"
    c0: float = 1.0
    zero: bool = False
    tail: float = 0.0

    fixed_size = False
    name, example = "adaptive", "adaptive:5.0|huffman"
    summary = "min-max bins; the entropy sets how many"
    biased = "decodes to the bin's centre"

    def __post_init__(self) -> None:
        checks.between(self, "c", 0.0, 12.0)
        checks.integer(self, "m", 1, 12)
        checks.fraction(self, "f")
        checks.one_of(self, "by", ("entropy", "grad"))
        checks.between(self, "c0", 0.0, 1e6)
        checks.between(self, "tail", 0.0, 0.1)

    @property
    def num_sections(self) -> int:  # type: ignore[override]
        return 4 if self.tail else 2

    @property
    def max_alphabet(self) -> int:
        return MAX_ALPHABET

    @property
    def randomized(self) -> bool:
        return self.f < 1.0

    @property
    def contractive(self) -> bool:
        # The outliers of a gradient leave nearly all values in one bin, whose centre is not zero.
        return self.zero

    @property
    def needs_gradient(self) -> bool:
        return self.by == "grad"

    # ------------------------------------------------------------------------------------------------------ encode

    def with_gradient(self, gradient: Tensor | None) -> Adaptive:
        if gradient is None:
            raise InputError("adaptive:by=grad needs the gradient: encode(x, spec, gradient=g)")
        if not isinstance(gradient, Tensor) or not gradient.is_floating_point():
            got = gradient.dtype if isinstance(gradient, Tensor) else type(gradient).__name__
            raise InputError(f"adaptive:by=grad needs a gradient of floats, got {got}")
        if not gradient.numel():
            raise InputError("adaptive:by=grad needs a gradient with values, got an empty one")
        rms = math.sqrt(_sum_of_squares(gradient.detach()) / gradient.numel())
        if not math.isfinite(rms):
            raise InputError("adaptive:by=grad needs a finite gradient")
        return _WithGradient(**{field.name: getattr(self, field.name) for field in fields(self)}, rms=rms)

    def _measure(self, counts: list[int]) -> tuple[float, float]:
        """Return the entropy of the coarse histogram (or the RMS of the gradient) and the number of levels for it."""
        total = sum(counts)
        entropy = math.log2(total) - math.fsum(count * math.log2(count) for count in counts if count) / total
        entropy = max(0.0, entropy)
        bits = math.ceil(entropy + self.c) if self.integer else entropy + self.c
        return entropy, 2.0**bits

    def _sample_size(self, n: int) -> int:
        return min(n, max(_MIN_SAMPLE, math.ceil(self.f * n)))

    def _levels(self, low: float, high: float, counts: list[int]) -> Levels:
        if low == high:
            return Levels(low, 1, 1, 0.0, True) if self.zero else Levels(low, high, 1, 0.0, False)
        measure, target = self._measure(counts)
        most = MAX_ALPHABET - 2 if self.zero else MAX_ALPHABET
        count = max(2, min(math.floor(target + 0.5), most))
        if target >= most + 0.5:
            counters.count("levels", 1, f"adaptive is limited to {most} levels: lower c")
        if not self.zero:
            return Levels(low, high, count, nearest_float32(measure), False)
        step = nearest_float32((high - low) / count)
        if step * count < high - low:  # rounded down (by a third for subnormals), which would give too many multiples
            step = _next_up(step)
        first, last = math.floor(low / step + 0.5), math.floor(high / step + 0.5)
        return Levels(step, first, last - first + 1, nearest_float32(measure), True)

    def to_symbols(
        self, x: Tensor, kernels: Kernels, arena: Arena, seed: int
    ) -> tuple[tuple[Tensor, ...], Symbols | None] | None:
        size, bins = self._sample_size(x.numel()), 1 << self.m
        counts: list[int] = []
        if self.tail or self.by == "grad":
            low, high, amax_bits = kernels.value_range(x)
            low, high = low + 0.0, high + 0.0  # -0 becomes +0
        else:
            low, high, amax_bits, counts = kernels.range_histogram(x, bins=bins, zero=self.zero, count=size, seed=seed)
        require_finite(amax_bits, x.numel())
        if amax_bits == 0:
            return None
        header = arena.take(_HEADER)
        tail: tuple[Tensor, ...] = ()
        if self.tail:
            low, high, tail = self._encode_tail(x, low, high, kernels, arena, seed)
        if self.zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if low < high and self.tail:
            counts = kernels.histogram(kernels.sample(x, size, seed), LinearGrid.over(low, high, bins)).tolist()
        levels = self._levels(low, high, counts)
        write_bytes(header, levels.to_bytes())
        symbols = Symbols(levels.num_levels, x, levels.grid()) if levels.num_levels > 1 else None
        return (header, *tail), symbols

    def _encode_tail(
        self, x: Tensor, low: float, high: float, kernels: Kernels, arena: Arena, seed: int
    ) -> tuple[float, float, tuple[Tensor, ...]]:
        """Return the range without the tail, and the two sections of the tail: positions and values."""
        n = x.numel()
        sample = kernels.sample(x, self._sample_size(n), seed).abs()
        rank = min(sample.numel(), max(1, math.floor(self.tail * sample.numel() + 0.5)))
        limit = float(sample.topk(rank).values[-1])
        beyond = _next_up(limit)
        positions, values, _ = (
            kernels.threshold_select(x, beyond) if math.isfinite(beyond) else kernels.threshold_select(x[:0], 1.0)
        )
        if positions.numel() > self._max_tail(n):
            counters.count(
                "tail", 1, "adaptive: far more values than tail= exceed the sampled range: none is sent exactly"
            )
            positions, values, limit = positions[:0], values[:0], max(-low, high)
        low, high = max(low, -limit) + 0.0, min(high, limit) + 0.0  # -0 becomes +0
        if not positions.numel():
            return low, high, (arena.take(0), arena.take(0))
        section = encode_positions(positions, n, kernels, arena)
        exact = arena.take(4 * values.numel())
        exact.copy_(values.view(torch.uint8))
        return low, high, (section, exact)

    def _max_tail(self, n: int) -> int:
        return min(n, max(64, math.ceil(4 * self.tail * n)))

    def pack(self, x: Tensor, symbols: Symbols, kernels: Kernels, packed: Tensor) -> None:
        assert isinstance(symbols.grid, LinearGrid)
        kernels.linear_encode(x, symbols.grid, packed)  # one pass: symbols are not materialized

    # ------------------------------------------------------------------------------------------------------ decode

    def from_symbols(
        self, side: tuple[Tensor, ...], reader: SymbolReader | None, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        levels = self._levels_of(side)
        if (reader is None) != (levels.num_levels == 1):
            raise FrameError(f"{levels.num_levels} levels need {'symbols' if reader is None else 'no symbols'}")
        if not self.tail or not side[1].numel():
            _decode_levels(levels, reader, kernels, out, weight)
            return
        n = out.numel()
        header = read_positions_header(side[1], n)
        if side[2].numel() != 4 * header.kept:
            raise FrameError(f"{header.kept} values of the tail take {4 * header.kept} bytes, not {side[2].numel()}")
        positions = kernels.positions_decode(side[1], n, header).long()
        values = torch.empty(positions.numel(), dtype=torch.float32, device=out.device)
        kernels.raw_decode(side[2], torch.float32, values, None)
        # A value of the tail replaces its symbol; with a weight, it is added to what was in ``out`` before.
        if weight is not None:
            values = out[positions] + values * torch.tensor(weight, dtype=torch.float32, device=out.device)
        _decode_levels(levels, reader, kernels, out, weight)
        out[positions] = values

    def _levels_of(self, side: tuple[Tensor, ...]) -> Levels:
        return Levels.from_bytes(read_bytes(side[0], _HEADER), self.zero)

    def alphabet(self, side: tuple[Tensor, ...]) -> int:
        return self._levels_of(side).num_levels

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        tail = (POSITIONS_HEADER + -(-n // 8), 4 * self._max_tail(n)) if self.tail else ()
        return (_HEADER, *tail, packed_nbytes(n, symbol_bits(MAX_ALPHABET)))

    def accepts(self, section_nbytes: tuple[int, ...], n: int, itemsize: int) -> bool:
        header, *tail, packed = section_nbytes
        if tail:
            positions, values = tail
            if values % 4 or values // 4 > self._max_tail(n) or (positions == 0) != (values == 0):
                return False
        return header == _HEADER and packed <= packed_nbytes(n, symbol_bits(MAX_ALPHABET))

    def describe(self, side: tuple[Tensor, ...], n: int) -> dict[str, Any]:
        levels = self._levels_of(side)
        details: dict[str, Any] = {"levels": levels.num_levels, "bits_wanted": math.log2(levels.num_levels)}
        details["gradient_rms" if self.needs_gradient else "entropy_estimate"] = levels.measure
        table = levels.table()
        details |= {"lowest_level": float(table[0]), "highest_level": float(table[-1])}
        if self.tail:
            details["apart"] = read_positions_header(side[1], n).kept if side[1].numel() else 0
        return details


@dataclass(frozen=True)
class _WithGradient(Adaptive):
    """``adaptive:by=grad`` for one gradient."""

    rms: float = 0.0

    def _measure(self, counts: list[int]) -> tuple[float, float]:
        target = (self.rms + self.c0) * 2.0**self.c
        return self.rms, 2.0 ** math.ceil(math.log2(max(target, 1.0))) if self.integer else target


def _decode_levels(
    levels: Levels, reader: SymbolReader | None, kernels: Kernels, out: Tensor, weight: float | None
) -> None:
    if isinstance(reader, PackedSymbols) and not (reader.packed.is_cpu or levels.zero):
        # On a device the levels of a range are computed: a table would have to be copied there first.
        reader.check(out.numel(), levels.num_levels)
        kernels.uniform_decode(
            reader.packed, low=levels.first, high=levels.second, levels=levels.num_levels, out=out, weight=weight
        )
    elif reader is not None:
        reader.values(levels.table(), out, weight)
    else:
        add_weighted(levels.table()[0], out, weight)
