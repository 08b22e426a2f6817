"""Small tasks whose exchanges calibrate the transport; ``laconic server`` and ``laconic worker`` load this file."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from laconic.train.task import cross_entropy

__all__ = ["BATCH", "TASKS", "large", "many_slots", "medium", "two_slots"]

BATCH = 8
EXAMPLES = 64
Examples = tuple[Tensor, Tensor]
Built = tuple[nn.Module, Examples, Examples, Callable[[Tensor, Tensor], Tensor]]


def _task(*widths: int) -> Built:
    """Return a multi-layer perceptron without nonlinearities and random examples."""
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
    examples = torch.randn(EXAMPLES, widths[0]), torch.randint(widths[-1], (EXAMPLES,))
    return nn.Sequential(*layers), examples, examples, cross_entropy


def two_slots() -> Built:
    """Two slots of a few values, for the cost of an exchange."""
    return _task(64, 10)


def many_slots() -> Built:
    """34 slots of a few values, as many as VGG-11 has, for the cost of a slot."""
    return _task(*[32] * 17, 10)


def medium() -> Built:
    """Two slots, 2.1 MB."""
    return _task(512, 1024)


def large() -> Built:
    """Two slots, 8.4 MB."""
    return _task(1024, 2048)


TASKS = (two_slots, many_slots, medium, large)
