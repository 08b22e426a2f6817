"""The models that come with laconic, in plain torch.

Layers have names, which name the slots: ``conv1.weight``, ``head.bias``. No model has dropout: a step depends on
parameters and examples alone, so that repeating it after a fault gives the same bits. Weights are initialised as torch
does by default (the GPT's as in GPT-2), from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.errors import ConfigError

__all__ = ["GPT", "MODELS", "GPTConfig", "ModelInfo", "build_model", "seeded"]


@dataclass(frozen=True)
class ModelInfo:
    """Description of a model, the shape of its examples, and the data sets that have this shape.

    Args:
        variants: Functions that build the model for data sets of another shape.
    """

    summary: str
    build: Callable[[], nn.Module]
    takes: str
    data: tuple[str, ...] = ()
    variants: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)


def build_model(name: str, *, seed: int, data: str | None = None) -> nn.Module:
    """Build a model of ``MODELS`` on the CPU, with weights drawn from ``seed``; the global generator is not changed.

    ``data`` names a data set; a model that has a variant for it is built as that.

    >>> sum(parameter.numel() for parameter in build_model("mlp", seed=0).parameters())
    327880
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}: use one of {', '.join(MODELS)}")
    with seeded(seed):
        return MODELS[name].variants.get(data or "", MODELS[name].build)()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the block, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the devices' generators
        yield


def _mlp() -> nn.Module:
    """784-392-50-10 with tanh in between: 327,880 parameters (Øland and Raj 2015). The outputs are logits."""
    return _named(
        flatten=nn.Flatten(), fc1=nn.Linear(784, 392), tanh1=nn.Tanh(), fc2=nn.Linear(392, 50), tanh2=nn.Tanh(),
        head=nn.Linear(50, 10),
    )  # fmt: skip


def _lenet5() -> nn.Module:
    """LeNet-5 with ReLU and max pooling: 61,706 parameters.

    Images of 28 x 28 are padded to the original 32 x 32 (without padding fc1 is smaller: 44,426 parameters).
    """
    return _named(
        conv1=nn.Conv2d(1, 6, 5, padding=2), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2), conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(), pool2=nn.MaxPool2d(2), flatten=nn.Flatten(), fc1=nn.Linear(400, 120), relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84), relu4=nn.ReLU(), head=nn.Linear(84, 10),
    )  # fmt: skip


VGG11_WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
VGG11_POOLED = (1, 2, 4, 6, 8)  # convolutions followed by max pooling


def _vgg11() -> nn.Module:
    """VGG-11 for CIFAR-10, with batch norm and a single linear layer on top: 9,231,114 parameters."""
    layers: dict[str, nn.Module] = {}
    channels = 3
    for i, width in enumerate(VGG11_WIDTHS, 1):
        layers[f"conv{i}"] = nn.Conv2d(channels, width, 3, padding=1)
        layers[f"norm{i}"] = nn.BatchNorm2d(width)
        layers[f"relu{i}"] = nn.ReLU(inplace=True)
        if i in VGG11_POOLED:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
        channels = width
    return _named(**layers, flatten=nn.Flatten(), head=nn.Linear(channels, 10))


def _vgg11fc() -> nn.Module:
    """VGG-11 with four pools and three linear layers, as Kothari et al. 2021 describe it: 34,440,970 parameters."""
    layers = dict(_vgg11().named_children())
    del layers["pool8"], layers["head"]
    layers |= {"fc1": nn.Linear(2048, 4096), "relu9": nn.ReLU(inplace=True)}
    layers |= {"fc2": nn.Linear(4096, 4096), "relu10": nn.ReLU(inplace=True), "head": nn.Linear(4096, 10)}
    return _named(**layers)


