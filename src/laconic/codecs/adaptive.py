"""``adaptive``: as many levels as the entropy of the values asks for."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from laconic import counters
from laconic.codecs import checks
from laconic.codecs.base import Quantizer, SymbolReader, Symbols, refuse_nonfinite
from laconic.codecs.positional import coded_positions
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
_LEAST_SAMPLE = 1024


def _next_up(value: float) -> float:
    """The next float32 above a float32 that is not negative."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<I", bits + 1))[0])


def _sum_of_squares(x: Tensor) -> float:
    """In float64 and in a fixed order, so that the levels it leads to are the same everywhere."""
    values = x.reshape(-1).to(torch.float64).square()
    while values.numel() > 1:
        values = pairwise_sum(torch.nn.functional.pad(values, (0, -values.numel() % 1024)).view(-1, 1024))
    return float(values)


class Levels(NamedTuple):
    """A packet's bins, as its header says: of [low, high], or multiples of a step from ``first`` on."""

    origin: float
    """The lower end, or the step."""
    other: float | int
    """The upper end, or the first multiple."""
    number: int
    measure: float
    """What the count came from: an entropy in bits, or the RMS of a derivative."""
    zero: bool

    def to_bytes(self) -> bytes:
        return struct.pack("<fiIf" if self.zero else "<ffIf", *self[:4])

    @classmethod
    def of(cls, header: bytes, zero: bool) -> Levels:
        origin, other, number, measure = struct.unpack("<fiIf" if zero else "<ffIf", header)
        levels = cls(origin, other, number, measure, zero)
        if not (math.isfinite(levels.origin) and math.isfinite(levels.other) and math.isfinite(levels.measure)):
            raise FrameError("an adaptive header must be finite")
        if not 1 <= levels.number <= MAX_ALPHABET:
            raise FrameError(f"an adaptive header speaks of {levels.number} levels, 1 to {MAX_ALPHABET} are allowed")
        if zero:
            first = int(levels.other)
            farthest = max(abs(first), abs(first + levels.number - 1))
            # The outermost centre may lie half a step beyond the largest value, which is then cut to float32's range.
            if farthest > MAX_ALPHABET or abs(levels.origin) * (farthest - 1) > FLOAT32_MAX:
                raise FrameError(
                    f"{levels.number} multiples of {levels.origin} from {levels.other} on are out of range"
                )
        elif levels.origin > levels.other or (levels.origin < levels.other) == (levels.number == 1):
            raise FrameError(f"{levels.number} levels do not go with the range [{levels.origin}, {levels.other}]")
        return levels

    def grid(self) -> LinearGrid:
        if self.zero:
            step, first = self.origin, int(self.other)
            pre = safe_prescale(step * self.number)
            base, inverse = nearest_float32((first - 0.5) * step * pre), nearest_float32(1 / (step * pre))
            return LinearGrid(pre, base, inverse, self.number)
        return LinearGrid.over(self.origin, self.other, self.number)

    def table(self) -> Tensor:
        """The value of each level."""
        level = torch.arange(self.number, dtype=torch.float64)
        if self.zero:
            values = (level + self.other) * self.origin
        else:
            values = self.origin + (level + 0.5) * ((self.other - self.origin) / self.number)
        return values.clamp(-FLOAT32_MAX, FLOAT32_MAX).to(torch.float32)


