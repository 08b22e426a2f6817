"""Accuracy of sums: errors of rotated and stochastic rounding, and unbiasedness."""

from __future__ import annotations

import pytest
import torch
from sum_helpers import encode_all

import laconic
import laws
from laconic.aggregate import homomorphic


def mean_error(spec, workers, same_input=False, rounds=4):
    """Return the squared error of a mean over its squared norm, averaged over rounds."""
    errors = []
    for seed in range(rounds):
        xs = [laws.normal(1 << 15, seed=10 * seed + (0 if same_input else i)) for i in range(workers)]
        _, frames = encode_all(spec, xs, seed=seed)
        mean = sum(xs) / workers
        errors.append(float((laconic.decode(homomorphic.add(*frames)) - mean).square().sum() / mean.square().sum()))
    return sum(errors) / rounds


@pytest.mark.parametrize("bits, expected", [(1, 0.363), (2, 0.119), (3, 0.037), (4, 0.0115), (5, 0.0035)])
def test_rotated_values_have_the_error_of_a_gaussian_at_the_best_clip(bits, expected):
    spike = torch.zeros(1 << 15)
    spike[::97] = laws.normal((1 << 15) // 97 + 1, seed=3)  # far from Gaussian before the rotation
    for x in (laws.normal(1 << 15, seed=1), spike):
        y = laconic.decode(laconic.encode(x, f"thc:{bits}"))
        assert float((y - x).square().sum() / x.square().sum()) == pytest.approx(expected, rel=0.2)
    assert mean_error(f"thc:{bits}", 4) == pytest.approx(expected, rel=0.2)


def test_rotation_at_two_bits_has_a_third_of_the_error():
    for workers in (2, 4, 8):
        assert mean_error("thc:2", workers) * 3 < mean_error("shared:2", workers)


def test_clips_of_stochastic_rounding_minimize_the_error():
    # With equal inputs clipping errors add up, while those of rounding do not.
    best = {2: mean_error("thc:2,round=stochastic", 4, True), 3: mean_error("thc:3,round=stochastic", 16, True)}
    stage = type(laconic.codec("thc:2").values)
    real = stage.clip_factor
    for factor in (0.75, 1.3):

        def scaled(self, levels, workers, factor=factor):
            return factor * real(self, levels, workers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage, "clip_factor", scaled)
            assert mean_error("thc:2,round=stochastic", 4, True) > best[2]
            assert mean_error("thc:3,round=stochastic", 16, True) > best[3]


def test_stochastic_sums_are_unbiased():
    xs = [laws.normal(600, seed=i) for i in range(3)]
    summing = laconic.summing("shared:2,round=stochastic", workers=3)
    agreed = summing.agree([summing.probe(x) for x in xs])
    seeds, truth = 1000, sum(xs).double() / 3
    total, squares = torch.zeros(600, dtype=torch.float64), torch.zeros(600, dtype=torch.float64)
    for seed in range(seeds):
        packets = [summing.packet(x, agreed, seed=seed, worker=i) for i, x in enumerate(xs)]
        error = laconic.codec("shared:2,round=stochastic").decode(_added(packets)).double() - truth
        total += error
        squares += error * error
    z = total / seeds / (squares / seeds**2).sqrt()
    assert float(z.abs().max()) < 5 and abs(float(z.sum())) / 600**0.5 < 5 and float((z * z).mean()) < 1.3


def _added(packets):
    total = laconic.Sum()
    for packet in packets:
        total.add(packet)
    return total.packet()
