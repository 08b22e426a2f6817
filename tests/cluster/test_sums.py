"""Rounds that a server adds without decoding: exact sums, no float of a gradient, bad input, bytes and accuracy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import BATCH, TIMEOUT, Events, core_of, train
from summing_jobs import SLOTS, SumJob, gradients, sum_job
from test_modes import Sockets
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import laconic
from laconic import wire
from laconic.cluster.homomorphic import worker as worker_side
from laconic.cluster.homomorphic.server import pack_contribution, unpack_contribution
from laconic.cluster.homomorphic.worker import scale_frame
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job
from laconic.cluster.replies import Reply
from laconic.codecs import Chain
from laconic.errors import ConfigError, FrameError, LaconicError, NonFiniteError
from laconic.optim import Schedule
from laconic.packet import Packet, TensorSpec
from laconic.train import Shards, build_task
from laconic.train.methods import method_options
from laconic.train.worker import Worker
from laconic_lab.faults.invariants import applied_once
from waiting import eventually, in_threads

LOCAL_STEPS = {"every": 2, "sends": "changes"}


def test_replies_are_the_sums_that_the_codec_computes() -> None:
    run = SumJob(sum_job(workers=3))
    specs = {"w": "ef|thc:4", "b": "shared:16"}
    direct = {n: [laconic.Contributor(s, workers=3, worker=i) for i in range(3)] for n, s in specs.items()}
    carried: dict[str, Tensor] = {}
    for sequence in range(4):
        replies = run.round(sequence)
        for slot, (name, contributors) in enumerate(direct.items()):
            probes = [c.probe(name, gradients(i, sequence)[name], seed=sequence) for i, c in enumerate(contributors)]
            agreed = contributors[0].summing.agree(probes)
            scales = agreed if sequence == 0 else contributors[0].summing.carry(carried[name])
            carried[name] = agreed
            total = laconic.sums.add(*(c.encode(name, scales, seed=sequence) for c in contributors))
            for reply in replies:
                reply_scales, summed = unpack_contribution(reply.frames[slot])
                assert summed is not None and bytes(summed.numpy()) == bytes(total)
                assert torch.equal(laconic.decode(reply_scales), agreed)
    assert run.core.version == 4
    applied_once(run.events)


@pytest.mark.parametrize("options", [{}, LOCAL_STEPS], ids=["every step", "local steps"])
def test_job_over_sockets_equals_the_job_in_one_process(options: dict[str, Any]) -> None:
    job = sum_job(workers=3, checkpoint_every=4, **options)
    in_process, _ = train(job, 4)
    sockets = Sockets()
    core, workers = train(job, 4, link=sockets)
    sockets.stop()
    for name, x in core.parameters.items():
        assert torch.equal(x, in_process.parameters[name])
        assert all(torch.equal(x, worker.parameters[name]) for worker in workers)
    assert core.holds_current_weights and core.version == 4


class FloatDetector(TorchDispatchMode):
    """Records every tensor of floats that an operation makes in this thread."""

    made: list[tuple[str, tuple[int, ...]]] = []  # noqa: RUF012 - shared by the threads of a test

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.made.append((str(func), tuple(x.shape)))
        return out


def test_server_makes_no_float_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SumJob(sum_job(workers=4))
    run.round(0)

    def forbidden(*args: Any, **options: Any) -> None:
        raise AssertionError("the server decodes")

    with FloatDetector():  # the first use imports much of torch
        torch.ones(1)
    FloatDetector.made.clear()
    pushes = [run.frames(worker, 1) for worker in range(4)]

    def push(worker: int) -> Reply:
        with FloatDetector():
            return run.push(worker, 1, pushes[worker])

    with monkeypatch.context() as patch:
        for name in ("decode", "accumulate"):
            patch.setattr(Chain, name, forbidden)
        replies = in_threads(*(lambda w=w: push(w) for w in range(4)))
    assert not FloatDetector.made and run.core.version == 2
    with FloatDetector():  # it does detect a decode
        laconic.decode(unpack_contribution(replies[0].frames[0])[1])
    assert FloatDetector.made
    # A round leaves bytes and integers; the weights are those of the last upload.
    state, _ = run.core.state()
    assert all(x.dtype == torch.int32 for name, x in state.items() if name.startswith("scales/"))
    assert all(not x.any() for name, x in state.items() if name.startswith(("parameter/", "optimizer/")))


def test_memory_of_a_round_is_one_sum_per_slot_for_any_number_of_workers() -> None:
    held = []
    for workers in (2, 8):
        run = SumJob(sum_job(workers=workers))
        run.round(0)
        total: Any = run.core._mode.current_round.total  # type: ignore[union-attr]
        for worker in range(workers - 1):  # all but the last
            with run.core.receive(worker, 0, 1) as receiver:
                for slot, frame in enumerate(run.frames(worker, 1)):
                    receiver.add(slot, frame, deadline=time.monotonic() + TIMEOUT)
        held.append(total.nbytes)
        assert run.core.queued_nbytes == 0
    values = 7 * 1024 + 4 * 1024  # one byte for each value of 7 blocks, four for each of a block of 16 bits
    assert held[0] == held[1] or held[1] <= 2 * held[0] <= 4 * values


def test_mean_is_over_the_workers_that_pushed() -> None:
    run = SumJob(sum_job(workers=3, backup=1))
    for sequence, workers in ((0, [0, 1]), (1, [0, 1]), (2, [0, 2])):
        if 2 in workers:  # it has missed two rounds and starts with the others' scales
            run.workers[2].restart(run.core._weights.scale_frames(), empty=False)
        replies = run.round(sequence, workers)
        summed = unpack_contribution(replies[0].frames[0])[1]
        assert summed is not None and laconic.sums.count(summed) == 2
    mean = sum(gradients(worker, 2)["w"] for worker in (0, 2)) / 2
    error = (laconic.decode(summed) - mean).norm() / mean.norm()
    assert error < 0.3  # worker 0's residual is in it; a sum divided by three would be off by a third


def test_slow_worker_catches_up_with_the_uploaded_weights_of_another() -> None:
    job = sum_job(workers=3, backup=1, checkpoint_every=1000)
    events: Events = []
    first = build_task("mlp", "digits", seed=0)
    core = core_of(job, {n: p.detach().clone() for n, p in first.model.named_parameters()}, events, exchanges=12)
    workers = []
    for number in range(3):
        task = build_task("mlp", "digits", seed=0)
        shards = Shards(task.num_train, 3, BATCH, 0)
        workers.append(Worker(number, task, shards, job, Schedule(job.lr), InProcessConnection(core, number)))

    def wait_before(worker: Worker, sequences: tuple[int, ...], condition: Callable[[], Any]) -> None:
        examples = worker._examples

        def wait_and_return(at: Any, step: int = 0) -> Tensor:
            if at.sequence in sequences:
                eventually(condition, TIMEOUT)
            return examples(at, step)

        worker._examples = wait_and_return  # type: ignore[method-assign]

    # Worker 2 misses six sums; the others go on only after it has asked for weights, so that somebody must upload them.
    def asked_for_weights() -> bool:
        return bool(core._sum_rounds().uploads._waiting) or any(e["event"] == "deposit" for e in events)

    wait_before(workers[2], (0, 1), lambda: core.version >= 6)
    for fast in workers[:2]:
        wait_before(fast, (8,), asked_for_weights)

    def live(worker: Worker) -> None:
        worker.run(12)
        worker.connection.leave()

    in_threads(*(lambda worker=worker: live(worker) for worker in workers))
    assert core.version == 12 and core.holds_current_weights
    uploads = [e["version"] for e in events if e["event"] == "deposit"]
    assert len(uploads) >= 2 and uploads[-1] == 12  # for the slow worker, and at the end
    for name, x in core.parameters.items():
        assert torch.equal(x, workers[0].parameters[name])


class NanTask:
    """A task whose loss is NaN once."""

    def __init__(self, task: Any, nan_at: int) -> None:
        self._task, self._nan_at, self._calls = task, nan_at, 0

    def loss(self, batch: Any) -> Tensor:
        self._calls += 1
        loss: Tensor = self._task.loss(batch)
        return loss * float("nan") if self._calls == self._nan_at + 1 else loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


@pytest.mark.parametrize("nan_at", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("options", [{}, LOCAL_STEPS], ids=["every step", "local steps"])
def test_non_finite_values_make_all_workers_drop_the_same_round(
    nan_at: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = sum_job(workers=2, **options)
    init = Worker.__init__

    def init_with_nan(self: Worker, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if self.number == 1:
            self.task = NanTask(self.task, nan_at)  # type: ignore[assignment]

    monkeypatch.setattr(Worker, "__init__", init_with_nan)
    with caplog.at_level(logging.WARNING):
        core, workers = train(job, 5)
    assert [worker.encoder.summing.dropped for worker in workers if worker.encoder.summing] == [1, 1]
    assert "all workers drop this round" in caplog.text and core.version == 5
    for name, x in core.parameters.items():
        assert bool(torch.isfinite(x).all())
        assert all(torch.equal(x, worker.parameters[name]) for worker in workers)


def test_job_ends_after_many_dropped_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SumJob(sum_job(workers=1))
    monkeypatch.setattr(worker_side, "MAX_DROPPED", 2)
    run.round(0)
    worker = run.workers[0]
    for sequence in (1, 2):
        frames = [worker.encode(name, torch.full_like(x, float("inf")), seed=0) for name, x in SLOTS.items()]
        reply = dict(zip(SLOTS, run.push(0, sequence, frames).frames, strict=True))
        if sequence == 1:
            assert worker.read_reply(reply) is None
            continue
        with pytest.raises(NonFiniteError, match="smaller --lr"):
            worker.read_reply(reply)


def bad_contributions() -> dict[str, Callable[[], Any]]:
    def encoded(spec: str, workers: int = 2, shape: tuple[int, ...] = (70, 90)) -> Callable[[], Any]:
        def make() -> Any:
            contributor = laconic.Contributor(spec, workers=workers)
            probe = contributor.probe("w", torch.ones(shape))
            return pack_contribution(scale_frame(probe), contributor.encode("w", probe))

        return make

    def only_scales(values: Tensor) -> Callable[[], Any]:
        return lambda: pack_contribution(scale_frame(values), None)

    return {
        "codec": encoded("thc:2"), "workers": encoded("thc:4", workers=3), "shape": encoded("thc:4", shape=(90, 70)),
        "negative scales": only_scales(torch.full((7,), -1.0)), "number of scales": only_scales(torch.zeros(8)),
        "no bundle": lambda: laconic.encode(torch.zeros(70, 90), "none"),
        "zeros": lambda: pack_contribution(scale_frame(torch.zeros(7)), laconic.encode(SLOTS["w"], "thc:4")),
    }  # fmt: skip


@pytest.mark.parametrize("fault", list(bad_contributions()))
def test_malformed_contribution_is_not_added(fault: str) -> None:
    run, clean = SumJob(sum_job()), SumJob(sum_job())
    good = laconic.encode(torch.zeros(90), "none")
    with pytest.raises(FrameError) as caught:
        run.push(0, 0, [bad_contributions()[fault](), good])
    assert "\n" not in str(caught.value)
    assert [bytes(f) for f in run.round(0)[0].frames] == [bytes(f) for f in clean.round(0)[0].frames]


def test_weight_uploads_are_checked_before_they_are_stored() -> None:
    run = SumJob(sum_job())
    run.round(0)
    good = [laconic.encode(torch.ones_like(x), "none") for x in SLOTS.values()]
    nan = wire.pack(Packet("none", TensorSpec((90,), torch.float32), (torch.full((360,), 255, dtype=torch.uint8),)))
    for frames in ([good[0], bytes(nan)], good[:1], [good[1], good[0]]):
        with pytest.raises(FrameError):
            run.core.upload_weights(0, 0, 1, frames)
    run.core.upload_weights(0, 0, 0, good)  # an old version
    assert not run.core.parameters["w"].any() and not run.core.holds_current_weights
    run.core.upload_weights(0, 0, 1, good)
    assert bool(run.core.parameters["w"].all()) and run.core.holds_current_weights
    assert run.core.state()[1]["version"] == 1


@pytest.mark.parametrize("options, message", [
    ({"workers": 40_000_000}, "can add .* workers at a server, not 40000000"),
    ({"push": "qsgd:4"}, "returns=sum adds integers"), ({"push_small": "none"}, "returns=sum adds integers"),
    ({"push": "momentum:0.9|thc:4"}, "error feedback only"), ({"push": "randk:0.1|thc:4"}, "returns=sum adds integers"),
    ({"mode": "async"}, "needs mode sync"), ({"pull": "bf16"}, "needs pull=none"),
    ({**LOCAL_STEPS, "after": "best"}, "after=mean"),
], ids=str)  # fmt: skip
def test_jobs_that_cannot_be_summed_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        sum_job(**options)
    assert "\n" not in str(caught.value)


def test_accuracy_is_that_of_uncompressed_gradients() -> None:
    def accuracy(job: Job) -> float:
        return train(job, 30)[1][0].task.evaluate()["accuracy"]

    dense = accuracy(Job(**{"workers": 4, "lr": 0.05, **method_options("3")}))
    for push in ("ef|thc:4", "ef|thc:2"):
        assert accuracy(sum_job(workers=4, push=push)) > dense - 1.5, push


def test_bytes_are_as_predicted() -> None:
    exchanges = 4
    _, workers = train(sum_job(workers=4, checkpoint_every=1000), exchanges)
    values = sum(p.numel() for p in workers[1].parameters.values())
    slots = len(workers[1].parameters)
    scales = 4 * sum(-(-p.numel() // 1024) for p in workers[1].parameters.values())
    for counted, bits in ((workers[1].bytes_sent, 4), (workers[1].bytes_received, 6)):
        # Integers, their scales and the scales of the next round; the first round agrees on its scales before.
        predicted = exchanges * (values * bits / 8 + 2 * scales) + scales
        assert predicted < counted < 1.02 * predicted + exchanges * slots * 400
    upload = workers[0].bytes_sent - workers[1].bytes_sent  # weights and momentum, once
    assert 8 * values < upload < 8 * values + 200 * slots


HOSTILE_SCALES = {
    "another dtype": torch.tensor(1), "negative": torch.full((7,), -1, dtype=torch.int32),
    "floats": torch.ones(7, dtype=torch.float64), "too few": torch.zeros(6, dtype=torch.int32),
    "infinite": torch.full((7,), 0x7F800000, dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("part", [*HOSTILE_SCALES, "channel", "clocks"])
def test_hostile_checkpoint_is_refused_and_changes_nothing(part: str) -> None:
    job = SumJob(sum_job())
    job.round(0)
    tensors, meta = job.core.state()
    assert tensors["scales/w"].shape == (7,)
    hostile: dict[str, Any] = tensors | {"parameter/b": torch.ones(90), "parameter/w": torch.ones(70, 90)}
    changed = meta
    if part == "clocks":
        changed = meta | {"clocks": ["x", None]}
    else:
        hostile |= {"scales/w": HOSTILE_SCALES[part]} if part in HOSTILE_SCALES else {"channel/w": torch.ones(3)}
    with pytest.raises((LaconicError, ValueError)):
        job.core.load(hostile, changed)
    assert all(torch.equal(x, tensors[name]) for name, x in job.core.state()[0].items())
    assert job.core.version == 1 and job.core.state()[1] == meta
    job.core.load(tensors, meta)
