"""``adaptive``: packets equal the definition; levels, entropy and error bounds."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from adaptive_definition import (
    ARGUMENTS,
    DATA,
    FLOAT32_MAX,
    SMALLEST,
    PacketFields,
    check,
    gradient_like,
    half_a_bin,
    levels_of,
    sample_positions,
    spec_of,
)

import laconic
import laws
from laconic import counters
from laconic.kernels import cpu, reference

SPECS = laws.ADAPTIVE
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


test_law = laws.holds


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda kwargs: spec_of(**kwargs))
@pytest.mark.parametrize("kind", DATA)
@BACKENDS
def test_packet_equals_the_definition(kind, arguments, backend):
    for n in (5, 1024, 1025, 4001):
        check(DATA[kind](n), n, backend, **arguments)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda kwargs: spec_of(**kwargs))
def test_large_packet_equals_the_definition(arguments, threads):
    for kind in ("weights", "gradients"):
        check(DATA[kind](150_001), 11, **arguments)


@pytest.mark.parametrize("n, count", [(1025, 1024), (1500, 1024), (2048, 1024), (100_000, 3000), (1 << 24, 1031)])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**64 - 2])
def test_sample_takes_one_value_of_each_interval(n, count, seed):
    places = sample_positions(n, count, seed)
    assert len(set(places.tolist())) == count and places.min() >= 0 and places.max() < n
    assert bool((np.diff(places) > 0).all())
    x = torch.arange(n, dtype=torch.float32)  # exact up to 2^24
    for backend in (cpu, reference):
        assert np.array_equal(backend.sample(x, count, seed).long().numpy(), places)


def test_sample_of_all_values_is_the_tensor():
    x = laws.normal(300)
    for backend in (cpu, reference):
        assert torch.equal(backend.sample(x, 300, 5), x)


def test_seed_changes_the_sample_only():
    x = gradient_like(50_000)
    measures = {check(x, seed)[0].measure for seed in range(6)}
    assert len(measures) == 6 and max(measures) - min(measures) < 0.5


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("c", [0.0, 2.5, 5.0, 8.0, 12.0])
@pytest.mark.parametrize("zero", [False, True])
def test_error_is_at_most_half_a_bin(kind, c, zero):
    x = DATA[kind](5000)
    codec = laconic.codec(spec_of(c=c, zero=zero))
    packet = codec.encode(x)
    error = float((codec.decode(packet).double() - x.double()).abs().max())
    assert error <= half_a_bin(PacketFields(packet, zero=zero), zero, float(x.abs().max()))


@pytest.mark.parametrize("kind", DATA)
def test_smallest_and_largest_value_fall_into_the_outermost_bins(kind):
    x = DATA[kind](3000)
    fields, expected = check(x)
    assert fields.symbols[int(x.argmin())] == 0
    assert fields.symbols[int(x.argmax())] == fields.levels - 1
    assert (float(x.min()), float(x.max())) == expected.header


@pytest.mark.parametrize("value", [1.0, -3.5, SMALLEST, -1e-40, 3.4e38, -FLOAT32_MAX])
@pytest.mark.parametrize("shape", [(), (1,), (300, 1000)])
@pytest.mark.parametrize("coder", ["", "|huffman", "|rans:auto"])
def test_constant_takes_a_header_and_decodes_exactly(value, shape, coder):
    x = torch.full(shape, value)
    frame = laconic.encode(x, "adaptive" + coder)
    assert len(frame) < 128
    assert torch.equal(laconic.decode(frame), x)


@pytest.mark.parametrize("low, high", [(-1.0, 2.0), (0.0, SMALLEST), (-FLOAT32_MAX, FLOAT32_MAX), (3.0, 3.0000002)])
@pytest.mark.parametrize("zero", [False, True])
def test_two_values_decode_to_different_values(low, high, zero):
    x = torch.tensor([low, high, high, low, low])
    y = laws.roundtrip(x, spec_of(c=5.0, zero=zero))
    ordered = torch.tensor([low, high])
    fields = PacketFields(laconic.codec(spec_of(c=5.0, zero=zero)).encode(x), zero=zero)
    assert bool(((y - x).abs() <= half_a_bin(fields, zero, float(ordered.abs().max()))).all())
    if high - low > SMALLEST and low <= 0 <= high:
        assert len(set(y.tolist())) == 2
    assert fields.symbols[0] < fields.symbols[1] or (zero and low > 0)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("coder", ["", "|huffman", "|rans"])
@pytest.mark.parametrize("x", [
    torch.tensor([-FLOAT32_MAX, FLOAT32_MAX]), torch.tensor([-FLOAT32_MAX, 0.0, FLOAT32_MAX]),
    torch.tensor([-FLOAT32_MAX, -FLOAT32_MAX / 2]), torch.tensor([FLOAT32_MAX / 3, FLOAT32_MAX]),
    torch.linspace(-1, 1, 5000) * FLOAT32_MAX, torch.linspace(-1, 1, 5000) * (3050 * SMALLEST),
    torch.linspace(-1, 0.1, 7000) * (5730 * SMALLEST), torch.arange(6000) * SMALLEST,
    torch.linspace(0, 1, 5000) * 2.0**-126, torch.linspace(-3, 5, 5000) * 2.0**64,
    torch.linspace(-3, 5, 5000) * 2.0**-65,
], ids=lambda x: f"{float(x[0]):.3g} to {float(x[-1]):.3g}, {x.numel()}")  # fmt: skip
def test_extreme_float32_values_are_binned(x, zero, coder):
    # Where a step is rounded to float32 among subnormals, more bins than asked for may be needed, and never more than
    # a coder knows; at the other end nothing may overflow, nor be taken for an overflow by the receiver.
    for c in (3.0, 12.0):
        codec = laconic.codec(spec_of(c=c, zero=zero) + coder)
        packet = codec.encode(x)
        error = float((codec.decode(packet).double() - x.double()).abs().max())
        plain = laconic.codec(spec_of(c=c, zero=zero)).encode(x)
        fields = PacketFields(plain, zero=zero)
        assert 2 <= fields.levels <= 4096
        assert error <= half_a_bin(fields, zero, float(x.abs().max()))
        assert torch.equal(codec.decode(packet), laconic.decode(laconic.encode(x, str(codec))))


@pytest.mark.parametrize("c", [0.0, 0.7, 3.0, 5.2, 9.0])
@pytest.mark.parametrize("kind", ["weights", "gradients", "two values"])
def test_integer_bits_give_a_power_of_two(c, kind):
    x = DATA[kind](20_000)
    whole, _ = check(x, c=c, integer=True)
    fine, _ = check(x, c=c)
    assert whole.levels == 2 ** math.ceil(fine.measure + c)
    assert fine.levels <= whole.levels < 2 * fine.levels + 2


def test_entropy_is_that_of_the_coarse_histogram():
    even = torch.linspace(-1, 1, 4096)
    for m in (1, 4, 7):
        assert check(even, m=m, f=1.0)[0].measure == pytest.approx(m, abs=1e-6)
    half = torch.cat([torch.full((512,), -1.0), torch.full((512,), 1.0)])
    assert check(half)[0].measure == 1.0
    spike = torch.zeros(1024)
    spike[0] = 1.0
    p = 1 / 1024
    assert check(spike)[0].measure == pytest.approx(-p * math.log2(p) - (1 - p) * math.log2(1 - p), rel=1e-6)


def test_sample_estimates_the_entropy_of_all_values():
    for kind in ("weights", "gradients"):
        x = DATA[kind](400_000)
        part, whole = check(x, f=0.03)[0].measure, check(x, f=1.0)[0].measure
        assert abs(part - whole) < 0.05


@pytest.mark.parametrize("spec, most", [("adaptive:12.0", 4096), ("adaptive:12.0,zero=true", 4094)])
def test_levels_are_limited_to_the_alphabet_of_coders_and_counted(spec, most, caplog, monkeypatch):
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


def test_limited_levels_are_logged_once(caplog, monkeypatch):
    # In training every layer and step asks for another number of levels: a log line for each would bury the rest.
    monkeypatch.setattr(counters, "_warn", counters.LogOnce("counts"))
    with caplog.at_level(logging.WARNING, "laconic"):
        for seed in range(5):
            laconic.encode(laws.normal(2000, seed=seed), "adaptive:12.0")
    assert len(caplog.records) == 1


def test_levels_within_the_limit_log_nothing(caplog):
    with caplog.at_level(logging.WARNING, "laconic"):
        assert levels_of(torch.linspace(0, 1, 4096), "adaptive:8.0,f=1.0") == 4096
    assert caplog.text == ""


def test_there_are_at_least_two_levels():
    spike = torch.zeros(200_000)
    spike[77] = 1.0
    assert levels_of(spike, "adaptive:0.0") == 2
