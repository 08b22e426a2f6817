"""Sums of what can be added as it travels: blocks, rotations, lanes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels import random
from laconic.kernels.cpu.checked_pointers import bytes_at, floats_at, refuse, threads, weight_of
from laconic.kernels.interface import (
    GROUP,
    LANE_BLOCK,
    LaneCoding,
    lane_values,
    lanes_nbytes,
    num_buckets,
    packed_nbytes,
)


def block_scales(x: Tensor, rms: bool) -> Tensor:
    scales = torch.empty(num_buckets(x.numel(), LANE_BLOCK), dtype=torch.float32)
    _core.block_scales(floats_at(x), x.numel(), rms, scales.data_ptr(), threads())
    return scales


def rotate(x: Tensor, seed: int, more: Tensor | None, out: Tensor) -> None:
    rotated = lane_values(x.numel(), True)
    assert out.numel() == rotated and (more is None or more.numel() == rotated), (x, more, out)
    add = 0 if more is None else floats_at(more)
    _core.rotate_blocks(floats_at(x), x.numel(), random.key(seed, random.ROTATION), add, floats_at(out), threads())


def lane_encode(
    x: Tensor,
    coding: LaneCoding,
    *,
    factor: float | None,
    rotation: int | None,
    noise: int | None,
    feedback: bool,
    clips: Tensor,
    out: Tensor,
) -> int:
    n = x.numel()
    assert not (feedback and rotation is not None)
    return _core.lane_encode(
        floats_at(x),
        n,
        *coding,
        math.nan if factor is None else factor,
        rotation is not None,
        random.key(rotation or 0, random.ROTATION),
        noise is not None,
        random.key(noise or 0, random.ROUNDING),
        bytes_at(clips, 4 * num_buckets(n, LANE_BLOCK)),
        bytes_at(out, lanes_nbytes(lane_values(n, rotation is not None), coding)),
        feedback,
        threads(),
    )


def lane_decode(
    lanes: Tensor,
    clips: Tensor,
    coding: LaneCoding,
    *,
    total: int,
    rotation: int | None,
    out: Tensor,
    weight: float | None,
) -> None:
    n = out.numel()
    valid = _core.lane_decode(
        bytes_at(lanes, lanes_nbytes(lane_values(n, rotation is not None), coding)),
        bytes_at(clips, 4 * num_buckets(n, LANE_BLOCK)),
        *coding,
        total,
        rotation is not None,
        random.key(rotation or 0, random.ROTATION),
        floats_at(out),
        n,
        weight_of(weight),
        threads(),
    )
    refuse(valid, f"a scale that is not a finite, non-negative number, or a sum above {total}")


def lane_add(other: Tensor, total: Tensor) -> None:
    nbytes = total.numel()
    assert nbytes % 4 == 0
    _core.lane_add(bytes_at(other, nbytes), bytes_at(total, nbytes), nbytes, threads())


def lane_accumulate(packed: Tensor, n: int, width: int, lane: int, total: Tensor) -> None:
    room = bytes_at(total, num_buckets(n, GROUP) * 32 * lane)
    _core.lane_accumulate(bytes_at(packed, packed_nbytes(n, width)), n, width, lane, room, threads())


def lane_pack(total: Tensor, n: int, lane: int, width: int, out: Tensor) -> None:
    room = bytes_at(total, num_buckets(n, GROUP) * 32 * lane)
    _core.lane_pack(room, n, lane, width, bytes_at(out, packed_nbytes(n, width)), threads())


def lane_largest(lanes: Tensor, n: int, coding: LaneCoding) -> int:
    return _core.lane_largest(bytes_at(lanes, lanes_nbytes(n, coding)), n, coding.width, coding.packed, threads())
