"""Values onto few levels, bucket by bucket."""

from __future__ import annotations

import struct

from torch import Tensor

from laconic import _core
from laconic.kernels import random
from laconic.kernels.cpu.checked_pointers import bytes_at, floats_at, refuse, threads, weight_of
from laconic.kernels.interface import NONFINITE, num_buckets, packed_nbytes, trits_nbytes, write_bytes


def qsgd_encode(
    x: Tensor, *, bits: int, bucket: int, l2: bool, stochastic: bool, seed: int, norms: Tensor, packed: Tensor
) -> int:
    n = x.numel()
    return _core.qsgd_encode(
        floats_at(x),
        n,
        bits,
        bucket,
        l2,
        stochastic,
        random.key(seed, random.ROUNDING),
        bytes_at(norms, 4 * num_buckets(n, bucket)),
        bytes_at(packed, packed_nbytes(n, bits)),
        threads(),
    )


def qsgd_decode(norms: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    valid = _core.qsgd_decode(
        bytes_at(norms, 4 * num_buckets(n, bucket)),
        bytes_at(packed, packed_nbytes(n, bits)),
        bits,
        bucket,
        floats_at(out),
        n,
        weight_of(weight),
        threads(),
    )
    refuse(valid, "a norm that is not a finite, non-negative number")


def qsgd_feedback(
    x: Tensor,
    residual: Tensor,
    *,
    bits: int,
    bucket: int,
    l2: bool,
    stochastic: bool,
    seed: int,
    norms: Tensor,
    packed: Tensor,
) -> int:
    residual.add_(x)
    amax_bits = qsgd_encode(
        residual, bits=bits, bucket=bucket, l2=l2, stochastic=stochastic, seed=seed, norms=norms, packed=packed
    )
    if 0 < amax_bits < NONFINITE:
        qsgd_decode(norms, packed, bits=bits, bucket=bucket, out=residual, weight=-1.0)
    return amax_bits


def ternary_encode(x: Tensor, *, bucket: int, seed: int, norms: Tensor, packed: Tensor) -> int:
    n = x.numel()
    return _core.ternary_encode(
        floats_at(x),
        n,
        bucket,
        random.key(seed, random.ROUNDING),
        bytes_at(norms, 4 * num_buckets(n, bucket)),
        bytes_at(packed, trits_nbytes(n)),
        threads(),
    )


def ternary_decode(norms: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    valid = _core.ternary_decode(
        bytes_at(norms, 4 * num_buckets(n, bucket)),
        bytes_at(packed, trits_nbytes(n)),
        bucket,
        floats_at(out),
        n,
        weight_of(weight),
        threads(),
    )
    refuse(valid, "a byte that is not five ternary values, or a scale that is not a finite, non-negative number")


def value_range(x: Tensor) -> tuple[float, float, int]:
    return _core.value_range(floats_at(x), x.numel(), threads()) if x.numel() else (0.0, 0.0, 0)


def uniform_encode(x: Tensor, *, levels: int, bounds: Tensor, packed: Tensor) -> tuple[float, float, int]:
    low, high, amax_bits = value_range(x)
    low, high = low + 0.0, high + 0.0  # whichever of -0 and +0 was met first
    if not 0 < amax_bits < NONFINITE:
        return low, high, amax_bits
    write_bytes(bounds, struct.pack("<2f", low, high))
    n, bits = x.numel(), (levels - 1).bit_length()
    if low < high:
        _core.uniform_encode(
            floats_at(x), n, low, high, levels, bits, bytes_at(packed, packed_nbytes(n, bits)), threads()
        )
    return low, high, amax_bits


def uniform_decode(packed: Tensor, *, low: float, high: float, levels: int, out: Tensor, weight: float | None) -> None:
    n, bits = out.numel(), (levels - 1).bit_length()
    _core.uniform_decode(
        bytes_at(packed, packed_nbytes(n, bits)),
        low,
        high,
        levels,
        bits,
        floats_at(out),
        n,
        weight_of(weight),
        threads(),
    )


def sign_encode(x: Tensor, *, bucket: int, scales: Tensor, packed: Tensor) -> int:
    n = x.numel()
    return _core.sign_encode(
        floats_at(x),
        n,
        bucket,
        bytes_at(scales, 4 * num_buckets(n, bucket)),
        bytes_at(packed, packed_nbytes(n, 1)),
        threads(),
    )


def sign_decode(scales: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    valid = _core.sign_decode(
        bytes_at(scales, 4 * num_buckets(n, bucket)),
        bytes_at(packed, packed_nbytes(n, 1)),
        bucket,
        floats_at(out),
        n,
        weight_of(weight),
        threads(),
    )
    refuse(valid, "a scale that is not a finite, non-negative number")


def onebit_encode(x: Tensor, *, bucket: int, means: Tensor, packed: Tensor) -> int:
    n = x.numel()
    return _core.onebit_encode(
        floats_at(x),
        n,
        bucket,
        bytes_at(means, 8 * num_buckets(n, bucket)),
        bytes_at(packed, packed_nbytes(n, 1)),
        threads(),
    )


def onebit_decode(means: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    n = out.numel()
    valid = _core.onebit_decode(
        bytes_at(means, 8 * num_buckets(n, bucket)),
        bytes_at(packed, packed_nbytes(n, 1)),
        bucket,
        floats_at(out),
        n,
        weight_of(weight),
        threads(),
    )
    refuse(valid, "a mean that is not a finite, non-negative number")
