"""The paper's rule on DDP buckets: five workers average coded gradients of the whole network after every step.

The paper quantizes weights, a layer at a time. Frameworks send gradients in DDP buckets of many layers: their few
largest entries are tens of times the usual ones and set the range, and nearly all other entries share a bin whose
centre is far from them. This module measures the effect on gradients and training, with and without ``zero`` and
``tail``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from laconic import aggregate
from laconic.frames import decode, encode
from laconic.inspect import explain
from laconic.records import Record
from laconic.train.data import Images
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.oland2015.settings import LAYERS
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.trainer import Progress

__all__ = ["KIND", "SPECS", "run_all"]

KIND = "study.oland2015.buckets"

SPECS = (
    "none", "adaptive:4.0|rans", "adaptive:5.0|rans", "adaptive:6.0|rans", "adaptive:4.0,zero=true|rans",
    "adaptive:5.0,zero=true|rans", "adaptive:1.0,zero=true,tail=0.001|rans", "adaptive:2.0,zero=true,tail=0.001|rans",
    "adaptive:3.0,zero=true,tail=0.001|rans",
)  # fmt: skip

SAMPLED_STEPS = 8
"""Steps of a run at which frames are decoded and explained; bytes are counted at all steps."""


EPOCHS, WORKERS, BATCH, LR, MOMENTUM = 6, 5, 20, 0.05, 0.9
SEEDS = (0, 1)


def run_all(
    images: Images, finished: RecordLog, progress: Progress | None = None, *, specs: Sequence[str] = SPECS,
    epochs: int = EPOCHS, deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Train with each codec from the same initial weights, and return a Record for each codec and seed.

    The network has the paper's layers with ReLU and cross entropy, as is usual today; each worker sends its whole
    gradient as one packet in each step. Seeds decide initial weights, order of images and sampling.
    """
    keys = []
    for number, (spec, seed) in enumerate((spec, seed) for spec in specs for seed in SEEDS):
        if progress is not None:
            progress("buckets", number, len(specs) * len(SEEDS))
        keys.append(json.dumps(["buckets", spec, images.name, epochs, WORKERS, BATCH, LR, MOMENTUM, seed]))
        if keys[-1] not in finished:
            if deadline is not None:
                deadline.check()
            settings: dict[str, Any] = {
                "epochs": epochs, "workers": WORKERS, "batch": BATCH, "lr": LR, "momentum": MOMENTUM,
            }  # fmt: skip
            values = {"key": keys[-1], "part": "buckets", "codec": spec, "data": images.name, "seed": seed, **settings}
            finished.add(Record(KIND, values | _train(images, spec, seed, **settings), seed=seed))
    return [finished.records[key] for key in keys]


@dataclass
class _FrameStatistics:
    """Bytes of all frames, and statistics of sampled ones."""

    nbytes: int = 0
    numel: int = 0
    errors: list[float] = field(default_factory=list)
    fullest: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)

    def add(self, gradient: Tensor, frame: bytes, *, sample: bool) -> None:
        self.nbytes += len(frame)
        self.numel += gradient.numel()
        if not sample or not bool(gradient.any()):
            return
        decoded = decode(frame)
        self.largest.append(float(gradient.abs().max() / gradient.square().mean().sqrt()))
        self.errors.append(float((decoded - gradient).square().sum() / gradient.square().sum()))
        (packet,) = explain(frame)
        if packet.entropy is not None:
            counts = torch.unique(decoded, return_counts=True)[1]
            self.fullest.append(int(counts.max()) / decoded.numel())


def _network(seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for outputs, inputs in LAYERS:
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def _train(
    images: Images, spec: str, seed: int, *, epochs: int, workers: int, batch: int, lr: float, momentum: float
) -> dict[str, Any]:
    model = _network(seed)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    order = torch.Generator().manual_seed(seed)
    pixels = images.train_images.reshape(len(images.train_labels), -1).to(torch.float32) / 255
    shares = torch.randperm(len(pixels), generator=order)[: len(pixels) // workers * workers].view(workers, -1)
    steps = shares.shape[1] // batch
    sampled_steps = {epochs * steps * i // SAMPLED_STEPS for i in range(SAMPLED_STEPS)}
    statistics, accuracy = _FrameStatistics(), []
    for epoch in range(epochs):
        shuffled = torch.stack([share[torch.randperm(len(share), generator=order)] for share in shares])
        for step in range(steps):
            number, frames = epoch * steps + step, []
            for worker in range(workers):
                chosen = shuffled[worker, step * batch : (step + 1) * batch]
                loss = nn.functional.cross_entropy(model(pixels[chosen]), images.train_labels[chosen])
                bucket = torch.cat([g.view(-1) for g in torch.autograd.grad(loss, parameters)])
                frames.append(encode(bucket, spec, seed=number * workers + worker))
                statistics.add(bucket, frames[-1], sample=number in sampled_steps)
            mean = aggregate.mean(frames)
            begin = 0
            for parameter in parameters:
                parameter.grad = mean[begin : begin + parameter.numel()].view_as(parameter)
                begin += parameter.numel()
            optimizer.step()
        accuracy.append(_accuracy(model, images))
    return {
        "bits": 8 * statistics.nbytes / statistics.numel,
        "relative_error": sum(statistics.errors) / len(statistics.errors),
        "fullest_bin": sum(statistics.fullest) / len(statistics.fullest) if statistics.fullest else None,
        "largest_over_rms": sum(statistics.largest) / len(statistics.largest),
        "peak": max(accuracy),
        "final": accuracy[-1],
    }


@torch.no_grad()
def _accuracy(model: nn.Module, images: Images) -> float:
    outputs = model(images.test_images.reshape(len(images.test_labels), -1).to(torch.float32) / 255)
    return 100 * float((outputs.argmax(1) == images.test_labels).to(torch.float64).mean())
