"""Compress the gradients of DistributedDataParallel by one line.

torchrun --standalone --nproc-per-node 2 examples/attach.py [STEPS]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.train import build_task


def main(steps: int = 100) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    task = build_task("lenet5", "digits", seed=0)  # a model, and digits included in laconic
    model = DistributedDataParallel(task.model)
    attachment = laconic.attach(model, "qsgd:4")  # the only new line
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        indices = torch.randint(task.num_train, (32,), generator=torch.Generator().manual_seed(step * world + rank))
        batch = task.batch(indices)
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    if rank == 0:
        sent = attachment.stats()["wire_bytes"] / steps
        plain = sum(4 * parameter.numel() for parameter in model.parameters())
        print(f"each rank sends {sent:,.0f} bytes a step; the float32 gradients are {plain:,} bytes")
        print(f"accuracy {task.evaluate()['accuracy']:.1f} % after {steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
