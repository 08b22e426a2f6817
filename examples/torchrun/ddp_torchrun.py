"""torchrun: one line compresses DDP's exchange. Checkpoints hold the residuals, so a restart loses nothing.

torchrun --standalone --nproc-per-node 2 examples/torchrun/ddp_torchrun.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.train import build_task

STEPS, SAVE_EVERY = 60, 20


def main(folder: Path | None = None) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    task = build_task("lenet5", "digits", seed=0)
    model = DistributedDataParallel(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attachment = laconic.attach(model, "ef|qsgd:4", check_every=20)  # the only new line

    start, checkpoint = 0, folder and folder / f"rank{rank}.pt"
    if checkpoint and checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        attachment.load_state_dict(saved["laconic"])
        start = saved["step"]
    for step in range(start, STEPS):
        indices = torch.randint(task.num_train, (32,), generator=torch.Generator().manual_seed(step * world + rank))
        batch = task.batch(indices)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        if checkpoint and (step + 1) % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state | {"laconic": attachment.state_dict()}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    if rank == 0:
        stats = attachment.stats()
        print(
            f"accuracy {task.evaluate()['accuracy']:.1f} %, {stats['wire_bytes'] / stats['steps'] / 1e3:.1f} kB a step"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
