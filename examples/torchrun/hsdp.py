"""Train a model that is sharded inside nodes, with compressed gradients between them, and continue after a restart.

torchrun --nproc-per-node 4 examples/torchrun/hsdp.py --nodes 2 --checkpoint run
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic

arguments = argparse.ArgumentParser()
arguments.add_argument("--nodes", type=int, default=2)
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--checkpoint", type=Path, default=Path("hsdp-checkpoint"))
chosen = arguments.parse_args()

dist.init_process_group("gloo")
shards = dist.get_world_size() // chosen.nodes
mesh = init_device_mesh("cpu", (chosen.nodes, shards), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)  # replicas begin with the same weights
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
attachment = laconic.attach(model, "ef|qsgd:4", replicate=mesh["replicate"])


def state() -> dict:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "laconic": attachment.state_dict()}


if chosen.checkpoint.exists():
    saved = state()
    dcp.load(saved, checkpoint_id=chosen.checkpoint)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    attachment.load_state_dict(saved["laconic"])

first = attachment.stats()["steps"]
torch.manual_seed(1000 * first + dist.get_rank())  # each rank reads other examples
for _ in range(chosen.steps):
    x = torch.randn(32, 64)
    loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dcp.save(state(), checkpoint_id=chosen.checkpoint)

stats = attachment.stats()
if dist.get_rank() == 0:
    print(
        f"steps {first} to {stats['steps']}: loss {loss:.3f}, "
        f"{stats['wire_bytes'] / 1e3 / stats['steps']:.0f} kB a step"
    )
dist.destroy_process_group()
