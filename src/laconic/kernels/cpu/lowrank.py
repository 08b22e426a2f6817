"""Products of a matrix with its low-rank factors."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels.cpu.pointers import bytes_at, floats_at, threads, weight_of
from laconic.kernels.reference.reductions import read_floats


def project_rows(x: Tensor, q: Tensor) -> Tensor:
    (rows, columns), rank = x.shape, q.shape[0]
    assert q.shape == (rank, columns) and q.is_contiguous() and x.is_contiguous(), (x.shape, q.shape)
    out = torch.empty(rows, rank)
    _core.project_rows(x.data_ptr(), rows, columns, rank, q.data_ptr(), out.data_ptr(), threads())
    return out


def project_columns(x: Tensor, p: Tensor) -> Tensor:
    (rows, columns), rank = x.shape, p.shape[1]
    assert p.shape == (rows, rank) and p.is_contiguous() and x.is_contiguous(), (x.shape, p.shape)
    out = torch.empty(rank, columns)
    _core.project_columns(x.data_ptr(), rows, columns, rank, p.data_ptr(), out.data_ptr(), threads())
    return out


def lowrank_decode(
    p: Tensor, q: Tensor, *, rows: int, columns: int, rank: int, out: Tensor, weight: float | None
) -> None:
    assert out.numel() == rows * columns
    for factor in (p, q):
        read_floats(factor, "factor", signed=True)
    left, right = bytes_at(p, 4 * rows * rank), bytes_at(q, 4 * rank * columns)
    _core.lowrank_decode(left, right, rows, columns, rank, floats_at(out), weight_of(weight), threads())
