"""Mutual TLS: who is accepted by a server, and where plaintext is allowed."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
from test_checkpoint import check_one_line

from laconic.cluster import certificates, security
from laconic.cluster.certificates import Authority
from laconic.cluster.security import Credentials, Identity
from laconic.errors import ConfigError, FrameError

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def names(*uris: str) -> dict[str, list[bytes]]:
    return {"x509_common_name": [b"worker-0"], "x509_subject_alternative_name": [uri.encode() for uri in uris]}


def test_identity_is_read_from_pem_and_from_the_call_context(job_folder: Path) -> None:
    assert security.peer_identity((job_folder / "server.pem").read_bytes()) == Identity("digits", "server")
    assert security.peer_identity((job_folder / "worker-1.pem").read_bytes()) == Identity("digits", "worker", 1)
    assert security.peer_identity(names("ps", "laconic://a.b/worker-12")) == Identity("a.b", "worker", 12)
    assert security.require_worker(names("laconic://a.b/worker-12"), "a.b") == 12


@pytest.mark.parametrize("peer", [
    {}, {"transport_security_type": [b"insecure"]}, {"x509_common_name": [b"worker-0"]}, names(), names("worker-0"),
    names("laconic://a/worker-00"), names("laconic://a/worker-"), names("laconic://a/worker--1"),
    names("laconic://a/worker-0\n"), names("laconic://a/worker-٣"), names("laconic://a/worker-9999999999"),
    names("laconic:///worker-0"), names("laconic://a/b/worker-0"),
    names("laconic://a/worker-0", "laconic://a/worker-1"), {"x509_subject_alternative_name": [b"\xff\xfe"]}, b"",
    b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
])  # fmt: skip
def test_peer_without_one_valid_identity_is_refused(peer: Any) -> None:
    with pytest.raises(FrameError) as error:
        security.peer_identity(peer)
    check_one_line(error)


def test_server_and_workers_of_other_jobs_are_not_workers_of_the_job() -> None:
    for uri in ("laconic://b/worker-0", "laconic://a/server"):
        with pytest.raises(FrameError) as error:
            security.require_worker(names(uri), "a")
        check_one_line(error, "expected a worker of job 'a'")


def test_damaged_certificates_raise_frame_error_only(job_folder: Path) -> None:
    whole = ssl.PEM_cert_to_DER_cert((job_folder / "worker-0.pem").read_text())
    outcomes = set()
    for at in range(len(whole)):
        for flip in (1, 0x80):
            bad = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
            try:
                outcomes.add(type(security.peer_identity(ssl.DER_cert_to_PEM_cert(bad).encode())))
            except FrameError:
                outcomes.add(FrameError)
    assert outcomes == {Identity, FrameError}


class EchoServer:
    """A TLS server on loopback that records requests and answers workers whose certificate matches their number."""

    def __init__(self, credentials: Credentials, host: str = "127.0.0.1") -> None:
        self.received: list[bytes] = []
        self.host = host
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        hello = grpc.unary_unary_rpc_method_handler(self._hello, request_deserializer=self._keep)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("echo", {"Hello": hello})])
        self.stop = self._server.stop
        self.port = self._server.add_secure_port(f"{host}:0", security.server_credentials(credentials))
        self._server.start()

    def _keep(self, request: bytes) -> bytes:
        self.received.append(request)
        return request

    def _hello(self, request: bytes, context: Any) -> bytes:
        worker = security.require_worker(context.auth_context(), "digits")
        if int(request) != worker:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, f"the certificate is that of worker {worker}")
        return b"welcome"

    def call(self, credentials: Any, worker: int = 0) -> Any:
        """Return the answer, or the status code of the refusal."""
        address = f"{self.host}:{self.port}"
        channel = grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
        with channel:
            try:
                return channel.unary_unary("/echo/Hello")(str(worker).encode(), timeout=10)
            except grpc.RpcError as error:
                return error.code()


@pytest.fixture(scope="module")
def server_of_job(job_folder: Path) -> Iterator[EchoServer]:
    server = EchoServer(security.load_server(job_folder))
    yield server
    server.stop(0).wait()


@pytest.fixture
def server(server_of_job: EchoServer) -> EchoServer:
    server_of_job.received.clear()
    return server_of_job


def new_authority() -> tuple[Authority, Credentials]:
    """Return a CA that can still sign, and the credentials of its server."""
    now = datetime.now(timezone.utc)
    ca = Authority("digits", now - DAY, now + DAY)
    return ca, issue(ca, Identity("digits", "server"), ["127.0.0.1"])


def issue(
    ca: Authority, identity: Identity, hosts: list[str], since: timedelta = -HOUR, until: timedelta = HOUR
) -> Credentials:
    now = datetime.now(timezone.utc)
    certificate, key = ca.issue(identity, hosts, now + since, now + until)
    return Credentials(identity, now + until, ca.pem, certificate, key)


def test_members_are_accepted_under_their_own_number(server: EchoServer, job_folder: Path) -> None:
    for worker in (0, 1):
        mine = security.channel_credentials(security.load_worker(job_folder, worker))
        assert server.call(mine, worker) == b"welcome"
        assert server.call(mine, 1 - worker) == grpc.StatusCode.PERMISSION_DENIED
    assert server.received == [b"0", b"1", b"1", b"0"]


def strangers(job_folder: Path, folder: Path) -> dict[str, Any]:
    ours = security.load_worker(job_folder, 0)
    certificates.new_job(folder / "other", name="digits", hosts=[], workers=1)
    other = security.load_worker(folder / "other", 0)
    return {
        "no certificate": grpc.ssl_channel_credentials(ours.ca),
        "a certificate of another job": security.channel_credentials(replace(other, ca=ours.ca)),
        "another job altogether": security.channel_credentials(other),
        "the server's own": security.channel_credentials(replace(security.load_server(job_folder))),
        "plaintext": None,
    }


def test_strangers_are_refused_before_anything_is_read(server: EchoServer, job_folder: Path, tmp_path: Path) -> None:
    for name, credentials in strangers(job_folder, tmp_path).items():
        assert server.call(credentials) == grpc.StatusCode.UNAVAILABLE, name
    assert server.received == []
    assert server.call(security.channel_credentials(security.load_worker(job_folder, 0))) == b"welcome"


@pytest.mark.parametrize("since, until", [(-HOUR, -HOUR / 2), (HOUR, HOUR * 2)], ids=["expired", "not yet valid"])
def test_invalid_dates_are_refused_by_both_ends(since: timedelta, until: timedelta) -> None:
    ca, server = new_authority()
    good = issue(ca, Identity("digits", "worker", 0), [])
    late = issue(ca, Identity("digits", "worker", 0), [], since, until)
    late_server = issue(ca, Identity("digits", "server"), ["127.0.0.1"], since, until)
    for holder, visitor in ((server, late), (late_server, good)):
        server = EchoServer(holder)
        assert server.call(security.channel_credentials(visitor)) == grpc.StatusCode.UNAVAILABLE
        assert server.received == []
        server.stop(0).wait()


def test_workers_refuse_a_false_server(job_folder: Path) -> None:
    ca, server = new_authority()
    worker = security.channel_credentials(issue(ca, Identity("digits", "worker", 0), []))
    posing = issue(ca, Identity("digits", "worker", 1), ["127.0.0.1"])  # a worker's certificate with the server's hosts
    for holder, host, answer in (
        (server, "127.0.0.1", b"welcome"),
        (server, "127.0.0.2", grpc.StatusCode.UNAVAILABLE),  # not in its certificate
        (posing, "127.0.0.1", grpc.StatusCode.UNAVAILABLE),
        (security.load_server(job_folder), "127.0.0.1", grpc.StatusCode.UNAVAILABLE),
    ):
        server = EchoServer(holder, host)
        assert server.call(worker) == answer
        assert server.received == ([b"0"] if answer == b"welcome" else [])
        server.stop(0).wait()


def test_server_is_accepted_on_every_host_of_its_certificate(job_folder: Path) -> None:
    server = EchoServer(security.load_server(job_folder), "127.0.0.2")
    assert server.call(security.channel_credentials(security.load_worker(job_folder, 0))) == b"welcome"
    server.stop(0).wait()


def test_client_without_certificate_is_refused_after_the_handshake(server: EchoServer, job_folder: Path) -> None:
    """In TLS 1.3 its handshake succeeds; the refusal comes with its first read."""
    context = ssl.create_default_context(cafile=str(job_folder / "ca.pem"))
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    with context.wrap_socket(plain, server_hostname="127.0.0.1") as line:
        assert line.version() == "TLSv1.3"
        with contextlib.suppress(OSError):  # the refusal may have arrived
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert line.recv(1) == b""
    assert server.received == []


def test_garbage_does_not_disturb_members(server: EchoServer, job_folder: Path) -> None:
    for junk in (
        b"",
        b"\x00" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\xff\xff",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
            line.sendall(junk)
    assert server.call(security.channel_credentials(security.load_worker(job_folder, 0))) == b"welcome"
    assert server.received == [b"0"]


LOOPBACK = [
    "localhost", "LOCALHOST:1", "127.0.0.1", "127.8.9.10:1", "::1", "[::1]", "[::1]:1", "[::ffff:127.0.0.1]:1",
    "ipv4:127.0.0.1:1", "ipv6:[::1]:1", "ipv6:%5B::1%5D:1", "dns:localhost:1", "dns:///localhost:1", "unix:/a",
    "unix:a",
]  # fmt: skip
REMOTE = [
    "", ":1", "0.0.0.0:1", "[::]:1", "::", "*:1", "10.0.0.5:1", "ps.example.org:1", "localhost.evil.org:1",
    "ipv4:127.0.0.1:1,10.0.0.5:1", "dns://8.8.8.8/localhost:1", "[::1]x:1", "127.1:1", "2130706433:1", "xds:localhost",
    "127.0.0.1@evil.org:1", "[::ffff:10.0.0.5]:1", "http://localhost:1", " 127.0.0.1:1", "127.0.0.1:1\n", "fe80::1",
]  # fmt: skip


@pytest.mark.parametrize("address", LOOPBACK)
def test_plaintext_is_allowed_on_loopback(address: str) -> None:
    assert security.is_loopback(address)
    security.require_tls(address, None)


@pytest.mark.parametrize("address", REMOTE)
def test_other_addresses_need_tls(address: str, job_folder: Path) -> None:
    assert not security.is_loopback(address)
    with pytest.raises(ConfigError) as error:
        security.require_tls(address, None)
    assert "laconic certs new" in str(error.value) and address in str(error.value)
    security.require_tls(address, security.load_server(job_folder))
