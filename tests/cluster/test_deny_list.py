"""Denied certificates: refused at hello and in calls in progress, without a restart of the server."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_peers import Peer, begin, client_of, exchange, head_of, serving
from helpers import ONES, Events, small_core

from laconic import counters
from laconic.cluster import security
from laconic.cluster.deny_list import DENIED_FILE, DenyList, deny, fingerprint
from laconic.cluster.replies import RefusedError
from laconic.errors import ConfigError, FileError
from waiting import eventually


@pytest.fixture
def certs(job_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(job_folder, tmp_path / "certs"))


def test_denied_worker_is_refused_and_its_call_ends_while_others_go_on(
    certs: Path, peers: Callable[..., Peer], caplog: pytest.LogCaptureFixture
) -> None:
    mine = [security.channel_credentials(security.load_worker(certs, worker)) for worker in (0, 1)]
    events: Events = []
    core = small_core(events, mode="async")
    options = {
        "credentials": security.server_credentials(security.load_server(certs)),
        "identify": lambda context: security.require_worker(context.auth_context(), "digits"),
        "deny_list": DenyList(certs / DENIED_FILE),
    }
    before = counters.counts().get("denied certificates", 0)
    with serving(core, **options) as server:
        clients = [client_of(server, worker, credentials=mine[worker]) for worker in (0, 1)]
        sequences = [begin(client) for client in clients]
        for client in clients:
            client.snapshot()
        call, _ = peers(server.port, mine[1]).begin_push(head_of(1, sequence=sequences[1]), ONES)
        assert eventually(lambda: core.queued_nbytes)
        assert deny(certs, ["worker-1"]) == ["worker-1"] and deny(certs, ["worker-1", "worker-1"]) == []
        assert eventually(call.done) and call.code() is grpc.StatusCode.CANCELLED
        with pytest.raises(RefusedError, match="denies the certificate of worker 1") as refused:
            clients[1].hello()
        assert refused.value.reason == "denied" and "\n" not in str(refused.value)
        assert exchange(clients[0], sequences[0], ONES).sequence == 1
        (certs / DENIED_FILE).unlink()
        assert eventually(lambda: not server.calls.in_progress()) and eventually(lambda: _accepted(clients[1]))
        for client in clients:
            client.close()
    assert counters.counts()["denied certificates"] > before and "denies 1 certificates" in caplog.text
    assert [event["worker"] for event in events if event["event"] == "leave"] == [1]


def _accepted(client: object) -> bool:
    try:
        client.hello()  # type: ignore[attr-defined]
    except RefusedError:
        time.sleep(0.05)
        return False
    return True


def test_invalid_list_is_an_error_at_the_start_and_changes_nothing_later(
    certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = certs / DENIED_FILE
    pem = (certs / "worker-0.pem").read_bytes()
    digits = fingerprint(pem).upper()
    path.write_text(f"# stolen\n\n{':'.join(digits[i : i + 2] for i in range(0, 64, 2))} worker-0")
    denied = DenyList(path)
    peer = {"x509_pem_cert": [pem]}
    assert denied.is_denied(peer) and denied.is_denied({}) and not denied.refresh()
    assert deny(certs, ["worker-1"]) == ["worker-1"] and denied.refresh()
    assert denied.is_denied({"x509_pem_cert": [(certs / "worker-1.pem").read_bytes()]})
    path.write_text("worker-1\x1b\n")
    assert not denied.refresh() and denied.is_denied(peer) and "stay denied" in caplog.text
    with pytest.raises(FileError, match=r"line 1: expected the SHA-256 .* got 'worker-1\\x1b': use") as error:
        DenyList(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mode", ["async", "bounded:1"])
def test_job_does_not_wait_for_a_worker_that_is_denied_while_it_computes(certs: Path, mode: str) -> None:
    mine = [security.channel_credentials(security.load_worker(certs, worker)) for worker in (0, 1)]
    events: Events = []
    core = small_core(events, mode=mode)
    options = {
        "credentials": security.server_credentials(security.load_server(certs)),
        "identify": lambda context: security.require_worker(context.auth_context(), "digits"),
        "deny_list": DenyList(certs / DENIED_FILE),
    }
    with serving(core, **options) as server:
        clients = [client_of(server, worker, credentials=mine[worker]) for worker in (0, 1)]
        for client in clients:
            begin(client)
        clients[1].snapshot()  # it gets a piece of work, and has no call in progress
        at = clients[0].snapshot()
        deny(certs, ["worker-1"])
        assert eventually(lambda: any(event["event"] == "leave" for event in events))
        tickets = [at.ticket]
        for _ in range(4):
            at = exchange(clients[0], at.sequence, ONES)
            tickets.append(at.ticket)
        assert core.version == 4 and 0 in tickets  # also the piece that worker 1 had
        for client in clients:
            client.close()


def test_only_workers_of_the_folder_can_be_denied(certs: Path) -> None:
    for name in ("worker-7", "server", "../x"):
        with pytest.raises(ConfigError, match=r"expected a worker of .*: worker-0, worker-1; got"):
            deny(certs, [name])
    assert not (certs / DENIED_FILE).exists()
