"""``adaptive`` with ``zero``, ``tail`` and ``by=grad``, and how its packets are explained."""

from __future__ import annotations

import logging
import math

import adaptive_definition as definition
import numpy as np
import pytest
import torch

import laconic
import laws
from laconic import InputError, counters

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


@pytest.mark.parametrize("kind", definition.DATA)
@pytest.mark.parametrize("c, coder", [(0.0, ""), (4.0, "|huffman"), (7.3, "|rans"), (12.0, "")])
def test_zero_decodes_to_zero(kind, coder, c):
    x = definition.DATA[kind](3000)
    x[::3] = 0.0
    x[1::7] = -0.0
    zeros = x == 0
    y = laws.roundtrip(x, f"adaptive:{c},zero=true{coder}")
    assert laws.same_bits(y[zeros], torch.zeros(int(zeros.sum())))


def test_without_zero_option_zero_decodes_to_another_value():
    """Guards the test above."""
    x = laws.normal(3000)
    x[::3] = 0.0
    assert bool((laws.roundtrip(x, "adaptive:4.0")[::3] != 0).all())


@pytest.mark.parametrize("kind", [kind for kind in definition.DATA if kind not in ("far from zero", "below zero")])
@pytest.mark.parametrize("c", [0.0, 1.0, 3.3, 5.0, 7.0])
def test_zero_option_costs_at_most_one_level(kind, c):
    x = definition.DATA[kind](4000)
    x[0] = 0.0  # so that the range holds it already
    plain, centred = definition.levels_of(x, f"adaptive:{c}"), definition.levels_of(x, f"adaptive:{c},zero=true")
    assert centred <= plain + 1


@pytest.mark.parametrize("c", [3.0, 5.0, 8.0])
def test_zero_option_costs_no_bits_with_a_coder(c):
    # Bins are as wide as before, but for the rounding of the step.
    x = laws.normal(100_000)
    sizes = [len(laconic.encode(x, f"adaptive:{c}{zero}|rans")) for zero in ("", ",zero=true")]
    assert abs(sizes[1] / sizes[0] - 1) < 0.005


def test_zero_option_keeps_the_mean_of_small_values():
    # The paper's grid moves everything near zero by one and the same amount, half a bin at most.
    x = definition.gradient_like(100_000)
    paper, centred = (laws.roundtrip(x, f"adaptive:3.0{zero}") - x for zero in ("", ",zero=true"))
    assert float(centred.mean().abs()) < 0.2 * float(paper.mean().abs())


@pytest.mark.parametrize("tail, coder", [(0.001, ""), (0.01, "|huffman"), (0.1, "|rans:auto")])
@pytest.mark.parametrize("kind", ["weights", "gradients", "one apart", "mostly zero", "large", "subnormal"])
def test_tail_decodes_exactly(kind, tail, coder):
    n = 30_000
    x = definition.DATA[kind](n)
    fields, expected = definition.check(x, tail=tail, f=0.1)
    apart = torch.from_numpy(fields.apart)
    assert 0 < apart.numel() <= max(64, math.ceil(4 * tail * n))
    assert bool((apart[1:] > apart[:-1]).all()) and int(apart[-1]) < n
    y = laws.roundtrip(x, definition.spec_of(tail=tail, f=0.1) + coder)
    assert laws.same_bits(y[apart], x[apart])
    rest = torch.ones(n, dtype=torch.bool)
    rest[apart] = False
    assert float(x[rest].abs().max()) <= float(x[apart].abs().min())
    assert float((y - x)[rest].abs().max()) <= definition.half_a_bin(fields, False, max(-expected.low, expected.high))


@pytest.mark.parametrize("value", [1.0, -2.5])
def test_tail_of_equal_values_is_empty(value):
    frame = laconic.encode(torch.full((5000,), value), "adaptive:5.0,tail=0.01")
    assert len(frame) < 160
    assert torch.equal(laconic.decode(frame), torch.full((5000,), value))


def test_tail_of_mostly_zeros_holds_the_other_values():
    x = torch.zeros(5000)
    x[7], x[9] = -1.0, 2.0
    for zero in (False, True):
        for coder in ("", "|rans"):
            spec = definition.spec_of(tail=0.01, zero=zero) + coder
            packet = laconic.codec(spec).encode(x)
            assert packet.sections[3].numel() == 0
            assert laws.same_bits(laconic.codec(spec).decode(packet), x)
        fields = definition.PacketFields(
            laconic.codec(definition.spec_of(tail=0.01, zero=zero)).encode(x), zero=zero, tail=True
        )
        assert fields.apart.tolist() == [7, 9] and fields.levels == 1


def test_tail_larger_than_its_limit_is_dropped_and_counted(caplog, monkeypatch):
    monkeypatch.setattr(counters, "_warn", counters.LogOnce("counts"))
    n = 100_000
    x = laws.normal(n) * 10
    x[torch.from_numpy(definition.sample_positions(n, 3000, 3))] *= 1e-3
    before = counters.counts().get("tail", 0)
    with caplog.at_level(logging.WARNING, "laconic"):
        codec = laconic.codec("adaptive:5.0,tail=0.001")
        packet = codec.encode(x, seed=3)
    assert counters.counts()["tail"] == before + 1 and "none is sent exactly" in caplog.text
    fields = definition.PacketFields(packet, tail=True)
    assert fields.apart.size == 0 and fields.header == (float(x.min()), float(x.max()))
    error = float((codec.decode(packet) - x).abs().max())
    assert error <= definition.half_a_bin(fields, False, float(x.abs().max()))
    assert definition.PacketFields(codec.encode(x, seed=4), tail=True).apart.size > 0  # another sample sees them


