"""``adaptive`` against the definition, written down once more in plain numpy, and what it promises."""

from __future__ import annotations

import logging
import math
import struct

import numpy as np
import pytest
import torch

import laconic
import laws
from laconic import InputError, counters, kernels
from laconic.kernels import cpu, reference
from laconic.kernels.sections import read_positions_header

SPECS = laws.ADAPTIVE
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])
FLOAT32_MAX = laws.FLOAT32_MAX
SMALLEST = 2.0**-149


def test_law(law, spec):
    law(spec)


# ----------------------------------------------------------------------------------------- the definition, once more


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


def sample_places(n: int, count: int, seed: int) -> np.ndarray:
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


class Plain:
    """Algorithms 1 and 2 of Øland and Raj, corrected: what a packet of ``x`` must hold."""

    def __init__(self, x, c, m=4, f=0.03, integer=False, zero=False, tail=0.0, rms=None, c0=1.0, seed=0):
        x = x.numpy()
        n = x.size
        low, high = float(x.min()) + 0.0, float(x.max()) + 0.0
        self.places = sample_places(n, min(n, max(1024, math.ceil(f * n))), seed)
        picked = x[self.places]
        self.apart = np.zeros(n, dtype=bool)
        if tail:
            rank = max(1, math.floor(tail * picked.size + 0.5))
            limit = float(np.sort(np.abs(picked))[-rank])
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
            counts = np.bincount(linear(picked, low, high, 2**m))
            p = counts[counts > 0] / picked.size
            self.measure = float(-(p * np.log2(p)).sum())
            bits = self.measure + c
            wanted = 2.0 ** math.ceil(bits) if integer else 2.0**bits
        else:
            self.measure, wanted = rms, (rms + c0) * 2.0**c
            wanted = 2.0 ** math.ceil(math.log2(wanted)) if integer else wanted
        self.levels = int(max(2, min(math.floor(wanted + 0.5), 4094 if zero else 4096)))
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


class Found:
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
    given = dict(arguments)
    if gradient is not None:
        given.pop("by")
        given["rms"] = float(np.sqrt(np.mean(gradient.numpy().astype(np.float64) ** 2)))
    wanted = Plain(x, seed=seed, **{"c": 5.0} | given)
    codec = laconic.codec(spec_of(**arguments))
    with kernels.use_backend(backend):
        packet = codec.encode(x, seed=seed, gradient=gradient)
        decoded = codec.decode(packet)
    found = Found(packet, zero=arguments.get("zero", False), tail=bool(arguments.get("tail")))
    assert found.header == wanted.header
    assert found.levels == wanted.levels
    assert found.measure == pytest.approx(wanted.measure, rel=1e-6, abs=1e-6)
    if found.apart is not None:
        assert np.array_equal(found.apart, np.flatnonzero(wanted.apart))
    assert np.array_equal(found.symbols, wanted.symbols)
    assert laws.same_bits(decoded, torch.from_numpy(wanted.values))
    return found, wanted


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
    {"c": 5.0},
    {"c": 0.0, "m": 1},
    {"c": 6.0, "m": 6, "f": 1.0, "integer": True},
    {"c": 4.0, "m": 8, "f": 0.5},
    {"c": 12.0, "m": 12},
    {"c": 4.0, "zero": True},
    {"c": 12.0, "zero": True},
    {"c": 3.0, "tail": 0.01},
    {"c": 5.0, "zero": True, "tail": 0.002},
)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda given: spec_of(**given))
@pytest.mark.parametrize("kind", DATA)
@BACKENDS
def test_a_packet_is_what_the_definition_says(kind, arguments, backend):
    for n in (5, 1024, 1025, 4001):
        check(DATA[kind](n), n, backend, **arguments)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda given: spec_of(**given))
def test_a_large_packet_is_what_the_definition_says(arguments, threads):
    for kind in ("weights", "gradients"):
        check(DATA[kind](150_001), 11, **arguments)


