"""Where they stand: Rice-coded gaps or a bitmap; and values back to their places."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.interface import (
    ALL,
    BITMAP,
    POSITIONS_HEADER,
    RICE,
    PositionHeader,
    PositionPlan,
    low_bits_candidates,
    packed_nbytes,
    read_positions_header,
    read_seed,
    write_bytes,
)
from laconic.kernels.reference.casts import all_finite
from laconic.kernels.reference.packing import bits_to_bytes, bytes_to_bits, pack, unpack
from laconic.kernels.reference.selection import index_dtype, random_positions, topk


def gaps_of(positions: Tensor) -> Tensor:
    """How many positions are left out before each."""
    wide = positions.to(torch.int64)
    previous = torch.cat([torch.full((1,), -1, dtype=torch.int64, device=wide.device), wide[:-1]])
    return wide - previous - 1


def plan_of(n: int, k: int, tried: list[tuple[int, int]]) -> PositionPlan:
    """The smaller of Rice-coded gaps and a bitmap; of several Rice parameters the first that is smallest.

    ``tried`` are parameters, and the sum of all gaps' high parts under each.
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
    """Header (mode, Rice parameter, count), then the low bits of the gaps, then their high parts in unary."""
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
    """Write ascending positions to ``out``, which has ``positions_max_nbytes`` bytes, and return how many it took."""
    plan = positions_plan(positions, n)
    positions_write(positions, n, plan, out[: plan.nbytes])
    return plan.nbytes


def topk_encode(x: Tensor, k: int, out: Tensor) -> tuple[int, Tensor, int]:
    """``topk`` with its positions in ``out``, of ``positions_max_nbytes`` bytes: how many it takes, values, and key."""
    positions, values, amax_bits = topk(x, k)
    return positions_encode(positions, x.numel(), out), values, amax_bits


def positions_decode(section: Tensor, n: int, header: PositionHeader) -> Tensor:
    mode, low_bits, k = header
    dtype = index_dtype(n)
    if mode == ALL:
        return torch.arange(n, dtype=dtype, device=section.device)
    if mode == BITMAP:
        bits = bytes_to_bits(section[8:])
        positions = torch.nonzero(bits).view(-1)
        if positions.numel() != k or (k and int(positions[-1]) >= n):
            raise FrameError(f"a bitmap of {n} positions promises {k} and marks {positions.numel()}")
        return positions.to(dtype)
    low_end = 8 + packed_nbytes(k, low_bits)
    ends = torch.nonzero(bytes_to_bits(section[low_end:])).view(-1)
    if ends.numel() != k or int(ends[-1]) < (section.numel() - low_end - 1) * 8:
        raise FrameError(f"coded positions promise {k} and hold {ends.numel()}")
    high = torch.cat([ends[:1], ends[1:] - ends[:-1] - 1])
    gaps = (high << low_bits) | unpack(section[8:low_end], k, low_bits).to(torch.int64)
    positions = (gaps + 1).cumsum(0) - 1
    if int(positions[-1]) >= n:
        raise FrameError(f"a coded position is {int(positions[-1])}, past the end of {n} values")
    return positions.to(dtype)


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
    """Values at their positions and zeros elsewhere; with a weight, added to what is there."""
    where = positions.long()
    if weight is None:
        out.zero_()
        out[where] = values
    else:
        factor = torch.tensor(weight, dtype=torch.float32, device=out.device)
        out[where] = out[where] + values * factor


def sparse_decode(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    """``scatter`` to the positions of a section; values that nobody has looked at must be finite.

    False, and nothing has happened, when the section has positions for another number of values.
    """
    header = read_positions_header(section, out.numel())
    if header.kept != values.numel():
        return False
    positions = positions_decode(section, out.numel(), header)
    if not all_finite(values):
        raise FrameError("a value in the frame is not finite")
    scatter(positions, values if weight is None else values.to(torch.float32), out, weight)
    return True


def grown(values: Tensor, gain: float) -> Tensor:
    """Values times a gain, saturating."""
    largest = torch.finfo(values.dtype).max
    return values if gain == 1.0 else (values * gain).clamp_(-largest, largest)


def randk_decode(section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> None:
    """``scatter``, to the ``random_positions`` of a section's seed, of values times a gain."""
    if not all_finite(values):
        raise FrameError("a value in the frame is not finite")
    positions = random_positions(out.numel(), values.numel(), read_seed(section), out)
    values = grown(values, gain)
    scatter(positions, values if weight is None else values.to(torch.float32), out, weight)
