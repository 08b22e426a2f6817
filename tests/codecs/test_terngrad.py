from __future__ import annotations

import pytest
import torch

import laconic
import laws

SPECS = [spec for spec in laws.QUANTIZERS if spec.startswith("terngrad")]


test_law = laws.holds


@pytest.mark.parametrize("bucket", [128, 512, 4096])
def test_values_are_zero_or_plus_or_minus_the_largest_of_their_bucket(bucket):
    x = laws.normal(10000, seed=bucket)
    y = laws.roundtrip(x, f"terngrad:{bucket}")
    for part, decoded in laws.by_bucket(bucket, x, y):
        assert set(decoded.abs().tolist()) <= {0.0, float(part.abs().max())}
    assert bool((y * x >= 0).all())


def test_largest_value_is_always_sent():
    x = laws.normal(512)
    at = int(x.abs().argmax())
    for seed in range(50):
        assert laws.roundtrip(x, "terngrad", seed)[at] == x[at]


def test_five_values_share_a_byte():
    n = 1 << 20
    assert 8 * len(laconic.encode(torch.ones(n), "terngrad")) / n <= 1.67
