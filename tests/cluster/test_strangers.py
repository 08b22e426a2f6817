"""Peers that are not workers of the job, garbage on the port, and workers that die or stop."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from helpers import (
    ONES,
    Events,
    Peer,
    begin,
    client_of,
    eventually,
    exchange,
    head_of,
    in_threads,
    job_of,
    serving,
    small_core,
)

from laconic.cluster import security
from laconic.cluster.core import Core
from laconic.cluster.protocol import RPC_PATHS, json_message
from laconic.frames import encode
from laconic.optim import SGD
from laconic_lab.faults.invariants import applied_once

ROUNDS = 20
ANY_REQUEST = head_of() | {"attempt": 5, "versions": [0], "lost": False, "protocol": 1, "fingerprint": "f"}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    for job in ("ours", "theirs"):
        security.new_job(folder / job, name=job, hosts=[], workers=2)
    return folder


def test_strangers_are_refused_and_do_not_disturb_the_job(certs: Path) -> None:
    events: Events = []
    core = small_core(events, exchanges=ROUNDS)
    ours, theirs = security.load_server(certs / "ours"), security.load_worker(certs / "theirs", 0)
    workers = [security.load_worker(certs / "ours", worker) for worker in range(2)]
    codes: dict[str, set[Any]] = {}
    done = threading.Event()

    def work(worker: int) -> None:
        client = client_of(server, worker, credentials=security.channel_credentials(workers[worker]))
        sequence = begin(client)
        while sequence < ROUNDS or len(codes) < 5:
            if sequence < ROUNDS:
                sequence = exchange(client, sequence, ONES).sequence
            time.sleep(0.01)
        client.leave()
        client.close()

    def disturb() -> None:
        strangers = {
            "no certificate": grpc.ssl_channel_credentials(workers[0].ca),
            "certificate of another job": security.channel_credentials(replace(theirs, ca=workers[0].ca)),
            "CA of another job": security.channel_credentials(theirs),
            "plaintext": None,
            "another worker": security.channel_credentials(workers[1]),
        }
        while not done.is_set():
            for name, credentials in strangers.items():
                peer = Peer(server.port, credentials)
                refusals = [peer.call(call, json_message(ANY_REQUEST)) for call in RPC_PATHS]
                refusals.append(peer.push(head_of(sequence=core.version), encode(torch.full((4,), 64.0), "none")))
                codes.setdefault(name, set()).update(refusal.code() if refusal else None for refusal in refusals)
                peer.close()
            for junk in (b"", b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", os.urandom(4096)):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 5) as line:
                    line.sendall(junk)

    identify = lambda context: security.require_worker(context.auth_context(), "ours")  # noqa: E731
    with serving(core, credentials=security.server_credentials(ours), identify=identify) as server:
        stranger = threading.Thread(target=disturb, daemon=True)
        stranger.start()
        in_threads(lambda: work(0), lambda: work(1))
        done.set()
        stranger.join(30)
    assert not stranger.is_alive()
    assert torch.equal(core.parameters["w"], torch.full((4,), -float(ROUNDS)))
    applied_once(events)
    assert sorted(e["worker"] for e in events if e["event"] == "welcome") == [0, 1]
    assert not [e for e in events if e["event"] in ("gather", "lost", "duplicate")]
    assert codes.pop("another worker") == {grpc.StatusCode.FAILED_PRECONDITION}
    assert all(refused == {grpc.StatusCode.UNAVAILABLE} for refused in codes.values()) and len(codes) == 4, codes


def test_garbage_on_the_port_does_not_disturb_a_worker() -> None:
    core = small_core(workers=1)
    rng = random.Random(0)
    with serving(core) as server, contextlib.ExitStack() as connections:
        client = client_of(server)
        sequence = begin(client)
        for number in range(40):
            line = connections.enter_context(socket.create_connection(("127.0.0.1", server.port), 5))
            with contextlib.suppress(OSError):
                line.sendall((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if number % 2 else b"") + rng.randbytes(2000))
            sequence = exchange(client, sequence, ONES).sequence
    assert core.version == 40 and torch.equal(core.parameters["w"], torch.full((4,), -40.0))


def test_dead_workers_are_noticed_within_a_second_and_stopped_ones_within_five(tmp_path: Path) -> None:
    """During a push and after one, with clients in plain gRPC that import nothing of laconic."""
    lost_at: dict[int, float] = {}
    kinds: list[str] = []

    def event_log(event: dict[str, Any]) -> None:
        kinds.append(event["event"])
        if event["event"] == "lost":
            lost_at.setdefault(event["worker"], time.monotonic())

    parameters = {"a": torch.zeros(1 << 20), "b": torch.zeros(3)}  # the first takes several messages
    core = Core(job_of(workers=5), parameters, SGD(momentum=0.0), lambda _: 1.0, event_log)
    frames = tmp_path / "frames"
    with frames.open("wb") as out:
        for x in parameters.values():
            frame = encode(torch.ones_like(x), "none")
            out.write(struct.pack("<Q", len(frame)) + frame)
    script = Path(__file__).with_name("bare_client.py")
    with serving(core) as server:
        clients = [
            subprocess.Popen(
                [sys.executable, script, f"127.0.0.1:{server.port}", str(worker), core.slots.fingerprint, frames, stop],
                stdout=subprocess.PIPE,
                text=True,
            )
            for worker, stop in enumerate(["whole", "half", "whole", "half", "half"])
        ]
        try:
            for worker, client in enumerate(clients):
                assert client.stdout is not None
                assert client.stdout.readline() == "hello\n"
                assert client.stdout.readline() in ("half\n", "whole\n"), worker
            assert eventually(lambda: kinds.count("push") == 2)
            signalled = time.monotonic()
            for worker, number in enumerate((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP)):
                clients[worker].send_signal(number)
            assert eventually(lambda: len(lost_at) == 4, 10)
        finally:
            for client in clients:
                client.kill()
                client.communicate()
        assert eventually(lambda: 4 in lost_at)
    assert set(lost_at) == {0, 1, 2, 3, 4}
    assert max(lost_at[0], lost_at[1]) - signalled < 1.0
    assert max(lost_at[2], lost_at[3]) - signalled < 5.0
