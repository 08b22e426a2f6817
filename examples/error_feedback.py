"""Compare training with and without error feedback, in one process: python examples/error_feedback.py"""

from __future__ import annotations

import torch
from torch import nn

import laconic

WORKERS, STEPS, BATCH = 2, 100, 64


def task(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points and their classes by a fixed random teacher."""
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    return x, (x @ teacher).argmax(1)


def train(spec: str) -> tuple[float, float]:
    """Return the loss on held-out points, and the bytes sent per step and worker."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    channels = [laconic.channel(spec, policy=laconic.Policy(min_numel=1024)) for _ in range(WORKERS)]
    data = [task(seed=1 + rank, count=STEPS * BATCH) for rank in range(WORKERS)]
    for step in range(STEPS):
        frames: dict[str, list[bytes]] = {name: [] for name, _ in model.named_parameters()}
        for rank, (channel, (x, y)) in enumerate(zip(channels, data, strict=True)):  # on each worker
            batch = slice(step * BATCH, (step + 1) * BATCH)
            model.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            for name, parameter in model.named_parameters():
                frames[name].append(channel.encode(name, parameter.grad, seed=step * WORKERS + rank))
        for name, parameter in model.named_parameters():  # on the server
            parameter.grad = laconic.aggregate.mean(frames[name])
        optimizer.step()
    x, y = task(seed=99, count=4096)
    return nn.functional.cross_entropy(model(x), y).item(), sum(c.stats.bytes_out for c in channels) / STEPS / WORKERS


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is too small for two threads
    for spec in ("none", "topk:0.01|qsgd:4", "ef|topk:0.01|qsgd:4"):
        print(f"{spec:24} loss {{:.4f}}, {{:,.0f}} bytes a step".format(*train(spec)))
