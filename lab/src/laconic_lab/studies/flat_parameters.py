"""The parameters of a model as one flat tensor, on which codecs and optimizers work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from laconic.train.task import Task

__all__ = ["FlatParameters"]


class FlatParameters:
    """The parameters of a task's model in one flat tensor.

    On a GPU convolutions read their weights with channels last. Such parameters are copies that ``publish`` renews, so
    that a convolution need not convert them forward, backward and in the gradient; all others are views.

    Args:
        names: The parameters, in the order of the flat tensor.
        channels_last: Whether convolutions get copies; by default on a GPU.
    """

    def __init__(self, task: Task, names: Sequence[str], channels_last: bool | None = None) -> None:
        by_name = dict(task.model.named_parameters())
        self.parameters: list[Parameter] = [by_name[name] for name in names]
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        apart = self.flat.is_cuda if channels_last is None else channels_last
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._runs: list[tuple[int, int, int, int, bool]] = []
        """First and last parameter, begin and end in the flat tensor; whether it is one parameter with a copy."""
        begin = 0
        for i, p in enumerate(self.parameters):
            end = begin + p.numel()
            view = self.flat[begin:end].view(p.shape)
            copied = apart and p.dim() == 4 and p.shape[2:].numel() > 1
            if copied:
                p.data = view.to(memory_format=torch.channels_last, copy=True)
                self._copies.append((p.data, view))
            else:
                p.data = view
            if self._runs and not copied and not self._runs[-1][-1]:
                first, _, start, _, _ = self._runs.pop()
                self._runs.append((first, i + 1, start, end, False))
            else:
                self._runs.append((i, i + 1, begin, end, copied))
            begin = end

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model what was written into the flat tensor."""
        for copy, view in self._copies:
            copy.copy_(view)

    @torch.no_grad()
    def collect(self) -> None:
        """Take over what was written into the model's parameters."""
        for copy, view in self._copies:
            view.copy_(copy)

    def gather(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return gradients of all parameters as a flat tensor."""
        flat = torch.empty_like(self.flat)
        for first, last, begin, end, copied in self._runs:
            if copied:
                flat[begin:end].view(gradients[first].shape).copy_(gradients[first])
            else:
                torch.cat([x.reshape(-1) for x in gradients[first:last]], out=flat[begin:end])
        return flat
