"""Program of one rank of a DDP cell on a host of the lab. Rank 0 prints a JSON line for each step."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from laconic import collective
from laconic_lab.studies.jang2017 import tasks

__all__ = ["main"]

FEEDBACK = "ef|thc:4"


def main(name: str, codec: str, rank: int, ranks: int, address: str, count: int) -> None:
    """Train ``count`` steps."""
    torch.set_num_threads(1)
    store = f"tcp://{address}:29511"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    model, (images, labels), _, loss = getattr(tasks, name)()
    ddp = DistributedDataParallel(model)
    if codec != "none":
        collective.attach(ddp, FEEDBACK if codec == "thc:4" else codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    size = tasks.BATCH[name]
    for step in range(count):
        first = (step * ranks + rank) * size % (tasks.IMAGES - size)
        dist.barrier()  # all ranks begin together
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss(ddp(images[first : first + size]), labels[first : first + size]).backward()
        optimizer.step()
        if rank == 0:
            sys.stdout.write(json.dumps({"step_s": time.perf_counter() - begin}) + "\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
