"""Runs with four and eight workers in all modes: the server's core and real workers as threads of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from laconic.cluster.core import Core
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.replies import RefusedError
from laconic.errors import NonFiniteError
from laconic.optim import SGD
from laconic.train.data_shards import Shards
from laconic.train.in_process import run_in_threads
from laconic.train.task import build_task
from laconic.train.worker import Worker
from laconic_lab.studies.kothari2021.settings import Setting
from laconic_lab.studies.trainer import single_thread

__all__ = ["train"]

EXCHANGE_TIMEOUT_S = 120.0
"""Seconds that a worker waits for the others in an exchange."""


def train(
    setting: Setting, seed: int, epochs: int, data_dir: Path | None, tick: Callable[[int], None]
) -> dict[str, Any]:
    """Train one run and return the values of its Record."""
    job = setting.job(seed)
    tasks = [
        build_task(setting.model, setting.data, data_dir=data_dir, seed=seed, holdout=setting.holdout)
        for _ in range(job.workers)
    ]
    shards = Shards(tasks[0].num_train, job.workers, setting.batch, seed)
    iterations = epochs * shards.iterations_per_epoch // job.every * job.every
    schedule = setting.schedule(iterations, shards.iterations_per_epoch)
    # An asynchronous server updates once for each worker's gradient and divides the learning rate; a synchronous one
    # updates once for their mean. Local changes count as a share of a mean at the server.
    divisor = job.updates_per_exchange
    staleness: list[int] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "applied":
            staleness.append(event.get("missed", 0))

    parameters = {name: p.detach().clone() for name, p in tasks[0].model.named_parameters()}
    optimizer = SGD(momentum=job.momentum, weight_decay=job.weight_decay)
    exchanges = iterations // job.every
    core = Core(job, parameters, optimizer, lambda i: schedule(i) / divisor, on_event, exchanges=exchanges)
    links = [InProcessConnection(core, number, timeout=EXCHANGE_TIMEOUT_S) for number in range(job.workers)]
    workers = [
        Worker(number, task, shards, job, schedule, link)
        for number, (task, link) in enumerate(zip(tasks, links, strict=True))
    ]
    began = time.perf_counter()
    with single_thread():  # torch's threads would compete with the workers'
        failed = run_in_threads(workers, exchanges)
    seconds = time.perf_counter() - began
    if failed and not _diverged(failed[0]):
        raise failed[0]
    with torch.no_grad():
        for name, p in tasks[0].model.named_parameters():
            p.copy_(core.parameters[name])
    tick(epochs)
    return {
        "accuracy": [tasks[0].evaluate()["accuracy"]], "diverged": bool(failed), "iterations": iterations,
        "push_bytes": [sum(worker.bytes_sent for worker in workers)],
        "pull_bytes": [sum(worker.bytes_received for worker in workers)], "seconds": round(seconds, 3),
        "staleness_mean": sum(staleness) / max(1, len(staleness)), "staleness_most": max(staleness, default=0),
    }  # fmt: skip


def _diverged(error: BaseException) -> bool:
    return isinstance(error, NonFiniteError) or (isinstance(error, RefusedError) and error.reason == "diverged")
