"""Runs a function on several ranks of torch.distributed, each in its own process."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

RankFunction = Callable[[int, int], dict[str, Any]]


def run_ranks(function: RankFunction, world: int, folder: Path) -> list[dict[str, Any]]:
    """Return the results of ``function(rank, world)``, by rank."""
    # The fork server has imported torch and has not run backward, after which autograd does not survive a fork.
    multiprocessing.set_forkserver_preload(["laconic.collective", "torch._dynamo"])
    folder.mkdir(parents=True, exist_ok=True)
    mp.start_processes(_rank, args=(function, world, str(folder)), nprocs=world, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(rank: int, function: RankFunction, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    result = function(rank, world)
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_threads(function: RankFunction, world: int) -> list[dict[str, Any]]:
    """Return the results of ``function(rank, world)``, by rank; each rank is a thread with torch's threaded group."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    results: dict[int, Any] = {}
    store = dist.HashStore()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = function(rank, world)
        except BaseException as error:
            results[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    return [results[rank] for rank in range(world)]


def run_fake(function: RankFunction, world: int) -> list[dict[str, Any]]:
    """Return the result of ``function(0, world)`` in torch's fake group, in which nothing arrives."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        return [function(0, world)]
    finally:
        dist.destroy_process_group()


class LogCapture(logging.Handler):
    """Collects the messages of laconic's logger while the block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> LogCapture:
        logging.getLogger("laconic").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("laconic").removeHandler(self)

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def batches(rank: int, count: int, size: int = 16):
    """Yield inputs, with the index of the largest of the first ten values as the class."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(count):
        x = torch.randn(size, 64, generator=generator)
        yield x, x[:, :10].argmax(1)


def parameters(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(xs, ys) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def by_name(ranks: list[dict[str, Any]], prefix: str) -> dict[str, list[Any]]:
    """Return the results whose names begin with a prefix, each as a list over ranks."""
    return {name: [rank[name] for rank in ranks] for name in ranks[0] if name.startswith(prefix)}


def failures(ranks: list[dict[str, Any]], prefix: str) -> dict[str, list[Any]]:
    """Return the results with a prefix that are not true on all ranks; at least one result must have the prefix."""
    results = by_name(ranks, prefix)
    assert results, f"no rank returned {prefix!r}"
    return {name: values for name, values in results.items() if not all(values)}


def facts(functions: Sequence[RankFunction], world: int, prefixes: Mapping[str, str]) -> Callable[..., None]:
    """Return a test that calls functions on ranks once, and checks each fact: all results with its prefix are true."""
    once: list[list[dict[str, Any]]] = []

    @pytest.mark.parametrize("prefix", prefixes.values(), ids=list(prefixes))
    def test(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        if not once:
            once.append(run_ranks(partial(_all_results, functions), world, tmp_path_factory.mktemp("facts")))
        assert not failures(once[0], prefix)

    return test


def _all_results(functions: Sequence[RankFunction], rank: int, world: int) -> dict[str, Any]:
    return {name: value for function in functions for name, value in function(rank, world).items()}
