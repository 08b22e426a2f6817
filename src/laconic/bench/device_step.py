"""What encoding and decoding all gradients adds to a training step on a GPU, in turns with the step alone.

Gradients lie in flat buckets, as DDP has them; each is encoded and decoded where backward has just put it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.bench.timing import quartiles
from laconic.codecs import Chain, codec
from laconic.errors import ConfigError
from laconic.records import Record
from laconic.train.models import MODELS, build_model

__all__ = ["StepSettings", "run_steps"]

SIDES = {"1 x 28 x 28": (1, 28, 10), "3 x 32 x 32": (3, 32, 10), "3 x 224 x 224": (3, 224, 1000)}
"""Channels, side and classes, by the first words of what a model says it takes."""


@dataclass(frozen=True)
class StepSettings:
    """What to run.

    Args:
        model: A model of images.
        device: ``cuda``, or one of several.
        batch: Images of a step.
        repeat: Turns.
        bucket: Values of a bucket; 25 MB of float32, as in DDP.
        seed: Of weights, inputs and codecs.
    """

    model: str = "resnet50"
    device: str = "cuda"
    batch: int = 64
    repeat: int = 21
    bucket: int = 25 * (1 << 20) // 4
    seed: int = 0

    def command(self, specs: Sequence[str]) -> str:
        words = ["laconic", "bench", *specs, "--device", self.device, "--step", self.model]
        for name in ("repeat", "seed"):
            if getattr(self, name) != getattr(StepSettings, name):
                words += [f"--{name}", str(getattr(self, name))]
        return shlex.join(words)


class _Step:
    """One forward and backward in bf16, its gradients in flat buckets."""

    def __init__(self, settings: StepSettings) -> None:
        takes = MODELS[settings.model].takes if settings.model in MODELS else ""
        found = next((size for words, size in SIDES.items() if takes.startswith(words)), None)
        if found is None:
            raise ConfigError(f"--step takes a model of images, not {settings.model!r}")
        channels, side, classes = found
        device = torch.device(settings.device)
        generator = torch.Generator().manual_seed(settings.seed)
        self.images = torch.randn(settings.batch, channels, side, side, generator=generator).to(device)
        self.classes = torch.randint(0, classes, (settings.batch,), generator=generator).to(device)
        self.model: nn.Module = build_model(settings.model, seed=settings.seed).to(device)
        self.device, self.seed = device, settings.seed
        sizes = [parameter.numel() for parameter in self.model.parameters()]
        self.flat = torch.zeros(sum(sizes), device=device)
        for parameter, part in zip(self.model.parameters(), torch.split(self.flat, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self.buckets: tuple[Tensor, ...] = torch.split(self.flat, settings.bucket)

    def alone(self) -> None:
        self.flat.zero_()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(self.images), self.classes)
        loss.backward()  # type: ignore[no-untyped-call]

    def compressed(self, chain: Chain) -> None:
        self.alone()
        for number, bucket in enumerate(self.buckets):
            chain.decode(chain.encode(bucket, seed=self.seed + number), out=bucket)

    def timed(self, work: Callable[[], None]) -> float:
        self.wait()
        begin = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def run_steps(specs: Sequence[str], settings: StepSettings | None = None) -> list[Record]:
    """A Record for each codec: the step alone, with it, and the difference in percent of the step."""
    settings = settings or StepSettings()
    chains = {spec: codec(spec) for spec in specs}
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {settings.device}: torch sees no CUDA device here")
    step = _Step(settings)
    works: dict[str, Callable[[], None]] = {"": step.alone}
    for spec, chain in chains.items():
        works[spec] = lambda chain=chain: step.compressed(chain)  # type: ignore[misc]
    for work in works.values():  # compiles, and lets libraries choose their kernels
        for _ in range(3):
            work()
    runs: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(settings.repeat):
        for name, work in works.items():
            runs[name].append(step.timed(work))
    alone = quartiles(tuple(runs[""]))
    records = []
    for spec in chains:
        with_codec = quartiles(tuple(runs[spec]))
        added = quartiles(tuple(100 * (a / b - 1) for a, b in zip(runs[spec], runs[""], strict=True)))
        values = {
            "command": settings.command(specs), "model": settings.model, "batch": settings.batch, "spec": spec,
            "values": step.flat.numel(), "buckets": len(step.buckets), "repeat": settings.repeat,
            "step_bf16_s": alone[1], "step_bf16_quartiles_s": [alone[0], alone[2]],
            "compressed_s": with_codec[1], "compressed_quartiles_s": [with_codec[0], with_codec[2]],
            "added_percent": added[1], "added_percent_quartiles": [added[0], added[2]],
        }  # fmt: skip
        records.append(Record("bench.device.step", values, settings.seed))
    return records