def _alexnet() -> nn.Module:
    """AlexNet as in "One weird trick" (Krizhevsky 2014), without dropout: 61,100,840 parameters."""
    return _named(
        conv1=nn.Conv2d(3, 64, 11, stride=4, padding=2), relu1=nn.ReLU(inplace=True), pool1=nn.MaxPool2d(3, stride=2),
        conv2=nn.Conv2d(64, 192, 5, padding=2), relu2=nn.ReLU(inplace=True), pool2=nn.MaxPool2d(3, stride=2),
        conv3=nn.Conv2d(192, 384, 3, padding=1), relu3=nn.ReLU(inplace=True), conv4=nn.Conv2d(384, 256, 3, padding=1),
        relu4=nn.ReLU(inplace=True), conv5=nn.Conv2d(256, 256, 3, padding=1), relu5=nn.ReLU(inplace=True),
        pool5=nn.MaxPool2d(3, stride=2), flatten=nn.Flatten(), fc1=nn.Linear(256 * 6 * 6, 4096),
        relu6=nn.ReLU(inplace=True), fc2=nn.Linear(4096, 4096), relu7=nn.ReLU(inplace=True), head=nn.Linear(4096, 1000),
    )  # fmt: skip


class Bottleneck(nn.Module):
    """1x1 reduction, 3x3 (with the stride), 1x1 expansion by four, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = _named(conv=nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm=nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


RESNET50_BLOCKS = (3, 4, 6, 3)


def _resnet50() -> nn.Module:
    """ResNet-50, version 1.5: 25,557,032 parameters."""
    conv = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
    return _resnet50_on(conv, 1000, pool1=nn.MaxPool2d(3, stride=2, padding=1))


def _resnet50_cifar10() -> nn.Module:
    """ResNet-50 for images of 32 x 32: a first convolution of 3 x 3 without stride, no pool; 23,520,842 parameters."""
    return _resnet50_on(nn.Conv2d(3, 64, 3, padding=1, bias=False), 10)


def _resnet50_on(conv: nn.Module, classes: int, **pool: nn.Module) -> nn.Module:
    """Return the blocks of ResNet-50 on a first convolution and an optional pool."""
    layers = {"conv1": conv, "norm1": nn.BatchNorm2d(64), "relu1": nn.ReLU(inplace=True), **pool}
    channels = 64
    for stage, blocks in enumerate(RESNET50_BLOCKS, 1):
        width = 64 << (stage - 1)
        for block in range(1, blocks + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            layers[f"stage{stage}_{block}"] = Bottleneck(channels, width, stride)
            channels = 4 * width
    return _named(**layers, mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), head=nn.Linear(channels, classes))


def _named(**layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


@dataclass(frozen=True)
class GPTConfig:
    """Dimensions of a GPT; by default 875,264 parameters."""

    vocabulary: int = 256
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4


class GPT(nn.Module):
    """A decoder like GPT-2 (Radford et al. 2019): int64 [batch, time] to logits [batch, time, vocabulary].

    Unlike in GPT-2, the embedding is not tied to the output layer: a slot is a tensor with one use.
    """

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # Each block adds to the stream twice; this keeps the variance of the sum.
                last = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers) if last else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.embedding(x) + self.position.weight[: x.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(stream)))
        return logits


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return y


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv, self.out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return mixed


GREY, SMALL, LARGE = "1 x 28 x 28 images", "3 x 32 x 32 images", "3 x 224 x 224 images in 1,000 classes"

MODELS: Mapping[str, ModelInfo] = MappingProxyType(
    {
        "mlp": ModelInfo("784-392-50-10, tanh", _mlp, GREY, ("digits", "mnist")),
        "lenet5": ModelInfo("LeNet-5, ReLU and max pooling", _lenet5, GREY, ("digits", "mnist")),
        "vgg11": ModelInfo("VGG-11 for CIFAR-10, batch norm", _vgg11, SMALL, ("cifar10",)),
        "alexnet": ModelInfo("AlexNet for ImageNet", _alexnet, LARGE),
        "resnet50": ModelInfo(
            "ResNet-50 for ImageNet, or with a small first convolution for CIFAR-10",
            _resnet50,
            f"{LARGE}, or {SMALL}",
            ("cifar10",),
            {"cifar10": _resnet50_cifar10},
        ),
        "vgg11fc": ModelInfo("VGG-11 for CIFAR-10 with three linear layers", _vgg11fc, SMALL, ("cifar10",)),
        "gpt": ModelInfo("a decoder of 4 layers over bytes, 128 wide", GPT, "windows of 128 bytes", ("text",)),
    }
)
"""Models by name; parameter counts are in the functions' docstrings, and tested."""
