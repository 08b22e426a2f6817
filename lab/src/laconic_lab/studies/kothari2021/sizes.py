"""Bytes and times of a model's gradients with every method: ResNet-50, and VGG-11 with the paper's layers."""

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

__all__ = ["ROUNDS", "gradients_of", "measure"]

ROUNDS = 3
SIDES = {"resnet50": (224, 224), "vgg11fc": (32, 32)}
CLASSES = {"resnet50": 1000, "vgg11fc": 10}


def gradients_of(model: str, seed: int, worker: int, *, examples: int = 2) -> dict[str, Tensor]:
    """Return gradients on random images: only sizes and the spread over the layers matter here."""
    network = build_model(model, seed=seed)
    with seeded(1000 * seed + worker):
        inputs, targets = torch.randn(examples, 3, *SIDES[model]), torch.randint(0, CLASSES[model], (examples,))
    F.cross_entropy(network(inputs), targets).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def measure(setting: Setting, gradients: Sequence[Mapping[str, Tensor]], *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the bytes of an iteration and the median seconds of the steps of an exchange.

    Methods that push changes after several iterations are measured with a gradient of the same shape.
    """
    job = setting.job(0)
    push = [Channel(job.push, policy=setting.policy("push")) for _ in gradients]
    pull = Channel(job.pull, policy=setting.policy("pull"))
    seconds: dict[str, list[float]] = {name: [] for name in ("encode_s", "aggregate_s", "answer_s", "decode_s")}
    nbytes = transfer = 0
    for r in range(rounds):
        began = time.perf_counter()
        frames = [
            [channel.encode(name, x, seed=r * 1000 + i) for i, (name, x) in enumerate(by_name.items())]
            for channel, by_name in zip(push, gradients, strict=True)
        ]
        encoded = time.perf_counter()
        names = list(gradients[0])
        mean = {name: aggregate.mean([pushed[i] for pushed in frames]) for i, name in enumerate(names)}
        aggregated = time.perf_counter()
        answer = [pull.encode(name, x, seed=r * 1000 + i) for i, (name, x) in enumerate(mean.items())]
        answered = time.perf_counter()
        for frame in answer:
            decode(frame)
        ended = time.perf_counter()
        seconds["encode_s"].append((encoded - began) / len(gradients))  # workers encode at the same time
        seconds["aggregate_s"].append(aggregated - encoded)
        seconds["answer_s"].append(answered - aggregated)
        seconds["decode_s"].append(ended - answered)
        nbytes = sum(len(frame) for pushed in frames for frame in pushed) + len(gradients) * sum(map(len, answer))
        transfer = sum(map(len, frames[0]))
    medians = {name: median(values) for name, values in seconds.items()}
    return {**medians, "bytes_per_iteration": nbytes / job.every, "rounds": rounds, "every": job.every,
            "transfer_bytes": transfer, "values": sum(x.numel() for x in gradients[0].values())}  # fmt: skip
