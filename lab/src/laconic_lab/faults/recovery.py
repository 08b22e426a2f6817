"""Small trainings that lose workers and servers: with every method they end with the same bits.

Threads end at a chosen exchange and only their files survive. Two workers train an MLP on digits.
"""

from __future__ import annotations

import contextlib
import functools
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.cluster.checkpoint import Folder
from laconic.cluster.connection import Connection, ShardedConnection, partition
from laconic.cluster.core import Core
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job
from laconic.cluster.replies import RefusedError, Reply
from laconic.optim import SGD, Schedule
from laconic.train import Shards, Task, build_task
from laconic.train.methods import method_options
from laconic.train.worker import Worker
from laconic_lab.faults.invariants import InvariantError, applied_once, lost_at_most

__all__ = ["Training", "check_losses", "job_of", "require_same_weights"]

BATCH = 32
ITERATIONS = 12
TIMEOUT = 120.0
"""Seconds after which a training counts as hung."""


class _Killed(BaseException):
    """Ends a worker."""


class _LosingConnection(InProcessConnection):
    """A connection whose worker is lost before or after it has pushed an exchange."""

    def __init__(self, core: Core, worker: int, *, incarnation: int, die_at: int | None, delivered: bool) -> None:
        super().__init__(core, worker, incarnation=incarnation)
        self._die_at, self._delivered = die_at, delivered

    def exchange(self, sequence: int, frames: Any, score: Callable[[], float]) -> Reply:
        if sequence != self._die_at:
            return super().exchange(sequence, frames, score)
        if self._delivered:  # the push arrives, its reply does not
            threading.Thread(target=self._deliver, args=(sequence, list(frames), score), daemon=True).start()
        raise _Killed

    def _deliver(self, sequence: int, frames: Any, score: Callable[[], float]) -> None:
        with contextlib.suppress(RefusedError):  # no worker is left
            super().exchange(sequence, frames, score)


