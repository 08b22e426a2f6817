"""Examples by number, from tensors, images, text or a torch Dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from laconic.errors import ConfigError
from laconic.train.data import Images

__all__ = ["Batch", "Examples", "ImageExamples", "TextExamples", "examples_of"]

NORMALIZATION = {
    "digits": ((0.1307,), (0.3081,)),
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
"""Mean and standard deviation of each channel over the training set, for values in [0, 1]; digits use MNIST's."""


class Batch(NamedTuple):
    """Inputs and targets; the first dimension is the example."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.inputs.to(device), self.targets.to(device))


class Examples(ABC):
    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, indices: Tensor) -> Batch:
        """Return the examples of these numbers (int64, one dimension), on the CPU."""


class TensorExamples(Examples):
    """Two tensors whose first dimension is the example."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> Batch:
        return Batch(self.inputs[indices], self.targets[indices])


class ImageExamples(TensorExamples):
    """Images stored as bytes; ``take`` returns float32 [batch, channels, height, width], mean 0 and deviation 1."""

    def __init__(self, images: Tensor, labels: Tensor, name: str) -> None:
        super().__init__(images if images.dim() == 4 else images.unsqueeze(1), labels)
        self.mean, self.deviation = (torch.tensor(values).view(-1, 1, 1) for values in NORMALIZATION[name])

    @classmethod
    def of(cls, images: Images) -> tuple[ImageExamples, ImageExamples]:
        """Return the examples for training and for the test."""
        train = cls(images.train_images, images.train_labels, images.name)
        return train, cls(images.test_images, images.test_labels, images.name)

    def take(self, indices: Tensor) -> Batch:
        bytes_, labels = super().take(indices)
        return Batch((bytes_ / 255 - self.mean) / self.deviation, labels)


class TextExamples(Examples):
    """Adjacent windows of a text; targets are the windows shifted by one byte."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.context

    def take(self, indices: Tensor) -> Batch:
        positions = indices.view(-1, 1) * self.context + torch.arange(self.context + 1)
        windows = self.text[positions].long()
        return Batch(windows[:, :-1], windows[:, 1:])


class DatasetExamples(Examples):
    """A map-style torch Dataset of pairs."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: Tensor) -> Batch:
        inputs, targets = default_collate([self.dataset[i] for i in indices.tolist()])
        return Batch(inputs, targets)


def examples_of(data: object, what: str) -> Examples:
    """Return examples from two tensors, a torch Dataset or ``Examples``; ``what`` names the set in errors."""
    if isinstance(data, TensorDataset):
        data = data.tensors  # much faster than example by example
    examples: Examples
    if isinstance(data, Examples):
        examples = data
    elif isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(x, Tensor) and x.dim() for x in data):
        if len(data[0]) != len(data[1]):
            raise ConfigError(f"{what}: {len(data[0])} inputs but {len(data[1])} targets")
        examples = TensorExamples(*data)
    elif isinstance(data, Dataset) and isinstance(data, Sized):
        examples = DatasetExamples(data)
    else:
        raise ConfigError(
            f"{what} must be two tensors (inputs, targets) or a torch Dataset with a length, got {type(data).__name__}"
        )
    if not len(examples):
        raise ConfigError(f"{what} is empty")
    if isinstance(examples, DatasetExamples):
        _try_first(examples, what)
    return examples


def _try_first(examples: Examples, what: str) -> None:
    """Load one example of a user's Dataset, so that its errors are found before training starts."""
    try:
        batch = examples.take(torch.zeros(1, dtype=torch.int64))
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{what}: the first example cannot be loaded as a pair (input, target): {message}") from error
    if not all(isinstance(part, Tensor) for part in batch):
        raise ConfigError(f"{what}: an example must be a pair (input, target) of tensors or numbers")
