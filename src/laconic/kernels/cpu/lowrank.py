"""Products of a matrix with its low-rank factors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels.cpu.pointers import bytes_at, floats_at, threads, weight_of
from laconic.kernels.reference.reductions import read_floats


def project_rows(x: Tensor, q: Tensor) -> Tensor:
    assert q.shape[1] == x.shape[1], (x.shape, q.shape)
    return _project(_core.project_rows, x, q, torch.empty(x.shape[0], q.shape[0]), q.shape[0])


def project_columns(x: Tensor, p: Tensor) -> Tensor:
    assert p.shape[0] == x.shape[0], (x.shape, p.shape)
    return _project(_core.project_columns, x, p, torch.empty(p.shape[1], x.shape[1]), p.shape[1])


def _project(kernel: Callable[..., None], x: Tensor, factor: Tensor, out: Tensor, rank: int) -> Tensor:
    assert x.is_contiguous() and factor.is_contiguous() and factor.dim() == 2
    kernel(x.data_ptr(), *x.shape, rank, factor.data_ptr(), out.data_ptr(), threads())
    return out


def lowrank_decode(
    p: Tensor, q: Tensor, *, rows: int, columns: int, rank: int, out: Tensor, weight: float | None
) -> None:
    assert out.numel() == rows * columns
    for factor in (p, q):
        read_floats(factor, "factor", signed=True)
    left, right = bytes_at(p, 4 * rows * rank), bytes_at(q, 4 * rank * columns)
    _core.lowrank_decode(left, right, rows, columns, rank, floats_at(out), weight_of(weight), threads())
