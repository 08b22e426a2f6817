"""Tables that tell a multi-tensor kernel where its tensors are.

A *table* on the device has a row for each tensor: the addresses of its data and its size. A second table says which
tensor and which part of it each program works on. Both are cached: the same addresses recur in every step of a
training, and building and copying a table takes longer than the kernel.
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
from laconic.kernels.sections import GROUP, num_buckets

__all__ = [
    "FIELDS", "TensorTable", "inputs", "load_pointer", "outputs", "part_table", "program_part", "size_unless_skipped",
]  # fmt: skip

FIELDS = tl.constexpr(6)
"""Fields of a row: values, residual, scales, packed symbols, tail, size."""

_GROUP = tl.constexpr(GROUP)
_NONFINITE = tl.constexpr(NONFINITE)


@lru_cache(maxsize=1024)
def part_table(sizes: tuple[int, ...], span: int, device: torch.device) -> Tensor:
    """Return the tensor and the part of it that each program works on."""
    parts_per_tensor = torch.tensor([num_buckets(size, span) for size in sizes])
    slot = torch.repeat_interleave(parts_per_tensor)
    first = torch.repeat_interleave(parts_per_tensor.cumsum(0) - parts_per_tensor, parts_per_tensor)
    parts = torch.stack([slot, torch.arange(slot.numel()) - first], 1).to(torch.int32).contiguous()
    return to_device(parts, device)  # synchronizes: all streams share it


class TensorTable(NamedTuple):
    """Launch arguments of a multi-tensor kernel."""

    table: Tensor
    parts: Tensor
    aligned: bool
    """Whether all values and residuals can be read as vectors of four."""
    tails: Tensor
    """Memory that the table points to; it must live as long."""

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], span: int, *, residuals: Sequence[Tensor | None] = (),
        scale_addresses: Sequence[int] = (), packed: Sequence[int] = (), tails: bool = False,
    ) -> TensorTable:  # fmt: skip
        """Describe tensors in parts of ``span`` values; sections are addresses, multiples of 16."""
        device = tensors[0].device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        table = _table(
            device, stream, span, tails, tuple(x.numel() for x in tensors), tuple(x.data_ptr() for x in tensors),
            tuple(0 if x is None else x.data_ptr() for x in residuals), tuple(scale_addresses), tuple(packed),
        )  # fmt: skip
        return held(table)

    @property
    def grid(self) -> tuple[int]:
        return (self.parts.shape[0],)


@lru_cache(maxsize=2048)
def _table(
    device: torch.device, stream: int, span: int, tails: bool, sizes: tuple[int, ...], values: tuple[int, ...],
    residuals: tuple[int, ...], scales: tuple[int, ...], packed: tuple[int, ...],
) -> TensorTable:  # fmt: skip
    """Return the table of these addresses for one stream: launches of one stream can share the memory for tails."""
    none = (0,) * len(sizes)
    assert all(address % 16 == 0 for address in (*scales, *packed))
    tail_buffer = torch.empty(len(sizes) * GROUP if tails else 0, dtype=torch.int32, device=device)
    tail = [tail_buffer.data_ptr() + 4 * GROUP * i for i in range(len(sizes))] if tails else none
    rows = list(zip(values, residuals or none, scales or none, packed or none, tail, sizes, strict=True))
    aligned = all(address % 16 == 0 for address in (*values, *residuals))
    table = to_device(torch.tensor(rows, dtype=torch.int64), device, non_blocking=True)
    return TensorTable(table, part_table(sizes, span, device), aligned, tail_buffer)


@triton.jit
def load_pointer(row, FIELD: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row + FIELD).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def program_part(table, parts):
    """Return a program's tensor, its row and its part."""
    number = tl.program_id(0)
    slot = tl.load(parts + 2 * number)
    return slot, table + slot * FIELDS, tl.load(parts + 2 * number + 1).to(tl.int64)


@triton.jit
def size_unless_skipped(row, slot, skip, SKIP: tl.constexpr):
    """Return a tensor's size; 0, so that nothing is read or written, if its amax bits in ``skip`` are not finite."""
    n = tl.load(row + 5)
    if SKIP:
        n = tl.where(tl.load(skip + slot) < _NONFINITE, n, 0)
    return n


@triton.jit
def outputs(row, slot, skip, BUCKET: tl.constexpr, SKIP: tl.constexpr):
    """Return an encoder's outputs (scales, symbols, tail), and its numbers of values, grouped values and buckets."""
    tail = tl.load(row + 4).to(tl.pointer_type(tl.int32))
    n = size_unless_skipped(row, slot, skip, SKIP)
    scales, packed = load_pointer(row, 2, True), load_pointer(row, 3, True)
    return scales, packed, tail, n, n // _GROUP * _GROUP, (n + BUCKET - 1) // BUCKET


@triton.jit
def inputs(row, slot, skip, BUCKET: tl.constexpr, SKIP: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a decoder's inputs (scales, symbols), its output, and the same numbers."""
    packed = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.uint8)), 16)
    n = size_unless_skipped(row, slot, skip, SKIP)
    scales, out = load_pointer(row, 2, True), load_pointer(row, 0, ALIGNED)
    return scales, packed, out, n, n // _GROUP * _GROUP, (n + BUCKET - 1) // BUCKET
