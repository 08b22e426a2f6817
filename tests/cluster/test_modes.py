"""What the modes are for: who is slow holds up nobody who need not wait, and no gradient is older than was agreed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import BATCH, core_of
from torch import Tensor

from laconic.cluster.client import Client, Patience
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

PACE = 0.04
"""Seconds that a batch takes at least: more than the work itself, so that it decides how long an epoch takes."""
SLOW = 4


class Paced:
    """A task whose batches take their time; everything else is the task's own."""

    def __init__(self, task: Task, seconds: float) -> None:
        self._task, self._seconds = task, seconds

    def loss(self, batch: Any) -> Tensor:
        time.sleep(self._seconds)
        return self._task.loss(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


@dataclass
class Outcome:
    """A job that has ended."""

    core: Core
    workers: list[Worker]
    events: list[dict[str, Any]]
    seconds: float
    snapshots: Counter[int] = field(default_factory=Counter)

    def count(self, kind: str, worker: int | None = None) -> int:
        return sum(e["event"] == kind and worker in (None, e.get("worker")) for e in self.events)

    def accuracy(self, weights: dict[str, Tensor] | None = None) -> float:
        """Of the server's weights on the test set."""
        task = self.workers[0].task
        with torch.no_grad():
            for name, x in (weights or self.core.parameters).items():
                task.model.get_parameter(name).copy_(x)
        return task.evaluate()["accuracy"]


def run(
    job: Job,
    exchanges: int,
    *,
    pace: Callable[[int], float] = lambda worker: 0.0,
    link: Callable[[Core, int], Any] = InProcessConnection,
    bundled: bool = False,
    before_each: Callable[[Worker, int], None] | None = None,
) -> Outcome:
    """The whole job, a thread a worker. ``before_each`` is called with the number of the exchange that begins."""
    events: list[dict[str, Any]] = []
    first = build_task("mlp", "digits", seed=job.seed)
    parameters = {name: p.detach().clone() for name, p in first.model.named_parameters()}
    layout = Layout.of(parameters, bundled=bundled)
    core = core_of(job, layout.pack(parameters), events, exchanges=exchanges)
    outcome = Outcome(core, [], events, 0.0)
    for number in range(job.workers):
        task: Any = build_task("mlp", "digits", seed=job.seed)
        shards = Shards(task.num_train, job.workers, BATCH, job.seed)
        counted = _counting(link(core, number), outcome.snapshots, number)
        task = Paced(task, pace(number))
        outcome.workers.append(Worker(number, task, shards, job, Schedule(job.lr), counted, layout=layout))
    failed: list[BaseException] = []
    if before_each is not None:
        for worker in outcome.workers:
            _watched(worker, before_each)

    def live(worker: Worker) -> None:
        try:
            worker.run(exchanges)
            worker.link.leave()
        except BaseException as error:
            failed.append(error)
        finally:
            worker.link.close()

    threads = [threading.Thread(target=live, args=(worker,), daemon=True) for worker in outcome.workers]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    outcome.seconds = time.monotonic() - began
    if isinstance(link, Sockets):
        link.stop()
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads)
    return outcome


class Sockets:
    """Links over loopback: pushes begin to arrive while they are computed, as between processes."""

    def __init__(self) -> None:
        self._server: Server | None = None

    def __call__(self, core: Core, worker: int) -> Client:
        self._server = self._server or Server(core, "127.0.0.1:0")
        return client_of(self._server.port, core, worker)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0)


def client_of(port: int, core: Core, worker: int, incarnation: int = 0, kind: type[Client] = Client) -> Client:
    limits = core.job.pull_limits(core.parameters.values())
    return kind(
        f"127.0.0.1:{port}",
        worker=worker,
        incarnation=incarnation,
        slots=core.slots,
        limits=limits,
        patience=Patience(total=5),
    )


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


def last_is_slow(job: Job) -> Callable[[int], float]:
    return lambda worker: SLOW * PACE if worker == job.workers - 1 else PACE


def quick(**options: Any) -> Job:
    return Job(**{"workers": 2, "lr": 0.1, "momentum": 0.0} | options)


EPOCH = 16
"""Exchanges of each of two workers."""


@pytest.fixture(scope="module")
def in_step() -> Outcome:
    """The synchronous job with a slow worker."""
    job = quick()
    return run(job, EPOCH, pace=last_is_slow(job))


