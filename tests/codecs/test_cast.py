from __future__ import annotations

import logging

import pytest
import torch

import laconic
import laws
from laconic import counters

SPECS = laws.CASTS


test_law = laws.holds


@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
def test_none_keeps_every_bit(dtype):
    x = laws.normal(333, dtype=dtype)
    x[:4] = torch.tensor([0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 8], dtype=dtype)
    assert laws.same_bits(laws.roundtrip(x, "none"), x)


def test_none_keeps_float64_beyond_float32():
    x = torch.tensor([1e300, -1e-300], dtype=torch.float64)
    assert laws.same_bits(laws.roundtrip(x, "none"), x)


@pytest.mark.parametrize("spec, bits, dtype", [("fp16", 11, torch.float16), ("bf16", 8, torch.bfloat16)])
def test_casts_round_to_nearest(spec, bits, dtype):
    x = laws.normal(20000)
    y = laws.roundtrip(x, spec)
    assert torch.equal(y, x.to(dtype).to(torch.float32))
    assert bool(((y - x).abs() <= x.abs() * 2.0**-bits).all())


def test_ties_round_to_even():
    ties = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-11)])
    assert torch.equal(laws.roundtrip(ties, "fp16"), torch.tensor([1.0, 1 + 2.0**-9, -1.0]))
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])
    assert torch.equal(laws.roundtrip(ties, "bf16"), torch.tensor([1.0, 1 + 2.0**-6]))


def test_fp16_subnormals_round_to_its_smallest_step():
    x = torch.linspace(-1e-4, 1e-4, 999)
    assert bool(((laws.roundtrip(x, "fp16") - x).abs() <= 2.0**-25).all())


@pytest.mark.parametrize("spec, largest", [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
def test_saturation_is_logged_once_and_counted(spec, largest, caplog, monkeypatch):
    x = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 1.0])
    before = counters.counts().get("saturated", 0)
    monkeypatch.setattr(counters, "_warn", counters.LogOnce("counts"))
    with caplog.at_level(logging.WARNING, "laconic"):
        for _ in range(2):
            y = laws.roundtrip(x, spec)
    assert y.tolist() == [largest, -largest, 1.0]
    assert caplog.text.count(f"values beyond the range of {spec} saturate") == 1
    assert counters.counts()["saturated"] == before + 4


def test_values_in_range_log_nothing(caplog):
    with caplog.at_level(logging.WARNING, "laconic"):
        laconic.encode(torch.tensor([65504.0, -65504.0]), "fp16")
    assert caplog.text == ""


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("spec", ["none", "qsgd:4", "topk:0.1"])
def test_other_dtype_raises_input_error(spec, dtype):
    with pytest.raises(laconic.InputError, match=rf"float32, float64, float16 or bfloat16.*{str(dtype)[6:]}"):
        laconic.encode(torch.ones(4, dtype=dtype), spec)
