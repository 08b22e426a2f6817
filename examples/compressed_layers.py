"""Train the MLP in compressed spaces, four epochs each: python examples/compressed_layers.py [DATA [SCHEME …]]

Without arguments on the embedded digits, once. With ``mnist`` (its folder in LACONIC_DATA) the mean of three seeds.
"""

from __future__ import annotations

import statistics
import sys

import torch

from laconic import layers
from laconic.train import Shards, build_task


def trained(data: str, scheme: str | None, seed: int) -> tuple[float, float]:
    """Accuracy in per cent, and the fraction of parameters that was trained."""
    task = build_task("mlp", data, seed=seed, layers=scheme)
    shards = Shards(task.num_train, 1, 128, seed)
    steps = 4 * shards.iterations_per_epoch
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(task.batch(shards.indices(0, step))).backward()
        optimizer.step()
        schedule.step()
    return task.evaluate()["accuracy"], 1.0 if scheme is None else layers.layout(task.model).rho


def main(data: str = "digits", *schemes: str) -> None:
    torch.set_num_threads(1)
    for scheme in ("dense", *(schemes or ("subspace:0.1", "monarch:0.2"))):
        seeds = range(1 if data == "digits" else 3)
        found = [trained(data, None if scheme == "dense" else scheme, seed) for seed in seeds]
        each = [accuracy for accuracy, _ in found]
        print(f"{scheme:14} rho {found[0][1]:.3f}  {statistics.mean(each):.2f} %  ({min(each):.2f}-{max(each):.2f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
