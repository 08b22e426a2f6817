"""Recipes: settings of ``LocalSGD`` by name, each with the trainings behind it.

A recipe is a choice of codec, interval and outer optimizer for training a transformer over a slow link. It was trained
beside plain data parallelism; its ``evidence`` says what it saved and what it cost.

>>> import laconic
>>> recipe = laconic.recipes.get("muon-sign-64")
>>> recipe.every, recipe.codec
(64, 'ef|sign')
>>> all(each.ratio > 1000 for each in recipe.evidence)
True
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import nn

from laconic.collective import LocalSGD, muon
from laconic.errors import ConfigError
from laconic.policy import Policy

__all__ = ["Evidence", "Recipe", "get", "names"]

MUON, ADAMW = "muon", "adamw"


@dataclass(frozen=True)
class Evidence:
    """Trainings of a transformer by a recipe, and by AdamW with plain data parallelism for as many steps.

    Args:
        parameters: Of the model.
        workers: How many trained it.
        steps: Of the inner optimizer.
        seeds: How many trainings there were.
        loss: Mean validation loss, in nats a byte.
        adamw_loss: The same of AdamW with plain data parallelism.
        ratio: Bytes of float32 data parallelism over those of the recipe, both directions.
    """

    parameters: int
    workers: int
    steps: int
    seeds: int
    loss: float
    adamw_loss: float
    ratio: float

    @property
    def beside_adamw(self) -> float:
        """By how many per cent the loss is above that of AdamW with plain data parallelism."""
        return 100 * (self.loss / self.adamw_loss - 1)


@dataclass(frozen=True)
class Recipe:
    """Arguments of ``LocalSGD`` for training a transformer over a slow link.

    Args:
        name: Its name.
        optimizer: ``muon`` (with AdamW for vectors, embeddings and head) or ``adamw``.
        every, codec, fragments, outer: Arguments of ``LocalSGD``.
        lr: AdamW's largest learning rate; Muon's is 20 times as large.
    """

    name: str
    optimizer: str
    every: int
    codec: str
    fragments: int = 1
    outer: str = "mean"
    lr: float = 1e-3

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The trainings behind the recipe, from the Records of ``laconic study gpt``."""
        return tuple(Evidence(**values) for values in _evidence().get(self.name, ()))

    @property
    def factor(self) -> float:
        """Factor of the mean."""
        return _argument(self.outer)

    @property
    def decay(self) -> float:
        """Factor of residuals in each exchange."""
        return _argument(self.codec.partition("|")[0])

    def optimizers(self, model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
        """Return the optimizers with the rates of the trainings, or with other options of ``laconic.muon`` or AdamW."""
        if self.optimizer == MUON:
            return muon(model, **{"lr": 20 * self.lr, "adamw_lr": self.lr} | options)
        rates: dict[str, Any] = {"lr": self.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
        return [torch.optim.AdamW(model.parameters(), **rates | options)]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``LocalSGD`` beside model and optimizer."""
        return {
            "every": self.every, "codec": self.codec, "fragments": self.fragments, "outer": self.outer,
            "policy": Policy(small="bf16"),
        }  # fmt: skip

    def local_sgd(
        self, model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None, **changes: Any,
    ) -> LocalSGD:  # fmt: skip
        """Return ``LocalSGD`` by this recipe.

        Args:
            model: The model; see ``LocalSGD``.
            optimizer: Optimizers to use instead of ``optimizers(model)``.
            changes: Other arguments of ``LocalSGD``, such as ``group`` or ``overlap``.
        """
        chosen = self.optimizers(model) if optimizer is None else optimizer
        return LocalSGD(model, chosen, **self.arguments() | changes)


_RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("muon-sign-16", MUON, 16, "ef:0.8|sign", 8, outer="mean:1.8", lr=7e-4),
        Recipe("muon-sign-64", MUON, 64, "ef|sign", 4),
        Recipe("muon-sign-65", MUON, 65, "ef:0.9|sign", 4, outer="mean:1.8", lr=7e-4),
        Recipe("muon-sign-98", MUON, 98, "ef:0.9|sign", 4, outer="mean:1.8", lr=7e-4),
    )
}


def _argument(text: str) -> float:
    """Return the argument of ``mean:1.8`` or ``ef:0.9``; 1 if there is none."""
    return float(text.partition(":")[2] or 1)


def names() -> list[str]:
    """Return the names of all recipes."""
    return list(_RECIPES)


def get(name: str) -> Recipe:
    """Return a recipe by its name."""
    if name not in _RECIPES:
        raise ConfigError(f"there is no recipe {name!r}: use one of {', '.join(_RECIPES)}")
    return _RECIPES[name]


@cache
def _evidence() -> dict[str, list[dict[str, Any]]]:
    """Return what ``make docs`` has written from Records."""
    text = resources.files("laconic").joinpath("recipes.json").read_text(encoding="utf-8")
    evidence: dict[str, list[dict[str, Any]]] = json.loads(text)
    return evidence
