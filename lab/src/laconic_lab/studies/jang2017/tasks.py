"""Tasks of the runs that check the planner, built in each process of ``laconic server`` and ``laconic worker``.

Images are random: times do not depend on them, and the models memorise their labels well enough to give realistic
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BATCH", "IMAGES", "LARGE", "SCRIPT", "few", "gpt", "many", "mlp", "pair", "resnet", "vgg11"]

SCRIPT = str(Path(__file__).resolve())
IMAGES = 512
BATCH = {"mlp": 64, "vgg11": 8, "gpt": 8, "resnet": 8, "few": 8, "pair": 8, "many": 8}
LARGE = {"pair": 2, "many": 16}
"""Number of slots that are large enough to be compressed."""

Images = tuple[Tensor, Tensor]
Built = tuple[nn.Module, Images, Images, Callable[[Tensor, Tensor], Tensor]]


def _images(*shape: int) -> Images:
    return torch.randn(IMAGES, *shape), torch.randint(10, (IMAGES,))


def _built(model: nn.Module, *shape: int) -> Built:
    return model, _images(*shape), _images(*shape), F.cross_entropy


def mlp() -> Built:
    """784-1024-256-10: 1,068,810 parameters, 4.3 MB."""
    layers = [nn.Flatten(), nn.Linear(784, 1024), nn.Tanh(), nn.Linear(1024, 256), nn.Tanh(), nn.Linear(256, 10)]
    return _built(nn.Sequential(*layers), 1, 28, 28)


def vgg11() -> Built:
    """VGG-11 for images of 32 x 32: 9,231,114 parameters, 36.9 MB."""
    from laconic.train.models import MODELS

    return _built(MODELS["vgg11"].build(), 3, 32, 32)


def gpt() -> Built:
    """laconic's GPT on windows of 64 random bytes: 875,264 parameters, 3.5 MB."""
    from laconic.train.models import MODELS
    from laconic.train.task import cross_entropy

    windows = torch.randint(256, (2, IMAGES, 64))
    examples = windows[0], windows[1]
    return MODELS["gpt"].build(), examples, examples, cross_entropy


def resnet() -> Built:
    """Six bottleneck blocks for images of 32 x 32: 868,266 parameters, 3.5 MB."""
    from laconic.train.models import Bottleneck

    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    channels = 32
    for width, stride in ((32, 1), (64, 2), (128, 2)):
        layers += [Bottleneck(channels, width, stride), Bottleneck(4 * width, width, 1)]
        channels = 4 * width
    return _built(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)), 3, 32, 32)


def few() -> Built:
    """Two slots with almost no values: the fixed cost of an exchange."""
    return _built(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 1, 8, 8)


def pair() -> Built:
    """Two slots just large enough to be compressed, and three small ones."""
    layers = [nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)]
    return _built(nn.Sequential(*layers), 1, 8, 8)


def many() -> Built:
    """A task of 34 such slots, as many as VGG-11 has weights and biases."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(16):
        layers += [nn.Linear(64, 64), nn.Tanh()]
    return _built(nn.Sequential(*layers, nn.Linear(64, 10)), 1, 8, 8)