@pytest.mark.parametrize("n, count", [(1025, 1024), (1500, 1024), (2048, 1024), (100_000, 3000), (1 << 24, 1031)])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**64 - 2])
def test_a_sample_is_one_value_of_every_part(n, count, seed):
    places = sample_places(n, count, seed)
    assert len(set(places.tolist())) == count and places.min() >= 0 and places.max() < n
    assert bool((np.diff(places) > 0).all())
    x = torch.arange(n, dtype=torch.float32)  # exact up to 2^24
    for backend in (cpu, reference):
        assert np.array_equal(backend.sample(x, count, seed).long().numpy(), places)


def test_a_sample_of_all_is_all():
    x = laws.normal(300)
    for backend in (cpu, reference):
        assert torch.equal(backend.sample(x, 300, 5), x)


def test_the_seed_moves_the_sample_and_little_else():
    x = gradient_like(50_000)
    measures = {check(x, seed)[0].measure for seed in range(6)}
    assert len(measures) == 6 and max(measures) - min(measures) < 0.5


# ---------------------------------------------------------------------------------------------------------- promises


def half_a_bin(found, zero, magnitude):
    """The bins' half width; a hair more, since places in the grid are found in float32."""
    origin, other = found.header
    width = origin if zero else (other - origin) / found.levels
    return width / 2 * (1 + 2.0**-22 * found.levels) + 2.0**-24 * magnitude + SMALLEST


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("c", [0.0, 2.5, 5.0, 8.0, 12.0])
@pytest.mark.parametrize("zero", [False, True])
def test_error_is_at_most_half_a_bin(kind, c, zero):
    x = DATA[kind](5000)
    codec = laconic.codec(spec_of(c=c, zero=zero))
    packet = codec.encode(x)
    error = float((codec.decode(packet).double() - x.double()).abs().max())
    assert error <= half_a_bin(Found(packet, zero=zero), zero, float(x.abs().max()))


@pytest.mark.parametrize("kind", DATA)
def test_least_and_largest_value_lie_in_the_outermost_bins(kind):
    x = DATA[kind](3000)
    found, wanted = check(x)
    assert found.symbols[int(x.argmin())] == 0
    assert found.symbols[int(x.argmax())] == found.levels - 1
    assert (float(x.min()), float(x.max())) == wanted.header


@pytest.mark.parametrize("value", [1.0, -3.5, SMALLEST, -1e-40, 3.4e38, -FLOAT32_MAX])
@pytest.mark.parametrize("shape", [(), (1,), (300, 1000)])
@pytest.mark.parametrize("coder", ["", "|huffman", "|rans:auto"])
def test_a_constant_costs_a_header_and_returns_exactly(value, shape, coder):
    x = torch.full(shape, value)
    frame = laconic.encode(x, "adaptive" + coder)
    assert len(frame) < 128
    assert torch.equal(laconic.decode(frame), x)


@pytest.mark.parametrize("low, high", [(-1.0, 2.0), (0.0, SMALLEST), (-FLOAT32_MAX, FLOAT32_MAX), (3.0, 3.0000002)])
@pytest.mark.parametrize("zero", [False, True])
def test_two_values_stay_apart(low, high, zero):
    x = torch.tensor([low, high, high, low, low])
    y = laws.roundtrip(x, spec_of(c=5.0, zero=zero))
    ordered = torch.tensor([low, high])
    found = Found(laconic.codec(spec_of(c=5.0, zero=zero)).encode(x), zero=zero)
    assert bool(((y - x).abs() <= half_a_bin(found, zero, float(ordered.abs().max()))).all())
    if high - low > SMALLEST and low <= 0 <= high:
        assert len(set(y.tolist())) == 2
    assert found.symbols[0] < found.symbols[1] or (zero and low > 0)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("coder", ["", "|huffman", "|rans"])
