"""Recipes make LocalSGD with the settings that were trained, and say what the trainings showed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from laconic import ConfigError, recipes


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_has_evidence(name: str) -> None:
    recipe = recipes.get(name)
    assert recipe.name == name and recipe.evidence
    for each in recipe.evidence:
        assert each.ratio > 100 and each.seeds >= 1
        assert each.beside_adamw == pytest.approx(100 * (each.loss / each.adamw_loss - 1))


def test_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="there is no recipe 'best': use one of muon-sign-16"):
        recipes.get("best")


def test_recipe_makes_local_sgd_with_its_settings(alone: None) -> None:
    model = network()
    local = recipes.get("muon-sign-64").local_sgd(model, overlap=8)
    options = local.options
    assert (options.every, options.codec, options.fragments, options.overlap) == (64, "ef|sign", 4, 8)
    assert [type(each).__name__ for each in local.optimizers] == ["Muon", "AdamW"]
    text = torch.randint(32, (4, 9))
    nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
    local.step()


def test_recipe_multiplies_the_mean_by_its_factor(alone: None) -> None:
    local = recipes.get("muon-sign-65").local_sgd(network())
    assert local.stats()["outer"] == "mean:1.8"
    assert local._fragments[0].outer.optimizer.param_groups[0]["lr"] == 1.8


def test_recipe_makes_optimizers_with_its_learning_rates() -> None:
    matrices, rest = recipes.get("muon-sign-65").optimizers(network())
    assert matrices.defaults["lr"] == pytest.approx(0.014) and rest.defaults["lr"] == pytest.approx(7e-4)
    matrices, rest = recipes.get("muon-sign-65").optimizers(network(), adamw_lr=3e-4)
    assert matrices.defaults["lr"] == pytest.approx(0.014) and rest.defaults["lr"] == pytest.approx(3e-4)


def test_recipe_takes_other_optimizers_and_arguments(alone: None) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    local = recipes.get("muon-sign-98").local_sgd(model, optimizer, every=32)
    assert local.every == 32 and local.optimizers == (optimizer,)
