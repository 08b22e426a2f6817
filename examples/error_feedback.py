"""Two workers train a small model: plain gradients, top-k without memory, and top-k with error feedback.

The workers live in one process; what would travel are the frames, and their bytes are counted.
"""

from __future__ import annotations

import torch
from torch import nn

import laconic

WORKERS, STEPS, BATCH = 2, 200, 64


def task(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points and classes of a fixed random teacher."""
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    return x, (x @ teacher).argmax(1)


def train(spec: str) -> tuple[float, float]:
    """Loss on held-out points, and bytes sent per step and worker."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    channels = [laconic.channel(spec, policy=laconic.Policy(min_numel=1024)) for _ in range(WORKERS)]
    data = [task(seed=1 + rank, count=STEPS * BATCH) for rank in range(WORKERS)]
    names = [name for name, _ in model.named_parameters()]

    for step in range(STEPS):
        frames: dict[str, list[bytes]] = {name: [] for name in names}
        for rank, channel in enumerate(channels):  # on each worker
            x, y = (part[step * BATCH : (step + 1) * BATCH] for part in data[rank])
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for name, parameter in model.named_parameters():
                frames[name].append(channel.encode(name, parameter.grad, seed=step * WORKERS + rank))
        for name, parameter in model.named_parameters():  # where the frames meet
            parameter.grad = laconic.aggregate.mean(frames[name])
        optimizer.step()

    x, y = task(seed=99, count=4096)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x), y).item()
    return loss, sum(channel.stats.bytes_out for channel in channels) / (STEPS * WORKERS)


def main() -> None:
    torch.set_num_threads(1)  # the model is small: a second thread would only wait
    print(f"{WORKERS} workers, {STEPS} steps, 64-256-10 classifier\n")
    print(f"{'channel':24}{'loss':>8}{'bytes/step':>12}{'of plain':>10}")
    plain = 0.0
    for spec in ("none", "topk:0.01|qsgd:4", "ef|topk:0.01|qsgd:4"):
        loss, nbytes = train(spec)
        plain = plain or nbytes
        print(f"{spec:24}{loss:>8.4f}{nbytes:>12,.0f}{nbytes / plain:>10.2%}")


if __name__ == "__main__":
    main()
