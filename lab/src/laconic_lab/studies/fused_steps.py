"""A training step on a GPU: the loss, the mean of what workers send, and a step of SGD, in few passes over memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.triton.launch_args import exact_options
from laconic.train.examples import Batch
from laconic.train.task import Task
from laconic_lab.studies.flat_parameters import FlatParameters
from laconic_lab.studies.fused_norm import can_share, outputs, shared_outputs

__all__ = ["descend", "loss", "shared_gradients", "weighted_sum"]

TILE = 2048


def loss(task: Task, batch: Batch) -> Tensor:
    """Return the mean loss of a task's model over a batch on its device."""
    return task.loss_function(outputs(task.model, batch.inputs), batch.targets)


def shared_gradients(
    task: Task, parameters: FlatParameters, batches: Sequence[Batch]
) -> tuple[list[Tensor], list[Sequence[Tensor]]] | None:
    """Return the losses of workers with equal weights and their gradients by parameter, from one pass over all images.

    None if the model cannot be run in this way.
    """
    model = task.model
    if not can_share(model):
        return None
    assert isinstance(model, torch.nn.Sequential)
    copies: dict[Tensor, Sequence[Tensor]] = {
        p: [p.detach().requires_grad_() for _ in batches] for p in parameters.parameters
    }
    out = shared_outputs(model, torch.cat([batch.inputs for batch in batches]), copies)
    parts = zip(out.chunk(len(batches)), batches, strict=True)
    losses = [task.loss_function(part, batch.targets) for part, batch in parts]
    wanted = [copy[worker] for worker in range(len(batches)) for copy in copies.values()]
    gradients = torch.autograd.grad(losses, wanted)
    count = len(copies)
    by_worker: list[Sequence[Tensor]] = [
        gradients[worker * count : (worker + 1) * count] for worker in range(len(batches))
    ]
    return [loss.detach() for loss in losses], by_worker


@triton.jit
def _weighted_sum(out, a, b, weight, n, MORE: tl.constexpr, PAIR: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = at < n
    total = tl.zeros((TILE,), tl.float32)
    if MORE:
        total = tl.load(out + at, mask=valid)
    total += tl.load(a + at, mask=valid) * weight
    if PAIR:
        total += tl.load(b + at, mask=valid) * weight
    tl.store(out + at, total, mask=valid)


def weighted_sum(tensors: Sequence[Tensor], weight: float, out: Tensor) -> None:
    """Store weight * tensors, added up one after the other with two roundings each; all are contiguous float32."""
    n = out.numel()
    for first in range(0, len(tensors), 2):
        pair = [x.contiguous() for x in tensors[first : first + 2]]
        _weighted_sum[(triton.cdiv(n, TILE),)](
            out, pair[0], pair[-1], weight, n, MORE=first > 0, PAIR=len(pair) == 2, TILE=TILE,
            **exact_options(num_warps=4),
        )  # fmt: skip


@triton.jit
def _descend(
    weights, velocity, gradient, rate, momentum, decay, n,
    MOMENTUM: tl.constexpr, DECAY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = at < n
    w = tl.load(weights + at, mask=valid)
    g = tl.load(gradient + at, mask=valid)
    if DECAY:
        g += w * decay
    if MOMENTUM:
        g += tl.load(velocity + at, mask=valid) * momentum
        tl.store(velocity + at, g, mask=valid)
    tl.store(weights + at, w - g * tl.load(rate), mask=valid)


@torch.no_grad()
def descend(
    weights: Tensor, velocity: Tensor, gradient: Tensor, rate: Tensor, *, momentum: float, decay: float
) -> None:
    """Do a step of SGD on flat float32 tensors.

    Args:
        rate: The learning rate, a tensor of one on the device.
    """
    n = weights.numel()
    _descend[(triton.cdiv(n, TILE),)](
        weights, velocity, gradient.contiguous(), rate, momentum, decay, n, MOMENTUM=momentum != 0, DECAY=decay != 0,
        TILE=TILE, **exact_options(num_warps=4),
    )  # fmt: skip
