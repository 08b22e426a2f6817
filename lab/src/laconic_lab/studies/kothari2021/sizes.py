"""ResNet-50, which the paper wished for: its gradients through every method, for bytes and for the time of a round."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic import aggregate
from laconic.channels import Channel
from laconic.frames import decode
from laconic.train.models import build_model, seeded
from laconic_lab.studies.kothari2021.settings import Setting

__all__ = ["gradients_of", "measure"]

ROUNDS = 3


def gradients_of(model: str, seed: int, worker: int, *, examples: int = 2) -> dict[str, Tensor]:
    """Of random images, 224 x 224: only their sizes and their spread over the layers count here."""
    network = build_model(model, seed=seed)
    with seeded(1000 * seed + worker):
        inputs, targets = torch.randn(examples, 3, 224, 224), torch.randint(0, 1000, (examples,))
    F.cross_entropy(network(inputs), targets).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def measure(setting: Setting, gradients: Sequence[Mapping[str, Tensor]], *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Bytes of an iteration and seconds of an exchange, by its steps; medians over the rounds.

    What methods push after several iterations is a change of the same shape: a gradient stands for it.
    """
    job = setting.job(0)
    push = [Channel(job.push, policy=setting.policy("push")) for _ in gradients]
    pull = Channel(job.pull, policy=setting.policy("pull"))
    seconds: dict[str, list[float]] = {name: [] for name in ("encode_s", "aggregate_s", "answer_s", "decode_s")}
    nbytes = 0
    for r in range(rounds):
        began = time.perf_counter()
        frames = [
            [channel.encode(name, x, seed=r * 1000 + i) for i, (name, x) in enumerate(one.items())]
            for channel, one in zip(push, gradients, strict=True)
        ]
        encoded = time.perf_counter()
        names = list(gradients[0])
        mean = {name: aggregate.mean([some[i] for some in frames]) for i, name in enumerate(names)}
        aggregated = time.perf_counter()
        answer = [pull.encode(name, x, seed=r * 1000 + i) for i, (name, x) in enumerate(mean.items())]
        answered = time.perf_counter()
        for frame in answer:
            decode(frame)
        ended = time.perf_counter()
        seconds["encode_s"].append((encoded - began) / len(gradients))  # workers do this side by side
        seconds["aggregate_s"].append(aggregated - encoded)
        seconds["answer_s"].append(answered - aggregated)
        seconds["decode_s"].append(ended - answered)
        nbytes = sum(map(len, (frame for some in frames for frame in some))) + len(gradients) * sum(map(len, answer))
    found = {name: median(some) for name, some in seconds.items()}
    return {**found, "bytes_per_iteration": nbytes / job.every, "rounds": rounds, "every": job.every}
