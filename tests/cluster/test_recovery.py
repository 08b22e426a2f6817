"""Losing workers and servers in every method: the run ends with the bits that it would have ended with anyway.

Crashes are of threads here, at a step of the run; what survives is what is on the disk. Real processes are killed in
``test_faults``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import BATCH
from torch import Tensor

from laconic.cluster.checkpoint import Folder
from laconic.cluster.connection import ShardedConnection, partition
from laconic.cluster.core import Core
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job
from laconic.cluster.rejoin import Offer, agree
from laconic.cluster.replies import RefusedError, Reply
from laconic.optim import SGD, Schedule
from laconic.train import Shards, Task, build_task
from laconic.train.methods import METHODS, method_options
from laconic.train.worker import Worker
from laconic_lab.faults.invariants import applied_once, lost_at_most


class Crash(BaseException):
    """The end of a worker's life."""


class Fragile(InProcessConnection):
    """A link that dies before or after it has pushed an exchange."""

    def __init__(self, core: Core, worker: int, *, incarnation: int, die_at: int | None, delivered: bool) -> None:
        super().__init__(core, worker, incarnation=incarnation)
        self._die_at, self._delivered = die_at, delivered

    def exchange(self, sequence: int, frames: Any, score: Callable[[], float]) -> Reply:
        if sequence != self._die_at:
            return super().exchange(sequence, frames, score)
        if self._delivered:  # the push arrives, its answer does not
            threading.Thread(target=self._deliver, args=(sequence, list(frames), score), daemon=True).start()
        raise Crash

    def _deliver(self, sequence: int, frames: Any, score: Callable[[], float]) -> None:
        with contextlib.suppress(RefusedError):  # nobody is there to hear it
            super().exchange(sequence, frames, score)


