"""Selection: the largest values, those above a threshold, random ones."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels import random, reference
from laconic.kernels.cpu.pointers import empty, empty_positions, floats_at, is_wide, threads
from laconic.kernels.interface import ChunkCounts
from laconic.kernels.sections import write_seed


def _as_float32(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16, whose order float32 preserves exactly."""
    return x if x.dtype == torch.float32 else x.to(torch.float32)


def _amax_bits(values: Tensor) -> int:
    return _core.amax_bits(values.data_ptr(), values.numel(), threads()) if values.numel() else 0


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor, int]:
    n = x.numel()
    wide, positions = empty_positions(n, k)
    if x.dtype == torch.float64:
        values = torch.empty(k, dtype=torch.float64)
        _core.topk_double(x.data_ptr(), n, k, wide, positions.data_ptr(), values.data_ptr())
        return positions, values, reference.amax_bits_any_dtype(values)
    flat = _as_float32(x)  # held by name: an address does not keep its tensor alive
    values = empty(k)
    amax_bits = _core.topk(floats_at(flat), n, k, wide, positions.data_ptr(), values.data_ptr(), threads())
    return positions, values if x is flat else values.to(x.dtype), amax_bits


def topk_chunks(x: Tensor, counts: ChunkCounts) -> tuple[Tensor, Tensor, int]:
    n, double, flat = x.numel(), x.dtype == torch.float64, x if x.dtype == torch.float64 else _as_float32(x)
    assert flat.is_contiguous() and flat.is_cpu and n, x
    assert 0 < counts.each <= counts.chunk and 0 < counts.last <= (n - 1) % counts.chunk + 1, (n, counts)
    wide, positions = empty_positions(n, counts.total(n))
    values = torch.empty(counts.total(n), dtype=flat.dtype)
    arguments = flat.data_ptr(), n, *counts, wide, positions.data_ptr(), values.data_ptr(), threads()
    if double:
        _core.topk_chunks_double(*arguments)
        return positions, values, reference.amax_bits_any_dtype(values)
    amax_bits = _core.topk_chunks(*arguments)
    return positions, values if x is flat else values.to(x.dtype), amax_bits


def topk_sampled(x: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor, int]:
    if x.dtype == torch.float64:
        return reference.topk_sampled(x, k, seed)
    n, flat, capacity = x.numel(), _as_float32(x), 2 * k + 16
    wide, positions = empty_positions(n, capacity)
    values, key = empty(capacity), random.key(seed, random.SAMPLING)
    count = _core.topk_sampled(floats_at(flat), n, k, key, wide, positions.data_ptr(), values.data_ptr(), threads())
    if count < 0:
        return topk(x, k)
    values = values[:count]
    return positions[:count], values if x is flat else values.to(x.dtype), _amax_bits(values)


def threshold_select(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, int]:
    if x.dtype == torch.float64:
        return reference.threshold_select(x, threshold)
    n, flat = x.numel(), _as_float32(x)
    (limit,) = struct.unpack("<I", struct.pack("<f", threshold))
    capacity = _core.count_threshold(floats_at(flat), n, limit, threads())
    wide, positions = empty_positions(n, capacity)
    values = empty(capacity)
    to = positions.data_ptr(), values.data_ptr(), capacity
    count, amax_bits = _core.threshold_select(floats_at(flat), n, limit, wide, *to)
    if count < capacity:  # another thread has changed x since the entries were counted
        positions, values = positions[:count], values[:count]
    return positions, values if x is flat else values.to(x.dtype), amax_bits


def random_positions(n: int, k: int, seed: int, like: Tensor) -> Tensor:
    wide, positions = empty_positions(n, k)
    if k:
        _core.random_positions(n, k, random.key(seed, random.POSITIONS), wide, positions.data_ptr(), threads())
    return positions


def randk_encode(x: Tensor, k: int, seed: int, section: Tensor) -> tuple[Tensor, int]:
    write_seed(section, seed)
    values = torch.empty(k, dtype=x.dtype)
    if x.dtype == torch.float32 and k:
        wide, positions = empty_positions(x.numel(), k)
        key = random.key(seed, random.POSITIONS)
        return values, _core.random_entries(
            floats_at(x), x.numel(), k, key, wide, positions.data_ptr(), values.data_ptr(), threads()
        )
    amax_bits = reference.amax_bits_any_dtype(x)
    positions = random_positions(x.numel(), k, seed, x)
    assert x.is_contiguous() and x.is_cpu, x
    _core.gather(
        x.data_ptr(), x.element_size(), positions.data_ptr(), k, is_wide(positions), values.data_ptr(), threads()
    )
    return values, amax_bits
