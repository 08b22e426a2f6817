"""Evaluations of runs on a device, whose examples stay there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from laconic.train.examples import Batch
from laconic.train.task import Task

__all__ = ["Evaluation", "on_device"]

CHUNK = 1000
"""Examples that a GPU evaluates at once. On a CPU batches stay as they are, so that losses have the task's own bits."""


def on_device(batches: Iterable[Batch], device: torch.device) -> list[Batch]:
    """Return batches on a device; those of a GPU are larger and have channels last."""
    moved = [batch.to(device) for batch in batches]
    if device.type != "cuda" or not moved:
        return moved
    inputs, targets = (torch.cat(parts) for parts in zip(*moved, strict=True))
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return [Batch(*pair) for pair in zip(torch.split(inputs, CHUNK), torch.split(targets, CHUNK), strict=True)]


class Evaluation:
    """What ``Task.evaluate`` and ``Task.judge`` return, of any task with the same examples.

    Args:
        tested: The test examples in batches.
    """

    def __init__(self, task: Task, tested: Sequence[Batch]) -> None:
        self._tested, self._held = tested, on_device(task.held_out(), task.device)
        self._statistics = [x.to(task.device) for x in task.statistics()]

    def of(self, task: Task) -> tuple[float, float, float]:
        """Return the accuracy on the test examples in per cent, the loss on them and on the held-out ones."""
        (loss, correct, answers, count), (held_loss, _, _, held) = task.measure(
            self._tested, self._held, statistics=self._statistics
        ).tolist()
        return 100 * correct / answers, loss / count, held_loss / held

    def judge(self, task: Task) -> Tensor:
        """Return the mean loss on the held-out examples, without waiting for the device."""
        sums = task.measure(self._held, statistics=self._statistics)[0]
        return sums[0] / sums[3]
