"""The modes of a server: a slow worker does not delay others, staleness stays within its bound, weights agree."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from grpc_peers import client_of, serving
from helpers import BATCH, Events, core_of, job_of
from torch import Tensor

from laconic.cluster.client import Client
from laconic.cluster.core import Core
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job
from laconic.cluster.replies import Reply
from laconic.cluster.server import Server
from laconic.optim import Schedule
from laconic.train import Shards, Task, build_task
from laconic.train.bundling import Layout
from laconic.train.methods import method_options
from laconic.train.worker import Worker
from laconic_lab.faults.invariants import all_work_once, applied_once, staleness
from waiting import in_threads

PACE = 0.04
"""Seconds of sleep per batch: more than the computation, so that it determines the length of an epoch."""
SLOW = 4


class SlowTask:
    """A task whose loss sleeps first."""

    def __init__(self, task: Task, seconds: float) -> None:
        self._task, self._seconds = task, seconds

    def loss(self, batch: Any) -> Tensor:
        time.sleep(self._seconds)
        return self._task.loss(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


@dataclass
class Outcome:
    """A finished job."""

    core: Core
    workers: list[Worker]
    events: Events
    seconds: float
    snapshots: Counter[int] = field(default_factory=Counter)

    def count(self, kind: str, worker: int | None = None) -> int:
        return sum(e["event"] == kind and worker in (None, e.get("worker")) for e in self.events)

    def accuracy(self, weights: dict[str, Tensor] | None = None) -> float:
        """Return the accuracy of the server's weights on the test set."""
        task = self.workers[0].task
        with torch.no_grad():
            for name, x in (weights or self.core.parameters).items():
                task.model.get_parameter(name).copy_(x)
        return task.evaluate()["accuracy"]


def run(
    job: Job, exchanges: int, *, pace: Callable[[int], float] = lambda worker: 0.0,
    link: Callable[[Core, int], Any] = InProcessConnection, bundled: bool = False,
    before_each: Callable[[Worker, int], None] | None = None,
) -> Outcome:  # fmt: skip
    """Run a job with one thread per worker; ``before_each`` is called with a worker and the exchange that begins."""
    events: Events = []
    first = build_task("mlp", "digits", seed=job.seed)
    parameters = {name: p.detach().clone() for name, p in first.model.named_parameters()}
    layout = Layout.of(parameters, bundled=bundled)
    core = core_of(job, layout.pack(parameters), events, exchanges=exchanges)
    outcome = Outcome(core, [], events, 0.0)
    for number in range(job.workers):
        task: Any = build_task("mlp", "digits", seed=job.seed)
        shards = Shards(task.num_train, job.workers, BATCH, job.seed)
        counted = _counting(link(core, number), outcome.snapshots, number)
        task = SlowTask(task, pace(number))
        outcome.workers.append(Worker(number, task, shards, job, Schedule(job.lr), counted, layout=layout))
    if before_each is not None:
        for worker in outcome.workers:
            _watched(worker, before_each)

    def live(worker: Worker) -> None:
        try:
            worker.run(exchanges)
            worker.connection.leave()
        finally:
            worker.connection.close()

    began = time.monotonic()
    in_threads(*(lambda worker=worker: live(worker) for worker in outcome.workers))
    outcome.seconds = time.monotonic() - began
    if isinstance(link, Sockets):
        link.stop()
    return outcome


class Sockets:
    """Connections over loopback: pushes begin to arrive while they are computed, as between processes."""

    def __init__(self) -> None:
        self._server: Server | None = None

    def __call__(self, core: Core, worker: int) -> Client:
        self._server = self._server or Server(core, "127.0.0.1:0")
        client: Client = client_of(self._server, worker)
        return client

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0)


def _watched(worker: Worker, before_each: Callable[[Worker, int], None]) -> None:
    examples = worker._examples

    def begin(at: Any, step: int = 0) -> Tensor:
        before_each(worker, at.sequence)
        return examples(at, step)

    worker._examples = begin  # type: ignore[method-assign]


def _counting(link: Any, snapshots: Counter[int], number: int) -> Any:
    fetch = link.snapshot

    def snapshot() -> Reply:
        snapshots[number] += 1
        return fetch()

    link.snapshot = snapshot
    return link


def last_worker_is_slow(job: Job) -> Callable[[int], float]:
    return lambda worker: SLOW * PACE if worker == job.workers - 1 else PACE


def fast_job(**options: Any) -> Job:
    return job_of(**{"lr": 0.1} | options)


EPOCH = 16
"""Exchanges of each of two workers."""


@pytest.fixture(scope="module")
def synchronous() -> Outcome:
    """The synchronous job with a slow worker."""
    job = fast_job()
    return run(job, EPOCH, pace=last_worker_is_slow(job))


