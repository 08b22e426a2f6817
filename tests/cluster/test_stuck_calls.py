"""Calls that gRPC never ends, though their deadlines are over: a worker leaves them behind and goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from grpc_peers import begin, client_of, exchange, serving
from helpers import TIMEOUT, core_of, job_of

from laconic import counters
from laconic.cluster import client as client_module
from laconic.cluster.call_thread import CallThread, StuckCallError
from laconic.cluster.replies import RefusedError
from laconic.frames import encode

FRAME = encode(torch.ones(8), "none")


def test_worker_leaves_a_stuck_call_behind_and_exchanges_on_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "STUCK_AFTER", 0.2)
    core = core_of(job_of(mode="async"), {"w": torch.zeros(8)})
    released = threading.Event()
    with serving(core) as server:
        client = client_of(server, 0, timeout=0.3)
        begin(client)
        sequence = client.snapshot().sequence

        def stuck(request: Iterator[bytes], timeout: float) -> Iterator[bytes]:
            released.wait(TIMEOUT)
            return iter(())

        monkeypatch.setattr(client, "_exchange", stuck)
        before = counters.counts().get("stuck calls", 0)
        reply = exchange(client, sequence, FRAME)
        assert reply.sequence == sequence + 1 and core.version == 1 and client.retries == 1
        assert counters.counts()["stuck calls"] == before + 1
        released.set()
        client.close()


def test_worker_whose_leave_is_stuck_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "STUCK_AFTER", 0.1)
    monkeypatch.setattr(client_module, "LEAVE_TIMEOUT", 0.1)
    released = threading.Event()
    with serving(core_of(job_of(mode="async"), {"w": torch.zeros(8)})) as server:
        client = client_of(server, 0)
        begin(client)
        monkeypatch.setattr(client, "_leave", lambda request, timeout: released.wait(TIMEOUT))
        before = counters.counts().get("stuck calls", 0)
        client.leave()
        client.close()
        assert not released.is_set() and counters.counts()["stuck calls"] == before + 1
        released.set()


def test_connection_that_cannot_be_closed_does_not_keep_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CLOSE_TIMEOUT", 0.1)
    released = threading.Event()
    with serving(core_of(job_of(mode="async"), {"w": torch.zeros(8)})) as server:
        client = client_of(server, 0)
        begin(client)
        channel = client._channel

        class Stuck:
            def close(self) -> None:
                released.wait(TIMEOUT)
                channel.close()

        monkeypatch.setattr(client, "_channel", Stuck())
        before = counters.counts().get("stuck calls", 0)
        client.close()
        assert not released.is_set() and counters.counts()["stuck calls"] == before + 1
        released.set()


def test_thread_passes_results_and_errors_on() -> None:
    calls = CallThread()
    assert calls.call(lambda: 7, TIMEOUT) == 7
    error = RefusedError("stale", "another exchange")

    def refuse() -> Any:
        raise error

    with pytest.raises(RefusedError) as raised:
        calls.call(refuse, TIMEOUT)
    assert raised.value is error and calls.call(lambda: 8, TIMEOUT) == 8
    calls.close()


def test_stuck_call_does_not_keep_its_thread_once_it_ends() -> None:
    others = set(threading.enumerate())
    calls, released = CallThread(), threading.Event()
    (thread,) = set(threading.enumerate()) - others
    with pytest.raises(StuckCallError, match="has not ended"):
        calls.call(lambda: released.wait(TIMEOUT), 0.1)
    released.set()
    thread.join(TIMEOUT)
    assert not thread.is_alive() and thread.daemon
