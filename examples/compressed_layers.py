"""Train an MLP with compressed layers for four epochs: python examples/compressed_layers.py [DATA [SCHEME …]]

The default data are the included digits, with one seed. With ``mnist`` (its folder in LACONIC_DATA) it is the mean of
three seeds.
"""

from __future__ import annotations

import statistics
import sys

import torch

from laconic import layers
from laconic.train import Shards, build_task


def train(data: str, scheme: str | None, seed: int) -> tuple[float, float]:
    """Return the accuracy in per cent and the fraction of parameters that was trained."""
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
        results = [train(data, None if scheme == "dense" else scheme, seed) for seed in seeds]
        rho, accuracies = results[0][1], [accuracy for accuracy, _ in results]
        spread = f"({min(accuracies):.2f}-{max(accuracies):.2f})"
        print(f"{scheme:14} rho {rho:.3f}  {statistics.mean(accuracies):.2f} %  {spread}")


if __name__ == "__main__":
    main(*sys.argv[1:])
