from __future__ import annotations

import pytest
import torch

import laconic
import laws

SPECS = [spec for spec in laws.EVERY if spec.startswith("randk")]


test_law = laws.holds


@pytest.mark.parametrize(
    "n, keep, k", [(1000, 0.1, 100), (1000, 0.0001, 1), (7, 0.5, 4), (1, 0.01, 1), (100, 1.0, 100)]
)
@pytest.mark.parametrize("scale", [True, False])
def test_keeps_k_entries_scaled_by_n_over_k(n, keep, k, scale):
    x = laws.normal(n, seed=n)
    y = laws.roundtrip(x, f"randk:{keep},scale={str(scale).lower()}")
    kept = y != 0
    assert int(kept.sum()) == k
    torch.testing.assert_close(y[kept], x[kept] * (n / k if scale else 1.0), rtol=1e-6, atol=0)


def test_section_is_a_seed_of_8_bytes():
    x = laws.normal(1_000_000)
    assert len(laconic.encode(x, "randk:0.01")) <= 4 * 10_000 + 128


def test_positions_are_uniform():
    n, seeds = 200, 3000
    hits = torch.zeros(n)
    for seed in range(seeds):
        hits += laws.roundtrip(torch.ones(n), "randk:0.25,scale=false", seed)
    z = (hits - seeds * 0.25) / (seeds * 0.25 * 0.75) ** 0.5
    assert float(z.abs().max()) < 5
    assert abs(float((z * z).mean()) - 1) < 0.6


def test_positions_of_neighbouring_seeds_are_unrelated():
    a, b = (laws.roundtrip(torch.ones(100_000), "randk:0.1,scale=false", seed) for seed in (1, 2))
    both = int((a * b).sum())
    assert abs(both - 1000) < 6 * 31


def test_nonfinite_value_that_is_not_selected_raises():
    for seed in range(20):
        x = torch.ones(1000)
        x[500] = float("nan")
        with pytest.raises(laconic.NonFiniteError):
            laconic.encode(x, "randk:0.001", seed=seed)


def test_scaling_saturates_instead_of_overflowing():
    x = torch.full((100,), 3e38)
    assert bool(torch.isfinite(laws.roundtrip(x, "randk:0.01")).all())


def test_channel_stage_turns_scaling_off():
    assert str(laconic.channel("ef|randk:0.5")) == "ef|randk:0.5,scale=false"
