"""Helpers of the steppers' tests."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from laconic_lab.studies.stepper import Stepper


def train_epochs(stepper: Stepper, epochs: int) -> None:
    for _ in range(epochs):
        stepper.begin_epoch()
        for _ in range(stepper.per_epoch):
            stepper.step()
        stepper.end_epoch()


class HostTransfers(TorchDispatchMode):
    """Records operations that copy from or wait for the host, which a CUDA graph cannot hold."""

    FORBIDDEN = (torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default)

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.FORBIDDEN:
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))
