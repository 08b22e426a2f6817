"""Products of a matrix with a few vectors, in a fixed order of additions: what low rank is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.reference.reductions import put, read_floats


def project_rows(x: Tensor, q: Tensor) -> Tensor:
    """x q^T for x (rows, columns) and q (rank, columns): eight partial sums by column modulo 8, folded in half."""
    sums = torch.zeros(x.shape[0], q.shape[0], 8, dtype=torch.float32, device=x.device)
    for first in range(0, x.shape[1], 8):
        here = min(8, x.shape[1] - first)
        sums[:, :, :here] += x[:, None, first : first + here] * q[None, :, first : first + here]
    for lanes in (4, 2, 1):
        sums = sums[:, :, :lanes] + sums[:, :, lanes:]
    return sums[:, :, 0].contiguous()


def project_columns(x: Tensor, p: Tensor) -> Tensor:
    """p^T x for x (rows, columns) and p (rows, rank), row after row."""
    total = torch.zeros(p.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    for row, weights in zip(x, p, strict=True):
        total += row[None, :] * weights[:, None]
    return total


def lowrank_decode(
    p: Tensor, q: Tensor, *, rows: int, columns: int, rank: int, out: Tensor, weight: float | None
) -> None:
    """The product of two sections of floats, ranks in order."""
    left = read_floats(p, "factor", signed=True).view(rows, rank)
    right = read_floats(q, "factor", signed=True).view(rank, columns)
    values = left[:, :1] * right[:1]
    for k in range(1, rank):
        values = values + left[:, k : k + 1] * right[k : k + 1]
    put(out, values.view(-1), weight)
