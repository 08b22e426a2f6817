"""Memory of pushes: bounded while they wait, and given back when they are interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from grpc_peers import Peer, begin, client_of, exchange, head_of, serving
from helpers import ONES, Events, core_of, job_of, small_core

from laconic.cluster.client import Client
from laconic.cluster.protocol import frame_messages, json_message
from laconic.cluster.replies import RefusedError
from laconic.cluster.shared_state import ByteBudget
from laconic.frames import encode
from waiting import eventually, in_threads

WORKERS = 8
NUMEL = 1 << 15
"""Values of a slot: two slots make a push of 256 KiB."""
JOBS = {
    "sync": {},
    "best": {"after": "best", "every": 2, "sends": "changes"},
    "async": {"mode": "async"},
    "backup": {"backup": 2},
}


@pytest.mark.parametrize("kind", list(JOBS))
def test_waiting_pushes_stay_within_the_byte_budget_and_all_are_answered(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(workers=WORKERS, **JOBS[kind])
    budget = 5 << 16  # of 2 MiB that arrive
    events: Events = []
    core = core_of(job, {"a": torch.zeros(NUMEL), "b": torch.zeros(NUMEL)}, events, byte_budget=budget)
    peak, acquire = [0], ByteBudget.acquire

    def watched(self: ByteBudget, *args: Any, **options: Any) -> None:
        acquire(self, *args, **options)
        peak[0] = max(peak[0], self.used)

    monkeypatch.setattr(ByteBudget, "acquire", watched)
    frames = [[encode(torch.full((NUMEL,), worker + 1.0), "none")] * 2 for worker in range(WORKERS)]
    frame_nbytes = len(frames[0][0])

    def work(worker: int, client: Client) -> None:
        try:
            client.exchange(0, list(enumerate(frames[worker])), lambda: float(worker))
        except RefusedError as error:
            if kind != "backup" or error.reason != "stale":
                raise

    with serving(core) as server:
        clients = [client_of(server, worker) for worker in range(WORKERS)]
        in_threads(*(lambda client=client: begin(client) for client in clients))
        if not job.update_mode.in_rounds:
            for client in clients:
                client.snapshot()
        first = threading.Event()

        def delayed(worker: int) -> None:
            if worker == 0:
                first.wait(20)
            work(worker, clients[worker])

        pushes = threading.Thread(
            target=in_threads, args=[lambda worker=worker: delayed(worker) for worker in range(WORKERS)]
        )
        pushes.start()
        if job.exact:  # nothing can be added before worker 0: the budget fills up and the others block
            assert eventually(lambda: core.queued_nbytes + frame_nbytes > budget)
            time.sleep(0.2)
            assert core.queued_nbytes <= budget
        first.set()
        pushes.join(20)
        assert not pushes.is_alive()
        for client in clients:
            client.close()
    assert core.queued_nbytes == 0 and core._budget._exempt is None
    assert peak[0] <= budget + 2 * frame_nbytes  # one push may exceed it
    pushed = sorted(e["worker"] for e in events if e["event"] == "applied")
    total = sum(worker + 1.0 for worker in pushed)
    expected = {"sync": -total / WORKERS, "async": -total, "best": 1.0, "backup": -total / (WORKERS - 2)}[kind]
    assert len(pushed) == (WORKERS - 2 if kind == "backup" else WORKERS)
    for x in core.parameters.values():
        torch.testing.assert_close(x, torch.full((NUMEL,), expected))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_interrupted_push_gives_its_memory_back(
    mode: str, peers: Callable[..., Peer], caplog: pytest.LogCaptureFixture
) -> None:
    events: Events = []
    core = small_core(events, slots={"w": 256, "b": 4}, workers=1, mode=mode)
    first, second = encode(torch.ones(256), "none"), encode(torch.ones(4), "none")
    with serving(core) as server:
        client = client_of(server)
        begin(client)
        client.snapshot()
        for times in range(3):
            call, _ = peers(server.port).begin_push(head_of(), first)
            assert eventually(lambda: core.queued_nbytes == len(first))
            call.cancel()
            assert eventually(lambda: core.queued_nbytes == 0)
            assert eventually(lambda times=times: [e["event"] for e in events].count("lost") == times + 1)
        # Started again before the server has noticed: the first attempt is replaced and gives its memory back.
        calls = []
        for held in (len(first), 2 * len(first)):
            calls.append(peers(server.port).begin_push(head_of(), first)[0])
            assert eventually(lambda held=held: core.queued_nbytes == held)
        for call in calls:
            call.cancel()
        assert eventually(lambda: core.queued_nbytes == 0)
        assert exchange(client, 0, first, second).sequence == 1
    assert core.version == 1 and core.queued_nbytes == 0
    assert torch.equal(core.parameters["w"], torch.full((256,), -1.0))
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


def test_push_without_its_last_message_does_not_count(peers: Callable[..., Peer]) -> None:
    """An interrupted stream may look like one that ended; with after=best its missing score would be the lowest."""
    core = small_core(workers=1, after="best", every=2, sends="changes")
    with serving(core) as server:
        begin(client_of(server))
        refusal = peers(server.port).call("Exchange", json_message(head_of()), *frame_messages(0, ONES))
        assert isinstance(refusal, grpc.RpcError) and "last message" in refusal.details()
    assert core.version == 0 and not core.parameters["w"].any()
