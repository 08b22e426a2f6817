"""Symbols to bytes and back by themselves: bits, ternary values, tails, sums in lanes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import GROUP, TRIT_GROUP_NBYTES, num_buckets, packed_nbytes, symbol_bits, symbol_dtype
from laconic.kernels.triton.tile import TILE, exact, period, read_symbols, store_symbols, words_of

__all__ = ["BYTES", "Packed", "pack", "pack_symbols", "pack_tail", "unpack", "unpack_symbols"]

BYTES = 256


@triton.jit
def pack_tail(symbols, out, count, program, BITS: tl.constexpr, BYTES: tl.constexpr):
    """One stream of bits: each byte looks up the symbols that reach into it."""
    byte = program * BYTES + tl.arange(0, BYTES)
    value = tl.zeros((BYTES,), tl.uint32)
    for k in tl.static_range(6 // BITS + 2):
        j = byte * 8 // BITS + k
        place = j * BITS - byte * 8
        symbol = tl.load(symbols + j, mask=(j < count) & (place < 8), other=0).to(tl.uint32, bitcast=True)
        left = tl.minimum(tl.maximum(place, 0), 31).to(tl.uint32)
        value = value | tl.where(place >= 0, symbol << left, symbol >> tl.maximum(-place, 0).to(tl.uint32))
    tl.store(out + byte, (value & 255).to(tl.uint8), mask=byte < (count * BITS + 7) // 8)


@triton.jit
def _pack_tail(symbols, out, count, BITS: tl.constexpr, BYTES: tl.constexpr):
    pack_tail(symbols, out, count, tl.program_id(0), BITS, BYTES)


class Packed:
    """A section that an encoder fills: full groups by its own kernel, the tail out of ``tail`` by ``finish``."""

    def __init__(self, section: Tensor, n: int, bits: int) -> None:
        assert section.numel() == packed_nbytes(n, bits) and section.dtype == torch.uint8, (section, n, bits)
        self.section, self.n, self.bits = section, n, bits
        self.full = n // GROUP * GROUP
        self.target = words_of(section)
        self.tail = section.new_empty(GROUP if self.full < n else 0, dtype=torch.int32)

    def finish(self) -> None:
        if self.full < self.n:
            begin, bits = self.full // 8 * self.bits, self.bits
            grid = (num_buckets(self.section.numel() - begin, BYTES),)
            _pack_tail[grid](self.tail, self.target[begin:], self.n - self.full, BITS=bits, BYTES=BYTES)
        self.copy_back()

    def copy_back(self) -> None:
        """What ``finish`` does for kernels that pack the tail themselves."""
        if self.target is not self.section:
            self.section.copy_(self.target)


@triton.jit
def _pack(symbols, packed, tail, n, full, BITS: tl.constexpr, PERIOD: tl.constexpr, SPAN: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    at = tl.arange(0, SPAN)
    found = tl.load(symbols + begin + at, mask=begin + at < n, other=0).to(tl.int32)
    store_symbols(found, packed, tail, begin, n, full, BITS, PERIOD, SPAN)


@triton.jit
def _unpack(packed, out, n, full, BITS: tl.constexpr, SPAN: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    at = tl.arange(0, SPAN)
    if begin + SPAN <= full:
        tl.store(out + begin + at, read_symbols(packed, at, begin, n, full, BITS, False).to(out.dtype.element_ty))
    else:
        found = read_symbols(packed, at, begin, n, full, BITS, True)
        tl.store(out + begin + at, found.to(out.dtype.element_ty), mask=begin + at < n)


def pack(symbols: Tensor, bits: int, out: Tensor) -> None:
    n = symbols.numel()
    if bits == 0 or n == 0:
        return
    if symbols.dtype == torch.bool:
        symbols = symbols.view(torch.uint8)
    into = Packed(out, n, bits)
    _pack[(num_buckets(n, TILE),)](
        symbols.contiguous(), into.target, into.tail, n, into.full, BITS=bits, PERIOD=period(bits), SPAN=TILE,
        **exact(num_warps=2),
    )  # fmt: skip
    into.finish()


def unpack(packed: Tensor, n: int, bits: int, dtype: torch.dtype = torch.int32) -> Tensor:
    assert packed.numel() == packed_nbytes(n, bits), (packed, n, bits)
    if bits == 0 or n == 0:
        return torch.zeros(n, dtype=dtype, device=packed.device)
    out = torch.empty(n, dtype=dtype, device=packed.device)
    _unpack[(num_buckets(n, TILE),)](
        words_of(packed), out, n, n // GROUP * GROUP, BITS=bits, SPAN=TILE, **exact(num_warps=2)
    )
    return out


# ----------------------------------------------------------------------------------------------------------- trits


@triton.jit
def trit_place(at, full):
    """Byte and power of three of the value at ``at``; ``full`` values lie in groups of 5 rows of 64."""
    inside = at % 320
    grouped = at < full
    byte = tl.where(grouped, at // 320 * 64 + inside % 64, full // 5 + (at - full) // 5)
    return byte, tl.where(grouped, inside // 64, (at - full) % 5)


@triton.jit
def trit_of(byte, power):
    divisor = tl.where(power == 0, 1, tl.where(power == 1, 3, tl.where(power == 2, 9, tl.where(power == 3, 27, 81))))
    return byte // divisor % 3


@triton.jit
def _pack_trits(symbols, out, n, full, nbytes, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    value = tl.zeros((BYTES,), tl.int32)
    for k in tl.static_range(5):
        at = tl.where(byte < full // 5, byte // 64 * 320 + k * 64 + byte % 64, full + (byte - full // 5) * 5 + k)
        symbol = tl.load(symbols + at, mask=(byte < nbytes) & (at < n), other=0).to(tl.int32)
        value += symbol * (3**k)
    tl.store(out + byte, value.to(tl.uint8), mask=byte < nbytes)


@triton.jit
def _unpack_trits(packed, out, n, full, SPAN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    byte, power = trit_place(at, full)
    value = tl.load(packed + byte, mask=at < n, other=0).to(tl.int32)
    tl.store(out + at, trit_of(value, power).to(out.dtype.element_ty), mask=at < n)


def pack_symbols(symbols: Tensor, alphabet: int, trits: bool, out: Tensor) -> None:
    if not trits:
        pack(symbols, symbol_bits(alphabet), out)
        return
    n, span = symbols.numel(), 5 * TRIT_GROUP_NBYTES
    if n:
        _pack_trits[(num_buckets(out.numel(), BYTES),)](
            symbols.contiguous(), out, n, n // span * span, out.numel(), BYTES=BYTES
        )


def unpack_symbols(packed: Tensor, n: int, alphabet: int, trits: bool) -> Tensor:
    if not trits:
        return unpack(packed, n, symbol_bits(alphabet), symbol_dtype(alphabet))
    out, span = torch.empty(n, dtype=symbol_dtype(alphabet), device=packed.device), 5 * TRIT_GROUP_NBYTES
    if n:
        _unpack_trits[(num_buckets(n, TILE),)](packed, out, n, n // span * span, SPAN=TILE)
    return out
