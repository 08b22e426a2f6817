"""Incarnation numbers from clocks that run ahead: refused, and never kept beyond the server's own time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from grpc_peers import Peer, begin, client_of, exchange, serving
from helpers import ONES, Events, small_core

from laconic.cluster.membership import MAX_SECONDS_AHEAD, incarnation_now
from laconic.cluster.protocol import MAX_INTEGER, json_message
from laconic.cluster.replies import RefusedError
from waiting import in_threads


@pytest.mark.parametrize("seconds", [MAX_SECONDS_AHEAD + 60, 10**9, MAX_INTEGER // 1000])
def test_incarnation_of_the_future_is_refused_and_the_worker_is_not_locked_out(seconds: float) -> None:
    core = small_core(workers=1)
    ahead = min(MAX_INTEGER - 1, incarnation_now() + int(1000 * seconds))
    with serving(core) as server:
        with pytest.raises(RefusedError, match="ahead of the server's clock") as refused:
            client_of(server, incarnation=ahead).hello()
        assert "\n" not in str(refused.value) and "--incarnation" in str(refused.value)
        client = client_of(server, incarnation=incarnation_now())
        sequence = begin(client)
        assert exchange(client, sequence, ONES).sequence == 1
        client.close()


def test_clock_slightly_ahead_is_allowed_and_saved_as_the_present() -> None:
    core = small_core(workers=1)
    ahead = incarnation_now() + 1000 * (MAX_SECONDS_AHEAD - 60)
    core.welcome(0, ahead, core.slots.fingerprint)
    tensors, meta = core.state()
    assert meta["incarnations"][0] <= incarnation_now() < ahead
    restarted = small_core(workers=1)
    restarted.load(tensors, meta)
    restarted.welcome(0, incarnation_now(), core.slots.fingerprint)  # the worker's clock has been corrected


def test_checkpoint_with_an_incarnation_of_the_future_does_not_lock_a_worker_out() -> None:
    core = small_core(workers=1)
    tensors, meta = core.state()
    restarted = small_core(workers=1)
    restarted.load(tensors, meta | {"incarnations": [MAX_INTEGER - 1]})
    restarted.welcome(0, incarnation_now() + 1, core.slots.fingerprint)
    assert torch.equal(restarted.parameters["w"], core.parameters["w"])


def test_going_back_to_a_checkpoint_keeps_the_newer_incarnation() -> None:
    core = small_core(workers=1)
    core.welcome(0, 5, core.slots.fingerprint)
    state = core.state()
    core.welcome(0, 7, core.slots.fingerprint)
    core.load(*state)
    with pytest.raises(RefusedError, match="replaced by 7"):
        core.welcome(0, 6, core.slots.fingerprint)


def test_superseded_process_neither_removes_nor_disturbs_its_successor(peers: Callable[..., Peer]) -> None:
    events: Events = []
    core = small_core(events)
    with serving(core) as server:
        clients = [client_of(server, worker, incarnation=2) for worker in (0, 1)]
        in_threads(*(lambda client=client: begin(client) for client in clients))
        old = {"worker": 0, "incarnation": 1}
        assert peers(server.port).call("Leave", json_message(old)) is None  # it has left: nothing to refuse
        core.disconnected(0, 1)
        assert not core.all_gone() and not [e for e in events if e["event"] in ("leave", "lost")]
        in_threads(*(lambda client=client: exchange(client, 0, ONES) for client in clients))
        clients[0].leave()
        assert [(e["worker"], e["incarnation"]) for e in events if e["event"] == "leave"] == [(0, 2)]
        for client in clients:
            client.close()
    assert core.version == 1 and len([e for e in events if e["event"] == "gather"]) == 0
