"""Bit packing and base-3 packing of symbols."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import GROUP, TRIT_GROUP_NBYTES, num_buckets, packed_nbytes, symbol_bits, symbol_dtype
from laconic.kernels.triton.launch_args import TILE, exact_options, packing_period, word_aligned
from laconic.kernels.triton.tile import load_symbols, store_symbols

__all__ = ["BYTES", "PackedSection", "pack", "pack_symbols", "pack_tail", "unpack", "unpack_symbols"]

BYTES = 256


@triton.jit
def pack_tail(symbols, out, count, program, BITS: tl.constexpr, BYTES: tl.constexpr):
    """Pack the tail as one bit stream: each byte collects the symbols that reach into it."""
    byte = program * BYTES + tl.arange(0, BYTES)
    value = tl.zeros((BYTES,), tl.uint32)
    for k in tl.static_range(6 // BITS + 2):
        j = byte * 8 // BITS + k
        shift = j * BITS - byte * 8
        symbol = tl.load(symbols + j, mask=(j < count) & (shift < 8), other=0).to(tl.uint32, bitcast=True)
        left_shift = tl.minimum(tl.maximum(shift, 0), 31).to(tl.uint32)
        value = value | tl.where(shift >= 0, symbol << left_shift, symbol >> tl.maximum(-shift, 0).to(tl.uint32))
    tl.store(out + byte, (value & 255).to(tl.uint8), mask=byte < (count * BITS + 7) // 8)


@triton.jit
def _pack_tail(symbols, out, count, BITS: tl.constexpr, BYTES: tl.constexpr):
    pack_tail(symbols, out, count, tl.program_id(0), BITS, BYTES)


class PackedSection:
    """A section that an encoder fills: its kernel writes full groups, ``finish`` packs what it left in ``tail``."""

    def __init__(self, section: Tensor, n: int, bits: int) -> None:
        assert section.numel() == packed_nbytes(n, bits) and section.dtype == torch.uint8, (section, n, bits)
        self.section, self.n, self.bits = section, n, bits
        self.full = n // GROUP * GROUP
        self.target = word_aligned(section)
        self.tail = section.new_empty(GROUP if self.full < n else 0, dtype=torch.int32)

    def finish(self) -> None:
        if self.full < self.n:
            begin, bits = self.full // 8 * self.bits, self.bits
            grid = (num_buckets(self.section.numel() - begin, BYTES),)
            _pack_tail[grid](self.tail, self.target[begin:], self.n - self.full, BITS=bits, BYTES=BYTES)
        self.copy_back()

    def copy_back(self) -> None:
        """Copy an aligned copy back to the section; for kernels that pack the tail themselves."""
        if self.target is not self.section:
            self.section.copy_(self.target)


@triton.jit
def _pack(symbols, packed, tail, n, full, BITS: tl.constexpr, PERIOD: tl.constexpr, SPAN: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    offsets = tl.arange(0, SPAN)
    values = tl.load(symbols + begin + offsets, mask=begin + offsets < n, other=0).to(tl.int32)
    store_symbols(values, packed, tail, begin, n, full, BITS, PERIOD, SPAN)


@triton.jit
def _unpack(packed, out, n, full, BITS: tl.constexpr, SPAN: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    offsets = tl.arange(0, SPAN)
    if begin + SPAN <= full:
        tl.store(
            out + begin + offsets, load_symbols(packed, offsets, begin, n, full, BITS, False).to(out.dtype.element_ty)
        )
    else:
        values = load_symbols(packed, offsets, begin, n, full, BITS, True)
        tl.store(out + begin + offsets, values.to(out.dtype.element_ty), mask=begin + offsets < n)


def pack(symbols: Tensor, bits: int, out: Tensor) -> None:
    n = symbols.numel()
    if bits == 0 or n == 0:
        return
    if symbols.dtype == torch.bool:
        symbols = symbols.view(torch.uint8)
    section = PackedSection(out, n, bits)
    _pack[(num_buckets(n, TILE),)](
        symbols.contiguous(), section.target, section.tail, n, section.full, BITS=bits, PERIOD=packing_period(bits),
        SPAN=TILE, **exact_options(num_warps=2),
    )  # fmt: skip
    section.finish()


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    return _unpack_as(packed, n, bits, torch.int32)


def _unpack_as(packed: Tensor, n: int, bits: int, dtype: torch.dtype) -> Tensor:
    assert packed.numel() == packed_nbytes(n, bits), (packed, n, bits)
    if bits == 0 or n == 0:
        return torch.zeros(n, dtype=dtype, device=packed.device)
    out = torch.empty(n, dtype=dtype, device=packed.device)
    _unpack[(num_buckets(n, TILE),)](
        word_aligned(packed), out, n, n // GROUP * GROUP, BITS=bits, SPAN=TILE, **exact_options(num_warps=2)
    )
    return out


@triton.jit
def trit_location(offsets, full):
    """Return byte and power of three of the value at ``offsets``; ``full`` values are in groups of 5 rows of 64."""
    in_group = offsets % 320
    grouped = offsets < full
    byte = tl.where(grouped, offsets // 320 * 64 + in_group % 64, full // 5 + (offsets - full) // 5)
    return byte, tl.where(grouped, in_group // 64, (offsets - full) % 5)


@triton.jit
def trit_digit(byte, power):
    divisor = tl.where(power == 0, 1, tl.where(power == 1, 3, tl.where(power == 2, 9, tl.where(power == 3, 27, 81))))
    return byte // divisor % 3


@triton.jit
def _pack_trits(symbols, out, n, full, nbytes, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    value = tl.zeros((BYTES,), tl.int32)
    for k in tl.static_range(5):
        offsets = tl.where(byte < full // 5, byte // 64 * 320 + k * 64 + byte % 64, full + (byte - full // 5) * 5 + k)
        symbol = tl.load(symbols + offsets, mask=(byte < nbytes) & (offsets < n), other=0).to(tl.int32)
        value += symbol * (3**k)
    tl.store(out + byte, value.to(tl.uint8), mask=byte < nbytes)


@triton.jit
def _unpack_trits(packed, out, n, full, SPAN: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    byte, power = trit_location(offsets, full)
    value = tl.load(packed + byte, mask=offsets < n, other=0).to(tl.int32)
    tl.store(out + offsets, trit_digit(value, power).to(out.dtype.element_ty), mask=offsets < n)


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
        return _unpack_as(packed, n, symbol_bits(alphabet), symbol_dtype(alphabet))
    out, span = torch.empty(n, dtype=symbol_dtype(alphabet), device=packed.device), 5 * TRIT_GROUP_NBYTES
    if n:
        _unpack_trits[(num_buckets(n, TILE),)](packed, out, n, n // span * span, SPAN=TILE)
    return out
