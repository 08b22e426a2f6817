"""The promises of the server's core, checked from the history that it writes and the numbers that it holds.

Gradients are whole numbers that tell worker and exchange apart, so a lost or doubled push shows in the sum.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from helpers import core_of, open_session

from laconic.cluster.core import Core
from laconic.cluster.job import Job
from laconic.cluster.protocol import NOTHING_LEFT
from laconic.cluster.replies import RefusedError
from laconic.errors import ConfigError, FrameError
from laconic.frames import encode
from laconic_lab.faults.invariants import all_work_once, applied_once, staleness

SOON = 10.0


def plain(**options: Any) -> Job:
    return Job(**{"workers": 2, "lr": 1.0, "momentum": 0.0} | options)


def small(job: Job, events: list[dict[str, Any]] | None = None, **options: Any) -> Core:
    core = core_of(job, {"w": torch.zeros(4, 4), "b": torch.zeros(4)}, events, **options)
    for worker in range(job.workers):
        open_session(core, worker)
    return core


def mark(worker: int, sequence: int) -> float:
    """A gradient's value: exact in float32, and no sum of others."""
    return float(4 ** (worker + 2 * sequence))


def push(worker: int, sequence: int, *, incarnation: int = 0, value: float | None = None) -> tuple[Any, ...]:
    value = mark(worker, sequence) if value is None else value
    frames = [encode(torch.full((4, 4), value), "none"), encode(torch.full((4,), value), "none")]
    return worker, incarnation, sequence, frames


def exchange(core: Core, one: tuple[Any, ...]) -> Any:
    return core.exchange(*one, deadline=time.monotonic() + SOON)


def both(core: Core, sequence: int) -> None:
    threads = [threading.Thread(target=exchange, args=(core, push(worker, sequence))) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)


def test_a_round_is_the_mean_whoever_comes_first() -> None:
    events: list[dict[str, Any]] = []
    core = small(plain(), events)
    for sequence in range(5):
        both(core, sequence)
    wanted = -sum((mark(0, s) + mark(1, s)) / 2 for s in range(5))
    assert torch.equal(core.parameters["w"], torch.full((4, 4), wanted)) and core.version == 5
    applied_once(events)


def test_a_push_sent_again_is_answered_and_not_applied_again() -> None:
    events: list[dict[str, Any]] = []
    core = small(plain(), events)
    both(core, 0)
    before = core.parameters["w"].clone()
    for worker in (0, 1, 1):
        assert exchange(core, push(worker, 0)).sequence == 1
    assert torch.equal(core.parameters["w"], before) and core.version == 1
    assert [e["event"] for e in events].count("duplicate") == 3
    both(core, 1)
    applied_once(events)


def test_a_push_broken_off_and_repeated_within_its_round_counts_once() -> None:
    events: list[dict[str, Any]] = []
    core = small(plain(), events)
    first = threading.Thread(target=exchange, args=(core, push(0, 0)))
    again = threading.Thread(target=exchange, args=(core, push(0, 0)))
    first.start()
    while not events or events[-1]["event"] != "push":
        time.sleep(0.001)
    again.start()
    time.sleep(0.05)
    assert core.version == 0  # twice the same worker is not two workers
    exchange(core, push(1, 0))
    first.join(SOON)
    again.join(SOON)
    assert torch.equal(core.parameters["b"], torch.full((4,), -(mark(0, 0) + mark(1, 0)) / 2))
    applied_once(events)


@pytest.mark.parametrize(
    "one, reason, resume_at",
    [
        (push(0, 3), "ahead", 2),
        (push(0, 0), "stale", 2),
        (push(0, 2, incarnation=7), "regather", None),  # a life that this server has not welcomed
        (push(5, 2), "worker", None),
    ],
)
def test_what_is_out_of_turn_is_refused_and_told_where_to_go_on(
    one: tuple[Any, ...], reason: str, resume_at: int | None
) -> None:
    core = small(plain())
    both(core, 0)
    both(core, 1)
    before = core.parameters["w"].clone()
    with pytest.raises(RefusedError) as caught:
        exchange(core, one)
    assert (caught.value.reason, caught.value.resume_at) == (reason, resume_at)
    assert torch.equal(core.parameters["w"], before)


def test_an_older_life_of_a_worker_is_refused_at_the_door_and_behind_it() -> None:
    core = small(plain())
    core.welcome(0, 3, core.slots.fingerprint)
    with pytest.raises(RefusedError, match="replaced"):
        core.welcome(0, 2, core.slots.fingerprint)
    with pytest.raises(RefusedError, match="replaced"):
        exchange(core, push(0, 0, incarnation=0))


def test_another_model_is_refused() -> None:
    core = small(plain())
    with pytest.raises(RefusedError, match="another model"):
        core.welcome(0, 1, "0123456789abcdef")


def bad_pushes() -> dict[str, list[bytes]]:
    good = encode(torch.ones(4), "none")
    nan = bytearray(encode(torch.full((4, 4), 1.0), "none"))
    wrong = bytearray(encode(torch.ones(4, 4), "none"))
    wrong[-1] ^= 1
    return {
        "shape": [encode(torch.ones(4, 5), "none"), good],
        "dtype": [encode(torch.ones(4, 4, dtype=torch.float64), "none"), good],
        "damage": [bytes(wrong), good],
        "cut": [bytes(nan[:-3]), good],
        "missing": [encode(torch.ones(4, 4), "none")],
        "swapped": [good, encode(torch.ones(4, 4), "none")],
        "nothing": [b"", good],
    }


@pytest.mark.parametrize("kind", list(bad_pushes()))
def test_nothing_malformed_changes_anything(kind: str) -> None:
    core = small(plain())
    with pytest.raises(FrameError):
        exchange(core, (0, 0, 0, bad_pushes()[kind]))
    both(core, 0)  # the round is as if it had never come
    assert torch.equal(core.parameters["w"], torch.full((4, 4), -(mark(0, 0) + mark(1, 0)) / 2))


