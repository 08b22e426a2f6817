"""Times a training step of DDP on a GPU, plain and attached, in turns, and takes its profile and its peak memory.

The group has one rank, which owns all shards: everything is encoded and decoded, and no link is involved.
"""

from __future__ import annotations

import copy
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import parse
from laconic.collective import LocalSGD, attach
from laconic.collective.reductions.device_replay import record_exchanges
from laconic.errors import ConfigError
from laconic.records import Record
from laconic_lab.bench.step_models import workload
from laconic_lab.bench.step_profile import profile_step
from laconic_lab.bench.timing import quartiles

__all__ = ["LIMITS", "LOCAL", "LOCAL_LIMIT_S", "StepBench", "StepSettings", "one_rank", "run_steps"]

LIMITS = {
    "qsgd:4": 3.0, "sign": 3.0, "ef|sign": 3.0, "ef|qsgd:4": 4.0, "ef|thc:4": 6.0, "ef|topk:0.01": 8.0,
    "ef|topk:0.01|qsgd:4": 8.0, "ef|powersgd:4": 15.0,
}  # fmt: skip
"""Goals: percent of plain DDP's step that an attached one may add."""
COMPILED_LIMIT = 3.0
"""Goal: percent more with torch.compile, whose step is shorter."""

LOCAL, LOCAL_LIMIT_S = "local ", 0.025
"""Before a spec: an exchange of all parameters by ``LocalSGD`` is timed; the goal for 124 million of them."""

RESIDUALS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"residual_dtype": torch.bfloat16},
    "pinned": {"residual_device": "cpu"},
    "bf16,pinned": {"residual_dtype": torch.bfloat16, "residual_device": "cpu"},
}
"""How residuals are kept: the options of ``attach`` and ``LocalSGD``."""

WARM_UP = 5
MIN_TURNS, BUDGET_S = 3, 4.0
"""After three turns, none begins once a codec has taken this long."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of the step benchmark.

    Args:
        model: An image model of laconic, or ``gpt2`` or ``vit``, which need transformers.
        device: ``cuda`` or ``cuda:1``.
        batch: Examples of a step, or of each of its parts with accumulation; None chooses by model.
        compiled: Whether torch.compile compiles the DDP module.
        accumulate: Backward passes per exchange.
        graphs: Whether exchanges are recorded as CUDA graphs.
        residuals: How residuals are kept: a name of ``RESIDUALS``.
        seed: Seed of weights, inputs and codecs.
    """

    model: str = "resnet50"
    device: str = "cuda"
    batch: int | None = None
    repeat: int = 21
    compiled: bool = False
    accumulate: int = 1
    graphs: bool = True
    residuals: str = "fp32"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.residuals not in RESIDUALS:
            raise ConfigError(f"--residuals must be one of {' '.join(RESIDUALS)}, got {self.residuals!r}")

    def command(self, specs: Sequence[str]) -> str:
        words = ["laconic", "bench", *specs, "--device", self.device, "--step", self.model]
        if self.compiled:
            words.append("--compile")
        if not self.graphs:
            words.append("--no-graphs")
        for name in ("accumulate", "residuals", "repeat", "seed"):
            if getattr(self, name) != getattr(StepSettings, name):
                words += [f"--{name}", str(getattr(self, name))]
        return shlex.join(words)

    def limit(self, spec: str) -> float | None:
        """Return the goal: the percentage that a codec may add, a quarter of it with four passes per exchange.

        There is none for residuals that take less memory and more time.
        """
        limit = LIMITS.get(spec) if self.residuals == StepSettings.residuals else None
        return None if limit is None else limit / self.accumulate + (COMPILED_LIMIT if self.compiled else 0.0)


