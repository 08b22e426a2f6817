"""Local SGD with Muon: ranks train alone for 10 steps; half the model is exchanged, compressed, every 5 steps.

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
    optimizers = laconic.muon(task.model, lr=0.02, adamw_lr=3e-3)
    local = laconic.LocalSGD(task.model, optimizers, every=10, codec="ef|topk:0.1|sign", fragments=2, overlap=2)
    for step in range(200):
        indices = torch.randint(task.num_train, (32,), generator=torch.Generator().manual_seed(step * world + rank))
        local.zero_grad()
        task.loss(task.batch(indices)).backward()
        local.step()
    local.finish()
    if rank == 0:
        stats = local.stats()
        sent = (stats["bytes_sent"] + stats["bytes_reduced"]) / 200  # without the broadcast of the first weights
        accuracy, waited_s = task.evaluate()["accuracy"], stats["waited_s"]
        print(f"accuracy {accuracy:.1f} %, {sent / 1e3:.2f} kB a step, waited {waited_s:.2f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