@pytest.mark.parametrize("zero", [False, True])
def test_tail_makes_the_bins_of_gradients_narrower(zero):
    # By the paper's rule nearly all of them share one bin, and come back as one value.
    x = definition.gradient_like(400_000)
    frames = [laconic.encode(x, definition.spec_of(c=5.0, zero=zero, tail=tail) + "|rans") for tail in (0.0, 0.01)]
    squared = [float((laconic.decode(frame) - x).square().sum()) for frame in frames]
    entropy = [laconic.explain(frame)[0].entropy for frame in frames]
    assert entropy[0] < 0.1 and entropy[1] > 2
    assert squared[1] < squared[0] / 100


def test_tail_is_accumulated_like_other_values():
    x, start = definition.gradient_like(9000), laws.normal(9000, seed=5)
    for coder in ("", "|huffman"):
        codec = laconic.codec("adaptive:3.0,tail=0.02" + coder)
        packet = codec.encode(x)
        assert packet.sections[1].numel() > 0
        for weight in (1.0, -0.3, 0.0):
            out = start.clone()
            codec.accumulate(packet, out, weight)
            assert torch.equal(out, start + codec.decode(packet) * torch.tensor(weight))


@pytest.mark.parametrize("scale", [0.0, 1e-20, 0.3, 1.0, 7.5, 1e3, 1e30])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("integer", [False, True])
@BACKENDS
def test_levels_follow_from_the_rms_of_the_gradient(scale, zero, integer, backend):
    x, gradient = laws.normal(3000), laws.normal(3000, seed=1) * scale
    definition.check(x, backend=backend, gradient=gradient, c=4.0, by="grad", zero=zero, integer=integer)
    definition.check(x, backend=backend, gradient=gradient, c=2.0, by="grad", c0=0.25, zero=zero, integer=integer)


def test_levels_by_gradient_do_not_depend_on_the_values():
    gradient = torch.full((10,), 3.0)
    for kind in ("weights", "gradients", "huge", "two values"):
        fields, _ = definition.check(definition.DATA[kind](2000), gradient=gradient, c=3.0, by="grad")
        assert (fields.levels, fields.measure) == (32, 3.0)


def test_gradient_may_have_any_shape_and_dtype():
    x = laws.normal(40, 50)
    frames = {
        laconic.encode(x, "adaptive:4.0,by=grad|huffman", gradient=gradient)
        for gradient in (
            torch.full((40, 50), 0.5), torch.full((50, 40), 0.5).t(), torch.full((2000,), -0.5, dtype=torch.float64),
            torch.full((7,), 0.5, dtype=torch.bfloat16), torch.full((40, 50), 0.5).requires_grad_(),
        )
    }  # fmt: skip
    assert len(frames) == 1
    assert laconic.decode(frames.pop()).shape == (40, 50)


@pytest.mark.parametrize("count", [1, 2, 1023, 1024, 1025, 70_001])
def test_rms_does_not_depend_on_threads(count):
    gradient = definition.gradient_like(count)
    frames = set()
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        frames.add(laconic.encode(torch.linspace(0, 1, 50), "adaptive:4.0,by=grad", gradient=gradient))
    (frame,) = frames
    (fields,) = laconic.explain(frame)
    assert fields.details["gradient_rms"] == pytest.approx(float(gradient.double().square().mean().sqrt()), rel=1e-6)


@pytest.mark.parametrize("spec", ["adaptive:5.0,by=grad", "adaptive:5.0,by=grad|rans", "topk:0.1|adaptive:5.0,by=grad"])
def test_missing_or_invalid_gradient_raises_input_error(spec):
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
def test_gradient_for_another_codec_raises_input_error(spec):
    x = laws.normal(100)
    with pytest.raises(InputError, match="takes no gradient: only adaptive:by=grad"):
        laconic.encode(x, spec, gradient=x)
    with pytest.raises(InputError, match="takes no gradient"):
        laconic.codec(spec).encode(x, gradient=x)


def test_packet_is_explained():
    x = definition.gradient_like(20_000)
    fields, expected = definition.check(x, c=4.0, tail=0.01)
    (packet,) = laconic.explain(laconic.encode(x, "adaptive:4.0,tail=0.01"))
    assert packet.codec == "adaptive:4.0,tail=0.01"
    assert packet.details["levels"] == fields.levels
    assert packet.details["entropy_estimate"] == fields.measure
    assert packet.details["bits_wanted"] == pytest.approx(math.log2(fields.levels))
    assert packet.details["apart"] == fields.apart.size > 0
    rest = torch.from_numpy(expected.values[~expected.apart])
    assert packet.details["lowest_level"] == float(rest.min())
    assert packet.details["highest_level"] == float(rest.max())
    p = np.bincount(expected.symbols) / x.numel()
    assert packet.entropy == pytest.approx(float(-(p[p > 0] * np.log2(p[p > 0])).sum()), rel=1e-9)
    assert packet.symbols == int((p > 0).sum())
    assert packet.bits_before == pytest.approx(math.ceil(math.log2(fields.levels)), rel=1e-3)
    assert packet.bits_after == pytest.approx(packet.bits_before, rel=1e-3)


def test_packet_by_gradient_is_explained():
    frame = laconic.encode(laws.normal(100), "adaptive:5.0,by=grad", gradient=torch.full((3,), 2.0))
    (packet,) = laconic.explain(frame)
    assert packet.details["gradient_rms"] == 2.0 and packet.details["levels"] == 96
    assert "entropy_estimate" not in packet.details
