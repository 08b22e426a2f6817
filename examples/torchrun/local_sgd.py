"""Local SGD with Muon: ranks train alone for 10 steps; half the model is exchanged, compressed, every 5 steps.

torchrun --standalone --nproc-per-node 2 examples/torchrun/local_sgd.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import laconic
from laconic.train import build_task

STEPS, SAVE_EVERY = 200, 46


def main(folder: Path | None = None) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    task = build_task("lenet5", "digits", seed=0)
    optimizers = laconic.muon(task.model, lr=0.02, adamw_lr=3e-3)
    local = laconic.LocalSGD(task.model, optimizers, every=10, codec="ef|topk:0.1|sign", fragments=2, overlap=2)

    parts = {"model": task.model, "muon": optimizers[0], "adamw": optimizers[1], "local": local}
    checkpoint = folder and folder / f"rank{rank}.pt"
    if checkpoint and checkpoint.exists():
        saved = torch.load(checkpoint)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    while local.steps < STEPS:
        generator = torch.Generator().manual_seed(local.steps * world + rank)
        local.zero_grad()
        task.loss(task.batch(torch.randint(task.num_train, (32,), generator=generator))).backward()
        local.step()
        if checkpoint and (local.steps % SAVE_EVERY == 0 or local.steps == STEPS):
            torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    local.finish()
    if rank == 0:
        stats = local.stats()
        sent = (stats["bytes_sent"] + stats["bytes_reduced"]) / STEPS  # without the broadcast of the first weights
        accuracy, waited_s = task.evaluate()["accuracy"], stats["waited_s"]
        print(f"accuracy {accuracy:.1f} %, {sent / 1e3:.2f} kB a step, waited {waited_s:.2f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
