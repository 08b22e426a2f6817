"""Where they stand, and values back to their places."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels import reference
from laconic.kernels.cpu.casts import all_finite
from laconic.kernels.cpu.checked_pointers import bytes_at, floats_at, index_room, is_wide, refuse, threads, weight_of
from laconic.kernels.cpu.selection import random_positions, topk
from laconic.kernels.interface import (
    ALL,
    POSITIONS_HEADER,
    PositionHeader,
    PositionPlan,
    read_positions_header,
    read_seed,
)
from laconic.kernels.reference.positions import grown


def topk_encode(x: Tensor, k: int, out: Tensor) -> tuple[int, Tensor, int]:
    positions, values, amax_bits = topk(x, k)
    return positions_encode(positions, x.numel(), out), values, amax_bits


def positions_plan(positions: Tensor, n: int) -> PositionPlan:
    return PositionPlan(*_core.plan_positions(positions.data_ptr(), positions.numel(), is_wide(positions), n))


def positions_write(positions: Tensor, n: int, plan: PositionPlan, out: Tensor) -> None:
    mode, low_bits, nbytes = plan
    address, k = positions.data_ptr(), positions.numel()
    _core.write_positions(address, k, is_wide(positions), mode, low_bits, nbytes, bytes_at(out, nbytes))


def positions_encode(positions: Tensor, n: int, out: Tensor) -> int:
    plan = positions_plan(positions, n)
    positions_write(positions, n, plan, out[: plan.nbytes])
    return plan.nbytes


def positions_decode(section: Tensor, n: int, header: PositionHeader) -> Tensor:
    mode, low_bits, k = header
    wide, positions = index_room(n, k)
    if mode == ALL:
        return torch.arange(n, dtype=positions.dtype)
    body, nbytes = section.data_ptr() + POSITIONS_HEADER, section.numel() - POSITIONS_HEADER
    valid = _core.read_positions(body, nbytes, mode, low_bits, k, n, wide, positions.data_ptr())
    refuse(valid, f"positions that are not {k} ascending ones below {n}")
    return positions


def sparse_decode(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    header = read_positions_header(section, out.numel())
    if header.kept != values.numel():
        return False
    positions = positions_decode(section, out.numel(), header)
    refuse(all_finite(values), "a value that is not finite")
    scatter(positions, values if weight is None else values.to(torch.float32), out, weight)
    return True


def _grown(values: Tensor, gain: float) -> tuple[Tensor, bool]:
    """Values times a gain, and whether all are finite."""
    if values.dtype != torch.float32 or gain == 1.0:
        return grown(values, gain), all_finite(values)
    out = torch.empty_like(values)
    return out, _core.scale_saturating(floats_at(values), values.numel(), gain, out.data_ptr())


def randk_decode(section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> None:
    values, finite = _grown(values, gain)
    refuse(finite, "a value that is not finite")
    positions = random_positions(out.numel(), values.numel(), read_seed(section), out)
    scatter(positions, values if weight is None else values.to(torch.float32), out, weight)


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
    if out.dtype != torch.float32:
        reference.scatter(positions, values, out, weight)
        return
    k = positions.numel()
    assert values.numel() == k
    _core.scatter(
        positions.data_ptr(),
        floats_at(values),
        k,
        is_wide(positions),
        floats_at(out),
        out.numel(),
        weight_of(weight),
        threads(),
    )
