"""Compress what pipeline stages send each other by one line.

torchrun --standalone --nproc-per-node 2 examples/pipeline.py [STEPS]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import laconic.pipeline
from laconic.train import build_task


def main(steps: int = 100) -> None:
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    task = build_task("mlp", "digits", seed=0)  # a model, and digits included in laconic
    layers = list(task.model.children())
    part = nn.Sequential(*layers[len(layers) * rank // stages : len(layers) * (rank + 1) // stages])
    stage = PipelineStage(part, rank, stages, torch.device("cpu"))
    compression = laconic.pipeline.compress(stage, forward="thc:4", backward="thc:4")  # the only new line
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
    losses: list[torch.Tensor] = []
    for step in range(steps):
        batch = task.batch(torch.randint(task.num_train, (128,), generator=torch.Generator().manual_seed(step)))
        optimizer.zero_grad()
        schedule.step(*([batch.inputs] if rank == 0 else []), target=batch.targets, losses=losses)
        optimizer.step()
    stats = compression.stats()["backward" if rank else "forward"]
    sent, plain = (stats[name] / steps for name in ("bytes_sent", "bytes_uncompressed"))
    print(f"stage {rank} sends {sent:,.0f} bytes a step, uncompressed {plain:,.0f} bytes")
    if losses:
        print(f"loss {float(torch.stack(losses).mean()):.3f} after {steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
