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
    SUM_BLOCK,
    PackedIntCoding,
    num_buckets,
    packed_int_count,
    packed_ints_nbytes,
    packed_nbytes,
)


def block_scales(x: Tensor, rms: bool) -> Tensor:
    scales = torch.empty(num_buckets(x.numel(), SUM_BLOCK), dtype=torch.float32)
    _core.block_scales(floats_at(x), x.numel(), rms, scales.data_ptr(), threads())
    return scales


def rotate(x: Tensor, seed: int, more: Tensor | None, out: Tensor) -> None:
    rotated = packed_int_count(x.numel(), True)
    assert out.numel() == rotated and (more is None or more.numel() == rotated), (x, more, out)
    add = 0 if more is None else floats_at(more)
    _core.rotate_blocks(floats_at(x), x.numel(), random.key(seed, random.ROTATION), add, floats_at(out), threads())


def packed_int_encode(
    x: Tensor,
    coding: PackedIntCoding,
    *,
    factor: float | None,
    rotation_seed: int | None,
    rounding_seed: int | None,
    feedback: bool,
    clips: Tensor,
    out: Tensor,
) -> int:
    n = x.numel()
    assert not (feedback and rotation_seed is not None)
    return _core.packed_int_encode(
        floats_at(x),
        n,
        *coding,
        math.nan if factor is None else factor,
        rotation_seed is not None,
        random.key(rotation_seed or 0, random.ROTATION),
        rounding_seed is not None,
        random.key(rounding_seed or 0, random.ROUNDING),
        bytes_at(clips, 4 * num_buckets(n, SUM_BLOCK)),
        bytes_at(out, packed_ints_nbytes(packed_int_count(n, rotation_seed is not None), coding)),
        feedback,
        threads(),
    )


def packed_int_decode(
    integers: Tensor,
    clips: Tensor,
    coding: PackedIntCoding,
    *,
    total: int,
    rotation_seed: int | None,
    out: Tensor,
    weight: float | None,
) -> None:
    n = out.numel()
    valid = _core.packed_int_decode(
        bytes_at(integers, packed_ints_nbytes(packed_int_count(n, rotation_seed is not None), coding)),
        bytes_at(clips, 4 * num_buckets(n, SUM_BLOCK)),
        *coding,
        total,
        rotation_seed is not None,
        random.key(rotation_seed or 0, random.ROTATION),
        floats_at(out),
        n,
        weight_of(weight),
        threads(),
    )
    refuse(valid, f"a scale that is not a finite, non-negative number, or a sum above {total}")


def packed_int_add(other: Tensor, total: Tensor) -> None:
    nbytes = total.numel()
    assert nbytes % 4 == 0
    _core.packed_int_add(bytes_at(other, nbytes), bytes_at(total, nbytes), nbytes, threads())


def packed_int_accumulate(packed: Tensor, n: int, width: int, sum_width: int, total: Tensor) -> None:
    room = bytes_at(total, num_buckets(n, GROUP) * 32 * sum_width)
    _core.packed_int_accumulate(bytes_at(packed, packed_nbytes(n, width)), n, width, sum_width, room, threads())


def packed_int_repack(total: Tensor, n: int, sum_width: int, width: int, out: Tensor) -> None:
    room = bytes_at(total, num_buckets(n, GROUP) * 32 * sum_width)
    _core.packed_int_repack(room, n, sum_width, width, bytes_at(out, packed_nbytes(n, width)), threads())


def packed_int_max(integers: Tensor, n: int, coding: PackedIntCoding) -> int:
    return _core.packed_int_max(
        bytes_at(integers, packed_ints_nbytes(n, coding)), n, coding.width, coding.packed, threads()
    )
