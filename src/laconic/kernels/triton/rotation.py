"""Hadamard transform of rows of 1,024 in one pass, with the roundings of the reference, which takes ten."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["hadamard"]

LENGTH, STAGES = 1024, 10
ROWS = 4
"""Rows per program."""


@triton.jit
def _hadamard(x, out, rows, LENGTH: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr):
    offset = tl.arange(0, ROWS * LENGTH)
    offsets = tl.program_id(0).to(tl.int64) * ROWS * LENGTH + offset
    valid = tl.program_id(0) * ROWS + offset // LENGTH < rows
    v = tl.load(x + offsets, mask=valid, other=0.0)
    for stage in tl.static_range(STAGES):
        pairs = tl.permute(tl.reshape(v, (ROWS * LENGTH // (2 << stage), 2, 1 << stage)), (0, 2, 1))
        low, high = tl.split(pairs)
        v = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (ROWS * LENGTH,))
    tl.store(out + offsets, v, mask=valid)


def hadamard(rows: Tensor) -> Tensor:
    """Multiply each row by the Hadamard matrix, without the factor 1/32."""
    assert rows.shape[1] == LENGTH and rows.is_contiguous() and rows.dtype == torch.float32
    out = torch.empty_like(rows)
    count = rows.shape[0]
    if count:
        _hadamard[(triton.cdiv(count, ROWS),)](rows, out, count, LENGTH, STAGES, ROWS, num_warps=8)
    return out
