"""Times compressed all-reduce beside plain all-reduce, with processes on one host."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from laconic.collective import Reducer
from laconic.errors import WrongResultError
from laconic.records import Record
from laconic_lab.bench.samples import gradient_like
from laconic_lab.bench.settings import BenchSettings

__all__ = ["CollectiveResult", "CollectiveSettings", "run_collective"]


@dataclass(frozen=True)
class CollectiveSettings(BenchSettings):
    """Settings: tensors of ``numel`` values and ``ranks`` single-threaded processes on gloo over loopback."""

    NAME, ARGUMENTS = "collective", "specs"

    specs: tuple[str, ...] = ("shared:8", "thc:4")
    numel: int = 25_000_000
    ranks: int = 2
    repeat: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        self.require_at_least({"numel": 1, "ranks": 1, "repeat": 1})


@dataclass(frozen=True)
class CollectiveResult:
    """Seconds of the slowest rank in each round; the rounds of all reductions alternate."""

    name: str
    seconds: tuple[float, ...]
    error: float
    """Squared error of the mean over its squared norm."""
    nbytes: int
    """Bytes that a rank passes to all-reduce."""

    @property
    def median(self) -> float:
        return median(self.seconds)

    def record(self, settings: CollectiveSettings, baseline: CollectiveResult) -> Record:
        values: dict[str, Any] = {
            "command": settings.command(), "name": self.name, "numel": settings.numel, "ranks": settings.ranks,
            "repeat": settings.repeat, "median_s": self.median, "best_s": min(self.seconds), "nbytes": self.nbytes,
            "relative_squared_error": self.error, "speedup_fp32": baseline.median / self.median,
            "speedup_fp32_best": min(baseline.seconds) / min(self.seconds),
        }  # fmt: skip
        return Record("bench.collective", values, settings.seed)


def run_collective(settings: CollectiveSettings) -> list[CollectiveResult]:
    """Time fp32 and bf16 means, then each spec."""
    with tempfile.TemporaryDirectory() as folder:
        ranks, spawn = range(settings.ranks), get_context("spawn")
        workers = [spawn.Process(target=_rank, args=(rank, settings, folder)) for rank in ranks]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise WrongResultError("a rank failed; its error output is above")
        measured = json.loads((Path(folder) / "results.json").read_text())
    results = [CollectiveResult(name, tuple(seconds), error, nbytes) for name, seconds, error, nbytes in measured]
    for result in results:
        if not result.error < (0.9 if result.name not in ("fp32", "bf16") else 1e-3):
            raise WrongResultError(f"{result.name}: the relative squared error of the mean is {result.error:g}")
    return results


def _rank(rank: int, settings: CollectiveSettings, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=settings.ranks)
    x = gradient_like(settings.numel, settings.seed + rank)
    out, half = torch.empty_like(x), torch.empty(settings.numel, dtype=torch.bfloat16)
    wanted = x.clone()
    dist.all_reduce(wanted)
    wanted.div_(settings.ranks)
    norm = float(wanted.square().sum())
    reducers = {spec: Reducer(spec) for spec in settings.specs}

    def fp32() -> None:
        dist.all_reduce(out)
        out.div_(settings.ranks)

    def bf16() -> None:
        half.copy_(out)
        dist.all_reduce(half)
        out.copy_(half).div_(settings.ranks)

    def by(reducer: Reducer) -> Callable[[], None]:
        def reduce() -> None:
            reducer.reduce("x", out, out=out)

        return reduce

    ways = {"fp32": fp32, "bf16": bf16} | {spec: by(reducer) for spec, reducer in reducers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, float] = {}
    for turn in range(settings.repeat + 1):
        for name, way in ways.items():
            out.copy_(x)
            dist.barrier()
            began = time.perf_counter()
            way()
            taken = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            errors[name] = float((out - wanted).square().sum()) / norm if norm else 0.0
            if turn:  # the first turn allocates
                seconds[name].append(float(taken))
    if rank == 0:
        nbytes = {"fp32": 4 * settings.numel, "bf16": 2 * settings.numel}
        nbytes |= {spec: each.stats.bytes_reduced // each.stats.rounds for spec, each in reducers.items()}
        rows: Sequence[tuple[Any, ...]] = [(name, seconds[name], errors[name], nbytes[name]) for name in ways]
        (Path(folder) / "results.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
