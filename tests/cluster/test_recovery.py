"""Lost workers and servers in every method: the run ends with the same bits as without the failure.

Here threads crash at a step of the run, and only files survive. Real processes are killed in ``test_faults``.
"""

from __future__ import annotations

import contextlib
import functools
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
from waiting import in_threads


class Crash(BaseException):
    """Ends a worker."""


class CrashingConnection(InProcessConnection):
    """A connection that crashes before or after it has pushed an exchange."""

    def __init__(self, core: Core, worker: int, *, incarnation: int, die_at: int | None, delivered: bool) -> None:
        super().__init__(core, worker, incarnation=incarnation)
        self._die_at, self._delivered = die_at, delivered

    def exchange(self, sequence: int, frames: Any, score: Callable[[], float]) -> Reply:
        if sequence != self._die_at:
            return super().exchange(sequence, frames, score)
        if self._delivered:  # the push arrives, its reply does not
            threading.Thread(target=self._deliver, args=(sequence, list(frames), score), daemon=True).start()
        raise Crash

    def _deliver(self, sequence: int, frames: Any, score: Callable[[], float]) -> None:
        with contextlib.suppress(RefusedError):  # no worker is left
            super().exchange(sequence, frames, score)


class Run:
    """A job of two workers whose files are in a folder, so that all of it can be restarted."""

    def __init__(self, job: Job, folder: Path, exchanges: int, *, servers: int = 1) -> None:
        self.job, self.folder, self.exchanges, self.servers = job, folder, exchanges, servers
        self.events: list[list[dict[str, Any]]] = [[] for _ in range(servers)]
        self.cores = [self.core(server) for server in range(servers)]
        self._lives = 0
        self.loses_files: int | None = None
        """The worker that restarts without its files."""

    def shards(self) -> list[dict[str, Tensor]]:
        task = build_task("mlp", "digits", seed=self.job.seed)
        return partition({name: p.detach().clone() for name, p in task.model.named_parameters()}, self.servers)

    def core(self, server: int = 0) -> Core:
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
            CrashingConnection(core, number, incarnation=self._lives, die_at=die_at, delivered=delivered)
            for core in self.cores
        ]
        numbers = {name: i for i, (name, _) in enumerate(task.model.named_parameters())}
        link = (
            links[0] if self.servers == 1 else ShardedConnection(links, [[*map(numbers.get, p)] for p in self.shards()])
        )
        shards = Shards(task.num_train, self.job.workers, BATCH, self.job.seed)
        lost = number == self.loses_files and self._lives > self.job.workers
        store = Folder(self.folder / ("elsewhere" if lost else f"worker-{number}"))
        return Worker(number, task, shards, self.job, Schedule(self.job.lr), link, store=store)

    def go(self, *, dies: int | None = None, at: int | None = None, delivered: bool = False) -> None:
        """Run to the end; one worker may crash and is restarted."""

        def live(number: int) -> None:
            worker = self.worker(number, die_at=at if number == dies else None, delivered=delivered)
            try:
                worker.run(self.exchanges)
            except Crash:
                worker = self.worker(number)
                worker.run(self.exchanges)
            worker.connection.leave()

        in_threads(*(lambda number=number: live(number) for number in range(self.job.workers)))

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


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Return a function that returns a method's run without a failure, made once."""

    @functools.cache
    def run(method: str) -> Run:
        job, exchanges = job_of(method)
        result = Run(job, tmp_path_factory.mktemp("clean"), exchanges)
        result.go()
        return result

    return run


@pytest.mark.parametrize(
    "method, delivered", [(name, bool(i % 2)) for i, name in enumerate([*METHODS, "1", "laconic"])]
)
def test_lost_worker_changes_no_bit(
    method: str, delivered: bool, tmp_path: Path, clean_run: Callable[[str], Run]
) -> None:
    """``delivered``: its push arrives and only the reply is lost."""
    job, exchanges = job_of(method)
    clean = clean_run(method)
    hurt = Run(job, tmp_path / "hurt", exchanges)
    hurt.go(dies=1, at=exchanges - 2, delivered=delivered)
    same(hurt, clean)
    assert len(applied_once(hurt.events[0])) == 2 * exchanges
    losses = lost_at_most(hurt.events[0], job.exchanges_per_checkpoint)
    if job.every == 1:  # otherwise it crashes right after a checkpoint
        assert bool(losses) == job.remembers  # without state of workers nothing is repeated
    assert not [e for e in hurt.events[0] if e["event"] == "memory_lost"]


@pytest.mark.parametrize("method", ["1", "5", "6", "laconic", "2w"])
def test_lost_server_changes_no_bit(method: str, tmp_path: Path, clean_run: Callable[[str], Run]) -> None:
    job, exchanges = job_of(method)
    clean = clean_run(method)
    first = Run(job, tmp_path / "hurt", exchanges)
    first.exchanges = exchanges // 2 + 1
    first.cores = [first.core()]  # it stops half way, some exchanges after a checkpoint
    first.go()
    again = Run(job, tmp_path / "hurt", exchanges)
    assert 0 < again.cores[0].version <= first.exchanges
    again.go()
    same(again, clean)


@pytest.mark.parametrize("method", ["1", "laconic"])
def test_several_servers_give_the_bits_of_one(method: str, tmp_path: Path, clean_run: Callable[[str], Run]) -> None:
    job, exchanges = job_of(method)
    one = clean_run(method)
    three = Run(job, tmp_path / "three", exchanges, servers=3)
    three.go()
    hurt = Run(job, tmp_path / "hurt", exchanges, servers=3)
    hurt.go(dies=0, at=exchanges - 2, delivered=True)
    same(hurt, three)
    if job.pull == "none":  # otherwise rounding seeds depend on the server
        same(three, one)
    for events in hurt.events:
        applied_once(events)


def test_worker_without_its_files_continues_without_residuals_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, exchanges = job_of("laconic")
    run = Run(job, tmp_path, exchanges)
    run.loses_files = 1
    run.go(dies=1, at=exchanges - 2)
    lost = [(e["worker"], e["version"]) for e in run.events[0] if e["event"] == "memory_lost"]
    assert lost == [(1, exchanges - 2)] and "empty memory" in caplog.text
    assert lost_at_most(run.events[0], 0) == [] and run.cores[0].version == exchanges
    applied_once(run.events[0])


@pytest.mark.parametrize("offers, available, version, lost", [
    ([{5, 4}, {5, 4}], {5, 4, 0}, 5, set()), ([{5, 4}, {4, 0}], {5, 4, 0}, 4, set()), ([{5}, {4}], {5, 4}, 5, {1}),
    ([{9}, {4}], {5, 4}, 4, {0}), ([{9}, {8}], {5, 4}, 5, {0, 1}),
])  # fmt: skip
def test_agreement_is_the_newest_common_version(
    offers: list[set[int]], available: set[int], version: int, lost: set[int]
) -> None:
    agreed = agree({worker: Offer(frozenset(versions)) for worker, versions in enumerate(offers)}, available)
    assert (agreed.version, set(agreed.lost)) == (version, lost)