@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([-FLOAT32_MAX, FLOAT32_MAX]),
        torch.tensor([-FLOAT32_MAX, 0.0, FLOAT32_MAX]),
        torch.tensor([-FLOAT32_MAX, -FLOAT32_MAX / 2]),
        torch.tensor([FLOAT32_MAX / 3, FLOAT32_MAX]),
        torch.linspace(-1, 1, 5000) * FLOAT32_MAX,
        torch.linspace(-1, 1, 5000) * (3050 * SMALLEST),
        torch.linspace(-1, 0.1, 7000) * (5730 * SMALLEST),
        torch.arange(6000) * SMALLEST,
        torch.linspace(0, 1, 5000) * 2.0**-126,
        torch.linspace(-3, 5, 5000) * 2.0**64,
        torch.linspace(-3, 5, 5000) * 2.0**-65,
    ],
    ids=lambda x: f"{float(x[0]):.3g} to {float(x[-1]):.3g}, {x.numel()}",
)
def test_the_ends_of_float32_are_binned(x, zero, coder):
    # Where a step is rounded to float32 among subnormals, more bins than asked for may be needed, and never more than
    # a coder knows; at the other end nothing may overflow, nor be taken for an overflow by the receiver.
    for c in (3.0, 12.0):
        codec = laconic.codec(spec_of(c=c, zero=zero) + coder)
        packet = codec.encode(x)
        error = float((codec.decode(packet).double() - x.double()).abs().max())
        plain = laconic.codec(spec_of(c=c, zero=zero)).encode(x)
        found = Found(plain, zero=zero)
        assert 2 <= found.levels <= 4096
        assert error <= half_a_bin(found, zero, float(x.abs().max()))
        assert torch.equal(codec.decode(packet), laconic.decode(laconic.encode(x, str(codec))))


@pytest.mark.parametrize("c", [0.0, 0.7, 3.0, 5.2, 9.0])
@pytest.mark.parametrize("kind", ["weights", "gradients", "two values"])
def test_a_sender_of_whole_bits_gets_a_power_of_two(c, kind):
    x = DATA[kind](20_000)
    whole, _ = check(x, c=c, integer=True)
    fine, _ = check(x, c=c)
    assert whole.levels == 2 ** math.ceil(fine.measure + c)
    assert fine.levels <= whole.levels < 2 * fine.levels + 2


def test_the_entropy_is_that_of_the_rough_histogram():
    even = torch.linspace(-1, 1, 4096)
    for m in (1, 4, 7):
        assert check(even, m=m, f=1.0)[0].measure == pytest.approx(m, abs=1e-6)
    half = torch.cat([torch.full((512,), -1.0), torch.full((512,), 1.0)])
    assert check(half)[0].measure == 1.0
    spike = torch.zeros(1024)
    spike[0] = 1.0
    p = 1 / 1024
    assert check(spike)[0].measure == pytest.approx(-p * math.log2(p) - (1 - p) * math.log2(1 - p), rel=1e-6)


def test_a_fraction_of_the_values_estimates_the_entropy_of_all():
    for kind in ("weights", "gradients"):
        x = DATA[kind](400_000)
        part, whole = check(x, f=0.03)[0].measure, check(x, f=1.0)[0].measure
        assert abs(part - whole) < 0.05


def levels_of(x, spec, **how):
    return Found(laconic.codec(spec).encode(x, **how), zero="zero=true" in spec).levels


@pytest.mark.parametrize("spec, most", [("adaptive:12.0", 4096), ("adaptive:12.0,zero=true", 4094)])
def test_levels_end_where_coders_do_and_this_is_said(spec, most, caplog, monkeypatch):
    monkeypatch.setattr(counters, "_warn", counters.LogOnce("counts"))
    before = counters.counts().get("levels", 0)
    with caplog.at_level(logging.WARNING, "laconic"):
        assert most <= levels_of(laws.normal(2000), spec) <= 4096
        assert counters.counts()["levels"] == before + 1
        assert "lower c" in caplog.text
        said = len(caplog.records)
        levels_of(laws.normal(2000, seed=1), spec)
    assert counters.counts()["levels"] == before + 2
    assert said == 1


def test_a_notice_is_said_once_whatever_its_numbers(caplog, monkeypatch):
    # In training every layer and step asks for another number of levels: a log line for each would bury the rest.
    monkeypatch.setattr(counters, "_warn", counters.LogOnce("counts"))
    with caplog.at_level(logging.WARNING, "laconic"):
        for seed in range(5):
            laconic.encode(laws.normal(2000, seed=seed), "adaptive:12.0")
    assert len(caplog.records) == 1


