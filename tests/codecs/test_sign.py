from __future__ import annotations

import pytest
import torch

import laconic
import laws

SPECS = [spec for spec in laws.QUANTIZERS if spec.startswith(("sign", "onebit"))]


test_law = laws.holds


@pytest.mark.parametrize("bucket", [128, 1024, 65536])
def test_sign_decodes_to_the_mean_magnitude_of_the_bucket(bucket):
    x = laws.normal(70001, seed=bucket)
    y = laws.roundtrip(x, f"sign:{bucket}")
    for part, decoded in laws.by_bucket(bucket, x.double(), y.double()):
        wanted = torch.where(part < 0, -part.abs().mean(), part.abs().mean())
        torch.testing.assert_close(decoded, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bucket", [128, 1024, 65536])
def test_onebit_decodes_to_the_mean_of_each_side(bucket):
    x = laws.normal(70001, seed=bucket) + 0.3
    y = laws.roundtrip(x, f"onebit:{bucket}")
    for part, decoded in laws.by_bucket(bucket, x.double(), y.double()):
        wanted = torch.where(part < 0, part[part < 0].mean(), part[part >= 0].mean())
        torch.testing.assert_close(decoded, wanted, rtol=1e-5, atol=0)


def test_onebit_with_one_side_only():
    x = laws.normal(300).abs() + 0.1
    for sign in (1, -1):
        y = laws.roundtrip(sign * x, "onebit")
        torch.testing.assert_close(y, (sign * x).mean().expand(300))


def test_zero_is_positive():
    assert bool((laws.roundtrip(torch.tensor([0.0, 4.0]), "sign") == 2.0).all())


def test_onebit_has_less_error_than_sign_where_the_mean_is_not_zero():
    x = laws.normal(8192) + 1.0
    errors = [float((laws.roundtrip(x, spec) - x).norm()) for spec in ("onebit:4096", "sign:4096")]
    assert errors[0] < errors[1]


def test_mean_of_huge_values_does_not_overflow():
    x = torch.full((4096,), laws.FLOAT32_MAX)
    for spec in ("sign", "onebit"):
        torch.testing.assert_close(laws.roundtrip(x, spec), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("spec", ["sign", "onebit"])
def test_one_bit_a_value(spec):
    n = 1 << 20
    assert 8 * len(laconic.encode(torch.ones(n), spec)) / n <= 1.009
