"""Ranks in processes of their own, and what each of them found."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

Work = Callable[[int, int], dict[str, Any]]


def run_ranks(work: Work, world: int, folder: Path) -> list[dict[str, Any]]:
    """What ``work(rank, world)`` returned on each rank."""
    # A server that has imported torch, and done no backward (after which autograd does not bear a fork).
    multiprocessing.set_forkserver_preload(["laconic.collective", "torch._dynamo"])
    folder.mkdir(parents=True, exist_ok=True)
    mp.start_processes(_rank, args=(work, world, str(folder)), nprocs=world, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(rank: int, work: Work, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = work(rank, world)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


class Heard(logging.Handler):
    """What laconic's logger says while the block lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Heard:
        logging.getLogger("laconic").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("laconic").removeHandler(self)

    def has(self, words: str) -> bool:
        return any(words in line for line in self.lines)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def batches(rank: int, count: int, size: int = 16):
    """Inputs, and which of the first ten is the largest."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(count):
        x = torch.randn(size, 64, generator=generator)
        yield x, x[:, :10].argmax(1)


def parameters(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(xs, ys) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
