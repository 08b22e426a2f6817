"""Subspaces: where entries lie, what renewal does, who counts steps, and that all of it is the same everywhere."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic import counters
from laconic.layers import LayerPolicy, SubspaceLayer, advance, subspaces
from laconic.layers.subspace import BLOCK, Tiles, _Placed, collected, placed

ALL = LayerPolicy(output=True, min_numel=0, min_coordinates=64)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def projection(tiles: Tiles, signs: Tensor) -> Tensor:
    """P as a matrix [d, K], entry by entry."""
    found = torch.zeros(tiles.numel, tiles.coordinates)
    for entry in range(tiles.numel):
        row, column = divmod(entry, tiles.coordinates)
        found[entry, column] = signs[row, column // BLOCK]
    return found


@pytest.mark.parametrize("numel, rho", [(640, 0.1), (1000, 0.3), (777, 0.13), (130, 0.5), (64, 0.9)])
def test_a_weight_is_the_origin_and_what_z_moves(numel: int, rho: float) -> None:
    tiles = Tiles(numel, rho)
    assert tiles.rows * tiles.coordinates >= numel > (tiles.rows - 1) * tiles.coordinates
    origin, z, g = torch.randn(numel), torch.randn(tiles.coordinates), torch.randn(numel)
    signs = tiles.signs(7, 3, origin)
    matrix = projection(tiles, signs)
    torch.testing.assert_close(placed(z, origin, signs, tiles.whole), origin + matrix @ z, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(collected(g, signs, tiles.whole), matrix.T @ g, rtol=1e-4, atol=1e-5)
    inputs = [x.double().requires_grad_() for x in (z, origin)]
    assert torch.autograd.gradcheck(lambda z, _: _Placed.apply(z, origin.double(), signs.double(), tiles.whole), inputs)


def test_signs_are_fair_and_differ_by_seed_and_epoch() -> None:
    tiles, like = Tiles(1_000_000, 0.05), torch.zeros(1)
    one, same, later, other = (tiles.signs(*key, like) for key in ((1, 0), (1, 0), (1, 1), (2, 0)))
    assert torch.equal(one, same) and set(one.flatten().tolist()) == {-1.0, 1.0}
    count = one.numel()
    for x in (one, one * later, one * other, one[0] * one[1], one[:, 1:] * one[:, :-1]):
        assert abs(float(x.sum())) < 4.5 * x.numel() ** 0.5
    assert count == tiles.rows * tiles.blocks
    # The same on every machine and with every release.
    assert tiles.signs(1, 0, like)[0, :12].tolist() == SIGNS


SIGNS = [-1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, -1]


def test_the_mean_over_signs_is_the_gradient() -> None:
    """P Pᵀ g is g and what tiles do to each other, which signs average out."""
    tiles, g = Tiles(2560, 0.25), torch.randn(2560)
    total = torch.zeros(2560)
    for epoch in range(400):
        signs = tiles.signs(5, epoch, g)
        total += placed(collected(g, signs, tiles.whole), torch.zeros_like(g), signs, tiles.whole)
    assert float((total / 400 - g).norm() / g.norm()) < 1.3 * (3 / 400) ** 0.5


def train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer, *, start: int = 0) -> None:
    for i in range(start, start + steps):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(16, 100, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model(x), x.flip(1)).backward()
        optimizer.step()


def network(every: int = 5, **options: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(100, 120), nn.Tanh(), nn.Linear(120, 100))
    return laconic.compress(model, f"subspace:0.2,T={every}", policy=ALL, **options)  # type: ignore[arg-type]


def sgd(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9} | options)  # type: ignore[arg-type]


def test_renewal_moves_nothing_and_forgets_directions() -> None:
    model = network()
    optimizer = sgd(model)
    layer = model[0]
    train(model, 4, optimizer)
    before, z = layer.weight.detach().clone(), layer.z.detach().clone()
    signs = layer._signs.clone()
    assert layer.steps == 4 and bool(z.any()) and bool(optimizer.state[layer.z]["momentum_buffer"].any())
    origin = layer.origin.detach().clone()
    torch.testing.assert_close(before, placed(z, origin, signs, layer.tiles.whole))
    train(model, 1, optimizer, start=4)
    assert layer.steps == 5 and not layer.z.any() and not optimizer.state[layer.z]["momentum_buffer"].any()
    assert bool(optimizer.state[model[2].bias]["momentum_buffer"].any())
    assert torch.equal(layer.origin, layer.weight) and not torch.equal(layer.origin, origin)
    assert not torch.equal(layer._signs, signs)
    assert layer.state.tolist()[1] == 5


def test_adam_keeps_sizes_and_forgets_directions() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(model, 5, optimizer)
    state = optimizer.state[model[0].z]
    assert not state["exp_avg"].any() and bool(state["exp_avg_sq"].all())


def test_renewed_subspaces_reach_what_a_fixed_one_cannot() -> None:
    target = torch.randn(60, 60)
    x = torch.eye(60)
    losses = {}
    for every in (0, 20):
        layer = laconic.compress(nn.Linear(60, 60, bias=False), f"subspace:0.1,T={every}", policy=ALL)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        for _ in range(600):
            optimizer.zero_grad()
            loss = 50 * F.mse_loss(layer(x), target)
            loss.backward()
            optimizer.step()
        losses[every] = float(loss.detach()) / 50
    assert losses[0] > 0.7 and losses[20] < 0.1


def test_the_step_counts_where_it_is_taken() -> None:
    model = network(every=3)
    x = torch.randn(4, 100)
    for _ in range(5):
        model(x)  # no step
    optimizer = sgd(model)
    optimizer.step()  # without gradients
    assert model[0].steps == 0
    for _ in range(2):  # gradients that are added up
        F.mse_loss(model(x), x).backward()
    optimizer.step()
    assert [layer.steps for _, layer in subspaces(model)] == [1, 1]
    only = torch.optim.SGD([model[0].z], lr=0.1)
    only.step()
    assert [layer.steps for _, layer in subspaces(model)] == [2, 1]
    assert advance(model) and [layer.steps for _, layer in subspaces(model)] == [3, 2] and not model[0].z.any()


def test_a_weight_seen_twice_and_changed_behind_our_back() -> None:
    model = network()
    layer, x = model[0], torch.randn(4, 100)
    (layer(x).sum() + layer(2 * x).sum()).backward()  # both have the same weight
    once = layer.z.grad.clone()
    layer.zero_grad()
    layer(3 * x).sum().backward()
    torch.testing.assert_close(layer.z.grad, once, rtol=1e-4, atol=1e-4)
    for change in (layer.z.data, layer.origin):
        before = layer.weight.detach().clone()
        with torch.no_grad():
            change.add_(0.5)
        assert not torch.equal(layer.weight, before)
        with torch.no_grad():
            torch.testing.assert_close(layer.weight, placed(layer.z, layer.origin, layer._signs, layer.tiles.whole))
    y = layer(x.requires_grad_()).sum()
    with torch.no_grad():
        layer.z.add_(1)
    layer(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()  # as a dense layer would refuse it


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_takes_of_the_whole_weight(name: str) -> None:
    model = network(every=4)
    layer = model[0]
    before = layer.weight.detach().norm().item()
    if name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2, eps=1e9)  # decay alone
    for _ in range(10):
        optimizer.zero_grad()
        (0 * model(torch.zeros(1, 100)).sum()).backward()
        optimizer.step()
    assert layer.weight.norm().item() == pytest.approx(before * 0.98**10, rel=1e-4)


def test_decay_that_cannot_be_followed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    before = counters.counts().get("subspace weight decay", 0)
    train(model, 1, torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1))
    assert counters.counts()["subspace weight decay"] == before + 2
    assert "Take AdamW or SGD" in caplog.text


def test_a_run_that_is_resumed_is_the_same_run() -> None:
    """Seed and steps are in the state: a renewal after a restart draws what it would have drawn."""
    straight = network(seed=3)
    train(straight, 17, sgd(straight))
    first = network(seed=3)
    optimizer = sgd(first)
    train(first, 8, optimizer)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second = network(seed=99)
    other = sgd(second)
    second.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(second, 9, other, start=8)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    assert torch.equal(straight[0].weight, second[0].weight)


def test_two_workers_stay_equal_and_layers_differ() -> None:
    one, two = network(seed=3), network(seed=3)
    for model in (one, two):
        train(model, 12, sgd(model))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert not torch.equal(one[0]._signs, one[2]._signs)


def test_names_and_what_is_trained() -> None:
    model = network()
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["0.z", "0.bias", "2.z", "2.bias"]
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"0.origin", "2.origin"}
    assert "coordinates=2432 of 12000, T=5" in str(model) and isinstance(model[0], SubspaceLayer)
