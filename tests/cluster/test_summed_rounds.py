"""Rounds that a server adds without decoding: exact, without a float of a gradient, and the same whatever happens."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import BATCH, core_of, seat, train
from test_faults import at_version, config_of, events_of, kill, weights_of
from test_modes import Sockets
from test_recovery import Run, same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import laconic
from laconic import wire
from laconic.cluster.checkpoint import Folder, load_latest
from laconic.cluster.homomorphic import server
from laconic.cluster.homomorphic import worker as worker_side
from laconic.cluster.homomorphic.server import unpack_part
from laconic.cluster.homomorphic.worker import Summands, scale_frame
from laconic.cluster.in_process import LocalLink
from laconic.cluster.job import Job
from laconic.cluster.replies import Reply, regather
from laconic.cluster.round import Contribution
from laconic.codecs import Chain
from laconic.errors import ConfigError, FrameError, NonFiniteError
from laconic.optim import Schedule
from laconic.packet import Packet, TensorSpec
from laconic.train import Shards, build_task
from laconic.train.in_process import run_in_threads
from laconic.train.launch import launch
from laconic.train.methods import method_options
from laconic.train.run import CHECKPOINTS, trainable
from laconic.train.worker import Worker
from laconic_lab.faults.invariants import applied_once

SOON = 10.0
SLOTS = {"w": torch.zeros(70, 90), "b": torch.zeros(90)}


def homomorphic(**options: Any) -> Job:
    return Job(**{"workers": 2, "lr": 0.05, **method_options("homomorphic"), **options})


def gradients(worker: int, sequence: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * sequence + worker)
    return {name: torch.randn(x.shape, generator=generator) for name, x in SLOTS.items()}


class Hand:
    """Workers of a core without training, moved by hand."""

    def __init__(self, job: Job, **options: Any) -> None:
        self.job, self.events = job, list[dict[str, Any]]()
        self.core = core_of(job, {name: x.clone() for name, x in SLOTS.items()}, self.events, **options)
        self.workers = [Summands(job, worker, SLOTS) for worker in range(job.workers)]
        for worker in range(job.workers):
            seat(self.core, worker)

    def push(self, worker: int, sequence: int, agreed: list[Any] | None = None) -> Contribution:
        mine = self.workers[worker]
        frames = []
        for slot, (name, x) in enumerate(gradients(worker, sequence).items()):
            if agreed is None:
                frames.append(mine.message(name, x, seed=sequence))
            else:
                probe = mine.probe(name, x, seed=sequence)
                frames.append(mine.settled(name, probe, mine.agreed(name, agreed[slot]), seed=sequence))
        return Contribution(worker, 0, sequence, frames)

    def settle(self, who: list[int], sequence: int) -> list[list[Any]]:
        def tell(worker: int) -> list[Any]:
            scales = [scale_frame(self.workers[worker].probe(n, x, seed=0)) for n, x in gradients(worker, 0).items()]
            return self.core.agree(worker, 0, sequence, scales, deadline=time.monotonic() + SOON)

        return together([lambda worker=worker: tell(worker) for worker in who])

    def round(self, sequence: int, who: list[int] | None = None, within: Any = None) -> list[Reply]:
        """One round of some workers; ``within`` is entered by every thread."""
        who = list(range(self.job.workers)) if who is None else who
        agreed = self.settle(who, sequence)[0] if sequence == 0 else None
        pushes = [self.push(worker, sequence, agreed) for worker in who]

        def go(push: Contribution) -> Reply:
            if within is None:
                return self.core.exchange(push, deadline=time.monotonic() + SOON)
            with within():
                return self.core.exchange(push, deadline=time.monotonic() + SOON)

        replies = together([lambda push=push: go(push) for push in pushes])
        for worker, reply in zip(who, replies, strict=True):
            assert self.workers[worker].take(dict(zip(SLOTS, reply.frames, strict=True))) is not None
        return replies


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return [found[number] for number in range(len(calls))]


# ------------------------------------------------------------------------------------------------------------- exact


def test_answers_are_the_sums_that_the_codec_makes_by_itself() -> None:
    hand = Hand(homomorphic(workers=3))
    specs = {"w": "ef|thc:4", "b": "shared:16"}
    direct = {n: [laconic.Contributor(s, workers=3, worker=i) for i in range(3)] for n, s in specs.items()}
    carried: dict[str, Tensor] = {}
    for sequence in range(4):
        replies = hand.round(sequence)
        for slot, (name, contributors) in enumerate(direct.items()):
            probes = [c.probe(name, gradients(i, sequence)[name], seed=sequence) for i, c in enumerate(contributors)]
            agreed = contributors[0].summing.agree(probes)
            scales = agreed if sequence == 0 else contributors[0].summing.carry(carried[name])
            carried[name] = agreed
            total = laconic.sums.add(*(c.encode(name, scales, seed=sequence) for c in contributors))
            for reply in replies:
                told, summed = unpack_part(reply.frames[slot])
                assert summed is not None and bytes(summed.numpy()) == bytes(total)
                assert torch.equal(laconic.decode(told), agreed)
    assert hand.core.version == 4
    applied_once(hand.events)


@pytest.mark.parametrize("options", [{}, {"every": 2, "sends": "changes"}], ids=["sync", "local steps"])
def test_a_job_over_sockets_is_the_job_in_one_process(options: dict[str, Any]) -> None:
    job = homomorphic(workers=3, checkpoint_every=4, **options)
    alone, _ = train(job, 6)
    sockets = Sockets()
    there, workers = train(job, 6, link=sockets)
    sockets.stop()
    for name, x in there.parameters.items():
        assert torch.equal(x, alone.parameters[name])
        assert all(torch.equal(x, worker.parameters[name]) for worker in workers)
    assert there.whole and there.version == 6


class NoFloats(TorchDispatchMode):
    """Every tensor of floats that anything makes, in this thread."""

    made: list[tuple[str, tuple[int, ...]]] = []  # noqa: RUF012 - of all threads of a test

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.made.append((str(func), tuple(x.shape)))
        return out


def test_no_float_of_a_gradient_exists_at_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(homomorphic(workers=4))
    hand.round(0)

    def forbidden(*args: Any, **options: Any) -> None:
        raise AssertionError("the server decodes")

    NoFloats.made.clear()
    pushes = [hand.push(worker, 1) for worker in range(4)]

    def go(push: Contribution) -> Reply:
        with NoFloats():
            return hand.core.exchange(push, deadline=time.monotonic() + SOON)

    with monkeypatch.context() as patch:
        for name in ("decode", "accumulate"):
            patch.setattr(Chain, name, forbidden)
        replies = together([lambda push=push: go(push) for push in pushes])
    assert not NoFloats.made and hand.core.version == 2
    with NoFloats():  # the detector sees what it is for
        laconic.decode(unpack_part(replies[0].frames[0])[1])
    assert NoFloats.made
    # What is left there of a round are bytes and integers; weights are those of the last deposit.
    state, _ = hand.core.state()
    assert all(x.dtype == torch.int32 for name, x in state.items() if name.startswith("scales/"))
    assert all(not x.any() for name, x in state.items() if name.startswith(("parameter/", "optimizer/")))


def test_memory_is_a_sum_per_slot_however_many_push() -> None:
    held = []
    for workers in (2, 8):
        hand = Hand(homomorphic(workers=workers))
        hand.round(0)
        total: Any = hand.core.current_round.total
        for worker in range(workers - 1):  # all but the last are in
            push = hand.push(worker, 1)
            with hand.core.receive(worker, 0, 1) as inbox:
                for slot, frame in enumerate(push.frames):
                    inbox.add(slot, frame, deadline=time.monotonic() + SOON)
        held.append(total.nbytes)
        assert hand.core.in_memory == 0
    values = 7 * 1024 + 4 * 1024  # a byte for each of 7 blocks, four for a block of 16 bits; lanes are in groups
    assert held[0] == held[1] or held[1] <= 2 * held[0] <= 4 * values


# --------------------------------------------------------------------------------------------------- some are missing


def test_a_mean_is_of_those_that_came() -> None:
    hand = Hand(homomorphic(workers=3, backup=1))
    for sequence, who in ((0, [0, 1]), (1, [0, 1]), (2, [0, 2])):
        if 2 in who:  # it has missed both: what it would push is out of date, so it begins where the others are
            hand.workers[2].load_scales(hand.core._weights.scale_frames())
        replies = hand.round(sequence, who)
        part = unpack_part(replies[0].frames[0])[1]
        assert part is not None and laconic.sums.count(part) == 2
    mean = sum(gradients(worker, 2)["w"] for worker in (0, 2)) / 2
    error = (laconic.decode(part) - mean).norm() / mean.norm()
    assert error < 0.3  # the residual of worker 0 is in it; a sum divided by three would be off by a third


def test_a_slow_worker_is_left_behind_and_catches_up_with_the_weights_of_another() -> None:
    job = homomorphic(workers=3, backup=1, checkpoint_every=1000)
    events: list[dict[str, Any]] = []
    first = build_task("mlp", "digits", seed=0)
    core = core_of(job, {n: p.detach().clone() for n, p in first.model.named_parameters()}, events, exchanges=12)
    workers = []
    for number in range(3):
        task = build_task("mlp", "digits", seed=0)
        shards = Shards(task.num_train, 3, BATCH, 0)
        workers.append(Worker(number, task, shards, job, Schedule(job.lr), LocalLink(core, number)))
    behind = workers[2]._examples

    def slowly(at: Any, step: int = 0) -> Tensor:
        if at.sequence in (0, 1):
            deadline = time.monotonic() + SOON
            while core.version < 6 and time.monotonic() < deadline:
                time.sleep(0.01)
        return behind(at, step)

    workers[2]._examples = slowly  # type: ignore[method-assign]

    def live(worker: Worker) -> None:
        worker.run(12)
        worker.link.leave()

    together([lambda worker=worker: live(worker) for worker in workers])
    assert core.version == 12 and core.whole
    deposits = [e["version"] for e in events if e["event"] == "deposit"]
    assert len(deposits) >= 2 and deposits[-1] == 12  # for the one that was behind, and at the end
    for name, x in core.parameters.items():
        assert torch.equal(x, workers[0].parameters[name])


def poisoned(worker: Worker, at: int) -> None:
    """From its batch at an exchange on a gradient comes that is not finite, once."""
    task: Any = worker.task
    loss, calls = task.loss, iter(range(1000))
    worker.task = Spoilt(task, lambda batch: loss(batch) * (float("nan") if next(calls) == at else 1.0))  # type: ignore[assignment]


class Spoilt:
    def __init__(self, task: Any, loss: Callable[[Any], Tensor]) -> None:
        self._task, self.loss = task, loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


@pytest.mark.parametrize("at", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("options", [{}, {"every": 2, "sends": "changes"}], ids=["sync", "local steps"])
def test_values_that_are_not_finite_make_all_workers_drop_the_same_round(
    at: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = homomorphic(workers=2, **options)
    init = Worker.__post_init__

    def spoil(self: Worker) -> None:
        init(self)
        if self.number == 1:
            poisoned(self, at)

    monkeypatch.setattr(Worker, "__post_init__", spoil)
    with caplog.at_level(logging.WARNING):
        core, workers = train(job, 6)
    assert [worker.summands.dropped for worker in workers if worker.summands] == [1, 1]
    assert "all drop this round" in caplog.text and core.version == 6
    for name, x in core.parameters.items():
        assert bool(torch.isfinite(x).all())
        assert all(torch.equal(x, worker.parameters[name]) for worker in workers)


def test_a_job_whose_values_stay_infinite_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(homomorphic(workers=1))
    monkeypatch.setattr(worker_side, "MOST_DROPPED", 2)
    hand.round(0)
    one = hand.workers[0]
    for sequence in (1, 2):
        frames = [one.message(name, torch.full_like(x, float("inf")), seed=0) for name, x in SLOTS.items()]
        reply = hand.core.exchange(Contribution(0, 0, sequence, frames), deadline=time.monotonic() + SOON)
        if sequence == 1:
            assert one.take(dict(zip(SLOTS, reply.frames, strict=True))) is None
            continue
        with pytest.raises(NonFiniteError, match="smaller --lr"):
            one.take(dict(zip(SLOTS, reply.frames, strict=True)))


# ------------------------------------------------------------------------------------------------------ recovery


def recovering(**options: Any) -> tuple[Job, int]:
    job = homomorphic(checkpoint_every=4, **options)
    return job, 12 // job.every


LOCAL = {"every": 2, "sends": "changes"}


@pytest.mark.parametrize("options", [{}, LOCAL, {"push": "thc:4", "push_small": "shared:8"}], ids=str)
def test_a_lost_server_and_lost_workers_change_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    job, exchanges = recovering(**options)
    clean = Run(job, tmp_path / "clean", exchanges)
    clean.go()
    first = Run(job, tmp_path / "hurt", exchanges)
    first.exchanges = exchanges // 2 + 1
    first.cores = [first.core()]  # it stops half way, somewhere after a checkpoint
    first.go(dies=0, at=exchanges // 2 - 1, delivered=True)
    again = Run(job, tmp_path / "hurt", exchanges)
    again._lives = 10  # the server remembers who has been here
    assert 0 < again.cores[0].version <= first.exchanges
    again.go(dies=1, at=exchanges - 1)
    same(again, clean)
    assert not [e for run in (first, again) for e in run.events[0] if e["event"] == "memory_lost"]


def test_a_worker_lost_in_the_first_round_changes_nothing(tmp_path: Path) -> None:
    job, _ = recovering()
    clean = Run(job, tmp_path / "clean", 3)
    clean.go()
    hurt = Run(job, tmp_path / "hurt", 3)
    hurt.go(dies=1, at=0)
    same(hurt, clean)


def test_several_servers_are_one(tmp_path: Path) -> None:
    job, exchanges = recovering()
    one = Run(job, tmp_path / "one", exchanges)
    one.go()
    two = Run(job, tmp_path / "two", exchanges, servers=2)
    two.go(dies=0, at=exchanges - 2, delivered=True)
    same(two, one)


def test_a_worker_without_its_files_goes_on_from_the_last_deposit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, exchanges = recovering()
    run = Run(job, tmp_path, exchanges)
    make = run.worker

    def worker(number: int, **options: Any) -> Worker:
        made = make(number, **options)
        if number == 1 and run._lives > 2:
            made.memory = Folder(tmp_path / "elsewhere")
        return made

    run.worker = worker  # type: ignore[method-assign]
    run.go(dies=1, at=exchanges - 2)
    assert [(e["worker"], e["version"]) for e in run.events[0] if e["event"] == "memory_lost"] == [(1, 8)]
    assert "empty memory" in caplog.text and run.cores[0].version == exchanges and run.cores[0].whole
    applied_once(run.events[0])


def test_a_server_lost_before_the_last_weights_are_there_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, exchanges = recovering()
    clean = Run(job, tmp_path / "clean", exchanges)
    clean.go()
    hurt = Run(job, tmp_path / "hurt", exchanges)
    made: list[Worker] = []
    make, deposit = hurt.worker, LocalLink.deposit

    def worker(number: int, **options: Any) -> Worker:
        made.append(make(number, **options))
        return made[-1]

    def crash(self: LocalLink, version: int, frames: Any) -> None:
        if version == exchanges and len(made) == 2:
            made.append(made[0])
            hurt.cores = [hurt.core()]  # what is on the disk
            for one in made:
                one.link.core = hurt.cores[0]  # type: ignore[attr-defined]
            raise regather()
        deposit(self, version, frames)

    hurt.worker = worker  # type: ignore[method-assign]
    monkeypatch.setattr(LocalLink, "deposit", crash)
    hurt.go()
    assert len(made) == 3 and hurt.cores[0].whole and hurt.cores[0].version == exchanges
    same(hurt, clean)


@pytest.mark.slow
def test_killed_processes_are_started_again_and_the_run_ends_as_in_one_process(tmp_path: Path) -> None:
    config, hurt = config_of("homomorphic"), tmp_path / "hurt"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as processes have
    try:
        clean, _ = train(config.job, config.exchanges)
    finally:
        torch.set_num_threads(threads)
    killers = [at_version(hurt, 25, lambda: kill("worker", hurt)), at_version(hurt, 47, lambda: kill("server", hurt))]
    launch({hurt: config})
    for killer in killers:
        killer.join(1)
    assert [e["version"] for e in events_of(hurt) if e["event"] == "resumed"] == [40]
    found = weights_of(hurt)
    assert len(found) == len(clean.parameters)
    for name, x in clean.parameters.items():
        assert torch.equal(found[f"parameter/{name}"], x), name


@pytest.mark.slow
def test_a_killed_worker_finds_its_renewed_subspaces_again(tmp_path: Path) -> None:
    """The server holds none of it but what was deposited: T=5 and checkpoints fall apart."""
    config = replace(config_of("homomorphic", checkpoint_every=8), layers="subspace:0.1,T=5", iterations=24)
    task = config.task()
    residents = config.residents(task)
    assert residents is not None
    slots = {name: x.clone() for name, x in trainable(task.model).items()}
    clean = core_of(config.job, slots, exchanges=24, resident=residents)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as processes have
    try:
        workers = []
        for number in range(config.job.workers):
            own = config.task()
            shards = Shards(own.num_train, config.job.workers, config.batch, config.job.seed)
            workers.append(Worker(number, own, shards, config.job, config.rates(), LocalLink(clean, number)))
        assert not run_in_threads(workers, 24)
    finally:
        torch.set_num_threads(threads)
    killer = at_version(tmp_path, 12, lambda: kill("worker", tmp_path))
    launch({tmp_path: config})
    killer.join(1)
    assert [e["event"] for e in events_of(tmp_path)].count("gather") >= 1
    found = load_latest(tmp_path / CHECKPOINTS)
    assert found is not None and found.meta["version"] == 24
    wanted = {f"parameter/{name}": x for name, x in clean.parameters.items()}
    wanted |= {f"resident/{name}": x for name, x in clean.resident.items()}
    assert len(clean.resident) == 2
    for name, x in wanted.items():
        assert torch.equal(found.tensors[name], x), name


# --------------------------------------------------------------------------------------------------- bad input, jobs


def bad_parts() -> dict[str, Callable[[Hand], Any]]:
    def of(spec: str, workers: int = 2, shape: tuple[int, ...] = (70, 90)) -> Callable[[Hand], Any]:
        def make(hand: Hand) -> Any:
            one = laconic.Contributor(spec, workers=workers)
            probe = one.probe("w", torch.ones(shape))
            return worker_side.pack_part(scale_frame(probe), one.encode("w", probe))

        return make

    def scales(values: Tensor) -> Callable[[Hand], Any]:
        return lambda hand: worker_side.pack_part(scale_frame(values), None)

    return {
        "codec": of("thc:2"),
        "workers": of("thc:4", workers=3),
        "shape": of("thc:4", shape=(90, 70)),
        "negative scales": scales(torch.full((7,), -1.0)),
        "number of scales": scales(torch.zeros(8)),
        "no bundle": lambda hand: laconic.encode(torch.zeros(70, 90), "none"),
        "zeros": lambda hand: worker_side.pack_part(scale_frame(torch.zeros(7)), laconic.encode(SLOTS["w"], "thc:4")),
    }


@pytest.mark.parametrize("kind", list(bad_parts()))
def test_nothing_malformed_is_added(kind: str) -> None:
    hand, clean = Hand(homomorphic()), Hand(homomorphic())
    good = laconic.encode(torch.zeros(90), "none")
    with pytest.raises(FrameError) as caught:
        hand.core.exchange(Contribution(0, 0, 0, [bad_parts()[kind](hand), good]), deadline=time.monotonic() + SOON)
    assert "\n" not in str(caught.value)
    assert [bytes(f) for f in hand.round(0)[0].frames] == [bytes(f) for f in clean.round(0)[0].frames]


def test_deposits_are_checked_before_they_count() -> None:
    hand = Hand(homomorphic())
    hand.round(0)
    good = [laconic.encode(torch.ones_like(x), "none") for x in SLOTS.values()]
    bad = wire.pack(Packet("none", TensorSpec((90,), torch.float32), (torch.full((360,), 255, dtype=torch.uint8),)))
    for version, frames in ((1, [good[0], bytes(bad)]), (1, good[:1]), (1, [good[1], good[0]])):
        with pytest.raises(FrameError):
            hand.core.deposit(0, 0, version, frames)
    hand.core.deposit(0, 0, 0, good)  # of a version that has passed
    assert not hand.core.parameters["w"].any() and not hand.core.whole
    hand.core.deposit(0, 0, 1, good)
    assert bool(hand.core.parameters["w"].all()) and hand.core.whole
    assert hand.core.state()[1]["version"] == 1


@pytest.mark.parametrize(
    "options, line",
    [
        ({"workers": 40_000_000}, "can add .* workers at a server, not 40000000"),
        ({"push": "qsgd:4"}, "returns=sum adds integers"),
        ({"push_small": "none"}, "returns=sum adds integers"),
        ({"push": "momentum:0.9|thc:4"}, "error feedback only"),
        ({"push": "randk:0.1|thc:4"}, "returns=sum adds integers"),
        ({"mode": "async"}, "needs mode sync"),
        ({"pull": "bf16"}, "give pull=none"),
        ({"every": 2, "sends": "changes", "after": "best"}, "after=mean"),
    ],
    ids=str,
)
def test_jobs_that_cannot_be_summed_are_refused_before_anything_starts(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        homomorphic(**options)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------- accuracy and bytes


@pytest.fixture(scope="module")
def dense() -> float:
    _, workers = train(Job(**{"workers": 4, "lr": 0.05, **method_options("3")}), 30)
    return workers[0].task.evaluate()["accuracy"]


@pytest.mark.parametrize("push", ["ef|thc:4", "ef|thc:2"])
def test_accuracy_is_that_of_uncompressed_gradients(push: str, dense: float) -> None:
    _, workers = train(homomorphic(workers=4, push=push), 30)
    assert workers[0].task.evaluate()["accuracy"] > dense - 1.5


def test_bytes_are_as_predicted() -> None:
    exchanges = 4
    job = homomorphic(workers=4, checkpoint_every=1000)
    _, workers = train(job, exchanges)
    values = sum(p.numel() for p in workers[1].parameters.values())
    slots = len(workers[1].parameters)
    scales = 4 * sum(-(-p.numel() // 1024) for p in workers[1].parameters.values())
    for counted, bits in ((workers[1].bytes_sent, 4), (workers[1].bytes_received, 6)):
        # Integers, scales of their own and scales of the next round; the first round settles its scales before.
        predicted = exchanges * (values * bits / 8 + 2 * scales) + scales
        assert predicted < counted < 1.02 * predicted + exchanges * slots * 400
    deposit = workers[0].bytes_sent - workers[1].bytes_sent  # weights and momentum, once
    assert 8 * values < deposit < 8 * values + 200 * slots


# --------------------------------------------------------------------------------------------- known beforehand


@pytest.mark.parametrize("shape", [(1,), (70, 70), (5000,)])
@pytest.mark.parametrize("spec", ["shared:8", "ef|thc:4", "thc:3", "shared:16"])
def test_a_message_read_at_a_glance_is_what_it_is_read_word_by_word(spec: str, shape: tuple[int, ...]) -> None:
    job = Job(workers=3, push=spec, push_small=spec, returns="sum")
    like = {"w": torch.zeros(shape)}
    (how,) = job.slot_sums(like)
    worker = Summands(job, 0, like)
    probe = worker.probe("w", torch.randn(shape, generator=torch.Generator().manual_seed(1)), seed=5)
    message = bytes(worker.settled("w", probe, probe, seed=5))
    assert how.mould is not None
    found = how.mould.read(message)
    assert found is not None
    scales, packet = server._read(how, message)
    assert torch.equal(found[0], scales) and packet is not None
    assert found[1].spec == packet.spec and found[1].codec == packet.codec
    assert all(torch.equal(a, b) for a, b in zip(found[1].sections, packet.sections, strict=True))
    for bit in range(8 * len(message)) if len(message) < 500 else range(0, 8 * len(message), 61):
        bent = bytearray(message)
        bent[bit // 8] ^= 1 << bit % 8
        assert how.mould.read(bent) is None, bit
    assert how.mould.read(message[:-1]) is None and how.mould.read(message + b"\0") is None


def test_a_message_that_looks_different_is_read_word_by_word() -> None:
    job = Job(workers=2, push="shared:8", push_small="shared:8", returns="sum")
    like = {"w": torch.zeros(10)}
    (how,) = job.slot_sums(like)
    assert how.mould is not None
    only_scales = server.pack_part(laconic.encode(torch.ones(1), "none"), None)
    assert how.mould.read(only_scales) is None and server.Part.of(how, only_scales).packet is None
    (nothing,) = job.slot_sums({"w": torch.zeros(0)})
    assert nothing.mould is None