class Training:
    """A job of two workers whose files are in a folder, so that all of it can be restarted.

    Args:
        exchanges: Exchanges of each worker.
        servers: Servers that share the parameters.
        first_incarnation: A server remembers incarnations: those of a later training on the same files are larger.
    """

    def __init__(self, job: Job, folder: Path, exchanges: int, *, servers: int = 1, first_incarnation: int = 0) -> None:
        self.job, self.folder, self.exchanges, self.servers = job, folder, exchanges, servers
        self.events: list[list[dict[str, Any]]] = [[] for _ in range(servers)]
        self.cores = [self.core(server) for server in range(servers)]
        self._lives, self._first_lives = first_incarnation, first_incarnation + job.workers
        self.loses_files: int | None = None
        """The worker that restarts without its files."""

    def shards(self) -> list[dict[str, Tensor]]:
        task = build_task("mlp", "digits", seed=self.job.seed)
        return partition({name: p.detach().clone() for name, p in task.model.named_parameters()}, self.servers)

    def core(self, server: int = 0) -> Core:
        """Return a server that continues from the files in the folder."""
        checkpoint_store = Folder(self.folder / f"server-{server}")
        core = Core(
            self.job, self.shards()[server], SGD(momentum=self.job.momentum), Schedule(self.job.lr),
            self.events[server].append, exchanges=self.exchanges, checkpoint_store=checkpoint_store,
        )  # fmt: skip
        if checkpoint_store.versions():
            core.load(*checkpoint_store.fetch(max(checkpoint_store.versions())))
            self.events[server].append({"event": "resumed", "version": core.version})
        else:
            checkpoint_store.save(0, *core.state())

        def keep(version: int) -> None:
            if version % self.job.exchanges_per_checkpoint == 0:
                checkpoint_store.save(version, *core.state())

        core.on_update(keep)
        return core

    def task(self) -> Task:
        """Return a worker's task."""
        return build_task("mlp", "digits", seed=self.job.seed)

    def worker(self, number: int, *, die_at: int | None = None, delivered: bool = False) -> Worker:
        self._lives += 1
        task = self.task()
        links = [
            _LosingConnection(core, number, incarnation=self._lives, die_at=die_at, delivered=delivered)
            for core in self.cores
        ]
        numbers = {name: i for i, (name, _) in enumerate(task.model.named_parameters())}
        link: Connection = links[0]
        if self.servers > 1:
            link = ShardedConnection(links, [[numbers[name] for name in shard] for shard in self.shards()])
        shards = Shards(task.num_train, self.job.workers, BATCH, self.job.seed)
        lost = number == self.loses_files and self._lives > self._first_lives
        store = Folder(self.folder / ("elsewhere" if lost else f"worker-{number}"))
        return Worker(number, task, shards, self.job, Schedule(self.job.lr), link, store=store)

    def run(self, *, dies: int | None = None, at: int | None = None, delivered: bool = False) -> None:
        """Run to the end; one worker may be lost, and is restarted.

        Args:
            dies: The worker.
            at: The exchange at which it is lost.
            delivered: Whether its push arrives and only the reply is lost.
        """
        failed: list[BaseException] = []

        def live(number: int) -> None:
            try:
                worker = self.worker(number, die_at=at if number == dies else None, delivered=delivered)
                try:
                    worker.run(self.exchanges)
                except _Killed:
                    worker = self.worker(number)
                    worker.run(self.exchanges)
                worker.connection.leave()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(self.job.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        if failed:
            raise failed[0]
        if any(thread.is_alive() for thread in threads):
            raise InvariantError(f"the training hangs at exchange {self.cores[0].version} of {self.exchanges}")

    def weights(self) -> dict[str, Tensor]:
        return {name: x for core in self.cores for name, x in core.parameters.items()}


def job_of(method: str) -> tuple[Job, int]:
    """Return a small job of a method and its number of exchanges."""
    options = {"workers": 2, "lr": 0.05, "checkpoint_every": 4} | method_options(method)
    if options.get("every", 1) > 1:
        options |= {"every": 2}
    job = Job(**options)
    return job, ITERATIONS // job.every


def require_same_weights(training: Training, other: Training) -> None:
    for name, x in training.weights().items():
        if not torch.equal(x, other.weights()[name]):
            raise InvariantError(f"P4: {name} has other bits than without the fault")


@functools.cache
def _undisturbed(method: str) -> Training:
    job, exchanges = job_of(method)
    with tempfile.TemporaryDirectory(prefix="laconic-training-") as folder:
        training = Training(job, Path(folder), exchanges)
        training.run()
    return training


def check_losses(method: str, folder: Path, seed: int) -> None:
    """Train while a worker is lost, and in two of three cases the server, too; check the invariants.

    Args:
        seed: Chooses which worker is lost, when, and whether a push is delivered.
    """
    rng = random.Random(seed)
    job, exchanges = job_of(method)
    undisturbed = _undisturbed(method)
    stop = rng.randrange(1, exchanges) if rng.random() < 2 / 3 else None
    events, first = list[dict[str, Any]](), 0
    if stop is not None:
        part = Training(job, folder, stop)
        part.run(dies=rng.randrange(2), at=rng.randrange(stop), delivered=rng.random() < 0.5)
        events += part.events[0]
        first = 10
    training = Training(job, folder, exchanges, first_incarnation=first)
    begin = training.cores[0].version
    training.run(dies=rng.randrange(2), at=rng.randrange(begin, exchanges), delivered=rng.random() < 0.5)
    require_same_weights(training, undisturbed)
    events += training.events[0]
    applied = applied_once(events)
    if len(applied) != job.workers * exchanges:
        raise InvariantError(f"P1: {len(applied)} pushes were applied, expected {job.workers * exchanges}")
    lost_at_most(events, 2 * job.exchanges_per_checkpoint)
