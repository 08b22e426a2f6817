"""One rank of a training run: same batches and initial weights for every exchange; measures the time to accuracy.

A program whose argument is JSON; rank 0 prints JSON lines. Evaluation is not timed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic.collective import LocalSGD, differing
from laconic.errors import WrongResultError
from laconic.train import build_task
from laconic.train.data_shards import Shards
from laconic.train.task import Task
from laconic_lab.bench.ddp.exchanges import DDPExchange, make_exchange

__all__ = ["main"]


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(options["rank"]), int(options["ranks"])
    dist.init_process_group("gloo", init_method=options["store"], rank=rank, world_size=ranks)
    results = []
    for name in options["ways"]:
        if rank == 0:
            print(json.dumps({"begin": name}), flush=True)
        results.append(_train(name, options, rank, ranks))
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"results": results}), flush=True)  # last, because the reader then ends all ranks


def _train(name: str, options: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    data_dir = options["data_dir"] and Path(options["data_dir"])
    task = build_task(options["model"], options["data"], data_dir=data_dir, seed=options["seed"], holdout=0.0)
    shards = Shards(task.num_train, ranks, options["batch"], options["seed"])
    way = None if name.startswith("local ") else make_exchange(name, task.model)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=options["lr"], momentum=0.9)
    local = None
    if way is None:
        every, _, spec = name.removeprefix("local ").partition(" ")
        local = LocalSGD(task.model, optimizer, every=int(every), codec=spec, outer="mean")
    curve: list[list[float]] = []
    steps: list[float] = []
    seconds, iterations = 0.0, int(options["epochs"] * shards.iterations_per_epoch)
    # The learning rate ends near zero, so that results are comparable.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for iteration in range(iterations):
        batch = task.batch(shards.indices(worker=rank, iteration=iteration))
        began = time.perf_counter()
        optimizer.zero_grad()
        outputs = (task.model if way is None else way.module)(batch.inputs)
        torch.autograd.backward(task.loss_function(outputs, batch.targets))
        if local is None:
            optimizer.step()
        else:
            local.step()
        schedule.step()
        steps.append(time.perf_counter() - began)
        seconds += steps[-1]
        if (iteration + 1) % options["test_every"] == 0 or iteration == iterations - 1:
            curve.append(_tested(task, iteration + 1, seconds, rank))
    differ = differing(dict(task.model.named_parameters())) if local is None else []
    if differ:
        raise WrongResultError(f"{name}: replicas ended with different parameters: {differ[0]}")
    return {
        "way": name, "curve": curve, "iterations": iterations, "sent": _sent(way, local, ranks, iterations),
        "median_step_s": statistics.median(steps),
    }  # fmt: skip


def _tested(task: Task, iteration: int, seconds: float, rank: int) -> list[float]:
    """Return iteration, elapsed seconds of the slowest rank, and accuracy, on rank 0."""
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    accuracy = task.evaluate()["accuracy"] if rank == 0 else 0.0
    dist.barrier()
    return [float(iteration), float(slowest), accuracy]


def _sent(way: DDPExchange | None, local: LocalSGD | None, ranks: int, iterations: int) -> float | None:
    """Return the bytes per iteration, where they are counted."""
    if local is not None:
        return local.exchange.stats.ring_bytes_estimate(ranks) / iterations
    if way is None or way.attachment is None:
        return None
    return float(way.attachment.stats()["ring_bytes_estimate"]) / iterations


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = given["interface"]
    main(given)