def test_levels_that_fit_say_nothing(caplog):
    with caplog.at_level(logging.WARNING, "laconic"):
        assert levels_of(torch.linspace(0, 1, 4096), "adaptive:8.0,f=1.0") == 4096
    assert caplog.text == ""


def test_there_are_at_least_two_levels():
    spike = torch.zeros(200_000)
    spike[77] = 1.0
    assert levels_of(spike, "adaptive:0.0") == 2


# -------------------------------------------------------------------------------------------------------------- zero


@pytest.mark.parametrize("coder", ["", "|huffman", "|rans"])
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("c", [0.0, 4.0, 7.3, 12.0])
def test_zero_returns_as_zero(kind, coder, c):
    x = DATA[kind](3000)
    x[::3] = 0.0
    x[1::7] = -0.0
    zeros = x == 0
    y = laws.roundtrip(x, f"adaptive:{c},zero=true{coder}")
    assert laws.same_bits(y[zeros], torch.zeros(int(zeros.sum())))


def test_zero_does_not_return_as_zero_without():
    """Guards the test above."""
    x = laws.normal(3000)
    x[::3] = 0.0
    assert bool((laws.roundtrip(x, "adaptive:4.0")[::3] != 0).all())


@pytest.mark.parametrize("kind", [kind for kind in DATA if kind not in ("far from zero", "below zero")])
@pytest.mark.parametrize("c", [0.0, 1.0, 3.3, 5.0, 7.0])
def test_a_centre_at_zero_costs_at_most_one_level(kind, c):
    x = DATA[kind](4000)
    x[0] = 0.0  # so that the range holds it already
    plain, centred = levels_of(x, f"adaptive:{c}"), levels_of(x, f"adaptive:{c},zero=true")
    assert centred <= plain + 1


@pytest.mark.parametrize("c", [3.0, 5.0, 8.0])
def test_a_centre_at_zero_costs_no_bits_behind_a_coder(c):
    # Bins are as wide as before, but for the rounding of the step.
    x = laws.normal(100_000)
    sizes = [len(laconic.encode(x, f"adaptive:{c}{zero}|rans")) for zero in ("", ",zero=true")]
    assert abs(sizes[1] / sizes[0] - 1) < 0.005


def test_small_values_around_a_centre_at_zero_are_not_moved():
    # The paper's grid moves everything near zero by one and the same amount, half a bin at most.
    x = gradient_like(100_000)
    paper, centred = (laws.roundtrip(x, f"adaptive:3.0{zero}") - x for zero in ("", ",zero=true"))
    assert float(centred.mean().abs()) < 0.2 * float(paper.mean().abs())


# -------------------------------------------------------------------------------------------------------------- tail