class Run:
    """A job of two workers whose files are under a folder, so that all of it can die and come back."""

    def __init__(self, job: Job, folder: Path, exchanges: int, *, servers: int = 1) -> None:
        self.job, self.folder, self.exchanges, self.servers = job, folder, exchanges, servers
        self.events: list[list[dict[str, Any]]] = [[] for _ in range(servers)]
        self.cores = [self.core(server) for server in range(servers)]
        self._lives = 0

    def parts(self) -> list[dict[str, Tensor]]:
        task = build_task("mlp", "digits", seed=self.job.seed)
        return partition({name: p.detach().clone() for name, p in task.model.named_parameters()}, self.servers)

    def core(self, server: int = 0) -> Core:
        checkpoint_store = Folder(self.folder / f"server-{server}")
        core = Core(
            self.job,
            self.parts()[server],
            SGD(momentum=self.job.momentum),
            Schedule(self.job.lr),
            self.events[server].append,
            exchanges=self.exchanges,
            checkpoint_store=checkpoint_store,
        )
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
        """A worker's own."""
        return build_task("mlp", "digits", seed=self.job.seed)

    def worker(self, number: int, *, die_at: int | None = None, delivered: bool = False) -> Worker:
        self._lives += 1
        task = self.task()
        links = [
            Fragile(core, number, incarnation=self._lives, die_at=die_at, delivered=delivered) for core in self.cores
        ]
        numbers = {name: i for i, (name, _) in enumerate(task.model.named_parameters())}
        link = (
            links[0] if self.servers == 1 else ShardedConnection(links, [[*map(numbers.get, p)] for p in self.parts()])
        )
        shards = Shards(task.num_train, self.job.workers, BATCH, self.job.seed)
        memory = Folder(self.folder / f"worker-{number}")
        return Worker(number, task, shards, self.job, Schedule(self.job.lr), link, memory=memory)

    def go(self, *, dies: int | None = None, at: int | None = None, delivered: bool = False) -> None:
        """To the end; a worker may die on the way and is started again."""

        def live(number: int) -> None:
            worker = self.worker(number, die_at=at if number == dies else None, delivered=delivered)
            try:
                worker.run(self.exchanges)
            except Crash:
                worker = self.worker(number)
                worker.run(self.exchanges)
            worker.link.leave()

        failed: list[BaseException] = []

        def watched(number: int) -> None:
            try:
                live(number)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=watched, args=(number,)) for number in range(self.job.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed, failed
        assert not any(thread.is_alive() for thread in threads)

    def weights(self) -> dict[str, Tensor]:
        return {name: x for core in self.cores for name, x in core.parameters.items()}


def job_of(method: str) -> tuple[Job, int]:
    options = {"workers": 2, "lr": 0.05, "checkpoint_every": 4} | method_options(method)
    if options.get("every", 1) > 1:
        options |= {"every": 2}
    job = Job(**options)
    return job, 12 // job.every


def same(run: Run, other: Run) -> None:
    for name, x in run.weights().items():
        assert torch.equal(x, other.weights()[name]), name


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("delivered", [False, True], ids=["push lost", "answer lost"])
def test_a_lost_worker_changes_nothing(method: str, delivered: bool, tmp_path: Path) -> None:
    job, exchanges = job_of(method)
    clean = Run(job, tmp_path / "clean", exchanges)
    clean.go()
    hurt = Run(job, tmp_path / "hurt", exchanges)
    hurt.go(dies=1, at=exchanges - 2, delivered=delivered)
    same(hurt, clean)
    assert len(applied_once(hurt.events[0])) == 2 * exchanges
    losses = lost_at_most(hurt.events[0], job.exchanges_per_checkpoint)
    if job.every == 1:  # else it dies right after a checkpoint
        assert bool(losses) == job.remembers  # what workers do not remember need not be made again
    assert not [e for e in hurt.events[0] if e["event"] == "memory_lost"]


@pytest.mark.parametrize("method", ["1", "5", "6", "laconic", "2w"])
def test_a_lost_server_changes_nothing(method: str, tmp_path: Path) -> None:
    job, exchanges = job_of(method)
    clean = Run(job, tmp_path / "clean", exchanges)
    clean.go()
    first = Run(job, tmp_path / "hurt", exchanges)
    first.exchanges = exchanges // 2 + 1
    first.cores = [first.core()]  # so that it stops half way, somewhere after a checkpoint
    first.go()
    again = Run(job, tmp_path / "hurt", exchanges)
    assert 0 < again.cores[0].version <= first.exchanges
    again.go()
    same(again, clean)


@pytest.mark.parametrize("method", ["1", "laconic"])
def test_several_servers_are_one(method: str, tmp_path: Path) -> None:
    job, exchanges = job_of(method)
    one = Run(job, tmp_path / "one", exchanges)
    one.go()
    three = Run(job, tmp_path / "three", exchanges, servers=3)
    three.go()
    hurt = Run(job, tmp_path / "hurt", exchanges, servers=3)
    hurt.go(dies=0, at=exchanges - 2, delivered=True)
    same(hurt, three)
    if job.pull == "none":  # else seeds are by slot and server
        same(three, one)
    for events in hurt.events:
        applied_once(events)


def test_a_worker_without_its_files_goes_on_with_an_empty_memory_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, exchanges = job_of("laconic")
    run = Run(job, tmp_path, exchanges)
    forgetful = run.worker

    def worker(number: int, **options: Any) -> Worker:
        made = forgetful(number, **options)
        if number == 1 and run._lives > 2:
            made.memory = Folder(tmp_path / "elsewhere")
        return made

    run.worker = worker  # type: ignore[method-assign]
    run.go(dies=1, at=exchanges - 2)
    lost = [(e["worker"], e["version"]) for e in run.events[0] if e["event"] == "memory_lost"]
    assert lost == [(1, exchanges - 2)] and "empty memory" in caplog.text
    assert lost_at_most(run.events[0], 0) == [] and run.cores[0].version == exchanges
    applied_once(run.events[0])


@pytest.mark.parametrize(
    "offers, held, version, lost",
    [
        ([{5, 4}, {5, 4}], {5, 4, 0}, 5, set()),
        ([{5, 4}, {4, 0}], {5, 4, 0}, 4, set()),
        ([{5}, {4}], {5, 4}, 5, {1}),
        ([{9}, {4}], {5, 4}, 4, {0}),
        ([{9}, {8}], {5, 4}, 5, {0, 1}),
    ],
)
def test_agreement(offers: list[set[int]], held: set[int], version: int, lost: set[int]) -> None:
    found = agree({worker: Offer(frozenset(one)) for worker, one in enumerate(offers)}, held)
    assert (found.version, set(found.lost)) == (version, lost)
