"""Positions of selected values: encode, decode and scatter, each with one synchronization."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.interface import ChunkCounts
from laconic.kernels.reference import positions as plain
from laconic.kernels.reference.gaps import read_gaps, write_gaps
from laconic.kernels.reference.ranks import read_ranks, write_ranks
from laconic.kernels.sections import GAPS, RANKS, RICE, PositionHeader, num_buckets, read_positions_header
from laconic.kernels.triton import entropy_coding, packing, rice
from laconic.kernels.triton import scatter as scatter_kernels
from laconic.kernels.triton.launch_args import exact_options

__all__ = [
    "encode_with_state",
    "gaps_encode",
    "positions_decode",
    "positions_encode",
    "ranks_encode",
    "scatter",
    "sparse_decode",
]


def positions_encode(positions: Tensor, n: int, out: Tensor) -> int:
    return encode_with_state(positions, n, out, None)[0]


def encode_with_state(positions: Tensor, n: int, out: Tensor, state: Tensor | None) -> tuple[int, list[int]]:
    """Encode positions; return the bytes and the words of the state, which come with the same synchronization."""
    coded = rice.rice_encode(positions, n, out, state)
    if coded is None:
        return plain.positions_encode(positions, n, out), [] if state is None else state.tolist()
    plan = coded.plan
    if not coded.written:
        plain.positions_write(positions, n, plan, out[: plan.nbytes])
    return plan.nbytes, coded.state


def gaps_encode(positions: Tensor, n: int, out: Tensor) -> int:
    return write_gaps(positions, n, out, entropy_coding.encode_symbols)


def ranks_encode(positions: Tensor, n: int, counts: ChunkCounts, out: Tensor) -> int:
    return write_ranks(positions, n, counts, out, packing.pack)


def positions_decode(section: Tensor, n: int, header: PositionHeader) -> Tensor:
    if header.mode == GAPS:
        return read_gaps(section, n, header.kept, entropy_coding.decode_symbols)
    if header.mode == RANKS:
        return read_ranks(section, n, header.kept, packing.unpack)
    positions = (
        scatter_kernels.decode_positions(section, n, header.kept)
        if header.mode == RICE and scatter_kernels.can_decode(section, n)
        else None
    )
    return plain.positions_decode(section, n, header) if positions is None else positions


def sparse_decode(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    if (
        values.numel()
        and scatter_kernels.can_decode(section, out.numel())
        and scatter_kernels.decode_and_scatter(section, values, out, weight)
    ):
        return True
    header = read_positions_header(section, out.numel())
    if header.mode not in (GAPS, RANKS):
        return plain.sparse_decode(section, values, out, weight)
    if header.kept != values.numel():
        return False
    plain.scatter_finite(positions_decode(section, out.numel(), header), values, out, weight)
    return True


@triton.jit
def _scatter(positions, values, out, k, weight, ADD: tl.constexpr, SPAN: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    valid = offsets < k
    to = out + tl.load(positions + offsets, mask=valid, other=0)
    value = tl.load(values + offsets, mask=valid, other=0.0)
    if ADD:
        value = tl.load(to, mask=valid, other=0.0) + value * weight
    tl.store(to, value, mask=valid)


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
    """Store values at their distinct positions and zeros elsewhere; with a weight, add them."""
    if weight is None:
        out.zero_()
    k = positions.numel()
    if k:
        _scatter[(num_buckets(k, 1024),)](
            positions, values, out, k, weight or 0.0, ADD=weight is not None, SPAN=1024, **exact_options(num_warps=4)
        )
