"""The mean over seeds is the input, to what chance allows."""

from __future__ import annotations

import pytest

import laconic
import laws


def between_levels(n=160):
    """Values spread over (0.2, 1] with both signs, a few zeros, and a last bucket that is not full."""
    x = laws.normal(n, seed=20)
    x = x.sign() * (0.2 + 0.8 * (x.abs() % 1))
    x[::16] = 0.0
    x[1] = 1.0
    return x


@pytest.mark.parametrize("spec", laws.UNBIASED)
def test_mean_over_2000_seeds_is_the_input(spec):
    assert not laconic.codec(spec).biased
    assert laws.looks_unbiased(spec, between_levels(), seeds=2000)


@pytest.mark.parametrize("spec", laws.UNBIASED)
def test_mean_is_the_input_in_float64(spec):
    # Halves would round what is decoded: of these a mean tells nothing.
    assert laws.looks_unbiased(spec, between_levels().double(), seeds=500)


@pytest.mark.parametrize("spec", ["qsgd:3,round=nearest", "topk:0.5", "sign", "uniform:3", "randk:0.5,scale=false"])
def test_biased_codec_fails_the_test(spec):
    assert not laws.looks_unbiased(spec, between_levels(), seeds=300)


@pytest.mark.slow
@pytest.mark.parametrize("spec", laws.UNBIASED)
def test_mean_over_many_seeds_is_the_input(spec):
    assert laws.looks_unbiased(spec, between_levels(700), seeds=40_000)


def test_biased_property_matches_the_list():
    for spec in ("none", "qsgd:4", "qsgd:4,norm=l2", "terngrad", "randk:0.1|qsgd:4"):
        assert laconic.codec(spec).biased is False
    for spec in ("bf16", "uniform:8", "sign", "qsgd:4,round=nearest", "topk:0.1|qsgd:4", "randk:0.1,scale=false"):
        assert laconic.codec(spec).biased is True
