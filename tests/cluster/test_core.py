"""The invariants of the server's core, checked from its event log and its weights.

Gradients are integers that differ by worker and exchange, so a lost or repeated push shows in the sum.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from helpers import Events, core_of, job_of, open_session

from laconic.cluster.core import Core
from laconic.cluster.job import Job
from laconic.cluster.protocol import NOTHING_LEFT
from laconic.cluster.replies import RefusedError
from laconic.errors import ConfigError, FileError, FrameError
from laconic.frames import encode
from laconic_lab.faults.invariants import all_work_once, applied_once, staleness
from waiting import in_threads

TIMEOUT = 10.0


def new_core(job: Job, events: Events | None = None, **options: Any) -> Core:
    """Return a core whose workers have joined."""
    core = core_of(job, {"w": torch.zeros(4, 4), "b": torch.zeros(4)}, events, **options)
    for worker in range(job.workers):
        open_session(core, worker)
    return core


def gradient_value(worker: int, sequence: int) -> float:
    """Return a value that is exact in float32 and not a sum of others."""
    return float(4 ** (worker + 2 * sequence))


def push(worker: int, sequence: int, *, incarnation: int = 0, value: float | None = None) -> tuple[Any, ...]:
    value = gradient_value(worker, sequence) if value is None else value
    frames = [encode(torch.full((4, 4), value), "none"), encode(torch.full((4,), value), "none")]
    return worker, incarnation, sequence, frames


def exchange(core: Core, request: tuple[Any, ...]) -> Any:
    return core.exchange(*request, deadline=time.monotonic() + TIMEOUT)


def both(core: Core, sequence: int) -> None:
    in_threads(*(lambda worker=worker: exchange(core, push(worker, sequence)) for worker in range(2)))


def test_round_is_the_mean_in_any_order_of_arrival() -> None:
    events: Events = []
    core = new_core(job_of(), events)
    for sequence in range(5):
        both(core, sequence)
    expected = -sum((gradient_value(0, s) + gradient_value(1, s)) / 2 for s in range(5))
    assert torch.equal(core.parameters["w"], torch.full((4, 4), expected)) and core.version == 5
    applied_once(events)


def test_repeated_push_is_answered_and_not_applied_again() -> None:
    events: Events = []
    core = new_core(job_of(), events)
    both(core, 0)
    before = core.parameters["w"].clone()
    for worker in (0, 1, 1):
        assert exchange(core, push(worker, 0)).sequence == 1
    assert torch.equal(core.parameters["w"], before) and core.version == 1
    assert [e["event"] for e in events].count("duplicate") == 3
    both(core, 1)
    applied_once(events)


def test_push_repeated_within_its_round_counts_once() -> None:
    events: Events = []
    core = new_core(job_of(), events)
    first = threading.Thread(target=exchange, args=(core, push(0, 0)))
    again = threading.Thread(target=exchange, args=(core, push(0, 0)))
    first.start()
    while not events or events[-1]["event"] != "push":
        time.sleep(0.001)
    again.start()
    time.sleep(0.05)
    assert core.version == 0  # the same worker twice is not two workers
    exchange(core, push(1, 0))
    first.join(TIMEOUT)
    again.join(TIMEOUT)
    assert torch.equal(core.parameters["b"], torch.full((4,), -(gradient_value(0, 0) + gradient_value(1, 0)) / 2))
    applied_once(events)


@pytest.mark.parametrize(
    "out_of_turn, reason, resume_at",
    [
        (push(0, 3), "ahead", 2),
        (push(0, 0), "stale", 2),
        (push(0, 2, incarnation=7), "regather", None),  # not welcomed by this server
        (push(5, 2), "worker", None),
    ],
)
def test_push_out_of_turn_is_refused_with_the_exchange_to_resume_at(
    out_of_turn: tuple[Any, ...], reason: str, resume_at: int | None
) -> None:
    core = new_core(job_of())
    both(core, 0)
    both(core, 1)
    before = core.parameters["w"].clone()
    with pytest.raises(RefusedError) as caught:
        exchange(core, out_of_turn)
    assert (caught.value.reason, caught.value.resume_at) == (reason, resume_at)
    assert torch.equal(core.parameters["w"], before)


def test_older_incarnation_is_refused_at_hello_and_at_a_push() -> None:
    core = new_core(job_of())
    core.welcome(0, 3, core.slots.fingerprint)
    with pytest.raises(RefusedError, match="replaced"):
        core.welcome(0, 2, core.slots.fingerprint)
    with pytest.raises(RefusedError, match="replaced"):
        exchange(core, push(0, 0, incarnation=0))


def test_hello_with_another_model_is_refused() -> None:
    core = new_core(job_of())
    with pytest.raises(RefusedError, match="another model"):
        core.welcome(0, 1, "0123456789abcdef")


def bad_pushes() -> dict[str, list[bytes]]:
    good = encode(torch.ones(4), "none")
    matrix = encode(torch.ones(4, 4), "none")
    return {
        "shape": [encode(torch.ones(4, 5), "none"), good],
        "dtype": [encode(torch.ones(4, 4, dtype=torch.float64), "none"), good],
        "damaged": [matrix[:-1] + bytes([matrix[-1] ^ 1]), good], "truncated": [matrix[:-3], good],
        "slot missing": [matrix], "swapped": [good, matrix], "empty": [b"", good],
    }  # fmt: skip


@pytest.mark.parametrize("kind", list(bad_pushes()))
def test_malformed_push_changes_nothing(kind: str) -> None:
    core = new_core(job_of())
    with pytest.raises(FrameError):
        exchange(core, (0, 0, 0, bad_pushes()[kind]))
    both(core, 0)  # the round is not affected
    assert torch.equal(core.parameters["w"], torch.full((4, 4), -(gradient_value(0, 0) + gradient_value(1, 0)) / 2))


def test_round_ends_without_backup_workers_and_they_catch_up() -> None:
    core = new_core(job_of(workers=3, backup=1))
    for sequence in range(2):
        both(core, sequence)
    assert core.version == 2
    with pytest.raises(RefusedError) as caught:  # the third worker is at exchange 0
        exchange(core, push(2, 0))
    assert caught.value.resume_at == 2


def test_wait_ends_at_the_deadline() -> None:
    core = new_core(job_of())
    began = time.monotonic()
    with pytest.raises(RefusedError, match="worker 1 to push exchange 0"):
        core.exchange(*push(0, 0), deadline=time.monotonic() + 0.2)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("mode, bound", [("bounded:1", 1), ("bounded:3", 3), ("async", None)])
def test_staleness_stays_within_the_bound_and_all_work_is_done_once(mode: str, bound: int | None) -> None:
    events: Events = []
    core = new_core(job_of(workers=3, mode=mode), events, exchanges=20)
    pauses = (0.0, 0.002, 0.02)  # the last worker is ten times slower
    shares = [0, 0, 0]

    def work(worker: int) -> None:
        at = core.snapshot(worker, 0, deadline=time.monotonic() + TIMEOUT)
        while at.ticket != NOTHING_LEFT:
            time.sleep(pauses[worker])
            at = exchange(core, push(worker, at.sequence, value=1.0))
            shares[worker] += 1
        core.leave(worker, 0)

    in_threads(*(lambda worker=worker: work(worker) for worker in range(3)))
    assert core.version == 60 == sum(shares) and core.finished(20)
    applied_once(events)
    all_work_once(events, 60)
    if bound is None:
        assert shares[2] < max(shares[:2])  # a slow worker does less
        assert staleness(events) > 3
    else:
        assert 0 < staleness(events) <= bound


@pytest.mark.parametrize("mode", ["async", "bounded:2"])
def test_work_of_a_lost_worker_is_done_by_its_next_incarnation_or_by_others(mode: str) -> None:
    events: Events = []
    core = new_core(job_of(mode=mode), events, exchanges=4)
    soon = time.monotonic() + TIMEOUT
    lost = core.snapshot(0, 0, deadline=soon).ticket
    open_session(core, 0, incarnation=1)
    again = core.snapshot(0, 1, deadline=soon)
    assert again.ticket == lost
    with pytest.raises(RefusedError, match="replaced"):
        exchange(core, push(0, 0))
    core.leave(0, 1)  # for good
    at = core.snapshot(1, 0, deadline=soon)
    while at.ticket != NOTHING_LEFT:
        at = exchange(core, push(1, at.sequence, value=1.0))
    all_work_once(events, 8)
    assert core.finished(4)


def test_discount_shortens_the_step_of_a_stale_gradient() -> None:
    core = new_core(job_of(mode="async", discount=True), exchanges=2)
    soon = time.monotonic() + TIMEOUT
    for worker in (0, 1):
        core.snapshot(worker, 0, deadline=soon)
    exchange(core, push(0, 0, value=1.0))
    assert float(core.parameters["b"][0]) == -1.0
    exchange(core, push(1, 0, value=1.0))  # one update stale
    assert float(core.parameters["b"][0]) == -1.5


def test_restored_queue_hands_out_unfinished_tickets_again() -> None:
    job = job_of(mode="async")
    original = new_core(job, exchanges=3)
    soon = time.monotonic() + TIMEOUT
    assert [original.snapshot(worker, 0, deadline=soon).ticket for worker in (0, 1)] == [0, 1]
    assert exchange(original, push(1, 0)).ticket == 2
    restored = new_core(job, exchanges=3)
    restored.load(*original.state())
    open_session(restored, 1, incarnation=1)
    assert restored.snapshot(1, 1, deadline=soon).ticket == 0


@pytest.mark.parametrize("options", [{}, {"mode": "async"}, {"returns": "delta", "pull": "qsgd:4"}], ids=str)
def test_overflow_of_the_weights_ends_the_job_for_all_workers(options: dict[str, Any]) -> None:
    events: Events = []
    core = new_core(job_of(lr=10.0, **options), events, exchanges=5)
    reasons: list[str] = []

    def work(worker: int) -> None:
        try:
            at = core.snapshot(worker, 0, deadline=time.monotonic() + TIMEOUT).sequence
            while True:
                at = exchange(core, push(worker, at, value=3e38)).sequence
        except RefusedError as error:
            reasons.append(error.reason)

    in_threads(lambda: work(0), lambda: work(1))
    assert reasons == ["diverged"] * 2 and core.failure is not None and "--lr" in core.failure
    assert [e["event"] for e in events].count("diverged") >= 1


def test_restored_core_continues_with_the_same_bits() -> None:
    job = job_of(push="none", pull="ef|topk:0.3", returns="gradients", momentum=0.9)
    original = new_core(job)
    for sequence in range(3):
        both(original, sequence)
    tensors, meta = original.state()
    restored = new_core(job)
    restored.load(tensors, meta)
    for core in (original, restored):
        both(core, 3)
    assert torch.equal(original.parameters["w"], restored.parameters["w"]) and restored.version == 4
    with pytest.raises(RefusedError, match="another model"):
        core_of(job, {"other": torch.zeros(2)}).load(tensors, meta)


@pytest.mark.parametrize("options", [
    {"workers": 0}, {"mode": "bounded"}, {"mode": "bounded:0"}, {"mode": "eventually"}, {"backup": 2},
    {"mode": "async", "returns": "gradients"}, {"every": 5}, {"sends": "changes"}, {"after": "best"},
    {"push": "topk:2"}, {"lr": float("nan")}, {"returns": "nothing"},
], ids=str)  # fmt: skip
def test_invalid_job_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        job_of(**options)
    assert "\n" not in str(caught.value)


def test_checkpoint_without_parameters_or_with_others_is_refused() -> None:
    core = new_core(job_of())
    tensors, meta = core.state()
    empty = {name: x for name, x in tensors.items() if not name.startswith("parameter/")}
    others = ({"parameter/w": torch.zeros(16)}, {"parameter/x": torch.zeros(4)}, {"weights/w": torch.zeros(1)})
    for bad in ({}, empty, *({**tensors, **other} for other in others), {**tensors, "optimizer/b": torch.zeros(5)}):
        with pytest.raises(FileError, match="the checkpoint"):
            core.load(bad, meta)
    core.load(tensors, meta)