@pytest.mark.parametrize("mode", ["async", "bounded:3", "bounded:6"])
def test_who_does_not_wait_for_a_slow_worker_is_done_earlier(mode: str, in_step: Outcome) -> None:
    job = quick(mode=mode)
    free = run(job, EPOCH, pace=last_is_slow(job))
    assert in_step.seconds > SLOW * PACE * EPOCH  # the slow one did half of the batches
    assert free.seconds < 0.75 * in_step.seconds
    all_work_once(free.events, 2 * EPOCH)
    applied_once(free.events)
    assert free.core.finished(EPOCH) and free.core.version == 2 * EPOCH
    assert free.count("applied", 1) < free.count("applied", 0)  # the slow one did less
    assert 0 < staleness(free.events) <= (job.update_mode.staleness_bound or 2 * SLOW)
    assert min(free.accuracy(), in_step.accuracy()) > 70


def test_a_bound_holds_also_when_it_holds_up_everybody() -> None:
    job = quick(workers=4, mode="bounded:1")
    outcome = run(job, 8, pace=last_is_slow(job))
    assert staleness(outcome.events) == 1
    all_work_once(outcome.events, 32)


# --------------------------------------------------------------------------------------------------- backup workers


def late_and_applied(events: list[dict[str, Any]]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    late, applied = (
        {(e["worker"], e["sequence"]) for e in events if e["event"] == kind} for kind in ("late", "applied")
    )
    return late, applied


@pytest.fixture(scope="module")
def three_in_step() -> Outcome:
    """All of three workers wait for the slow one."""
    job = quick(workers=3, momentum=0.5)
    return run(job, 16, pace=last_is_slow(job), link=Sockets())


@pytest.mark.parametrize("returns", ["weights", "gradients", "delta"])
def test_a_round_does_not_wait_for_a_backup_worker(returns: str, three_in_step: Outcome) -> None:
    exchanges = three_in_step.core.version
    job = quick(workers=3, backup=1, returns=returns, momentum=0.5)
    outcome = run(job, exchanges, pace=last_is_slow(job), link=Sockets())
    assert outcome.seconds < 0.75 * three_in_step.seconds
    assert outcome.core.version == exchanges
    late, applied = late_and_applied(outcome.events)
    assert late and {worker for worker, _ in late} == {2}
    assert not late & applied
    assert len(applied) == 2 * exchanges  # two of three, every round
    applied_once(outcome.events, backup=True)
    if returns != "weights":  # what it is told is a change of weights that it does not hold
        assert outcome.snapshots[2] > 1
    assert outcome.accuracy() > 70


@pytest.mark.parametrize("returns", ["gradients", "delta"])
def test_who_is_behind_never_computes_on_weights_that_nobody_had(returns: str) -> None:
    """It must not take the last change for all that it missed."""
    job = quick(workers=3, backup=1, returns=returns, momentum=0.5)
    held: dict[int, dict[str, Tensor]] = {}
    seen: list[tuple[int, int, float]] = []

    class Watched(Sockets):
        def __call__(self, core: Core, worker: int) -> Client:
            if not held:
                held[0] = {name: x.clone() for name, x in core.parameters.items()}
                core.on_update(lambda v: held.update({v: {name: x.clone() for name, x in core.parameters.items()}}))
            return super().__call__(core, worker)

    def look(worker: Worker, sequence: int) -> None:
        far = max(float((p.detach() - held[sequence][name]).abs().max()) for name, p in worker.parameters.items())
        seen.append((worker.number, sequence, far))

    outcome = run(job, 16, pace=last_is_slow(job), link=Watched(), before_each=look)
    assert outcome.count("late", 2)
    assert {number for number, _, _ in seen} == {0, 1, 2}
    assert not [one for one in seen if one[2] > 1e-5]


# ------------------------------------------------------------------------------------------------------------ delta


def distance(outcome: Outcome, worker: int) -> float:
    """How far a worker's weights are from the server's, as a share of how far the server's have come."""
    start = {name: p.detach() for name, p in build_task("mlp", "digits", seed=0).model.named_parameters()}
    mine = outcome.workers[worker].parameters
    apart = sum(float((mine[name].detach() - x).square().sum()) for name, x in outcome.core.parameters.items())
    travelled = sum(float((start[name] - x).square().sum()) for name, x in outcome.core.parameters.items())
    return float((apart / travelled) ** 0.5)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("pull, most", [("none", 1e-6), ("ef|qsgd:8", 0.05), ("ef|topk:0.05", 0.6), ("topk:0.05", 0.6)])
def test_changes_of_weights_keep_workers_near_the_server(mode: str, pull: str, most: float) -> None:
    job = quick(mode=mode, returns="delta", pull=pull)
    outcome = run(job, 30)
    # Without rounds the other worker's last pushes are behind this one's last pull.
    nearest = min(distance(outcome, worker) for worker in range(2))
    assert nearest <= most
    if mode == "sync":
        assert distance(outcome, 0) == distance(outcome, 1)
    if pull == "none" and mode == "sync":
        for name, x in outcome.core.parameters.items():
            torch.testing.assert_close(outcome.workers[1].parameters[name].detach(), x, rtol=0, atol=1e-6)
    assert outcome.accuracy() > 70


def test_a_server_knows_exactly_what_its_workers_hold() -> None:
    """Sender and receiver add the very same decoded numbers: what a lossy pull leaves out is never forgotten."""
    for mode in ("sync", "async"):
        outcome = run(quick(mode=mode, returns="delta", pull="ef|topk:0.02|qsgd:4"), 12)
        for number, worker in enumerate(outcome.workers):
            held = outcome.core._weights.held if mode == "sync" else outcome.core._members.sessions[number].held
            for name, x in held.items():
                assert torch.equal(worker.parameters[name].detach(), x), (mode, number, name)


@pytest.mark.parametrize("mode", ["async", "bounded:2"])
@pytest.mark.parametrize("method", ["4", "5", "laconic", "laconic-min"])
def test_methods_need_no_rounds(method: str, mode: str) -> None:
    job = quick(**{"mode": mode} | method_options(method, mode))
    assert job.returns == "delta"
    outcome = run(job, 48 // job.every)
    assert outcome.accuracy() > 70


def test_without_rounds_a_change_counts_for_its_part_of_a_mean() -> None:
    job = Job(workers=4, mode="async", sends="changes", every=2, returns="weights")
    core = core_of(job, {"w": torch.zeros(3)}, [])
    core._weights.step({"w": torch.tensor([4.0, 8.0, -2.0])})
    assert core.parameters["w"].tolist() == [1.0, 2.0, -0.5]


# ----------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("returns", ["weights", "gradients", "delta"])
def test_bundled_or_layer_by_layer_is_the_same_when_nothing_is_lost(returns: str) -> None:
    job = quick(returns=returns, momentum=0.9)
    single, bundle = run(job, 12), run(job, 12, bundled=True)
    (only,) = bundle.core.parameters.values()
    flat = torch.cat([x.reshape(-1) for x in single.core.parameters.values()])
    assert torch.equal(only.reshape(-1), flat)
    for name, x in single.workers[0].parameters.items():
        assert torch.equal(bundle.workers[0].parameters[name], x)


# ----------------------------------------------------------------------------------------------------------- rejoin


class Crash(BaseException):
    """The end of a worker's life."""


class Mortal(Client):
    """A client that dies in an exchange: before its push, or after it and without the answer."""

    die_at, delivered = -1, False

    def exchange(self, sequence: int, frames: Any, score: Callable[[], float]) -> Reply:
        if sequence != self.die_at:
            return super().exchange(sequence, frames, score)
        if self.delivered:
            super().exchange(sequence, frames, score)
        raise Crash


@contextmanager
def serving(core: Core) -> Iterator[Server]:
    server = Server(core, "127.0.0.1:0")
    try:
        yield server
    finally:
        server.stop(0)


@pytest.mark.parametrize("mode, returns", [("async", "weights"), ("async", "delta"), ("bounded:2", "weights")])
@pytest.mark.parametrize("delivered", [False, True], ids=["push lost", "answer lost"])
def test_a_worker_that_comes_again_takes_up_its_work(mode: str, returns: str, delivered: bool) -> None:
    exchanges, dies_at = 15, 6
    job = quick(mode=mode, returns=returns)
    events: list[dict[str, Any]] = []
    task = build_task("mlp", "digits", seed=0)
    core = core_of(
        job, {name: p.detach().clone() for name, p in task.model.named_parameters()}, events, exchanges=exchanges
    )
    failed: list[BaseException] = []

    def life(number: int, incarnation: int, die_at: int) -> None:
        task = build_task("mlp", "digits", seed=0)
        client = client_of(server.port, core, number, incarnation, Mortal)
        assert isinstance(client, Mortal)
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
            try:
                life(number, 0, dies_at if number == 1 else -1)
            except Crash:
                life(number, 1, -1)
        except BaseException as error:
            failed.append(error)

    with serving(core) as server:
        threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed and not any(thread.is_alive() for thread in threads), failed
    assert [e["incarnation"] for e in events if e["event"] == "welcome" and e["worker"] == 1] == [0, 1]
    all_work_once(events, 2 * exchanges)
    applied_once(events)
    if job.update_mode.staleness_bound:
        assert staleness(events) <= job.update_mode.staleness_bound
    assert core.finished(exchanges) and core.all_gone()
