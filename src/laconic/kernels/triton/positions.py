"""Where selected values stand: positions coded and read, values put back; each waits once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.reference import positions as plain
from laconic.kernels.sections import RICE, PositionHeader, num_buckets
from laconic.kernels.triton import rice
from laconic.kernels.triton import scatter as scattering
from laconic.kernels.triton.tile import exact

__all__ = ["positions_decode", "positions_encode", "scatter", "sparse_decode"]


def positions_encode(positions: Tensor, n: int, out: Tensor) -> int:
    coded = rice.code(positions, n, out)
    if coded is None:
        return plain.positions_encode(positions, n, out)
    plan, written = coded
    if not written:
        plain.positions_write(positions, n, plan, out[: plan.nbytes])
    return plan.nbytes


def positions_decode(section: Tensor, n: int, header: PositionHeader) -> Tensor:
    found = scattering.read(section, n, header.kept) if header.mode == RICE and scattering.reads(section, n) else None
    return plain.positions_decode(section, n, header) if found is None else found


def sparse_decode(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    if values.numel() and scattering.reads(section, out.numel()) and scattering.place(section, values, out, weight):
        return True
    return plain.sparse_decode(section, values, out, weight)


@triton.jit
def _scatter(positions, values, out, k, weight, ADD: tl.constexpr, SPAN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    there = at < k
    to = out + tl.load(positions + at, mask=there, other=0)
    value = tl.load(values + at, mask=there, other=0.0)
    if ADD:
        value = tl.load(to, mask=there, other=0.0) + value * weight
    tl.store(to, value, mask=there)


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
    """Values at their positions and zeros elsewhere; with a weight, added to what is there. No position is twice."""
    if weight is None:
        out.zero_()
    k = positions.numel()
    if k:
        _scatter[(num_buckets(k, 1024),)](
            positions, values, out, k, weight or 0.0, ADD=weight is not None, SPAN=1024, **exact(num_warps=4)
        )
