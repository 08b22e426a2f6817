"""Top-k of many tensors, with positions in a section of fixed size: no launch depends on the values.

A section of k of n positions is an Elias-Fano code: the low bits of every position, packed, then a bitmap in which bit
``(position >> low_bits) + i`` stands for the i-th position. It takes as many bytes as the longest Rice code of the same
positions, and each part of it can be written and read without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.graph_tables import held, to_device
from laconic.kernels.interface import NONFINITE
from laconic.kernels.multi_tensor_interface import Addresses, Tensors
from laconic.kernels.sections import fixed_low_bits
from laconic.kernels.triton.bitmap import popcount
from laconic.kernels.triton.launch_args import exact_options
from laconic.kernels.triton.tensor_table import part_table
from laconic.kernels.triton.topk_batched import Selector

__all__ = ["sparse_decode_all", "topk_all"]

SPAN = tl.constexpr(2048)
"""Positions, or bits of the bitmap, per program."""
FIELDS = tl.constexpr(6)
"""Fields of a row: values, section, kept, low bits, size or first position, output."""

_NONFINITE = tl.constexpr(NONFINITE)


@triton.jit
def _write_positions(table, parts, positions):
    """Set the bits of each position in a zeroed section; a word may be shared with other programs."""
    number = tl.program_id(0)
    row = table + tl.load(parts + 2 * number) * FIELDS
    words = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    kept, low_bits = tl.load(row + 2), tl.load(row + 3)
    i = tl.load(parts + 2 * number + 1).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = i < kept
    position = tl.load(positions + tl.load(row + 4) + i, mask=inside, other=0) - tl.load(row + 5)
    one = tl.full((SPAN,), 1, tl.int64)
    bit = (kept * low_bits + 31) // 32 * 32 + (position >> low_bits) + i
    tl.atomic_or(words + (bit >> 5), (one << (bit & 31)).to(tl.int32), mask=inside, sem="relaxed")
    bit = i * low_bits
    low = (position & ((one << low_bits) - 1)) << (bit & 31)
    tl.atomic_or(words + (bit >> 5), low.to(tl.int32), mask=inside & (low != 0), sem="relaxed")
    over = low >> 32
    tl.atomic_or(words + (bit >> 5) + 1, over.to(tl.int32), mask=inside & (over != 0), sem="relaxed")


@triton.jit
def _scatter(table, parts, flag, skip, weight, ADD: tl.constexpr, SKIP: tl.constexpr):
    """Read a part of a bitmap, and store or add the values at its positions."""
    number = tl.program_id(0)
    slot = tl.load(parts + 2 * number)
    row = table + slot * FIELDS
    values = tl.load(row).to(tl.pointer_type(tl.float32))
    low_words = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    kept, low_bits, n = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    out = tl.load(row + 5).to(tl.pointer_type(tl.float32))
    bits = kept + (n >> low_bits) + 1
    begin = tl.load(parts + 2 * number + 1).to(tl.int64) * SPAN
    high_words = low_words + (kept * low_bits + 31) // 32
    usable = True
    if SKIP:
        usable = tl.load(skip + slot) < _NONFINITE
    if usable:
        before = tl.zeros((SPAN,), tl.int32)
        first = begin * 0
        while first < begin // 32:
            at = first + tl.arange(0, SPAN)
            word = tl.load(high_words + at, mask=at < begin // 32, other=0).to(tl.uint32, bitcast=True)
            before += popcount(word)
            first += SPAN
        bit = begin + tl.arange(0, SPAN)
        word = tl.load(high_words + (bit >> 5), mask=bit < bits, other=0).to(tl.uint32, bitcast=True)
        one = ((word >> (bit & 31).to(tl.uint32)) & 1).to(tl.int64)
        i = tl.sum(before, 0) + tl.cumsum(one, 0) - 1
        chosen = (one > 0) & (i < kept)
        low_at = i * low_bits
        low = tl.load(low_words + (low_at >> 5), mask=chosen & (low_bits > 0), other=0).to(tl.uint32, bitcast=True)
        crosses = chosen & ((low_at & 31) + low_bits > 32)
        next_low = tl.load(low_words + (low_at >> 5) + 1, mask=crosses, other=0).to(tl.uint32, bitcast=True)
        pair = (low.to(tl.int64) | (next_low.to(tl.int64) << 32)) >> (low_at & 31)
        mask = (tl.full((SPAN,), 1, tl.int64) << low_bits) - 1
        position = ((bit - i) << low_bits) | (pair & mask)
        value = tl.load(values + i, mask=chosen, other=0.0)
        valid = (position < n) & (tl.abs(value) < float("inf"))
        wrong = tl.max((chosen & (valid == 0)).to(tl.int32), 0) > 0
        found = tl.max(tl.where(bit < bits, i, 0), 0)
        wrong = wrong | ((begin + SPAN >= bits) & (found + 1 != kept))
        tl.store(flag, 1, mask=wrong)
        to = out + position
        chosen = chosen & valid
        if ADD:
            value = tl.load(to, mask=chosen, other=0.0) + value * weight
        tl.store(to, value, mask=chosen)


class _Rows(NamedTuple):
    """Launch arguments: a row of numbers for each tensor, and the tensor and part of each program."""

    table: Tensor
    parts: Tensor

    @property
    def grid(self) -> tuple[int]:
        return (self.parts.shape[0],)


@lru_cache(maxsize=4096)
def _rows(rows: tuple[tuple[int, ...], ...], counts: tuple[int, ...], device: torch.device, stream: int) -> _Rows:
    table = to_device(torch.tensor(rows, dtype=torch.int64), device, non_blocking=True)
    return _Rows(table, part_table(counts, SPAN.value, device))


@lru_cache(maxsize=1024)
def _selector(
    addresses: tuple[int, ...], sizes: tuple[int, ...], counts: tuple[int, ...], firsts: tuple[int, ...],
    device: torch.device,
) -> Selector:  # fmt: skip
    """Return the selector of tensors at addresses, as spans of a tensor that begins at the first of them."""
    begins = [(address - addresses[0]) // 4 for address in addresses]
    spans = [(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
    return Selector(spans, counts, device, firsts)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def topk_all(tensors: Tensors, sections: Addresses, values: Tensors) -> None:
    """Select the largest magnitudes of each tensor: positions to zeroed sections, values in order of position.

    Of equal magnitudes the lowest index wins.
    """
    device, sizes, counts = tensors[0].device, tuple(x.numel() for x in tensors), tuple(x.numel() for x in values)
    addresses = tuple(x.data_ptr() for x in tensors)
    firsts = tuple((x.data_ptr() - values[0].data_ptr()) // 4 for x in values)
    # Tables are copied from the host when they are new, and are then shared by all streams.
    selector = held(_selector(addresses, sizes, counts, firsts, device))
    kept = values[0].as_strided((firsts[-1] + counts[-1],), (1,))
    positions, _ = selector.choose_with_values(tensors[0].view(-1), torch.int64, kept)
    rows = tuple(
        (0, section, k, fixed_low_bits(n, k), first, (address - addresses[0]) // 4)
        for section, k, n, first, address in zip(sections, counts, sizes, firsts, addresses, strict=True)
    )
    launched = held(_rows(rows, counts, device, _stream(device)))
    _write_positions[launched.grid](launched.table, launched.parts, positions, **exact_options(num_warps=4))


def sparse_decode_all(
    sections: Addresses, values: Addresses, counts: Sequence[int], outs: Tensors, weight: float | None,
    skip: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Store float32 values at their positions and zeros elsewhere, or add ``weight`` times them; return the flag."""
    device = outs[0].device
    if weight is None:
        torch._foreach_zero_(list(outs))
    rows = tuple(
        (value, section, k, fixed_low_bits(out.numel(), k), out.numel(), out.data_ptr())
        for value, section, k, out in zip(values, sections, counts, outs, strict=True)
    )
    bits = tuple(k + (out.numel() >> fixed_low_bits(out.numel(), k)) + 1 for k, out in zip(counts, outs, strict=True))
    launched = held(_rows(rows, bits, device, _stream(device)))
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    _scatter[launched.grid](
        launched.table, launched.parts, flag, flag if skip is None else skip, weight or 0.0, ADD=weight is not None,
        SKIP=skip is not None, **exact_options(num_warps=4),
    )  # fmt: skip
    return flag