class StepBench:
    """A plain and an attached DDP module of the same model."""

    def __init__(self, settings: StepSettings) -> None:
        self.settings, self.device = settings, torch.device(settings.device)
        self.workload = workload(settings.model, settings.batch, self.device, settings.seed)
        self.model = self.workload.build().to(self.device)
        self.ddp = DistributedDataParallel(copy.deepcopy(self.model))
        self.attached = DistributedDataParallel(copy.deepcopy(self.model))
        self.attachment = attach(self.attached, "none", **RESIDUALS[settings.residuals])
        self.values = sum(parameter.numel() for parameter in self.ddp.parameters() if parameter.requires_grad)
        self._plain: tuple[dict[str, Any], frozenset[str], int | None] | None = None
        self.modules: dict[str, nn.Module] = {"ddp": self.ddp, "attached": self.attached}
        if settings.compiled:
            self.modules = {which: cast(nn.Module, torch.compile(module)) for which, module in self.modules.items()}

    def step(self, which: str) -> None:
        module = self.modules[which]
        module.zero_grad(set_to_none=False)
        for number in range(self.settings.accumulate):
            with ExitStack() as stack:
                if number < self.settings.accumulate - 1:
                    stack.enter_context((self.ddp if which == "ddp" else self.attached).no_sync())
                with torch.autocast(self.device.type, torch.bfloat16):
                    loss = self.workload.loss(module, self.workload.inputs, self.workload.targets)
                loss.backward()  # type: ignore[no-untyped-call]

    def timed(self, work: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds of a step, and after how many of them the host had launched it."""
        self.wait()
        begin = time.perf_counter()
        work()
        launched = time.perf_counter()
        self.wait()
        return time.perf_counter() - begin, launched - begin

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak(self, work: Callable[[], None]) -> int | None:
        """Return the largest number of bytes that were allocated on the device during a step."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.wait()
        return int(torch.cuda.max_memory_allocated(self.device))

    def compare(self, spec: str) -> dict[str, Any]:
        """Return what an attached step takes and what a plain one takes, in turns."""
        works = {which: partial(self.step, which) for which in self.modules}
        if self._plain is None:
            for _ in range(WARM_UP):
                for work in works.values():
                    work()
            # Beside the attached module, whose hook does not compress.
            self._plain = *profile_step(works["ddp"], self.wait), self.peak(works["attached"])
        plain, model_kernels, peak = self._plain
        self.attachment.set(spec)
        for _ in range(WARM_UP):
            works["attached"]()
        more = self.peak(works["attached"])
        runs: dict[str, list[tuple[float, float]]] = {which: [] for which in works}
        began = time.perf_counter()
        for turn in range(self.settings.repeat):
            if turn >= MIN_TURNS and time.perf_counter() - began > BUDGET_S:
                break
            for which, work in works.items():
                runs[which].append(self.timed(work))
        profile, _ = profile_step(works["attached"], self.wait, model_kernels)
        return {
            **_seconds("ddp", [run for run, _ in runs["ddp"]]),
            **_seconds("attached", [run for run, _ in runs["attached"]]),
            **_percent("attached_added", [run for run, _ in runs["attached"]], [run for run, _ in runs["ddp"]]),
            "ddp_launched_s": quartiles(tuple(launched for _, launched in runs["ddp"]))[1],
            "attached_launched_s": quartiles(tuple(launched for _, launched in runs["attached"]))[1],
            "added_peak_bytes": None if peak is None or more is None else more - peak,
            "residual_bytes": self.attachment.stats()["residual_bytes"],
            "fp32_bytes": 4 * self.values, "limit_percent": self.settings.limit(spec),
            "turns": len(runs["ddp"]), "ddp_profile": plain, "attached_profile": profile,
        }  # fmt: skip

    def exchange_locally(self, spec: str) -> dict[str, Any]:
        """Return what an exchange of all parameters by ``LocalSGD`` takes after a local step."""
        model = copy.deepcopy(self.model)
        # An outer optimizer with momentum: a single rank that takes plain means has nothing to exchange.
        kept = RESIDUALS[self.settings.residuals]
        local = LocalSGD(model, None, every=1, codec=spec, outer="nesterov", **kept)
        runs = []
        for turn in range(WARM_UP + self.settings.repeat):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            seconds, _ = self.timed(local.after_step)
            if turn >= WARM_UP:
                runs.append(seconds)
        residual_bytes = local.stats(residual_norms=False)["residual_bytes"]
        return {**_seconds("exchange", runs), "limit_s": LOCAL_LIMIT_S, "residual_bytes": residual_bytes}


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Create a process group with this process as its only rank."""
    if dist.is_initialized():
        raise ConfigError("--step creates its own process group: run it outside torchrun")
    store = dist.HashStore()  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_steps(
    specs: Sequence[str], settings: StepSettings | None = None, *, tell: Callable[[str], None] = lambda text: None,
    keep: Callable[[Sequence[Record]], None] = lambda records: None,
) -> list[Record]:  # fmt: skip
    """Return a Record per codec: plain DDP's step beside the attached one, or the exchange of ``local SPEC``.

    Args:
        tell: Is called with each codec.
        keep: Is called with all Records so far, after each.
    """
    settings = settings or StepSettings()
    for spec in specs:
        parse(spec.removeprefix(LOCAL))
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {settings.device}: torch sees no CUDA device here")
    records = []
    record_exchanges(settings.graphs)
    with one_rank(torch.device(settings.device)):
        bench = StepBench(settings)
        for spec in specs:
            tell(spec)
            local = spec.startswith(LOCAL)
            measured = bench.exchange_locally(spec.removeprefix(LOCAL)) if local else bench.compare(spec)
            values = {
                "command": settings.command(specs), "model": settings.model, "examples": bench.workload.examples,
                "batch": bench.workload.inputs.shape[0], "spec": spec.removeprefix(LOCAL), "values": bench.values,
                "repeat": settings.repeat, "compiled": settings.compiled, "accumulate": settings.accumulate,
                "graphs": settings.graphs, "residuals": settings.residuals, **measured,
            }  # fmt: skip
            records.append(Record(f"bench.device.{'local' if local else 'step'}", values, settings.seed))
            keep(records)
        bench.attachment.detach()
    return records


def _seconds(name: str, runs: Sequence[float]) -> dict[str, object]:
    low, middle, high = quartiles(tuple(runs))
    return {f"{name}_s": middle, f"{name}_quartiles_s": [low, high]}


def _percent(name: str, runs: Sequence[float], beside: Sequence[float]) -> dict[str, object]:
    """Return how much longer a step took than its neighbour, turn by turn."""
    low, middle, high = quartiles(tuple(100 * (a / b - 1) for a, b in zip(runs, beside, strict=True)))
    return {f"{name}_percent": middle, f"{name}_percent_quartiles": [low, high]}
