"""Hugging Face Accelerate with local steps: ranks train alone and exchange their compressed changes.

torchrun --standalone --nproc-per-node 2 examples/torchrun/local_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laconic.collective.local_trainers import accelerate_local


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(2048, 64)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=32)
    model, local, data = accelerate_local(  # instead of accelerator.prepare
        accelerator, model, optimizer, data, every=5, codec="ef|topk:0.1|sign"
    )
    for inputs, targets in data:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            local.step()  # instead of optimizer.step
            local.zero_grad()
    local.finish()  # all ranks hold the same model
    stats = local.stats()
    sent = (stats["bytes_sent"] + stats["bytes_reduced"]) / stats["steps"]  # without the first weights
    accelerator.print(f"{stats['steps']} steps, {sent / 1e3:.2f} kB each")
    accelerator.end_training()


if __name__ == "__main__":
    main()
