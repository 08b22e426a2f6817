"""A renewed subspace first takes the remaining steps of its momentum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laconic
from laconic.layers.subspace import subspaces
from laconic.optim import SGD


def test_spent_momentum_equals_steps_without_gradients() -> None:
    start = torch.arange(4.0)
    spent, waited = {"w": start.clone()}, {"w": start.clone()}
    spending, waiting = SGD(momentum=0.8), SGD(momentum=0.8)
    for optimizer, parameters in ((spending, spent), (waiting, waited)):
        optimizer.step(parameters, {"w": torch.tensor([1.0, -2.0, 0.5, 0.0])}, lr=0.1)
    spending.spend(spent, ["w", "unknown"], lr=0.1)
    for _ in range(200):
        waiting.step(waited, {"w": torch.zeros(4)}, lr=0.1)
    assert spent["w"] == pytest.approx(waited["w"], abs=1e-6)
    assert spending.state_dict() == {}


@pytest.mark.parametrize("nesterov", [False, True])
def test_renewal_takes_the_remaining_momentum_steps(nesterov: bool) -> None:
    model = laconic.compress(nn.Linear(128, 64), "subspace:0.1,T=2", policy={"*": "subspace:0.1,T=2"}, seed=3)
    ((_, layer),) = subspaces(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))

    def backward() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()

    backward()
    optimizer.step()
    backward()
    gradient = layer.z.grad.clone()
    velocity = 0.9 * optimizer.state[layer.z]["momentum_buffer"] + gradient
    step = gradient + 0.9 * velocity if nesterov else velocity
    before, signs, z = layer.origin.detach().clone(), layer._signs.clone(), layer.z.detach().clone()
    optimizer.step()
    moved = z - 0.1 * step - 0.1 * 0.9 / (1 - 0.9) * velocity
    expected = laconic.layers.subspace.move_origin(moved, before, signs, layer.tiles.whole)
    assert not layer.z.any() and torch.allclose(layer.weight, expected, atol=1e-6)
    assert not optimizer.state[layer.z]["momentum_buffer"].any()


def test_adam_drops_its_momentum() -> None:
    model = laconic.compress(nn.Linear(128, 64), "subspace:0.1,T=1", policy={"*": "subspace:0.1,T=1"}, seed=3)
    ((_, layer),) = subspaces(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    before = layer.weight.detach().clone()
    model(torch.ones(2, 128)).square().mean().backward()
    optimizer.step()
    moved = float((layer.weight.detach() - before).abs().max())
    assert moved == pytest.approx(0.01, rel=1e-3)  # one step of Adam
    assert not optimizer.state[layer.z]["exp_avg"].any()
