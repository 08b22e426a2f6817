"""Stages of a small model, and their training by torch's schedules, for tests on gloo ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.utils.checkpoint import checkpoint

from laconic.pipeline import compress

CPU = torch.device("cpu")
WIDTH, BATCH, MICRO_BATCHES = 64, 32, 4
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {
    "interleaved": ScheduleInterleaved1F1B, "zero bubble": ScheduleInterleavedZeroBubble, "bfs": ScheduleLoopedBFS,
    "zbv": ScheduleZBVZeroBubble,
}  # fmt: skip


class Part(nn.Module):
    """One stage: a residual layer; the tokens that came with the activations go on unchanged."""

    def __init__(self, index: int, *, tokens: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.tokens, self.checkpointed = tokens, checkpointed

    def inner(self, x):
        return x + torch.tanh(self.layer(x))

    def forward(self, x, tokens=None):
        y = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return (y, tokens) if self.tokens else y


def loss_fn(output, target):
    return (output - target).square().mean()


def data(step: int = 0, batch: int = BATCH):
    generator = torch.Generator().manual_seed(7 + step)
    return torch.randn(batch, 8, WIDTH, generator=generator), torch.randn(batch, 8, WIDTH, generator=generator)


def stages_of(rank: int, world: int, kind: str) -> list[int]:
    if kind in SINGLE:
        return [rank]
    return [rank, 2 * world - 1 - rank] if kind == "zbv" else [rank, rank + world]


def run(kind: str, rank: int, world: int, *, codecs=None, steps: int = 2, group=None, wrap=lambda module: module,
        part=Part, **options):  # fmt: skip
    """Train some steps; return the gradients of the last one, the losses, the compressions and the schedule."""
    indices = stages_of(rank, world, kind)
    modules = [wrap(part(index)) for index in indices]
    total = world * len(indices)
    stages = [PipelineStage(m, i, total, CPU, group=group) for m, i in zip(modules, indices, strict=True)]
    compressions = [] if codecs is None else [compress(stage, *codecs, **options) for stage in stages]
    if kind in SINGLE:
        schedule = SINGLE[kind](stages[0], MICRO_BATCHES, loss_fn=loss_fn)
    else:
        schedule = MULTI[kind](stages, MICRO_BATCHES, loss_fn=loss_fn)
    losses: list[torch.Tensor] = []
    for step in range(steps):
        for module in modules:
            module.zero_grad()
        take(schedule, step, stages, losses)
    gradients = [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]
    return gradients, [loss.detach() for loss in losses], compressions, schedule


def take(schedule, step, stages, losses=None, batch: int = BATCH):
    x, y = data(step, batch)
    arguments = (x,) if any(stage.is_first for stage in stages) else ()
    target = y if any(stage.is_last for stage in stages) else None
    return schedule.step(*arguments, target=target, losses=losses)