@dataclass(frozen=True)
class Adaptive(Quantizer):
    """Bins of equal width over [min, max], decoded to their centres: 2^(H + c) of them, H the values' own entropy.

    Øland and Raj 2015: H is the entropy in bits of a rough histogram, of 2^m bins, over a random part of the layer.
    Counting is from the smallest value up, the top value belongs to the last bin, and the number of levels need not be
    a power of two: a coder behind (``|huffman``) makes fractions of bits free.

    Few large values widen every bin until nearly all values share the one around zero. Its centre is not zero, so all
    of them come back moved by the same amount: ``zero=true`` puts a centre there, for the same bits.

    Args:
        c: Bits beyond the entropy.
        m: The rough histogram has 2^m bins.
        f: Fraction of the values it looks at (at least 1,024 of them).
        integer: Round the bits up to a whole number, as a sender without a coder must.
        by: ``entropy``, or ``grad``: (G + c0) 2^c levels, where G is the RMS of the gradient that ``encode`` is given.
        c0: The floor of G.
        zero: Zero is the centre of a bin.
        tail: Fraction of the values, those of largest magnitude, that travel apart and exactly; bins cover the rest.
    """

    c: float = 5.0
    m: int = 4
    f: float = 0.03
    integer: bool = False
    by: str = "entropy"
    c0: float = 1.0
    zero: bool = False
    tail: float = 0.0

    name: ClassVar[str] = "adaptive"
    summary: ClassVar[str] = "min-max bins, as many as the entropy asks for"
    example: ClassVar[str] = "adaptive:5.0|huffman"
    biased: ClassVar[bool | str] = "decodes to the bin's centre"

    def __post_init__(self) -> None:
        checks.between(self, "c", 0.0, 12.0)
        checks.whole(self.name, "m", self.m, 1, 12)
        checks.fraction(self, "f")
        checks.one_of(self.name, "by", self.by, ("entropy", "grad"))
        checks.between(self, "c0", 0.0, 1e6)
        checks.between(self, "tail", 0.0, 0.1)

    @property
    def num_sections(self) -> int:  # type: ignore[override]
        return 4 if self.tail else 2

    @property
    def max_alphabet(self) -> int:
        return MAX_ALPHABET

    @property
    def contractive(self) -> bool:
        # Gradients have outliers that leave nearly all values in one bin, and its centre away from them.
        return self.zero

    # ------------------------------------------------------------------------------------------------------ encode

    def given(self, gradient: Tensor | None) -> Adaptive:
        """This stage for one encoding, with the levels that the gradient asks for."""
        if self.by == "entropy":
            return self
        if gradient is None:
            raise InputError("adaptive:by=grad needs the gradient: encode(x, spec, gradient=g)")
        if not isinstance(gradient, Tensor) or not gradient.is_floating_point():
            what = gradient.dtype if isinstance(gradient, Tensor) else type(gradient).__name__
            raise InputError(f"adaptive:by=grad needs a gradient of floats, got {what}")
        if not gradient.numel():
            raise InputError("adaptive:by=grad needs a gradient with values, got an empty one")
        rms = math.sqrt(_sum_of_squares(gradient.detach()) / gradient.numel())
        if not math.isfinite(rms):
            raise InputError("adaptive:by=grad needs a finite gradient")
        return _WithGradient(**{field.name: getattr(self, field.name) for field in fields(self)}, rms=rms)

    def _measure(self, counts: list[int]) -> tuple[float, float]:
        """What decides the levels, out of the rough histogram, and how many that is."""
        total = sum(counts)
        entropy = math.log2(total) - math.fsum(count * math.log2(count) for count in counts if count) / total
        entropy = max(0.0, entropy)
        bits = math.ceil(entropy + self.c) if self.integer else entropy + self.c
        return entropy, 2.0**bits

    def _sample_size(self, n: int) -> int:
        return min(n, max(_LEAST_SAMPLE, math.ceil(self.f * n)))

    def _levels(self, low: float, high: float, counts: list[int]) -> Levels:
        if low == high:
            return Levels(low, 1, 1, 0.0, True) if self.zero else Levels(low, high, 1, 0.0, False)
        measure, wanted = self._measure(counts)
        most = MAX_ALPHABET - 2 if self.zero else MAX_ALPHABET
        count = max(2, min(math.floor(wanted + 0.5), most))
        if wanted >= most + 0.5:
            counters.count("levels", 1, f"adaptive asks for more levels than {most}, which are used: lower c")
        if not self.zero:
            return Levels(low, high, count, nearest_float32(measure), False)
        step = nearest_float32((high - low) / count)
        if step * count < high - low:  # rounded down, by a third among subnormals: more multiples than asked for
            step = _next_up(step)
        first, last = math.floor(low / step + 0.5), math.floor(high / step + 0.5)
        return Levels(step, first, last - first + 1, nearest_float32(measure), True)

    def split(
        self, x: Tensor, kernels: Kernels, arena: Arena, seed: int
    ) -> tuple[tuple[Tensor, ...], Symbols | None] | None:
        size, bins = self._sample_size(x.numel()), 1 << self.m
        counts: list[int] = []
        if self.tail or self.by == "grad":
            low, high, amax_bits = kernels.value_range(x)
            low, high = low + 0.0, high + 0.0  # whichever of -0 and +0 was met first
        else:
            low, high, amax_bits, counts = kernels.range_histogram(x, bins=bins, zero=self.zero, count=size, seed=seed)
        refuse_nonfinite(amax_bits, x.numel())
        if amax_bits == 0:
            return None
        header = arena.take(_HEADER)
        apart: tuple[Tensor, ...] = ()
        if self.tail:
            low, high, apart = self._set_apart(x, low, high, kernels, arena, seed)
        if self.zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if low < high and self.tail:
            counts = kernels.histogram(kernels.sample(x, size, seed), LinearGrid.over(low, high, bins)).tolist()
        levels = self._levels(low, high, counts)
        write_bytes(header, levels.to_bytes())
        symbols = Symbols(levels.number, x, levels.grid()) if levels.number > 1 else None
        return (header, *apart), symbols

    def _set_apart(
        self, x: Tensor, low: float, high: float, kernels: Kernels, arena: Arena, seed: int
    ) -> tuple[float, float, tuple[Tensor, ...]]:
        """The range without its tails, and the sections of what lies beyond: positions and values."""
        n = x.numel()
        picked = kernels.sample(x, self._sample_size(n), seed).abs()
        rank = min(picked.numel(), max(1, math.floor(self.tail * picked.numel() + 0.5)))
        limit = float(picked.topk(rank).values[-1])
        beyond = _next_up(limit)
        positions, values, _ = (
            kernels.threshold_select(x, beyond) if math.isfinite(beyond) else kernels.threshold_select(x[:0], 1.0)
        )
        if positions.numel() > self._max_apart(n):
            counters.count(
                "tail", 1, "adaptive: far more than tail= of a tensor lies beyond the sampled range: none apart"
            )
            positions, values, limit = positions[:0], values[:0], max(-low, high)
        low, high = max(low, -limit) + 0.0, min(high, limit) + 0.0  # no -0
        if not positions.numel():
            return low, high, (arena.take(0), arena.take(0))
        place = coded_positions(positions, n, kernels, arena)
        exact = arena.take(4 * values.numel())
        exact.copy_(values.view(torch.uint8))
        return low, high, (place, exact)

    def _max_apart(self, n: int) -> int:
        return min(n, max(64, math.ceil(4 * self.tail * n)))

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        found = self.split(x, kernels, arena, seed)
        if found is None:
            return ()
        side, symbols = found
        if symbols is None:
            return (*side, arena.take(0))
        assert isinstance(symbols.grid, LinearGrid)
        packed = arena.take(packed_nbytes(x.numel(), symbol_bits(symbols.alphabet)))
        kernels.linear_encode(x, symbols.grid, packed)
        return (*side, packed)

    # ------------------------------------------------------------------------------------------------------ decode

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        *side, packed = sections
        self.join(tuple(side), _Packed(packed, kernels) if packed.numel() else None, kernels, out, weight)

    def join(
        self, side: tuple[Tensor, ...], reader: SymbolReader | None, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        levels = self._read(side)
        if (reader is None) != (levels.number == 1):
            raise FrameError(f"{levels.number} levels do not go with {'no' if reader is None else 'coded'} symbols")
        if not self.tail or not side[1].numel():
            _put(levels, reader, out, weight)
            return
        n = out.numel()
        header = read_positions_header(side[1], n)
        if side[2].numel() != 4 * header.kept:
            raise FrameError(f"{side[2].numel()} bytes of values apart do not go with their positions")
        positions = kernels.positions_decode(side[1], n, header).long()
        values = torch.empty(positions.numel(), dtype=torch.float32, device=out.device)
        kernels.raw_decode(side[2], torch.float32, values, None)
        # What lies apart replaces its symbol; where values are added, it is added to what was there before.
        if weight is not None:
            values = out[positions] + values * torch.tensor(weight, dtype=torch.float32, device=out.device)
        _put(levels, reader, out, weight)
        out[positions] = values

    def _read(self, side: tuple[Tensor, ...]) -> Levels:
        return Levels.of(read_bytes(side[0], _HEADER), self.zero)

    def alphabet(self, side: tuple[Tensor, ...]) -> int:
        return self._read(side).number

    def packed_symbols(self, packed: Tensor, side: tuple[Tensor, ...], n: int, kernels: Kernels) -> Tensor:
        return _Packed(packed, kernels).symbols(n, self.alphabet(side))

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        apart = (POSITIONS_HEADER + -(-n // 8), 4 * self._max_apart(n)) if self.tail else ()
        return (_HEADER, *apart, packed_nbytes(n, symbol_bits(MAX_ALPHABET)))

    def fits(self, sections: tuple[int, ...], n: int, itemsize: int) -> bool:
        header, *apart, packed = sections
        if apart:
            place, exact = apart
            if exact % 4 or exact // 4 > self._max_apart(n) or (place == 0) != (exact == 0):
                return False
        return header == _HEADER and packed <= packed_nbytes(n, symbol_bits(MAX_ALPHABET))

    def describe(self, side: tuple[Tensor, ...], n: int) -> dict[str, Any]:
        levels = self._read(side)
        found: dict[str, Any] = {"levels": levels.number, "bits_wanted": math.log2(levels.number)}
        found["entropy_estimate" if self.by == "entropy" else "gradient_rms"] = levels.measure
        table = levels.table()
        found |= {"lowest_level": float(table[0]), "highest_level": float(table[-1])}
        if self.tail:
            found["apart"] = read_positions_header(side[1], n)[2] if side[1].numel() else 0
        return found


@dataclass(frozen=True)
class _WithGradient(Adaptive):
    rms: float = 0.0

    def _measure(self, counts: list[int]) -> tuple[float, float]:
        wanted = (self.rms + self.c0) * 2.0**self.c
        return self.rms, 2.0 ** math.ceil(math.log2(max(wanted, 1.0))) if self.integer else wanted


class _Packed(NamedTuple):
    """Symbols that were not coded, as ``join`` sees them."""

    packed: Tensor
    kernels: Kernels

    def symbols(self, n: int, alphabet: int) -> Tensor:
        self._check(n, alphabet)
        return self.kernels.unpack_symbols(self.packed, n, alphabet, False)

    def values(self, table: Tensor, out: Tensor, weight: float | None) -> None:
        self._check(out.numel(), table.numel())
        self.kernels.table_decode(self.packed, table, out, weight)

    def bins(self, levels: Levels, out: Tensor, weight: float | None) -> None:
        """``values`` of levels over a range. On a device they are worked out: a table would first be sent there."""
        if self.packed.is_cpu or levels.zero:
            self.values(levels.table(), out, weight)
            return
        self._check(out.numel(), levels.number)
        self.kernels.uniform_decode(
            self.packed, low=levels.origin, high=levels.other, levels=levels.number, out=out, weight=weight
        )

    def _check(self, n: int, levels: int) -> None:
        wanted = packed_nbytes(n, symbol_bits(levels))
        if self.packed.numel() != wanted:
            raise FrameError(f"{levels} levels take {wanted} bytes, the frame has {self.packed.numel()}")


def _put(levels: Levels, reader: SymbolReader | None, out: Tensor, weight: float | None) -> None:
    if isinstance(reader, _Packed):
        reader.bins(levels, out, weight)
        return
    table = levels.table()
    if reader is not None:
        reader.values(table, out, weight)
    elif weight is None:
        out.fill_(float(table[0]))
    else:
        out.add_(table[0].to(out.device) * torch.tensor(weight, dtype=torch.float32))
