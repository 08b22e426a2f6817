"""Where selected values stand: gaps packed by Triton, the rest by torch, with fewer waits than the reference needs."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.interface import POSITIONS_HEADER, RICE, PositionPlan, packed_nbytes, read_positions_header
from laconic.kernels.interface import write_bytes as write_header
from laconic.kernels.reference import positions as plain
from laconic.kernels.reference.packing import bits_to_bytes, bytes_to_bits
from laconic.kernels.reference.selection import index_dtype
from laconic.kernels.triton.packing import pack, unpack

__all__ = ["positions_plan", "positions_read", "positions_write"]


def positions_plan(positions: Tensor, n: int) -> PositionPlan:
    """One wait for all that is to be known of the gaps."""
    k = positions.numel()
    if k == n:
        return plain.plan_of(n, k, [])
    gaps, tried = plain.gaps_of(positions), plain.low_bits_candidates(n, k)
    high = torch.stack([(gaps >> low_bits).sum() for low_bits in tried]).tolist()
    return plain.plan_of(n, k, list(zip(tried, high, strict=True)))


def positions_write(positions: Tensor, n: int, plan: PositionPlan, out: Tensor) -> None:
    if plan.mode != RICE:
        plain.positions_write(positions, n, plan, out)
        return
    k, low_bits = positions.numel(), plan.low_bits
    gaps = plain.gaps_of(positions)
    low_end = POSITIONS_HEADER + packed_nbytes(k, low_bits)
    write_header(out[:POSITIONS_HEADER], (plan.mode | low_bits << 8 | k << 16).to_bytes(POSITIONS_HEADER, "little"))
    pack(gaps & ((1 << low_bits) - 1), low_bits, out[POSITIONS_HEADER:low_end])
    # As many bits as the plan has bytes for: what lies behind the last one is 0.
    bits = torch.zeros(8 * (plan.nbytes - low_end), dtype=torch.uint8, device=out.device)
    bits[((gaps >> low_bits) + 1).cumsum(0) - 1] = 1
    out[low_end:] = bits_to_bytes(bits)


def positions_read(section: Tensor, n: int) -> Tensor:
    mode, low_bits, k = read_positions_header(section, n)
    if mode != RICE:
        return plain.positions_read(section, n)
    low_end = POSITIONS_HEADER + packed_nbytes(k, low_bits)
    ends = torch.nonzero(bytes_to_bits(section[low_end:])).view(-1)
    if ends.numel() != k:
        raise FrameError(f"coded positions promise {k} and hold {ends.numel()}")
    high = torch.cat([ends[:1], ends[1:] - ends[:-1] - 1])
    gaps = (high << low_bits) | unpack(section[POSITIONS_HEADER:low_end], k, low_bits).to(torch.int64)
    positions = (gaps + 1).cumsum(0) - 1
    last_end, last = torch.stack([ends[-1], positions[-1]]).tolist()
    if last_end < (section.numel() - low_end - 1) * 8:
        raise FrameError(f"coded positions promise {k} and end before their section does")
    if not last < n:
        raise FrameError(f"a coded position is {last}, past the end of {n} values")
    return positions.to(index_dtype(n))
