"""Program of one rank of a DDP cell on a host of the lab. Rank 0 prints a JSON line for each exchange."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic import collective
from laconic.plan.candidates import Candidate
from laconic_lab.studies.jang2017 import tasks

__all__ = ["main"]

FEEDBACK = "ef|thc:4"


def main(trainings: Sequence[tuple[str, str, int]], rank: int, ranks: int, address: str) -> None:
    """Train one task after the other: (task, codec, exchanges), one of each step or of each interval of local steps."""
    torch.set_num_threads(1)
    store = f"tcp://{address}:29511"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    for name, codec, count in trainings:
        for seconds in _train(name, codec, count, rank, ranks):
            if rank == 0:
                sys.stdout.write(json.dumps({"step_s": seconds}) + "\n")
                sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def _train(name: str, codec: str, count: int, rank: int, ranks: int) -> Iterator[float]:
    """Yield the seconds of a step, one for each exchange."""
    torch.manual_seed(0)
    model, (images, labels), _, loss = getattr(tasks, name)()
    candidate = Candidate.parse(codec)
    attachment = None
    if candidate.local:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        local = collective.LocalSGD(model, optimizer, every=candidate.every, codec=candidate.codec)
        trained: nn.Module = model
        update: Callable[[], Any] = local.step
    else:
        trained = DistributedDataParallel(model)
        if codec != "none":
            attachment = collective.attach(trained, FEEDBACK if codec == "thc:4" else codec)
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3, momentum=0.9)
        update = optimizer.step
    size = tasks.BATCH[name]
    for exchange in range(count):
        dist.barrier()  # all ranks begin together
        begin = time.perf_counter()
        for step in range(candidate.every):
            first = ((exchange * candidate.every + step) * ranks + rank) * size % (tasks.IMAGES - size)
            optimizer.zero_grad(set_to_none=True)
            loss(trained(images[first : first + size]), labels[first : first + size]).backward()
            update()
        yield (time.perf_counter() - begin) / candidate.every
    if attachment is not None:
        attachment.detach()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
