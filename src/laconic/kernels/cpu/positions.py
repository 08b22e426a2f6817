"""Coded positions, and values scattered to them."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels import reference
from laconic.kernels.cpu.casts import all_finite
from laconic.kernels.cpu.pointers import (
    bytes_at,
    empty_positions,
    floats_at,
    is_wide,
    require_valid,
    threads,
    weight_of,
)
from laconic.kernels.cpu.selection import random_positions, topk, topk_chunks
from laconic.kernels.interface import ChunkCounts
from laconic.kernels.reference.positions import scale_saturating
from laconic.kernels.sections import (
    ALL,
    POSITIONS_HEADER,
    PositionHeader,
    PositionPlan,
    read_positions_header,
    read_seed,
)


def topk_encode(x: Tensor, k: int, out: Tensor) -> tuple[int, Tensor, int]:
    positions, values, amax_bits = topk(x, k)
    return positions_encode(positions, x.numel(), out), values, amax_bits


def topk_chunks_encode(x: Tensor, counts: ChunkCounts, out: Tensor) -> tuple[int, Tensor, int]:
    positions, values, amax_bits = topk_chunks(x, counts)
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
    wide, positions = empty_positions(n, k)
    if mode == ALL:
        return torch.arange(n, dtype=positions.dtype)
    body, nbytes = section.data_ptr() + POSITIONS_HEADER, section.numel() - POSITIONS_HEADER
    valid = _core.read_positions(body, nbytes, mode, low_bits, k, n, wide, positions.data_ptr())
    require_valid(valid, f"positions that are not {k} ascending ones below {n}")
    return positions


def sparse_decode(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    header = read_positions_header(section, out.numel())
    if header.kept != values.numel():
        return False
    positions = positions_decode(section, out.numel(), header)
    require_valid(all_finite(values), "a value that is not finite")
    scatter(positions, values if weight is None else values.to(torch.float32), out, weight)
    return True


def randk_decode(section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> None:
    if values.dtype != torch.float32 or gain == 1.0:
        scaled, finite = scale_saturating(values, gain), all_finite(values)
    else:
        scaled = torch.empty_like(values)
        finite = _core.scale_saturating(floats_at(values), values.numel(), gain, scaled.data_ptr())
    require_valid(finite, "a value that is not finite")
    positions = random_positions(out.numel(), values.numel(), read_seed(section), out)
    scatter(positions, scaled if weight is None else scaled.to(torch.float32), out, weight)


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
    if out.dtype != torch.float32:
        reference.scatter(positions, values, out, weight)
        return
    k = positions.numel()
    assert values.numel() == k
    address, wide = positions.data_ptr(), is_wide(positions)
    weight = weight_of(weight)
    _core.scatter(address, floats_at(values), k, wide, floats_at(out), out.numel(), weight, threads())
