"""Pushes that arrive twice, too late, too early, or from an earlier incarnation of a worker.

Each worker's gradient of each exchange has its own position in the vector, so that lost and repeated pushes show in
the sum.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from grpc_peers import Peer, begin, client_of, exchange, head_of, serving
from helpers import ONES, Events, small_core

from laconic.cluster import calls
from laconic.cluster.protocol import NOTHING_LEFT
from laconic.frames import encode
from laconic_lab.faults.invariants import all_work_once, applied_once
from waiting import eventually, in_threads

ROUNDS = 20


def one_hot(worker: int, sequence: int) -> bytes:
    x = torch.zeros(2 * ROUNDS)
    x[2 * sequence + worker] = 1.0
    return encode(x, "none")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_repeated_and_foreign_pushes_change_nothing(
    mode: str, peers: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "REPEATS", 1_000_000)  # the server's pace would make this test last minutes
    events: Events = []
    core = small_core(events, slots={"w": 2 * ROUNDS}, mode=mode, exchanges=ROUNDS)
    refusals: set[str] = set()

    def disturb(peer: Peer, worker: int, clock: int, rng: random.Random) -> None:
        """Push an earlier or later exchange, or one of another incarnation."""
        earlier = max(0, clock - 1 - rng.randrange(1, 9))
        sequence, incarnation = rng.choice(
            [(clock - 1, 1), (clock - 1, 1), (earlier, 1), (clock + 5, 1), (clock, 0), (clock, 2)]
        )
        refusal = peer.push(head_of(worker, incarnation, sequence), one_hot(worker, min(sequence, ROUNDS - 1)))
        refusals.add("answered" if refusal is None else refusal.details().partition('"message"')[0])

    def work(worker: int) -> None:
        rng = random.Random(worker)
        client, peer = client_of(server, worker, incarnation=1), peers(server.port)
        sequence = begin(client)
        ticket = client.snapshot().ticket
        while ticket != NOTHING_LEFT and (ticket is not None or sequence < ROUNDS):
            number = 2 * sequence + worker if ticket is None else ticket
            reply = exchange(client, sequence, one_hot(number % 2, number // 2))
            sequence, ticket = reply.sequence, reply.ticket
            for _ in range(10):
                disturb(peer, worker, sequence, rng)
        client.leave()
        client.close()

    with serving(core) as server:
        in_threads(lambda: work(0), lambda: work(1))
    weight = 0.5 if mode == "sync" else 1.0
    assert torch.equal(core.parameters["w"], torch.full((2 * ROUNDS,), -weight))
    applied_once(events)
    if mode == "async":
        all_work_once(events, 2 * ROUNDS)
    assert {"answered", '{"reason": "stale", ', '{"reason": "ahead", ', '{"reason": "incarnation", '} <= refusals
    assert core.queued_nbytes == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_repeated_push_does_not_disturb_the_current_one(mode: str, peers: Callable[..., Peer]) -> None:
    core = small_core(workers=1, mode=mode)
    with serving(core) as server:
        client, peer, other = client_of(server), peers(server.port), peers(server.port)
        sequence = begin(client)
        client.snapshot()
        exchange(client, sequence, ONES)
        call, complete = peer.begin_push(head_of(sequence=1), ONES)
        assert eventually(lambda: core.queued_nbytes)
        other.push(head_of(sequence=0), ONES)
        complete.set()
        assert len(list(call)) == 2  # a JSON message and the weights
    assert core.version == 2 and torch.equal(core.parameters["w"], torch.full((4,), -2.0))


@pytest.mark.parametrize(
    "options", [{}, {"mode": "async"}, {"workers": 3, "backup": 2}], ids=["sync", "async", "backup"]
)
def test_push_of_an_older_incarnation_is_refused_even_if_it_began_earlier(
    options: dict[str, Any], peers: Callable[..., Peer]
) -> None:
    core = small_core(**{"workers": 1} | options)
    with serving(core) as server:
        first = client_of(server, incarnation=3)
        begin(first)
        first.snapshot()
        call, complete = peers(server.port).begin_push(head_of(incarnation=3), encode(torch.full((4,), 64.0), "none"))
        assert eventually(lambda: core.queued_nbytes)
        second = client_of(server, incarnation=4)
        sequence = begin(second, attempt=9)
        second.snapshot()
        complete.set()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        for incarnation, reason in ((0, "incarnation"), (3, "incarnation"), (5, "regather")):  # 5 has not joined
            refusal = peers(server.port).push(head_of(incarnation=incarnation), ONES)
            assert reason in refusal.details()
        assert core.version == 0 == core.queued_nbytes
        exchange(second, sequence, ONES)
    assert torch.equal(core.parameters["w"], torch.full((4,), -1.0))


def test_push_before_the_snapshot_does_not_use_up_the_ticket(peers: Callable[..., Peer]) -> None:
    """A worker's next incarnation has the same ticket; a push before it has the weights must not consume it."""
    events: Events = []
    core = small_core(events, workers=1, mode="async", exchanges=3)
    with serving(core) as server:
        first = client_of(server)
        begin(first)
        assert first.snapshot().ticket == 0
        second = client_of(server, incarnation=1)
        begin(second)
        refusal = peers(server.port).push(head_of(incarnation=1), ONES)
        assert "no work to push" in refusal.details()
        reply = second.snapshot()
        while reply.ticket != NOTHING_LEFT:
            reply = exchange(second, reply.sequence, ONES)
    all_work_once(events, 3)
