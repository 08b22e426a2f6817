"""Peers that are not workers of the job, garbage on the port, and workers that die or stop."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_peers import Peer, begin, client_of, exchange, head_of, serving
from helpers import ONES, TIMEOUT, Events, job_of, small_core

from laconic.cluster import calls as calls_module
from laconic.cluster import certificates, checkpoint, security
from laconic.cluster import server as server_module
from laconic.cluster.core import Core
from laconic.cluster.protocol import GRPC_OPTIONS, RPC_PATHS, frame_messages, json_message
from laconic.frames import encode
from laconic.optim import SGD
from laconic_lab.faults import flood_client
from laconic_lab.faults.flood_process import FloodProcess
from laconic_lab.faults.invariants import applied_once
from laconic_lab.faults.soak import usage
from waiting import eventually, in_threads

ROUNDS = 20
ANY_REQUEST = head_of() | {"attempt": 5, "versions": [0], "lost": False, "protocol": 1, "fingerprint": "f"}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    for job in ("ours", "theirs"):
        certificates.new_job(folder / job, name=job, hosts=[], workers=2)
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


def is_closed_by_peer(line: socket.socket, until: float) -> bool:
    """Whether the server closes a connection in time."""
    try:
        while True:
            line.settimeout(max(0.01, until - time.monotonic()))
            if not line.recv(4096):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True


def test_connections_that_do_not_finish_their_handshake_are_closed(tmp_path: Path) -> None:
    """Silent, inside TLS, inside HTTP/2's preface, or after it."""
    certificates.new_job(tmp_path, name="ours", hosts=["localhost"], workers=1)
    credentials = security.server_credentials(security.load_server(tmp_path))
    hello = flood_client.client_hello()
    beginnings = [
        b"", hello[:50], hello, flood_client.PREFACE[:10], flood_client.PREFACE,
        flood_client.PREFACE + flood_client.SETTINGS,
    ]  # fmt: skip
    with serving(small_core(workers=1)) as plain, serving(small_core(workers=1), credentials=credentials) as secure:
        before = usage()[1]
        lines = []
        for server in (plain, secure):
            for data in 10 * beginnings:
                line = socket.create_connection(("127.0.0.1", server.port), 5)
                line.sendall(data)
                lines.append(line)
        until = time.monotonic() + 15
        assert [is_closed_by_peer(line, until) for line in lines] == len(lines) * [True]
        for line in lines:
            line.close()
        assert eventually(lambda: usage()[1] <= before, 5), (usage(), before)


def silent() -> Iterator[bytes]:
    threading.Event().wait(10 * TIMEOUT)
    yield b""


def test_silent_calls_are_cancelled_and_do_not_block_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "FIRST_MESSAGE_TIMEOUT", 1.0)
    core = small_core(workers=1)
    with serving(core) as server, contextlib.ExitStack() as channels:
        address = f"127.0.0.1:{server.port}"
        calls = []
        for name in ("Hello", "Exchange"):
            options = (*GRPC_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
            channel = channels.enter_context(grpc.insecure_channel(address, options=options))
            calls += [channel.stream_stream(RPC_PATHS[name])(silent(), timeout=10 * TIMEOUT) for _ in range(11)]
        assert eventually(lambda: len(server.calls) == 22)
        client = client_of(server, timeout=TIMEOUT)
        sequence = begin(client)
        assert exchange(client, sequence, ONES).sequence == sequence + 1
        client.close()
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN), call
        assert eventually(lambda: not len(server.calls))
    assert core.version == 1


def test_replaced_pushes_are_ended_and_do_not_block_workers() -> None:
    """A worker starts its push again and again without ending the earlier ones."""
    core = small_core(slots={"w": 4, "b": 4}, workers=1)

    def half() -> Iterator[bytes]:
        yield json_message(head_of())
        yield from frame_messages(0, ONES)
        yield from silent()

    with serving(core) as server, contextlib.ExitStack() as channels:
        address = f"127.0.0.1:{server.port}"
        client = client_of(server, timeout=TIMEOUT)
        sequence = begin(client)
        channel = channels.enter_context(grpc.insecure_channel(address, options=GRPC_OPTIONS))
        calls = [channel.stream_stream(RPC_PATHS["Exchange"])(half(), timeout=10 * TIMEOUT) for _ in range(11)]
        assert eventually(lambda: sum(call.done() for call in calls) == 10)  # all but the newest
        assert exchange(client, sequence, ONES, ONES).sequence == sequence + 1
        assert eventually(lambda: not len(server.calls) and not core.queued_nbytes)
        client.close()
    assert core.version == 1


def test_worker_that_computes_longer_than_the_idle_timeout_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = [(name, 1000 if name == "grpc.max_connection_idle_ms" else value) for name, value in
               server_module.STRANGER_OPTIONS]  # fmt: skip
    monkeypatch.setattr(server_module, "STRANGER_OPTIONS", shorter)
    core = small_core(workers=1)
    with serving(core) as server:
        before = usage()[1]
        client = client_of(server)
        sequence = begin(client)
        assert eventually(lambda: usage()[1] <= before, 10)  # the server has closed the connection
        sequence = exchange(client, sequence, ONES).sequence
        client.close()
    assert sequence == 1 and client.retries == 0


def test_strangers_leave_open_files_for_checkpoints(tmp_path: Path) -> None:
    """Connections of strangers get at most half of the open files, and a connected worker stays connected."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        core = small_core(workers=1)
        with serving(core) as server:
            address = f"127.0.0.1:{server.port}"
            client = client_of(server)
            sequence = begin(client)
            before = usage()[1]  # other tests of this process may have left some files open
            flood = FloodProcess(address)
            try:
                flood.request(hold=400, seed=0)
                flood.report()
                assert eventually(lambda: usage()[1] > before + 100, 10) and usage()[1] < before + 160
                checkpoint.save(tmp_path, 1, {"w": torch.ones(3)}, {})
                assert exchange(client, sequence, ONES).sequence == sequence + 1
                flood.request(release=True)
                flood.report()
            finally:
                flood.close()
            client.close()
            late = client_of(server, incarnation=1)
            assert begin(late, 1) == sequence + 1
            late.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
