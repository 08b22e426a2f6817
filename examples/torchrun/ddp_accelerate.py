"""Hugging Face Accelerate: a handler attaches the prepared module.

torchrun --standalone --nproc-per-node 2 examples/torchrun/ddp_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laconic.collective.trainers import accelerate_handler


def main() -> None:
    handler = accelerate_handler("ef|topk:0.05|qsgd:4")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])  # the only new lines
    torch.manual_seed(0)
    x = torch.randn(2048, 64)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=32)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for inputs, targets in data:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    stats = handler.attachment.stats()
    accelerator.print(f"{stats['steps']} steps, {stats['wire_bytes'] / stats['steps'] / 1e3:.1f} kB each")
    accelerator.end_training()


if __name__ == "__main__":
    main()
