"""Packed integers that can be added without decoding, and the rotation before them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels import random
from laconic.kernels.cpu.pointers import bytes_at, floats_at, packed_at, require_valid, threads, weight_of
from laconic.kernels.interface import IntRounding, PackedIntSum
from laconic.kernels.sections import PackedIntCoding, num_blocks, packed_int_count, packed_ints_nbytes, wide_sum_nbytes


def block_scales(x: Tensor, rms: bool) -> Tensor:
    scales = torch.empty(num_blocks(x.numel()), dtype=torch.float32)
    _core.block_scales(floats_at(x), x.numel(), rms, scales.data_ptr(), threads())
    return scales


def rotate(x: Tensor, seed: int, addend: Tensor | None, out: Tensor) -> None:
    rotated = packed_int_count(x.numel(), True)
    assert out.numel() == rotated and (addend is None or addend.numel() == rotated), (x, addend, out)
    add = 0 if addend is None else floats_at(addend)
    _core.rotate_blocks(floats_at(x), x.numel(), random.key(seed, random.ROTATION), add, floats_at(out), threads())


def packed_int_encode(
    x: Tensor, coding: PackedIntCoding, rounding: IntRounding, *, feedback: bool, clips: Tensor, out: Tensor
) -> int:
    n, (factor, rotation_seed, rounding_seed) = x.numel(), rounding
    rotated = rotation_seed is not None
    assert not (feedback and rotated)
    return _core.packed_int_encode(
        floats_at(x), n, *coding, math.nan if factor is None else factor, rotated,
        0 if rotation_seed is None else random.key(rotation_seed, random.ROTATION), rounding_seed is not None,
        0 if rounding_seed is None else random.key(rounding_seed, random.ROUNDING), bytes_at(clips, 4 * num_blocks(n)),
        bytes_at(out, packed_ints_nbytes(packed_int_count(n, rotated), coding)), feedback, threads(),
    )  # fmt: skip


def packed_int_decode(packed: PackedIntSum, *, rotation_seed: int | None, out: Tensor, weight: float | None) -> None:
    n, (integers, clips, coding, total) = out.numel(), packed
    rotated = rotation_seed is not None
    valid = _core.packed_int_decode(
        bytes_at(integers, packed_ints_nbytes(packed_int_count(n, rotated), coding)),
        bytes_at(clips, 4 * num_blocks(n)), *coding, total, rotated,
        0 if rotation_seed is None else random.key(rotation_seed, random.ROTATION), floats_at(out), n,
        weight_of(weight), threads(),
    )  # fmt: skip
    require_valid(valid, f"a scale that is not a finite, non-negative number, or a sum above {total}")


def packed_int_add(other: Tensor, total: Tensor) -> None:
    nbytes = total.numel()
    assert nbytes % 4 == 0
    _core.packed_int_add(bytes_at(other, nbytes), bytes_at(total, nbytes), nbytes, threads())


def packed_int_accumulate(packed: Tensor, n: int, width: int, sum_width: int, total: Tensor) -> None:
    _core.packed_int_accumulate(
        packed_at(packed, n, width), n, width, sum_width, bytes_at(total, wide_sum_nbytes(n, sum_width)), threads()
    )


def packed_int_repack(total: Tensor, n: int, sum_width: int, width: int, out: Tensor) -> None:
    _core.packed_int_repack(
        bytes_at(total, wide_sum_nbytes(n, sum_width)), n, sum_width, width, packed_at(out, n, width), threads()
    )


def packed_int_max(integers: Tensor, n: int, coding: PackedIntCoding) -> int:
    section = bytes_at(integers, packed_ints_nbytes(n, coding))
    return _core.packed_int_max(section, n, coding.width, coding.packed, threads())