@pytest.mark.parametrize("tail", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("kind", ["weights", "gradients", "one apart", "mostly zero", "large", "subnormal"])
@pytest.mark.parametrize("coder", ["", "|huffman", "|rans:auto"])
def test_what_travels_apart_returns_exactly(kind, tail, coder):
    n = 30_000
    x = DATA[kind](n)
    found, wanted = check(x, tail=tail, f=0.1)
    apart = torch.from_numpy(found.apart)
    assert 0 < apart.numel() <= max(64, math.ceil(4 * tail * n))
    assert bool((apart[1:] > apart[:-1]).all()) and int(apart[-1]) < n
    y = laws.roundtrip(x, spec_of(tail=tail, f=0.1) + coder)
    assert laws.same_bits(y[apart], x[apart])
    rest = torch.ones(n, dtype=torch.bool)
    rest[apart] = False
    assert float(x[rest].abs().max()) <= float(x[apart].abs().min())
    assert float((y - x)[rest].abs().max()) <= half_a_bin(found, False, max(-wanted.low, wanted.high))


@pytest.mark.parametrize("value", [1.0, -2.5])
def test_of_equal_values_none_travel_apart(value):
    frame = laconic.encode(torch.full((5000,), value), "adaptive:5.0,tail=0.01")
    assert len(frame) < 160
    assert torch.equal(laconic.decode(frame), torch.full((5000,), value))


def test_few_values_among_zeros_travel_apart_and_nothing_else_does():
    x = torch.zeros(5000)
    x[7], x[9] = -1.0, 2.0
    for zero in (False, True):
        for coder in ("", "|rans"):
            spec = spec_of(tail=0.01, zero=zero) + coder
            packet = laconic.codec(spec).encode(x)
            assert packet.sections[3].numel() == 0
            assert laws.same_bits(laconic.codec(spec).decode(packet), x)
        found = Found(laconic.codec(spec_of(tail=0.01, zero=zero)).encode(x), zero=zero, tail=True)
        assert found.apart.tolist() == [7, 9] and found.levels == 1


def test_a_sample_that_misses_most_large_values_leaves_none_apart_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(counters, "_warn", counters.LogOnce("counts"))
    n = 100_000
    x = laws.normal(n) * 10
    x[torch.from_numpy(sample_places(n, 3000, 3))] *= 1e-3
    before = counters.counts().get("tail", 0)
    with caplog.at_level(logging.WARNING, "laconic"):
        codec = laconic.codec("adaptive:5.0,tail=0.001")
        packet = codec.encode(x, seed=3)
    assert counters.counts()["tail"] == before + 1 and "none is sent exactly" in caplog.text
    found = Found(packet, tail=True)
    assert found.apart.size == 0 and found.header == (float(x.min()), float(x.max()))
    error = float((codec.decode(packet) - x).abs().max())
    assert error <= half_a_bin(found, False, float(x.abs().max()))
    assert Found(codec.encode(x, seed=4), tail=True).apart.size > 0  # another sample sees them


@pytest.mark.parametrize("zero", [False, True])
def test_a_tail_apart_makes_the_bins_of_gradients_fine(zero):
    # By the paper's rule nearly all of them share one bin, and come back as one value.
    x = gradient_like(400_000)
    frames = [laconic.encode(x, spec_of(c=5.0, zero=zero, tail=tail) + "|rans") for tail in (0.0, 0.01)]
    squared = [float((laconic.decode(frame) - x).square().sum()) for frame in frames]
    entropy = [laconic.explain(frame)[0].entropy for frame in frames]
    assert entropy[0] < 0.1 and entropy[1] > 2
    assert squared[1] < squared[0] / 100


def test_values_apart_are_added_like_the_others():
    x, start = gradient_like(9000), laws.normal(9000, seed=5)
    for coder in ("", "|huffman"):
        codec = laconic.codec("adaptive:3.0,tail=0.02" + coder)
        packet = codec.encode(x)
        assert packet.sections[1].numel() > 0
        for weight in (1.0, -0.3, 0.0):
            out = start.clone()
            codec.accumulate(packet, out, weight)
            assert torch.equal(out, start + codec.decode(packet) * torch.tensor(weight))


# --------------------------------------------------------------------------------------------------- by the gradient


@pytest.mark.parametrize("scale", [0.0, 1e-20, 0.3, 1.0, 7.5, 1e3, 1e30])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("integer", [False, True])
@BACKENDS
def test_levels_come_from_the_gradients_rms(scale, zero, integer, backend):
    x, gradient = laws.normal(3000), laws.normal(3000, seed=1) * scale
    check(x, backend=backend, gradient=gradient, c=4.0, by="grad", zero=zero, integer=integer)
    check(x, backend=backend, gradient=gradient, c=2.0, by="grad", c0=0.25, zero=zero, integer=integer)


def test_the_values_do_not_move_levels_that_a_gradient_decides():
    gradient = torch.full((10,), 3.0)
    for kind in ("weights", "gradients", "huge", "two values"):
        found, _ = check(DATA[kind](2000), gradient=gradient, c=3.0, by="grad")
        assert (found.levels, found.measure) == (32, 3.0)


def test_a_gradient_of_any_shape_and_dtype_serves():
    x = laws.normal(40, 50)
    frames = {
        laconic.encode(x, "adaptive:4.0,by=grad|huffman", gradient=gradient)
        for gradient in (
            torch.full((40, 50), 0.5),
            torch.full((50, 40), 0.5).t(),
            torch.full((2000,), -0.5, dtype=torch.float64),
            torch.full((7,), 0.5, dtype=torch.bfloat16),
            torch.full((40, 50), 0.5).requires_grad_(),
        )
    }
    assert len(frames) == 1
    assert laconic.decode(frames.pop()).shape == (40, 50)


@pytest.mark.parametrize("count", [1, 2, 1023, 1024, 1025, 70_001])
def test_a_gradients_rms_does_not_depend_on_threads(count):
    gradient = gradient_like(count)
    frames = set()
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        frames.add(laconic.encode(torch.linspace(0, 1, 50), "adaptive:4.0,by=grad", gradient=gradient))
    (frame,) = frames
    (found,) = laconic.explain(frame)
    assert found.details["gradient_rms"] == pytest.approx(float(gradient.double().square().mean().sqrt()), rel=1e-6)


@pytest.mark.parametrize("spec", ["adaptive:5.0,by=grad", "adaptive:5.0,by=grad|rans", "topk:0.1|adaptive:5.0,by=grad"])
def test_a_gradient_that_is_missing_or_no_use_is_named(spec):
    x = laws.normal(100)
    with pytest.raises(InputError, match=r"needs the gradient: encode\(x, spec, gradient=g\)"):
        laconic.encode(x, spec)
    with pytest.raises(InputError, match="needs the gradient"):
        laconic.encode_into(x, spec, bytearray(laconic.max_nbytes(spec, x)))
    with pytest.raises(InputError, match="empty"):
        laconic.encode(x, spec, gradient=torch.empty(0))
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(InputError, match="finite gradient"):
            laconic.encode(x, spec, gradient=torch.tensor([1.0, bad]))
    assert laws.roundtrip(torch.zeros(3), "adaptive:5.0").shape == (3,)
    assert laconic.decode(laconic.encode(x, spec, gradient=x)).shape == (100,)


@pytest.mark.parametrize("spec", ["adaptive", "none", "qsgd:4", "topk:0.1", "adaptive:5.0|huffman", "uniform:8|rans"])
def test_a_gradient_for_a_codec_without_use_for_it_is_refused(spec):
    x = laws.normal(100)
    with pytest.raises(InputError, match="takes no gradient: only adaptive:by=grad"):
        laconic.encode(x, spec, gradient=x)
    with pytest.raises(InputError, match="takes no gradient"):
        laconic.codec(spec).encode(x, gradient=x)


# --------------------------------------------------------------------------------------------------------- explained


def test_a_packet_is_explained():
    x = gradient_like(20_000)
    found, wanted = check(x, c=4.0, tail=0.01)
    (packet,) = laconic.explain(laconic.encode(x, "adaptive:4.0,tail=0.01"))
    assert packet.codec == "adaptive:4.0,tail=0.01"
    assert packet.details["levels"] == found.levels
    assert packet.details["entropy_estimate"] == found.measure
    assert packet.details["bits_wanted"] == pytest.approx(math.log2(found.levels))
    assert packet.details["apart"] == found.apart.size > 0
    rest = torch.from_numpy(wanted.values[~wanted.apart])
    assert packet.details["lowest_level"] == float(rest.min())
    assert packet.details["highest_level"] == float(rest.max())
    p = np.bincount(wanted.symbols) / x.numel()
    assert packet.entropy == pytest.approx(float(-(p[p > 0] * np.log2(p[p > 0])).sum()), rel=1e-9)
    assert packet.symbols == int((p > 0).sum())
    assert packet.bits_before == pytest.approx(math.ceil(math.log2(found.levels)), rel=1e-3)
    assert packet.bits_after == pytest.approx(packet.bits_before, rel=1e-3)


def test_a_packet_by_its_gradient_is_explained():
    frame = laconic.encode(laws.normal(100), "adaptive:5.0,by=grad", gradient=torch.full((3,), 2.0))
    (packet,) = laconic.explain(frame)
    assert packet.details["gradient_rms"] == 2.0 and packet.details["levels"] == 96
    assert "entropy_estimate" not in packet.details
