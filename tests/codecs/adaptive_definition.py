"""The definition of ``adaptive`` in plain numpy, from docs/wire-format.md."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

import laconic
import laws
from laconic import kernels
from laconic.kernels import reference
from laconic.kernels.sections import read_positions_header

FLOAT32_MAX = laws.FLOAT32_MAX
SMALLEST = 2.0**-149


def splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def hashes(count: int, seed: int) -> np.ndarray:
    key = splitmix64(splitmix64(seed & (1 << 64) - 1) ^ 2 * 0xD1B54A32D192ED03 & (1 << 64) - 1)
    low, high = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)
    mask, h = np.uint64(0xFFFFFFFF), np.arange(count, dtype=np.uint64) ^ low
    h = (h ^ h >> np.uint64(16)) * np.uint64(0x7FEB352D) & mask
    h = (h ^ h >> np.uint64(15) ^ high) * np.uint64(0x846CA68B) & mask
    return h ^ h >> np.uint64(16)


def sample_positions(n: int, count: int, seed: int) -> np.ndarray:
    """One place out of each of ``count`` equal parts of n; all of them if so many."""
    if count == n:
        return np.arange(n)
    part = np.arange(count, dtype=np.int64)
    begin = part * n // count
    span = (part + 1) * n // count - begin
    return begin + (hashes(count, seed) * span.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def power(spread: float) -> np.float32:
    return np.float32(2.0**64 if spread < 2.0**-64 else 2.0**-64 if spread > 2.0**64 else 1.0)


def trunc_bins(x: np.ndarray, pre: np.float32, base: np.float32, inverse: np.float32, levels: int) -> np.ndarray:
    t = (x * pre - base) * inverse
    assert t.dtype == np.float32
    return np.minimum(levels - 1, np.maximum(0, np.trunc(t))).astype(np.int64)


def linear(x: np.ndarray, low: float, high: float, levels: int) -> np.ndarray:
    spread = high - low
    pre = power(spread)
    return trunc_bins(x, pre, np.float32(low * float(pre)), np.float32(levels / (spread * float(pre))), levels)


class Expected:
    """Algorithms 1 and 2 of Øland and Raj, corrected: what a packet of ``x`` must hold."""

    def __init__(self, x, c, m=4, f=0.03, integer=False, zero=False, tail=0.0, rms=None, c0=1.0, seed=0):
        x = x.numpy()
        n = x.size
        low, high = float(x.min()) + 0.0, float(x.max()) + 0.0
        self.sampled = sample_positions(n, min(n, max(1024, math.ceil(f * n))), seed)
        sample = x[self.sampled]
        self.apart = np.zeros(n, dtype=bool)
        if tail:
            rank = max(1, math.floor(tail * sample.size + 0.5))
            limit = float(np.sort(np.abs(sample))[-rank])
            self.apart = np.abs(x) > np.float32(limit)
            low, high = max(low, -limit) + 0.0, min(high, limit) + 0.0
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        self.low, self.high = low, high
        self.symbols = np.zeros(n, dtype=np.int64)
        if low == high:
            self.levels, self.measure, self.header = 1, 0.0, (low, 1 if zero else high)
            self.values = np.where(self.apart, x, np.float32(low))
            return
        if rms is None:
            counts = np.bincount(linear(sample, low, high, 2**m))
            p = counts[counts > 0] / sample.size
            self.measure = float(-(p * np.log2(p)).sum())
            bits = self.measure + c
            expected = 2.0 ** math.ceil(bits) if integer else 2.0**bits
        else:
            self.measure, expected = rms, (rms + c0) * 2.0**c
            expected = 2.0 ** math.ceil(math.log2(expected)) if integer else expected
        self.levels = int(max(2, min(math.floor(expected + 0.5), 4094 if zero else 4096)))
        if zero:
            step = np.float32((high - low) / self.levels)
            if float(step) * self.levels < high - low:
                step = np.nextafter(step, np.float32(np.inf))
            step = float(step)
            first, last = math.floor(low / step + 0.5), math.floor(high / step + 0.5)
            self.levels, self.header = last - first + 1, (step, first)
            pre = power(step * self.levels)
            base, inverse = np.float32((first - 0.5) * step * float(pre)), np.float32(1 / (step * float(pre)))
            self.symbols = trunc_bins(x, pre, base, inverse, self.levels)
            values = (first + self.symbols) * step
        else:
            self.header = (low, high)
            self.symbols = linear(x, low, high, self.levels)
            values = low + (self.symbols + 0.5) * ((high - low) / self.levels)
        values = np.clip(values, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
        self.values = np.where(self.apart, x, values)


class PacketFields:
    """A packet's fields, read by this file's own code."""

    def __init__(self, packet, *, zero=False, tail=False):
        header, *apart, packed = packet.sections
        origin, other, self.levels, self.measure = struct.unpack("<fiIf" if zero else "<ffIf", laws.bytes_of(header))
        self.header = (origin, other)
        self.apart = None
        if tail:
            place, exact = apart
            if place.numel():
                head = read_positions_header(place, packet.spec.numel)
                self.apart = reference.positions_decode(place, packet.spec.numel, head).long().numpy()
                assert exact.numel() == 4 * self.apart.size
            else:
                assert exact.numel() == 0
                self.apart = np.zeros(0, dtype=np.int64)
        bits = math.ceil(math.log2(self.levels)) if self.levels > 1 else 0
        n = packet.spec.numel
        self.symbols = reference.unpack(packed, n, bits).numpy() if bits else np.zeros(n, dtype=np.int64)
        assert packed.numel() == reference_nbytes(n, bits)


def reference_nbytes(n: int, bits: int) -> int:
    return n // 256 * 32 * bits + (n % 256 * bits + 7) // 8


def spec_of(**arguments) -> str:
    parts = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in arguments.items()]
    return "adaptive:" + ",".join(parts) if parts else "adaptive"


def check(x, seed=0, backend="cpu", gradient=None, **arguments):
    """The packet of x holds what the definition says; returns both."""
    kwargs = dict(arguments)
    if gradient is not None:
        kwargs.pop("by")
        kwargs["rms"] = float(np.sqrt(np.mean(gradient.numpy().astype(np.float64) ** 2)))
    expected = Expected(x, seed=seed, **{"c": 5.0} | kwargs)
    codec = laconic.codec(spec_of(**arguments))
    with kernels.use_backend(backend):
        packet = codec.encode(x, seed=seed, gradient=gradient)
        decoded = codec.decode(packet)
    fields = PacketFields(packet, zero=arguments.get("zero", False), tail=bool(arguments.get("tail")))
    assert fields.header == expected.header
    assert fields.levels == expected.levels
    assert fields.measure == pytest.approx(expected.measure, rel=1e-6, abs=1e-6)
    if fields.apart is not None:
        assert np.array_equal(fields.apart, np.flatnonzero(expected.apart))
    assert np.array_equal(fields.symbols, expected.symbols)
    assert laws.same_bits(decoded, torch.from_numpy(expected.values))
    return fields, expected


def gradient_like(n, seed=0):
    """Nearly all values small, a few a thousand times as large."""
    return laws.normal(n, seed=seed) * torch.exp(2 * laws.normal(n, seed=seed + 100)) * 1e-3


DATA = {
    "weights": lambda n: laws.normal(n, seed=1) * 0.05,
    "gradients": gradient_like,
    "mostly zero": lambda n: laws.normal(n, seed=2) * ((laws.normal(n, seed=3) > 1.5) | (torch.arange(n) == 1)),
    "uniform": lambda n: (torch.arange(n) * 2654435761 % 2**32).float() / 2**32,
    "far from zero": lambda n: 1000 + laws.normal(n, seed=4) * 1e-3,
    "below zero": lambda n: -laws.normal(n, seed=5).abs(),
    "two values": lambda n: torch.where(laws.normal(n, seed=6) > 0, 0.5, -0.25),
    "one apart": lambda n: torch.where(torch.arange(n) == n // 2, 1e10, laws.normal(n, seed=7)),
    "huge": lambda n: laws.normal(n, seed=8).clamp(-1, 1) * FLOAT32_MAX,
    "large": lambda n: laws.normal(n, seed=8) * 2.0**63,
    "small": lambda n: laws.normal(n, seed=8) * 2.0**-66,
    "subnormal": lambda n: laws.normal(n, seed=9) * 1e-41,
    "a few of the smallest": lambda n: torch.arange(n).remainder(7) * SMALLEST,
    "both zeros": lambda n: torch.where(torch.arange(n) == 3, -1.0, torch.where(laws.normal(n) > 0, 0.0, -0.0)),
}
ARGUMENTS = (
    {"c": 5.0}, {"c": 0.0, "m": 1}, {"c": 6.0, "m": 6, "f": 1.0, "integer": True}, {"c": 4.0, "m": 8, "f": 0.5},
    {"c": 12.0, "m": 12}, {"c": 4.0, "zero": True}, {"c": 12.0, "zero": True}, {"c": 3.0, "tail": 0.01},
    {"c": 5.0, "zero": True, "tail": 0.002},
)  # fmt: skip


def levels_of(x, spec, **how):
    return PacketFields(laconic.codec(spec).encode(x, **how), zero="zero=true" in spec).levels


def half_a_bin(fields, zero, magnitude):
    """The bins' half width; a hair more, since places in the grid are fields in float32."""
    origin, other = fields.header
    width = origin if zero else (other - origin) / fields.levels
    return width / 2 * (1 + 2.0**-22 * fields.levels) + 2.0**-24 * magnitude + SMALLEST
