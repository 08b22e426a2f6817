"""Helpers of the steppers' tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from laconic_lab.studies.stepper import Stepper


def train_epochs(stepper: Stepper, epochs: int) -> None:
    for _ in range(epochs):
        stepper.begin_epoch()
        for _ in range(stepper.per_epoch):
            stepper.step()
        stepper.end_epoch()


@contextmanager
def host_transfers_forbidden() -> Iterator[None]:
    """Raise on copies from the host and waits for the device within the block: a CUDA graph cannot hold them."""

    def forbidden(*arguments: object, **options: object) -> None:
        raise AssertionError("a CUDA graph cannot hold this operation")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", forbidden)
        for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, forbidden)
        yield
