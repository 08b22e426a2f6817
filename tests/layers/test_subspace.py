"""Subspaces: the projection, renewal, counting of steps, and the same results on all workers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic import counters
from laconic.layers import LayerPolicy, SubspaceLayer, advance, subspaces
from laconic.layers.subspace import SIGN_BLOCK, Tiles, _MovedWeight, move_origin, project_gradient

ALL = LayerPolicy(output=True, min_numel=0, min_coordinates=64)


def projection(tiles: Tiles, signs: Tensor) -> Tensor:
    """Return P as a matrix [d, K]."""
    matrix = torch.zeros(tiles.numel, tiles.coordinates)
    for entry in range(tiles.numel):
        row, column = divmod(entry, tiles.coordinates)
        matrix[entry, column] = signs[row, column // SIGN_BLOCK]
    return matrix


@pytest.mark.parametrize("numel, rho", [(640, 0.1), (300, 0.3), (777, 0.13), (130, 0.5), (64, 0.9)])
def test_weight_is_origin_plus_projected_z(numel: int, rho: float) -> None:
    tiles = Tiles(numel, rho)
    assert tiles.rows * tiles.coordinates >= numel > (tiles.rows - 1) * tiles.coordinates
    origin, z, g = torch.randn(numel), torch.randn(tiles.coordinates), torch.randn(numel)
    signs = tiles.signs(7, 3, origin)
    matrix = projection(tiles, signs)
    torch.testing.assert_close(move_origin(z, origin, signs, tiles.whole), origin + matrix @ z, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(project_gradient(g, signs, tiles.whole), matrix.T @ g, rtol=1e-4, atol=1e-5)
    inputs = [x.double().requires_grad_() for x in (z, origin)]
    assert torch.autograd.gradcheck(
        lambda z, _: _MovedWeight.apply(z, origin.double(), signs.double(), tiles.whole), inputs
    )


def test_signs_are_balanced_and_differ_by_seed_and_epoch() -> None:
    tiles, like = Tiles(1_000_000, 0.05), torch.zeros(1)
    first, same, later, other = (tiles.signs(*key, like) for key in ((1, 0), (1, 0), (1, 1), (2, 0)))
    assert torch.equal(first, same) and set(first.flatten().tolist()) == {-1.0, 1.0}
    for x in (first, first * later, first * other, first[0] * first[1], first[:, 1:] * first[:, :-1]):
        assert abs(float(x.sum())) < 4.5 * x.numel() ** 0.5
    assert first.numel() == tiles.rows * tiles.blocks
    # The signs must not change between machines or releases.
    assert tiles.signs(1, 0, like)[0, :12].tolist() == SIGNS


SIGNS = [-1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, -1]


def test_mean_over_signs_is_the_gradient() -> None:
    """P Pᵀ g is g plus the tiles' interference, which random signs average out."""
    tiles, g = Tiles(2560, 0.25), torch.randn(2560)
    total = torch.zeros(2560)
    for epoch in range(400):
        signs = tiles.signs(5, epoch, g)
        total += move_origin(project_gradient(g, signs, tiles.whole), torch.zeros_like(g), signs, tiles.whole)
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


def test_renewal_keeps_the_weight_and_zeroes_momentum() -> None:
    model = network()
    optimizer = sgd(model)
    layer = model[0]
    train(model, 4, optimizer)
    before, z = layer.weight.detach().clone(), layer.z.detach().clone()
    signs = layer._signs.clone()
    assert layer.steps == 4 and bool(z.any()) and bool(optimizer.state[layer.z]["momentum_buffer"].any())
    origin = layer.origin.detach().clone()
    torch.testing.assert_close(before, move_origin(z, origin, signs, layer.tiles.whole))
    train(model, 1, optimizer, start=4)
    assert layer.steps == 5 and not layer.z.any() and not optimizer.state[layer.z]["momentum_buffer"].any()
    assert bool(optimizer.state[model[2].bias]["momentum_buffer"].any())
    assert torch.equal(layer.origin, layer.weight) and not torch.equal(layer.origin, origin)
    assert not torch.equal(layer._signs, signs)
    assert layer.state.tolist()[1] == 5


def test_renewal_keeps_adams_second_moments() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(model, 5, optimizer)
    state = optimizer.state[model[0].z]
    assert not state["exp_avg"].any() and bool(state["exp_avg_sq"].all())


def test_renewed_subspaces_reach_targets_outside_a_fixed_one() -> None:
    target = torch.randn(60, 60)
    x = torch.eye(60)
    losses = {}
    for every in (0, 20):
        layer = laconic.compress(nn.Linear(60, 60, bias=False), f"subspace:0.1,T={every}", policy=ALL)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        for _ in range(500):
            optimizer.zero_grad()
            loss = 50 * F.mse_loss(layer(x), target)
            loss.backward()
            optimizer.step()
        losses[every] = float(loss.detach()) / 50
    assert losses[0] > 0.7 and losses[20] < 0.1


def test_steps_are_counted_by_the_optimizer_that_takes_them() -> None:
    model = network(every=3)
    x = torch.randn(4, 100)
    for _ in range(5):
        model(x)  # no step
    optimizer = sgd(model)
    optimizer.step()  # without gradients
    assert model[0].steps == 0
    for _ in range(2):  # accumulated gradients
        F.mse_loss(model(x), x).backward()
    optimizer.step()
    assert [layer.steps for _, layer in subspaces(model)] == [1, 1]
    only = torch.optim.SGD([model[0].z], lr=0.1)
    only.step()
    assert [layer.steps for _, layer in subspaces(model)] == [2, 1]
    assert advance(model) and [layer.steps for _, layer in subspaces(model)] == [3, 2] and not model[0].z.any()


def test_cached_weight_follows_changes_of_z_and_origin() -> None:
    model = network()
    layer, x = model[0], torch.randn(4, 100)
    (layer(x).sum() + layer(2 * x).sum()).backward()  # both calls use the same weight
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
            torch.testing.assert_close(
                layer.weight, move_origin(layer.z, layer.origin, layer._signs, layer.tiles.whole)
            )
    y = layer(x.requires_grad_()).sum()
    with torch.no_grad():
        layer.z.add_(1)
    layer(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()  # as for a dense layer


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_shrinks_the_whole_weight(name: str) -> None:
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


def test_unsupported_weight_decay_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    before = counters.counts().get("subspace weight decay", 0)
    train(model, 1, torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1))
    assert counters.counts()["subspace weight decay"] == before + 2
    assert "Use AdamW or SGD" in caplog.text


def test_resumed_run_ends_with_the_same_bits() -> None:
    """Seed and steps are in the state, so a renewal after a restart draws the same directions."""
    uninterrupted = network(seed=3)
    train(uninterrupted, 17, sgd(uninterrupted))
    first = network(seed=3)
    optimizer = sgd(first)
    train(first, 8, optimizer)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second = network(seed=99)
    other = sgd(second)
    second.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(second, 9, other, start=8)
    for name, value in uninterrupted.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    assert torch.equal(uninterrupted[0].weight, second[0].weight)


def test_workers_stay_equal_and_layers_have_different_signs() -> None:
    first, second = network(seed=3), network(seed=3)
    for model in (first, second):
        train(model, 12, sgd(model))
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert not torch.equal(first[0]._signs, first[2]._signs)


def test_only_z_and_bias_are_trained() -> None:
    model = network()
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["0.z", "0.bias", "2.z", "2.bias"]
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"0.origin", "2.origin"}
    assert "coordinates=2432 of 12000, T=5" in str(model) and isinstance(model[0], SubspaceLayer)
