from __future__ import annotations

import pytest
import torch

import laconic
import laws

SPECS = [spec for spec in laws.QUANTIZERS if spec.startswith("uniform")]


test_law = laws.holds


@pytest.mark.parametrize("bits", [1, 2, 3, 7, 8, 12, 16, 17, 20, 24, 29, 30])
def test_error_is_at_most_half_a_bin(bits):
    x = laws.normal(50000, seed=bits)
    width = float(x.max().double() - x.min().double()) / 2**bits
    y = laws.roundtrip(x, f"uniform:{bits}")
    # What is decoded is rounded to float32: from about 23 bits on that is all that is left of the error.
    error = (y.double() - x.double()).abs() - x.double().abs().clamp(min=width) * 2.0**-24
    assert float(error.max()) <= width / 2 * (1 + 1e-9)


@pytest.mark.parametrize("bits", [1, 4, 16, 24, 30])
def test_values_decode_to_centres_of_equal_bins(bits):
    x = torch.linspace(-3, 5, 4001)
    width = 8 / 2**bits
    index = ((x.double() + 3) / width).floor().clamp(max=2**bits - 1)
    torch.testing.assert_close(laws.roundtrip(x, f"uniform:{bits}").double(), -3 + (index + 0.5) * width)


@pytest.mark.parametrize("bits", range(1, 31))
def test_frame_size_matches_the_bits(bits):
    assert laconic.codec(f"uniform:{bits}").encode(laws.normal(2560)).sections[1].numel() == 320 * bits


@pytest.mark.parametrize("bits", range(1, 13))
@pytest.mark.parametrize("scale", [1.0, 1e-40, 3.4e38])
def test_coder_decodes_to_the_values_of_packing(bits, scale):
    x = laws.normal(700).clamp(-1, 1) * scale
    for coder in ("huffman", "rans:auto", "deflate"):
        assert laws.same_bits(laws.roundtrip(x, f"uniform:{bits}|{coder}"), laws.roundtrip(x, f"uniform:{bits}"))


def test_largest_value_falls_into_the_last_bin():
    y = laws.roundtrip(torch.tensor([0.0, 1.0]), "uniform:2")
    assert y.tolist() == [0.125, 0.875]


@pytest.mark.parametrize("value", [1.0, -3.5, 1e-40, 3.4e38])
def test_constant_tensor_takes_a_header_and_decodes_exactly(value):
    x = torch.full((300, 1000), value)
    frame = laconic.encode(x, "uniform:8")
    assert len(frame) < 128
    assert torch.equal(laconic.decode(frame), x)


@pytest.mark.parametrize("weight", [1.0, 0.5, -2.0])
def test_constant_packet_accumulates(weight):
    codec = laconic.codec("uniform:4")
    out = torch.ones(10)
    codec.accumulate(codec.encode(torch.full((10,), 3.0)), out, weight)
    assert torch.equal(out, torch.full((10,), 1 + 3 * weight))


def test_full_range_of_float32_is_binned():
    largest = laws.FLOAT32_MAX
    x = torch.tensor([-largest, -largest / 3, 0.0, largest / 3, largest])
    y = laws.roundtrip(x, "uniform:8")
    assert float((y.double() - x.double()).abs().max()) <= largest / 256 * (1 + 1e-6)
