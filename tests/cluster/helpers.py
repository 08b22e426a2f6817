"""Small jobs for tests: a core with a few parameters, and threads as workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laconic.cluster.core import Core
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job
from laconic.cluster.rejoin import Offer
from laconic.frames import encode
from laconic.optim import SGD, Schedule
from laconic.train import Shards, build_task
from laconic.train.in_process import run_in_threads
from laconic.train.worker import Worker

BATCH = 32
TIMEOUT = 20.0
ONES = encode(torch.ones(4), "none")

Events = list[dict[str, Any]]


def job_of(**options: Any) -> Job:
    """Return a job whose updates subtract the gradient: learning rate 1, no momentum."""
    return Job(**{"workers": 2, "lr": 1.0, "momentum": 0.0} | options)


def core_of(job: Job, parameters: dict[str, Tensor], events: Events | None = None, **options: Any) -> Core:
    optimizer = SGD(momentum=job.momentum, weight_decay=job.weight_decay)
    event_log = events.append if events is not None else None
    return Core(job, parameters, optimizer, Schedule(job.lr), event_log, **options)


def small_core(events: Events | None = None, *, slots: dict[str, int] | None = None, **options: Any) -> Core:
    """Return a core with zeros as parameters; ``options`` are those of a job."""
    exchanges = options.pop("exchanges", None)
    parameters = {name: torch.zeros(numel) for name, numel in (slots or {"w": 4}).items()}
    return core_of(job_of(**options), parameters, events, exchanges=exchanges)


def open_session(
    core: Core, worker: int, incarnation: int = 0, *, attempt: int = 0, versions: set[int] | None = None
) -> None:
    """Welcome a worker that can resume from any version, or from some only, and take its offer."""
    answer = core.welcome(worker, incarnation, core.slots.fingerprint)
    core.offer(worker, incarnation, attempt, Offer(frozenset(answer["versions"] if versions is None else versions)))


def train(
    job: Job, exchanges: int, *, model: str = "mlp", link: Callable[[Core, int], Any] = InProcessConnection,
    events: Events | None = None,
) -> tuple[Core, list[Worker]]:  # fmt: skip
    """Run a whole job in threads; return the core and the workers at its end."""
    first = build_task(model, "digits", seed=job.seed)
    core = core_of(
        job, {name: p.detach().clone() for name, p in first.model.named_parameters()}, events, exchanges=exchanges
    )
    workers = []
    for number in range(job.workers):
        task = build_task(model, "digits", seed=job.seed)
        shards = Shards(task.num_train, job.workers, BATCH, job.seed)
        workers.append(Worker(number, task, shards, job, Schedule(job.lr), link(core, number)))
    failures = run_in_threads(workers, exchanges)
    assert not failures, failures
    return core, workers
