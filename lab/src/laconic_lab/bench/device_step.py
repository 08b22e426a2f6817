"""Times a training step on a GPU with and without compression of all gradients, in turns.

*In place* encodes and decodes flat buckets of gradients, as DDP has them. *Attached* does all that ``laconic.attach``
does: a frame per slot by its policy, to the host and back, in a group of one rank that owns all shards.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import Chain, codec
from laconic.collective import attach
from laconic.errors import ConfigError
from laconic.records import Record
from laconic.train.models import MODELS, build_model
from laconic_lab.bench.timing import quartiles

__all__ = ["StepSettings", "run_steps"]

SIDES = {"1 x 28 x 28": (1, 28, 10), "3 x 32 x 32": (3, 32, 10), "3 x 224 x 224": (3, 224, 1000)}
"""Channels, image side and classes of each input kind."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of the step benchmark.

    Args:
        model: An image model.
        device: ``cuda`` or ``cuda:1``.
        bucket: Values of a DDP bucket; 25 MB of float32 by default.
        seed: Seed of weights, inputs and codecs.
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
    """A forward and backward pass in bf16 with gradients in flat buckets."""

    def __init__(self, settings: StepSettings) -> None:
        takes = MODELS[settings.model].takes if settings.model in MODELS else ""
        found = next((size for words, size in SIDES.items() if takes.startswith(words)), None)
        if found is None:
            raise ConfigError(f"--step must be an image model, got {settings.model!r}")
        channels, side, classes = found
        device = torch.device(settings.device)
        generator = torch.Generator().manual_seed(settings.seed)
        self.images = torch.randn(settings.batch, channels, side, side, generator=generator).to(device)
        self.classes = torch.randint(0, classes, (settings.batch,), generator=generator).to(device)
        self.device, self.seed, self.name = device, settings.seed, settings.model
        self.model = self._build()
        self.ddp = DistributedDataParallel(self._build())
        self.attached_to: dict[str, DistributedDataParallel] = {}
        sizes = [parameter.numel() for parameter in self.model.parameters()]
        self.flat = torch.zeros(sum(sizes), device=device)
        for parameter, part in zip(self.model.parameters(), torch.split(self.flat, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self.buckets: tuple[Tensor, ...] = torch.split(self.flat, settings.bucket)

    def _build(self) -> nn.Module:
        return build_model(self.name, seed=self.seed).to(self.device)

    def _backward(self, model: nn.Module) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(self.images), self.classes)
        loss.backward()  # type: ignore[no-untyped-call]

    def alone(self) -> None:
        self.flat.zero_()
        self._backward(self.model)

    def by_ddp(self) -> None:
        self.ddp.zero_grad(set_to_none=False)
        self._backward(self.ddp)

    def attached(self, spec: str) -> None:
        if spec not in self.attached_to:
            self.attached_to[spec] = DistributedDataParallel(self._build())
            attach(self.attached_to[spec], spec)
        self.attached_to[spec].zero_grad(set_to_none=False)
        self._backward(self.attached_to[spec])

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


@contextmanager
def _one_rank() -> Iterator[None]:
    """Create a process group with this process as its only rank."""
    if dist.is_initialized():
        raise ConfigError("--step creates its own process group: run it outside torchrun")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_steps(specs: Sequence[str], settings: StepSettings | None = None) -> list[Record]:
    """Return a Record per codec: the step without and with it, and the difference in percent."""
    settings = settings or StepSettings()
    chains = {spec: codec(spec) for spec in specs}
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {settings.device}: torch sees no CUDA device here")
    with _one_rank():
        step = _Step(settings)
        works: dict[tuple[str, str], Callable[[], None]] = {("step", ""): step.alone, ("ddp", ""): step.by_ddp}
        for spec, chain in chains.items():
            works["compressed", spec] = lambda chain=chain: step.compressed(chain)  # type: ignore[misc]
            works["attached", spec] = lambda spec=spec: step.attached(spec)  # type: ignore[misc]
        for work in works.values():  # compiles kernels and lets libraries and DDP settle
            for _ in range(3):
                work()
        runs: dict[tuple[str, str], list[float]] = {name: [] for name in works}
        for _ in range(settings.repeat):
            for name, work in works.items():
                runs[name].append(step.timed(work))
    records = []
    for spec in chains:
        values = {
            "command": settings.command(specs), "model": settings.model, "batch": settings.batch, "spec": spec,
            "values": step.flat.numel(), "buckets": len(step.buckets), "repeat": settings.repeat,
            **_seconds("step_bf16", runs["step", ""]), **_seconds("ddp", runs["ddp", ""]),
            **_seconds("compressed", runs["compressed", spec]), **_seconds("attached", runs["attached", spec]),
            **_percent("added", runs["compressed", spec], runs["step", ""]),
            **_percent("attached_added", runs["attached", spec], runs["ddp", ""]),
        }  # fmt: skip
        records.append(Record("bench.device.step", values, settings.seed))
    return records


def _seconds(name: str, runs: Sequence[float]) -> dict[str, object]:
    low, middle, high = quartiles(tuple(runs))
    return {f"{name}_s": middle, f"{name}_quartiles_s": [low, high]}


def _percent(name: str, runs: Sequence[float], beside: Sequence[float]) -> dict[str, object]:
    """Return how much longer a step took than its neighbour, turn by turn."""
    low, middle, high = quartiles(tuple(100 * (a / b - 1) for a, b in zip(runs, beside, strict=True)))
    return {f"{name}_percent": middle, f"{name}_percent_quartiles": [low, high]}
