"""Parts of LocalSGD that need no ranks: cuts of fragments, weights, clip factors, residuals of sums."""

from __future__ import annotations

import pytest
import torch

import laconic
from laconic.collective.local.fragments import _cuts
from laconic.collective.local.outer import advise_longer_mean
from laconic.collective.local.rounds import clip_factor, token_weight


def test_fragments_are_consecutive_balanced_and_not_empty():
    assert _cuts([1, 1, 1, 1], 2) == [(0, 2), (2, 4)]
    assert _cuts([100, 1, 1, 1], 2) == [(0, 1), (1, 4)]
    assert _cuts([1, 1, 1, 100], 3) == [(0, 2), (2, 3), (3, 4)]
    assert _cuts([5], 1) == [(0, 1)]


@pytest.mark.parametrize("spec", ["ef|thc:4", "ef|shared:4"])
def test_unsent_values_of_a_sum_are_the_input_minus_what_was_decoded(spec):
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    contributor = laconic.Contributor(spec, workers=1)
    packet = contributor.packet("w", contributor.probe("w", x))
    decoded = contributor.chain.decode(packet)
    assert torch.allclose(contributor.unsent("w", 3000), x - decoded, atol=1e-6)


def test_weights_and_clip_factors_of_unequal_ranks():
    assert [token_weight([1, 3], rank) for rank in (0, 1)] == [0.5, 1.5]
    assert token_weight([0, 0], 1) == 1.0
    assert [clip_factor([1.0, 2.0, 8.0], rank) for rank in range(3)] == [1.0, 1.0, 0.25]
    assert clip_factor([float("nan"), 1.0, 3.0], 0) == 1.0 and clip_factor([float("nan"), 1.0, 3.0], 2) == 2 / 3
    assert clip_factor([0.0, 0.0], 0) == 1.0


def test_a_mean_of_adams_short_steps_is_advised_against_once_it_is_too_short(caplog):
    weights = [torch.nn.Parameter(torch.zeros(3, 3))]
    adam, sgd = torch.optim.AdamW(weights), torch.optim.SGD(weights, lr=0.1)
    for outer, optimizers, every, replicas in (
        ("mean", [sgd], 1, 4),
        ("mean", [adam, sgd], 1, 4),
        ("mean", [], 1, 4),  # the user's own steps
        ("mean", [adam], 20, 4),  # not measured
        ("mean", [adam], 1, 1),
        ("mean:2", [adam], 1, 4),
        ("nesterov", [adam], 1, 4),
    ):
        advise_longer_mean(outer, optimizers, every, replicas)
    assert not caplog.records
    advise_longer_mean("mean", [adam], 2, 4)
    (record,) = caplog.records
    assert "With 4 replicas" in record.message and "outer='mean:2.0'" in record.message
