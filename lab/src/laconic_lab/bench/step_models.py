"""Models whose training step is timed on a GPU: laconic's image models, and GPT-2 and ViT of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from laconic.errors import ConfigError
from laconic.train.models import MODELS, build_model, seeded

__all__ = ["FROM_TRANSFORMERS", "Workload", "workload"]

SIDES = {"1 x 28 x 28": (1, 28, 10), "3 x 32 x 32": (3, 32, 10), "3 x 224 x 224": (3, 224, 1000)}
"""Channels, image side and classes of each input kind."""

FROM_TRANSFORMERS = ("gpt2", "vit")


@dataclass(frozen=True)
class Workload:
    """A model with random weights, a batch for it, and its loss.

    Attributes:
        examples: What a batch holds, in words.
    """

    build: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    examples: str


def workload(name: str, batch: int | None, device: torch.device, seed: int) -> Workload:
    """Return a model and a batch of random examples; ``ConfigError`` if there is no such model."""
    if name in FROM_TRANSFORMERS:
        return _of_transformers(name, batch, device, seed)
    takes = MODELS[name].takes if name in MODELS else ""
    side = next((size for words, size in SIDES.items() if takes.startswith(words)), None)
    if side is None:
        raise ConfigError(f"--step must be an image model, {' or '.join(FROM_TRANSFORMERS)}, got {name!r}")
    return _of_images(lambda: build_model(name, seed=seed), _class_loss, batch or 64, side, device, seed)


def _of_transformers(name: str, batch: int | None, device: torch.device, seed: int) -> Workload:
    try:
        import transformers  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ConfigError(f"--step {name} needs transformers: pip install transformers") from None

    def built(make: Callable[[], Any]) -> nn.Module:
        with seeded(seed):
            model: nn.Module = make()
        return model

    if name == "vit":
        config = transformers.ViTConfig(num_labels=1000)
        make = lambda: built(lambda: transformers.ViTForImageClassification(config))  # noqa: E731
        return _of_images(make, _logits_loss, batch or 64, SIDES["3 x 224 x 224"], device, seed)
    config = transformers.GPT2Config(use_cache=False)
    batch, length = batch or 8, config.n_positions
    tokens = torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
    tokens = tokens.to(device)
    return Workload(
        lambda: built(lambda: transformers.GPT2LMHeadModel(config)), tokens, tokens,
        lambda model, inputs, labels: model(input_ids=inputs, labels=labels).loss, f"{batch} x {length:,} tokens",
    )  # fmt: skip


def _of_images(
    build: Callable[[], nn.Module], loss: Callable[[nn.Module, Tensor, Tensor], Tensor], batch: int,
    size: tuple[int, int, int], device: torch.device, seed: int,
) -> Workload:  # fmt: skip
    channels, side, classes = size
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, channels, side, side, generator=generator).to(device)
    labels = torch.randint(0, classes, (batch,), generator=generator).to(device)
    return Workload(build, images, labels, loss, f"{batch} images")


def _class_loss(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    return cross_entropy(model(images), classes)


def _logits_loss(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    return cross_entropy(model(pixel_values=images).logits, classes)