@pytest.mark.parametrize("mode", ["async", "bounded:3"])
def test_job_without_rounds_ends_earlier_than_one_that_waits_for_a_slow_worker(mode: str, synchronous: Outcome) -> None:
    job = fast_job(mode=mode)
    free = run(job, EPOCH, pace=last_worker_is_slow(job))
    assert synchronous.seconds > SLOW * PACE * EPOCH  # the slow worker did half of the batches
    assert free.seconds < 0.75 * synchronous.seconds
    all_work_once(free.events, 2 * EPOCH)
    applied_once(free.events)
    assert free.core.finished(EPOCH) and free.core.version == 2 * EPOCH
    assert free.count("applied", 1) < free.count("applied", 0)  # the slow worker did less
    assert 0 < staleness(free.events) <= (job.update_mode.staleness_bound or 2 * SLOW)
    assert min(free.accuracy(), synchronous.accuracy()) > 70


def test_bound_of_one_holds_for_four_workers() -> None:
    job = fast_job(workers=4, mode="bounded:1")
    outcome = run(job, 8, pace=last_worker_is_slow(job))
    assert staleness(outcome.events) == 1
    all_work_once(outcome.events, 32)


def late_and_applied(events: Events) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    late, applied = (
        {(e["worker"], e["sequence"]) for e in events if e["event"] == kind} for kind in ("late", "applied")
    )
    return late, applied


@pytest.fixture(scope="module")
def three_synchronous() -> Outcome:
    """Three workers that all wait for the slow one."""
    job = fast_job(workers=3, momentum=0.5)
    return run(job, 16, pace=last_worker_is_slow(job), link=Sockets())


@pytest.mark.parametrize("returns", ["weights", "gradients", "delta"])
def test_round_does_not_wait_for_a_backup_worker(returns: str, three_synchronous: Outcome) -> None:
    exchanges = three_synchronous.core.version
    job = fast_job(workers=3, backup=1, returns=returns, momentum=0.5)
    outcome = run(job, exchanges, pace=last_worker_is_slow(job), link=Sockets())
    assert outcome.seconds < 0.75 * three_synchronous.seconds
    assert outcome.core.version == exchanges
    late, applied = late_and_applied(outcome.events)
    assert late and {worker for worker, _ in late} == {2}
    assert not late & applied
    assert len(applied) == 2 * exchanges  # two of three in every round
    applied_once(outcome.events, backup=True)
    if returns != "weights":  # a change needs weights that it does not hold
        assert outcome.snapshots[2] > 1
    assert outcome.accuracy() > 70


@pytest.mark.parametrize("returns", ["gradients", "delta"])
def test_late_worker_computes_on_the_weights_of_some_version(returns: str) -> None:
    """It must not apply only the last of several changes."""
    job = fast_job(workers=3, backup=1, returns=returns, momentum=0.5)
    held: dict[int, dict[str, Tensor]] = {}
    seen: list[tuple[int, int, float]] = []

    class WatchedSockets(Sockets):
        def __call__(self, core: Core, worker: int) -> Client:
            if not held:
                held[0] = {name: x.clone() for name, x in core.parameters.items()}
                core.on_update(lambda v: held.update({v: {name: x.clone() for name, x in core.parameters.items()}}))
            return super().__call__(core, worker)

    def compare(worker: Worker, sequence: int) -> None:
        difference = max(
            float((p.detach() - held[sequence][name]).abs().max()) for name, p in worker.parameters.items()
        )
        seen.append((worker.number, sequence, difference))

    outcome = run(job, 16, pace=last_worker_is_slow(job), link=WatchedSockets(), before_each=compare)
    assert outcome.count("late", 2)
    assert {number for number, _, _ in seen} == {0, 1, 2}
    assert max(difference for _, _, difference in seen) <= 1e-5


def distance(outcome: Outcome, worker: int) -> float:
    """Return how far a worker's weights are from the server's, relative to how far the server's have moved."""
    start = {name: p.detach() for name, p in build_task("mlp", "digits", seed=0).model.named_parameters()}
    mine = outcome.workers[worker].parameters
    apart = sum(float((mine[name].detach() - x).square().sum()) for name, x in outcome.core.parameters.items())
    travelled = sum(float((start[name] - x).square().sum()) for name, x in outcome.core.parameters.items())
    return float((apart / travelled) ** 0.5)


