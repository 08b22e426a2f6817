"""Local SGD: ranks train alone for 10 steps, then exchange their compressed changes.

torchrun --standalone --nproc-per-node 2 examples/torchrun/local_sgd.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import laconic
from laconic.train import build_task


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    task = build_task("lenet5", "digits", seed=0)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05, momentum=0.9)
    local = laconic.LocalSGD(task.model, optimizer, every=10, codec="ef|topk:0.1|qsgd:4", outer="mean")
    for step in range(200):
        indices = torch.randint(task.num_train, (32,), generator=torch.Generator().manual_seed(step * world + rank))
        local.zero_grad()
        task.loss(task.batch(indices)).backward()
        local.step()
    if rank == 0:
        stats = local.exchange.stats
        sent = (stats.bytes_sent + stats.bytes_reduced) / 200  # without the broadcast of the first weights
        print(f"accuracy {task.evaluate()['accuracy']:.1f} %, {sent / 1e3:.2f} kB a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
