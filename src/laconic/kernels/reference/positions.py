"""Coded positions (Rice-coded or entropy-coded gaps, or a bitmap), and values scattered to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.interface import ChunkCounts
from laconic.kernels.reference.casts import all_finite
from laconic.kernels.reference.contexts import contexts_decode
from laconic.kernels.reference.gaps import gaps_decode, gaps_of
from laconic.kernels.reference.packing import bits_to_bytes, bytes_to_bits, pack, unpack
from laconic.kernels.reference.ranks import ranks_decode
from laconic.kernels.reference.selection import index_dtype, random_positions, topk, topk_chunks
from laconic.kernels.sections import (
    ALL,
    BITMAP,
    CONTEXTS,
    GAPS,
    POSITIONS_HEADER,
    RANKS,
    RICE,
    PositionHeader,
    PositionPlan,
    low_bits_candidates,
    packed_nbytes,
    read_positions_header,
    read_seed,
    write_bytes,
)


def plan_of(n: int, k: int, tried: list[tuple[int, int]]) -> PositionPlan:
    """Return the smallest plan: Rice codes (of equal ones the first) or a bitmap.

    ``tried`` has Rice parameters, each with the sum of the high parts of all gaps.
    """
    if k == n:
        return PositionPlan(ALL, 0, POSITIONS_HEADER)
    plans = []
    for low_bits, high in tried:
        nbytes = POSITIONS_HEADER + packed_nbytes(k, low_bits) + -(-(k + high) // 8)
        plans.append(PositionPlan(RICE, low_bits, nbytes))
    plans.append(PositionPlan(BITMAP, 0, POSITIONS_HEADER + -(-n // 8)))
    return min(plans, key=lambda plan: plan.nbytes)


def positions_plan(positions: Tensor, n: int) -> PositionPlan:
    gaps, k = gaps_of(positions), positions.numel()
    tried = [] if k == n else low_bits_candidates(n, k)
    return plan_of(n, k, [(low_bits, int((gaps >> low_bits).sum())) for low_bits in tried])


def positions_write(positions: Tensor, n: int, plan: PositionPlan, out: Tensor) -> None:
    """Write the header (mode, Rice parameter, count), the low bits of the gaps, and their high parts in unary."""
    k = positions.numel()
    header = plan.mode | plan.low_bits << 8 | k << 16
    write_bytes(out[:8], header.to_bytes(8, "little"))
    if plan.mode == BITMAP:
        bits = torch.zeros(n, dtype=torch.int32, device=out.device)
        bits[positions.long()] = 1
        out[8:] = bits_to_bytes(bits)
    elif plan.mode == RICE:
        gaps = gaps_of(positions)
        low_end = 8 + packed_nbytes(k, plan.low_bits)
        pack(gaps & ((1 << plan.low_bits) - 1), plan.low_bits, out[8:low_end])
        ends = ((gaps >> plan.low_bits) + 1).cumsum(0) - 1
        bits = torch.zeros(int(ends[-1]) + 1, dtype=torch.int32, device=out.device)
        bits[ends] = 1
        out[low_end:] = bits_to_bytes(bits)


def positions_encode(positions: Tensor, n: int, out: Tensor) -> int:
    plan = positions_plan(positions, n)
    positions_write(positions, n, plan, out[: plan.nbytes])
    return plan.nbytes


def topk_encode(x: Tensor, k: int, out: Tensor) -> tuple[int, Tensor, int]:
    positions, values, amax_bits = topk(x, k)
    return positions_encode(positions, x.numel(), out), values, amax_bits


def topk_chunks_encode(x: Tensor, counts: ChunkCounts, out: Tensor) -> tuple[int, Tensor, int]:
    positions, values, amax_bits = topk_chunks(x, counts)
    return positions_encode(positions, x.numel(), out), values, amax_bits


def positions_decode(section: Tensor, n: int, header: PositionHeader) -> Tensor:
    mode, low_bits, k = header
    dtype = index_dtype(n)
    if mode == ALL:
        return torch.arange(n, dtype=dtype, device=section.device)
    if mode == GAPS:
        return gaps_decode(section, n, k)
    if mode == RANKS:
        return ranks_decode(section, n, k)
    if mode == CONTEXTS:
        return contexts_decode(section, n, k)
    if mode == BITMAP:
        bits = bytes_to_bits(section[8:])
        positions = torch.nonzero(bits).view(-1)
        if positions.numel() != k or (k and int(positions[-1]) >= n):
            raise FrameError(
                f"the frame holds a bitmap of {positions.numel()} of {n} positions, its header announces {k}"
            )
        return positions.to(dtype)
    low_end = 8 + packed_nbytes(k, low_bits)
    ends = torch.nonzero(bytes_to_bits(section[low_end:])).view(-1)
    if ends.numel() != k or int(ends[-1]) < (section.numel() - low_end - 1) * 8:
        raise FrameError(f"the frame holds {ends.numel()} coded positions, its header announces {k}")
    high = torch.cat([ends[:1], ends[1:] - ends[:-1] - 1])
    gaps = (high << low_bits) | unpack(section[8:low_end], k, low_bits).to(torch.int64)
    positions = (gaps + 1).cumsum(0) - 1
    if int(positions[-1]) >= n:
        raise FrameError(f"the frame holds a coded position {int(positions[-1])}, the tensor has {n} values")
    return positions.to(dtype)


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
    where = positions.long()
    if weight is None:
        out.zero_()
        out[where] = values
    else:
        factor = torch.tensor(weight, dtype=torch.float32, device=out.device)
        out[where] = out[where] + values * factor


def sparse_decode(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    return sparse_decode_by(positions_decode, section, values, out, weight)


def sparse_decode_by(
    decode: Callable[[Tensor, int, PositionHeader], Tensor], section: Tensor, values: Tensor, out: Tensor,
    weight: float | None,
) -> bool:  # fmt: skip
    """``sparse_decode`` with a backend's ``positions_decode``."""
    header = read_positions_header(section, out.numel())
    if header.kept != values.numel():
        return False
    scatter_finite(decode(section, out.numel(), header), values, out, weight)
    return True


def scatter_finite(positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
    """``scatter`` values of a frame, which may not be finite."""
    if not all_finite(values):
        raise FrameError("the frame holds a value that is not finite")
    scatter(positions, values if weight is None else values.to(torch.float32), out, weight)


def scale_saturating(values: Tensor, gain: float) -> Tensor:
    largest = torch.finfo(values.dtype).max
    return values if gain == 1.0 else (values * gain).clamp_(-largest, largest)


def randk_decode(section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> None:
    if not all_finite(values):
        raise FrameError("the frame holds a value that is not finite")
    positions = random_positions(out.numel(), values.numel(), read_seed(section), out)
    values = scale_saturating(values, gain)
    scatter(positions, values if weight is None else values.to(torch.float32), out, weight)
