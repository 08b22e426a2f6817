"""Products of a matrix with a few vectors, in the reference's order of additions, for ``powersgd``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import num_buckets
from laconic.kernels.triton.launch_args import exact_options

__all__ = ["add_columns", "fold_columns", "project_columns", "project_rows"]

ROWS, COLUMNS = 16, 128
"""Rows and columns per program."""


@triton.jit
def add_columns(sums, x, q, row, k, column, rows, columns, rank):
    """Add the products of eight columns of rows of x and of q to the partial sum of each column modulo 8."""
    valid = column < columns
    left = tl.load(x + row[:, None] * columns + column[None, :], mask=(row[:, None] < rows) & valid[None, :], other=0.0)
    right = tl.load(q + k[:, None] * columns + column[None, :], mask=(k[:, None] < rank) & valid[None, :], other=0.0)
    return sums + left[:, None, :] * right[None, :, :]


@triton.jit
def fold_columns(sums, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """Add the eight partial sums in halves."""
    for fold in tl.static_range(3):
        sums = tl.sum(tl.reshape(sums, (ROWS, RANKS, 2, 4 >> fold)), 2)
    return tl.reshape(sums, (ROWS, RANKS))


@triton.jit
def _project_rows(x, q, out, rows, columns, rank, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """Accumulate eight partial sums by column modulo 8, then fold them in halves."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.arange(0, RANKS)
    column = tl.arange(0, 8)
    sums = tl.zeros((ROWS, RANKS, 8), tl.float32)
    first = columns * 0
    while first < columns:
        sums = add_columns(sums, x, q, row, k, first + column, rows, columns, rank)
        first += 8
    tl.store(out + row[:, None] * rank + k[None, :], fold_columns(sums, ROWS, RANKS),
             mask=(row[:, None] < rows) & (k[None, :] < rank))  # fmt: skip


@triton.jit
def _project_columns(x, p, out, rows, columns, rank, COLUMNS: tl.constexpr, RANKS: tl.constexpr):
    """Accumulate row after row."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, RANKS)
    total = tl.zeros((RANKS, COLUMNS), tl.float32)
    base = x + column
    row = rows * 0
    while row < rows:
        values = tl.load(base, mask=column < columns, other=0.0)
        weights = tl.load(p + row * rank + k, mask=k < rank, other=0.0)
        total += values[None, :] * weights[:, None]
        base += columns
        row += 1
    tl.store(
        out + k[:, None] * columns + column[None, :], total, mask=(k[:, None] < rank) & (column[None, :] < columns)
    )


def project_rows(x: Tensor, q: Tensor) -> Tensor:
    (rows, columns), rank = x.shape, q.shape[0]
    out = torch.empty(rows, rank, dtype=torch.float32, device=x.device)
    if out.numel():
        _project_rows[(num_buckets(rows, ROWS),)](
            x.contiguous(), q.contiguous(), out, rows, columns, rank, ROWS=ROWS, RANKS=triton.next_power_of_2(rank),
            **exact_options(num_warps=4),
        )  # fmt: skip
    return out


def project_columns(x: Tensor, p: Tensor) -> Tensor:
    (rows, columns), rank = x.shape, p.shape[1]
    out = torch.empty(rank, columns, dtype=torch.float32, device=x.device)
    if out.numel():
        _project_columns[(num_buckets(columns, COLUMNS),)](
            x.contiguous(), p.contiguous(), out, rows, columns, rank, COLUMNS=COLUMNS,
            RANKS=triton.next_power_of_2(rank), **exact_options(num_warps=4),
        )  # fmt: skip
    return out