@pytest.mark.parametrize("mode, pull, most", [
    ("sync", "none", 1e-6), ("sync", "ef|qsgd:8", 0.05), ("sync", "topk:0.05", 0.6), ("async", "none", 1e-6),
    ("async", "ef|topk:0.05", 0.6),
])  # fmt: skip
def test_delta_keeps_workers_near_the_server(mode: str, pull: str, most: float) -> None:
    job = fast_job(mode=mode, returns="delta", pull=pull)
    outcome = run(job, 30)
    # Without rounds one worker has not pulled the other's last pushes.
    nearest = min(distance(outcome, worker) for worker in range(2))
    assert nearest <= most
    if mode == "sync":
        assert distance(outcome, 0) == distance(outcome, 1)
    if pull == "none" and mode == "sync":
        for name, x in outcome.core.parameters.items():
            torch.testing.assert_close(outcome.workers[1].parameters[name].detach(), x, rtol=0, atol=1e-6)
    assert outcome.accuracy() > 70


def test_server_has_exactly_the_weights_that_its_workers_hold() -> None:
    """Both add the same decoded frames, so the rest of a lossy pull is sent later."""
    for mode in ("sync", "async"):
        outcome = run(fast_job(mode=mode, returns="delta", pull="ef|topk:0.02|qsgd:4"), 12)
        for number, worker in enumerate(outcome.workers):
            held = outcome.core._weights.held if mode == "sync" else outcome.core._members.sessions[number].held
            for name, x in held.items():
                assert torch.equal(worker.parameters[name].detach(), x), (mode, number, name)


@pytest.mark.parametrize(
    "method, mode", [("4", "async"), ("5", "bounded:2"), ("laconic", "async"), ("laconic-min", "bounded:2")]
)
def test_methods_train_without_rounds(method: str, mode: str) -> None:
    job = fast_job(**{"mode": mode} | method_options(method, mode))
    assert job.returns == "delta"
    outcome = run(job, 48 // job.every)
    assert outcome.accuracy() > 70


def test_change_without_rounds_is_divided_by_the_number_of_workers() -> None:
    job = Job(workers=4, mode="async", sends="changes", every=2, returns="weights")
    core = core_of(job, {"w": torch.zeros(3)}, [])
    core._weights.step({"w": torch.tensor([4.0, 8.0, -2.0])})
    assert core.parameters["w"].tolist() == [1.0, 2.0, -0.5]


@pytest.mark.parametrize("returns", ["weights", "gradients", "delta"])
def test_bundled_and_layerwise_slots_give_the_same_bits_without_compression(returns: str) -> None:
    job = fast_job(returns=returns, momentum=0.9)
    single, bundle = run(job, 6), run(job, 6, bundled=True)
    (only,) = bundle.core.parameters.values()
    flat = torch.cat([x.reshape(-1) for x in single.core.parameters.values()])
    assert torch.equal(only.reshape(-1), flat)
    for name, x in single.workers[0].parameters.items():
        assert torch.equal(bundle.workers[0].parameters[name], x)


class Crash(BaseException):
    """Ends a worker."""


class CrashingClient(Client):
    """A client that crashes in an exchange: before its push, or before it gets the reply."""

    die_at, delivered = -1, False

    def exchange(self, sequence: int, frames: Any, score: Callable[[], float]) -> Reply:
        if sequence != self.die_at:
            return super().exchange(sequence, frames, score)
        if self.delivered:
            super().exchange(sequence, frames, score)
        raise Crash


@pytest.mark.parametrize(
    "mode, returns, delivered",
    [("async", "weights", False), ("async", "delta", False), ("async", "delta", True), ("bounded:2", "weights", True)],
)
def test_restarted_worker_continues_its_work(mode: str, returns: str, delivered: bool) -> None:
    exchanges, dies_at = 15, 6
    job = fast_job(mode=mode, returns=returns)
    events: Events = []
    task = build_task("mlp", "digits", seed=0)
    core = core_of(
        job, {name: p.detach().clone() for name, p in task.model.named_parameters()}, events, exchanges=exchanges
    )

    def life(number: int, incarnation: int, die_at: int) -> None:
        task = build_task("mlp", "digits", seed=0)
        client = client_of(server, number, incarnation, kind=CrashingClient)
        client.die_at, client.delivered = die_at, delivered
        shards = Shards(task.num_train, 2, BATCH, 0)
        worker = Worker(number, task, shards, job, Schedule(job.lr), client)
        try:
            worker.run(exchanges)
            client.leave()
        finally:
            client.close()

    def live(number: int) -> None:
        try:
            life(number, 0, dies_at if number == 1 else -1)
        except Crash:
            life(number, 1, -1)

    with serving(core) as server:
        in_threads(lambda: live(0), lambda: live(1))
    assert [e["incarnation"] for e in events if e["event"] == "welcome" and e["worker"] == 1] == [0, 1]
    all_work_once(events, 2 * exchanges)
    applied_once(events)
    if job.update_mode.staleness_bound:
        assert staleness(events) <= job.update_mode.staleness_bound
    assert core.finished(exchanges) and core.all_gone()
