"""Jobs small enough for a test: threads as workers, one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from laconic.cluster.core import Core
from laconic.cluster.in_process import LocalLink
from laconic.cluster.job import Job
from laconic.cluster.rejoin import Offer
from laconic.optim import SGD, Schedule
from laconic.train import Shards, build_task
from laconic.train.in_process import run_together
from laconic.train.worker import Worker

BATCH = 32


def core_of(
    job: Job, parameters: dict[str, Tensor], events: list[dict[str, Any]] | None = None, **options: Any
) -> Core:
    optimizer = SGD(momentum=job.momentum, weight_decay=job.weight_decay)
    tell = events.append if events is not None else None
    return Core(job, parameters, optimizer, Schedule(job.lr), tell, **options)


def seat(core: Core, worker: int, incarnation: int = 0, *, attempt: int = 0, versions: set[int] | None = None) -> None:
    """WorkerSession a worker that can go on from anywhere, or from some versions only."""
    told = core.welcome(worker, incarnation, core.slots.fingerprint)
    core.offer(worker, incarnation, attempt, Offer(frozenset(told["versions"] if versions is None else versions)))


def train(
    job: Job,
    exchanges: int,
    *,
    model: str = "mlp",
    link: Callable[[Core, int], Any] = LocalLink,
    events: list[dict[str, Any]] | None = None,
) -> tuple[Core, list[Worker]]:
    """The whole job in threads; the core and the workers at its end."""
    first = build_task(model, "digits", seed=job.seed)
    core = core_of(
        job, {name: p.detach().clone() for name, p in first.model.named_parameters()}, events, exchanges=exchanges
    )
    workers = []
    for number in range(job.workers):
        task = build_task(model, "digits", seed=job.seed)
        shards = Shards(task.num_train, job.workers, BATCH, job.seed)
        workers.append(Worker(number, task, shards, job, Schedule(job.lr), link(core, number)))
    failed = run_together(workers, exchanges)
    assert not failed, failed
    return core, workers
