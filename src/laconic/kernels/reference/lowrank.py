"""Products of a matrix with its low-rank factors, in a fixed order of additions."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.reference.reductions import put, read_floats


def project_rows(x: Tensor, q: Tensor) -> Tensor:
    """Keep eight partial sums, by column modulo 8, and fold them in half three times."""
    sums = torch.zeros(x.shape[0], q.shape[0], 8, dtype=torch.float32, device=x.device)
    for first in range(0, x.shape[1], 8):
        columns = slice(first, min(first + 8, x.shape[1]))
        sums[:, :, : columns.stop - first] += x[:, None, columns] * q[None, :, columns]
    for half in (4, 2, 1):
        sums = sums[:, :, :half] + sums[:, :, half:]
    return sums[:, :, 0].contiguous()


def project_columns(x: Tensor, p: Tensor) -> Tensor:
    """Add row after row."""
    total = torch.zeros(p.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    for row, weights in zip(x, p, strict=True):
        total += row[None, :] * weights[:, None]
    return total


def lowrank_decode(
    p: Tensor, q: Tensor, *, rows: int, columns: int, rank: int, out: Tensor, weight: float | None
) -> None:
    left = read_floats(p, "factor", signed=True).view(rows, rank)
    right = read_floats(q, "factor", signed=True).view(rank, columns)
    values = left[:, :1] * right[:1]
    for k in range(1, rank):
        values = values + left[:, k : k + 1] * right[k : k + 1]
    put(out, values.view(-1), weight)
