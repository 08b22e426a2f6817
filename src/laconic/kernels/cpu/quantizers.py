"""Quantizers: qsgd, terngrad, uniform, sign, onebit, bins."""

from __future__ import annotations

import struct

from torch import Tensor

from laconic import _core
from laconic.kernels import random
from laconic.kernels.cpu.pointers import (
    bucket_floats_at,
    bytes_at,
    floats_at,
    packed_at,
    require_valid,
    threads,
    weight_of,
)
from laconic.kernels.interface import NONFINITE, BinCoding, QsgdCoding
from laconic.kernels.sections import symbol_bits, trits_nbytes, write_bytes


def qsgd_encode(x: Tensor, coding: QsgdCoding, *, seed: int, norms: Tensor, packed: Tensor) -> int:
    n, (bits, bucket, l2, stochastic), key = x.numel(), coding, random.key(seed, random.ROUNDING)
    norms_ptr, packed_ptr = bucket_floats_at(norms, n, bucket), packed_at(packed, n, bits)
    return _core.qsgd_encode(floats_at(x), n, bits, bucket, l2, stochastic, key, norms_ptr, packed_ptr, threads())


def qsgd_decode(norms: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    norms_ptr, packed_ptr = bucket_floats_at(norms, n, bucket), packed_at(packed, n, bits)
    store = weight_of(weight)
    valid = _core.qsgd_decode(norms_ptr, packed_ptr, bits, bucket, floats_at(out), n, store, threads())
    require_valid(valid, "a norm that is not a finite, non-negative number")


def qsgd_feedback(x: Tensor, residual: Tensor, coding: QsgdCoding, *, seed: int, norms: Tensor, packed: Tensor) -> int:
    amax_bits = qsgd_encode(residual.add_(x), coding, seed=seed, norms=norms, packed=packed)
    if 0 < amax_bits < NONFINITE:
        qsgd_decode(norms, packed, bits=coding.bits, bucket=coding.bucket, out=residual, weight=-1.0)
    return amax_bits


def ternary_encode(x: Tensor, *, bucket: int, seed: int, norms: Tensor, packed: Tensor) -> int:
    n, key = x.numel(), random.key(seed, random.ROUNDING)
    norms_ptr, packed_ptr = bucket_floats_at(norms, n, bucket), bytes_at(packed, trits_nbytes(n))
    return _core.ternary_encode(floats_at(x), n, bucket, key, norms_ptr, packed_ptr, threads())


def ternary_decode(norms: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    norms_ptr, packed_ptr = bucket_floats_at(norms, n, bucket), bytes_at(packed, trits_nbytes(n))
    store = weight_of(weight)
    valid = _core.ternary_decode(norms_ptr, packed_ptr, bucket, floats_at(out), n, store, threads())
    require_valid(valid, "a byte that is not five ternary values, or a scale that is not a finite, non-negative number")


def value_range(x: Tensor) -> tuple[float, float, int]:
    return _core.value_range(floats_at(x), x.numel(), threads()) if x.numel() else (0.0, 0.0, 0)


def uniform_encode(x: Tensor, *, levels: int, bounds: Tensor, packed: Tensor) -> tuple[float, float, int]:
    low, high, amax_bits = value_range(x)
    low, high = low + 0.0, high + 0.0  # -0 becomes 0: which of the two is met first depends on the backend
    if not 0 < amax_bits < NONFINITE:
        return low, high, amax_bits
    write_bytes(bounds, struct.pack("<2f", low, high))
    n, bits = x.numel(), symbol_bits(levels)
    if low < high:
        _core.uniform_encode(floats_at(x), n, low, high, levels, bits, packed_at(packed, n, bits), threads())
    return low, high, amax_bits


def uniform_decode(packed: Tensor, *, low: float, high: float, levels: int, out: Tensor, weight: float | None) -> None:
    n, bits = out.numel(), symbol_bits(levels)
    section, store = packed_at(packed, n, bits), weight_of(weight)
    _core.uniform_decode(section, low, high, levels, bits, floats_at(out), n, store, threads())


def sign_encode(x: Tensor, *, bucket: int, scales: Tensor, packed: Tensor) -> int:
    n = x.numel()
    scales_ptr, packed_ptr = bucket_floats_at(scales, n, bucket), packed_at(packed, n, 1)
    return _core.sign_encode(floats_at(x), n, bucket, scales_ptr, packed_ptr, threads())


def sign_decode(scales: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    scales_ptr, packed_ptr = bucket_floats_at(scales, n, bucket), packed_at(packed, n, 1)
    valid = _core.sign_decode(scales_ptr, packed_ptr, bucket, floats_at(out), n, weight_of(weight), threads())
    require_valid(valid, "a scale that is not a finite, non-negative number")


def onebit_encode(x: Tensor, *, bucket: int, means: Tensor, packed: Tensor) -> int:
    n = x.numel()
    means_ptr, packed_ptr = bucket_floats_at(means, n, bucket, 2), packed_at(packed, n, 1)
    return _core.onebit_encode(floats_at(x), n, bucket, means_ptr, packed_ptr, threads())


def onebit_decode(means: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    means_ptr, packed_ptr = bucket_floats_at(means, n, bucket, 2), packed_at(packed, n, 1)
    valid = _core.onebit_decode(means_ptr, packed_ptr, bucket, floats_at(out), n, weight_of(weight), threads())
    require_valid(valid, "a mean that is not a finite, non-negative number")


def bins_encode(x: Tensor, coding: BinCoding, *, means: Tensor, packed: Tensor) -> int:
    n, (bits, bucket, slope, offset) = x.numel(), coding
    means_ptr, packed_ptr = bucket_floats_at(means, n, bucket, 1 << bits), packed_at(packed, n, bits)
    return _core.bins_encode(floats_at(x), n, bits, bucket, slope, offset, means_ptr, packed_ptr, threads())


def bins_decode(means: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    means_ptr, packed_ptr = bucket_floats_at(means, n, bucket, 1 << bits), packed_at(packed, n, bits)
    valid = _core.bins_decode(means_ptr, packed_ptr, bits, bucket, floats_at(out), n, weight_of(weight), threads())
    require_valid(valid, "a mean that is not a finite number")