def test_a_round_goes_on_without_backup_workers_and_they_catch_up() -> None:
    core = small(plain(workers=3, backup=1))
    for sequence in range(2):
        both(core, sequence)
    assert core.version == 2
    with pytest.raises(RefusedError) as caught:  # the third was at 0: what it pushes is out of date
        exchange(core, push(2, 0))
    assert caught.value.resume_at == 2


def test_waiting_ends_at_the_deadline() -> None:
    core = small(plain())
    began = time.monotonic()
    with pytest.raises(RefusedError, match="worker 1 to push exchange 0"):
        core.exchange(*push(0, 0), deadline=time.monotonic() + 0.2)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("mode, bound", [("bounded:1", 1), ("bounded:3", 3), ("async", None)])
def test_no_gradient_is_older_than_the_bound_and_all_work_is_done_once(mode: str, bound: int | None) -> None:
    events: list[dict[str, Any]] = []
    core = small(plain(workers=3, mode=mode), events, exchanges=20)
    pauses = (0.0, 0.002, 0.02)  # the last one is ten times slower
    shares = [0, 0, 0]

    def work(worker: int) -> None:
        at = core.snapshot(worker, 0, deadline=time.monotonic() + SOON)
        while at.ticket != NOTHING_LEFT:
            time.sleep(pauses[worker])
            at = exchange(core, push(worker, at.sequence, value=1.0))
            shares[worker] += 1
        core.leave(worker, 0)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert core.version == 60 == sum(shares) and core.finished(20)
    applied_once(events)
    all_work_once(events, 60)
    if bound is None:
        assert shares[2] < max(shares[:2])  # who is slow does less
        assert staleness(events) > 3
    else:
        assert 0 < staleness(events) <= bound


@pytest.mark.parametrize("mode", ["async", "bounded:2"])
def test_work_of_a_lost_worker_is_done_by_its_next_life_or_by_others(mode: str) -> None:
    events: list[dict[str, Any]] = []
    core = small(plain(mode=mode), events, exchanges=4)
    soon = time.monotonic() + SOON
    lost = core.snapshot(0, 0, deadline=soon).ticket
    open_session(core, 0, incarnation=1)
    again = core.snapshot(0, 1, deadline=soon)
    assert again.ticket == lost
    with pytest.raises(RefusedError, match="replaced"):
        exchange(core, push(0, 0))
    core.leave(0, 1)  # and nobody comes back
    at = core.snapshot(1, 0, deadline=soon)
    while at.ticket != NOTHING_LEFT:
        at = exchange(core, push(1, at.sequence, value=1.0))
    all_work_once(events, 8)
    assert core.finished(4)


def test_a_step_is_shortened_by_what_its_gradient_missed() -> None:
    core = small(plain(mode="async", discount=True), exchanges=2)
    soon = time.monotonic() + SOON
    for worker in (0, 1):
        core.snapshot(worker, 0, deadline=soon)
    exchange(core, push(0, 0, value=1.0))
    assert float(core.parameters["b"][0]) == -1.0
    exchange(core, push(1, 0, value=1.0))  # missed one
    assert float(core.parameters["b"][0]) == -1.5


def test_a_saved_state_without_rounds_gives_out_again_what_was_out() -> None:
    job = plain(mode="async")
    there = small(job, exchanges=3)
    soon = time.monotonic() + SOON
    assert [there.snapshot(worker, 0, deadline=soon).ticket for worker in (0, 1)] == [0, 1]
    assert exchange(there, push(1, 0)).ticket == 2
    back = small(job, exchanges=3)
    back.load(*there.state())
    open_session(back, 1, incarnation=1)
    assert back.snapshot(1, 1, deadline=soon).ticket == 0


@pytest.mark.parametrize("options", [{}, {"mode": "async"}, {"returns": "delta", "pull": "qsgd:4"}], ids=str)
def test_weights_that_overflow_end_the_job_and_everybody_is_told(options: dict[str, Any]) -> None:
    events: list[dict[str, Any]] = []
    core = small(plain(lr=10.0, **options), events, exchanges=5)
    told: list[str] = []

    def work(worker: int) -> None:
        try:
            at = core.snapshot(worker, 0, deadline=time.monotonic() + SOON).sequence
            while True:
                at = exchange(core, push(worker, at, value=3e38)).sequence
        except RefusedError as error:
            told.append(error.reason)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON / 2)
    assert told == ["diverged"] * 2 and core.failure is not None and "--lr" in core.failure
    assert [e["event"] for e in events].count("diverged") >= 1


def test_a_saved_state_is_all_of_it() -> None:
    job = plain(push="none", pull="ef|topk:0.3", returns="gradients", momentum=0.9)
    there = small(job)
    for sequence in range(3):
        both(there, sequence)
    tensors, meta = there.state()
    back = small(job)
    back.load(tensors, meta)
    for core in (there, back):
        both(core, 3)
    assert torch.equal(there.parameters["w"], back.parameters["w"]) and back.version == 4
    with pytest.raises(RefusedError, match="another model"):
        core_of(job, {"other": torch.zeros(2)}).load(tensors, meta)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"mode": "bounded"},
        {"mode": "bounded:0"},
        {"mode": "eventually"},
        {"backup": 2},
        {"mode": "async", "returns": "gradients"},
        {"every": 5},
        {"sends": "changes"},
        {"after": "best"},
        {"push": "topk:2"},
        {"lr": float("nan")},
        {"returns": "nothing"},
    ],
    ids=str,
)
def test_jobs_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        plain(**options)
    assert "\n" not in str(caught.value)
