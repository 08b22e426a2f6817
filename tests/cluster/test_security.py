"""Certificates of a job: how they are made, what is wrong with them, and who gets through to a server with them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from laconic import counters
from laconic.cluster import security
from laconic.cluster.security import Credentials, Identity
from laconic.errors import ConfigError, FileError, FrameError

grpc = pytest.importorskip("grpc")
pytest.importorskip("cryptography")

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good job of two workers; tests do not change it."""
    folder = tmp_path_factory.mktemp("certs") / "job"
    security.new_job(folder, name="digits", hosts=["ps.example.org", "10.0.0.5", "127.0.0.2"], workers=2)
    return folder


@pytest.fixture
def copy(job: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(job, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def one_line(error: pytest.ExceptionInfo[Exception], *words: str) -> None:
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


# -------------------------------------------------------------------------------------------------------------- new


def test_a_job_has_certificates_for_everybody_and_no_key_to_make_more(job: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    members = ("server", "worker-0", "worker-1")
    assert set(contents(job)) == {"ca.pem"} | {f"{name}.{kind}" for name in members for kind in ("pem", "key")}
    ca = x509.load_pem_x509_certificate((job / "ca.pem").read_bytes())
    for path in job.glob("*.key"):
        assert load_pem_private_key(path.read_bytes(), None).public_key() != ca.public_key()
    found = security.certificates(job)
    assert [certificate.identity for certificate in found] == [
        Identity("digits", "server"),
        Identity("digits", "worker", 0),
        Identity("digits", "worker", 1),
    ]
    assert set(found[0].hosts) == {"ps.example.org", "localhost", "10.0.0.5", "127.0.0.2", "127.0.0.1", "::1"}
    assert found[1].hosts == () and all(certificate.fault is None for certificate in found)
    assert all(DAY * 364 < c.until - datetime.now(timezone.utc) <= DAY * 365 for c in found if c.until)


@pytest.mark.parametrize("umask", [0, 0o077])
def test_keys_are_for_their_owner_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        security.new_job(tmp_path / "job", name="a", hosts=[], workers=1)
    finally:
        os.umask(before)
    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "job").glob("*.key")} == {0o600}


def test_an_existing_job_is_never_touched(copy: Path) -> None:
    before = contents(copy)
    with pytest.raises(FileError) as error:
        security.new_job(copy, name="digits", hosts=[], workers=2)
    one_line(error, str(copy), "not an empty folder")
    assert contents(copy) == before and listed(copy.parent) == ["copy"]
    with pytest.raises(FileError, match="not an empty folder"):
        security.new_job(copy / "ca.pem", name="digits", hosts=[], workers=2)
    (copy.parent / "empty").mkdir()
    assert len(security.new_job(copy.parent / "empty", name="digits", hosts=[], workers=2)) == 3


def test_whoever_is_first_keeps_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sync = tmp_path / "job", security.sync_folder

    def somebody_else(folder: Path) -> None:
        if not target.exists():
            target.mkdir()
            (target / "theirs").touch()
        sync(folder)

    monkeypatch.setattr(security, "sync_folder", somebody_else)
    with pytest.raises(FileError) as error:
        security.new_job(target, name="a", hosts=[], workers=1)
    one_line(error, "cannot make certificates")
    assert listed(tmp_path) == ["job"] and listed(target) == ["theirs"]


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
@pytest.mark.parametrize("at", range(7))
def test_a_half_made_job_does_not_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, at: int
) -> None:
    calls, fsync = iter(range(100)), os.fsync

    def failing(handle: int) -> None:
        if next(calls) == at:  # 5 files, then their folder; the seventh call comes when all is in place
            raise fault
        fsync(handle)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises((FileError, KeyboardInterrupt)) as error:
        security.new_job(tmp_path / "job", name="a", hosts=[], workers=1)
    assert listed(tmp_path) == ([] if at < 6 else ["job"])
    if isinstance(fault, OSError):
        one_line(error, "No space left on device")
    if at == 6:
        assert security.load_worker(tmp_path / "job", 0).identity.worker == 0


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"name": ""}, "a job's name"),
        ({"name": "a/b"}, "a job's name"),
        ({"name": "a\n"}, "a job's name"),
        ({"name": "x" * 49}, "a job's name"),
        ({"workers": 0}, "workers must be a whole number from 1 to 4096, got 0"),
        ({"workers": 5000}, "got 5000"),
        ({"days": 0}, "days must be a whole number from 1 to 3650, got 0"),
        ({"days": 10**9}, "days must be"),
        ({"hosts": ["ps:50051"]}, "without port"),
        ({"hosts": ["https://ps"]}, "without port or scheme"),
        ({"hosts": [""]}, "a DNS name or an IP address"),
        ({"hosts": ["10.0.0.256"]}, "a DNS name or an IP address"),
        ({"hosts": ["bücher.example"]}, "xn--"),
        ({"hosts": ["-a"]}, "a DNS name"),
        ({"hosts": ["a" * 64]}, "a DNS name"),
        ({"hosts": [".".join(["a" * 60] * 5)]}, "a DNS name"),
        ({"hosts": ["0.0.0.0"]}, "where a server listens"),
        ({"hosts": ["::"]}, "where a server listens"),
    ],
)
def test_what_a_job_cannot_be(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        security.new_job(tmp_path / "job", **({"name": "a", "hosts": [], "workers": 1} | wrong))
    one_line(error, words)
    assert listed(tmp_path) == []


def test_hosts_are_spelled_once_and_as_certificates_do(tmp_path: Path) -> None:
    hosts = ["PS", "ps", "*.cluster.local", "node_1", "fe80::1%eth0", "2001:DB8:0::5", "localhost", "127.0.0.1"]
    found = security.new_job(tmp_path / "job", name="a", hosts=hosts, workers=1)[0].hosts
    expected = ["*.cluster.local", "127.0.0.1", "2001:db8::5", "::1", "fe80::1", "localhost", "node_1", "ps"]
    assert sorted(found) == expected


# ------------------------------------------------------------------------------------------------------------- load


def test_what_was_made_can_be_loaded(job: Path) -> None:
    server, worker = security.load_server(job), security.load_worker(job, 1)
    assert server.identity == Identity("digits", "server") and worker.identity == Identity("digits", "worker", 1)
    assert server.ca == worker.ca == (job / "ca.pem").read_bytes()
    assert (worker.certificate, worker.key) == (
        (job / "worker-1.pem").read_bytes(),
        (job / "worker-1.key").read_bytes(),
    )
    assert "PRIVATE" not in repr(worker)


def test_missing_files_are_named(copy: Path) -> None:
    with pytest.raises(FileError, match=r"no such file: .*worker-7\.pem"):
        security.load_worker(copy, 7)
    with pytest.raises(FileError) as error:
        security.load_server(copy / "nowhere")
    one_line(error, "no such folder", "nowhere", "laconic certs new")
    for name in ("worker-0.key", "worker-0.pem", "ca.pem"):
        (copy / name).unlink()
        with pytest.raises(FileError) as error:
            security.load_worker(copy, 0)
        one_line(error, f"no such file: {copy / name}", "laconic certs new")


@pytest.mark.parametrize("days, words", [(366, "expired on"), (-1, "is not valid before")])
def test_dates_are_said(job: Path, monkeypatch: pytest.MonkeyPatch, days: int, words: str) -> None:
    now = datetime.now(timezone.utc) + days * DAY
    monkeypatch.setattr(security, "_now", lambda: now)
    with pytest.raises(FileError) as error:
        security.load_server(job)
    until = security.certificates(job)[0].until if days > 0 else security.certificates(job)[0].since
    assert until is not None
    one_line(error, "server.pem", words, f"{until:%Y-%m-%d %H:%M} UTC", f"it is {now:%Y-%m-%d %H:%M}")
    assert all(words in (certificate.fault or "") for certificate in security.certificates(job))


def test_a_host_whose_clock_is_late_may_use_new_certificates(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime.now(timezone.utc) - timedelta(minutes=50)
    monkeypatch.setattr(security, "_now", lambda: now)
    security.load_worker(job, 0)


def test_a_certificate_of_another_job_is_told(copy: Path, tmp_path: Path) -> None:
    security.new_job(tmp_path / "other", name="digits", hosts=[], workers=1)  # of the same name, too
    for kind in ("pem", "key"):
        shutil.copy(tmp_path / "other" / f"worker-0.{kind}", copy)
    with pytest.raises(FileError) as error:
        security.load_worker(copy, 0)
    one_line(error, "worker-0.pem was not signed by", "ca.pem", "different jobs")


def test_swapped_files_are_told(copy: Path) -> None:
    shutil.copy(copy / "worker-1.key", copy / "worker-0.key")
    with pytest.raises(FileError) as error:
        security.load_worker(copy, 0)
    one_line(error, "worker-0.key is not the key of", "worker-0.pem")
    shutil.copy(copy / "worker-1.pem", copy / "worker-0.pem")
    with pytest.raises(FileError) as error:
        security.load_worker(copy, 0)
    one_line(error, "is the certificate of worker-1 under another name")


def test_damaged_files_are_told(copy: Path) -> None:
    for name in ("worker-0.key", "worker-0.pem", "ca.pem"):
        whole = (copy / name).read_bytes()
        for bad in (b"", b"hello", whole[: len(whole) // 2], whole.replace(b"A", b"-"), bytes(100)):
            (copy / name).write_bytes(bad)
            with pytest.raises(FileError) as error:
                security.load_worker(copy, 0)
            one_line(error, name)
    (copy / "worker-0.key").unlink()
    (copy / "worker-0.key").mkdir()
    with pytest.raises(FileError):
        security.load_worker(copy, 0)


def test_a_key_with_a_password_is_told(copy: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form

    path = copy / "worker-0.key"
    key = form.load_pem_private_key(path.read_bytes(), None)
    locked = form.BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, locked))
    with pytest.raises(FileError) as error:
        security.load_worker(copy, 0)
    one_line(error, "without a password")


def test_a_key_for_everybody_to_read_is_warned_of(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    security.load_worker(copy, 0)
    assert not caplog.records
    (copy / "worker-0.key").chmod(0o644)
    before = counters.counts().get("world-readable key", 0)
    security.load_worker(copy, 0)
    assert "chmod 600" in caplog.text and counters.counts()["world-readable key"] == before + 1


def test_what_is_missing_to_install_is_said(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = security.load_server(job)
    for module in ("cryptography", "grpc"):
        monkeypatch.setitem(sys.modules, module, None)
    for call in (
        lambda: security.new_job("x", name="a", hosts=[], workers=1),
        lambda: security.load_server(job),
        lambda: security.certificates(job),
        lambda: security.peer_identity(credentials.certificate),
        lambda: security.server_credentials(credentials),
        lambda: security.channel_credentials(credentials),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        one_line(error, "pip install 'laconic[cluster]'")


def test_importing_brings_neither_library() -> None:
    code = "import sys, laconic.cluster.security; print({'grpc', 'cryptography'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --------------------------------------------------------------------------------------------------------- identity


def names(*uris: str) -> dict[str, list[bytes]]:
    return {"x509_common_name": [b"worker-0"], "x509_subject_alternative_name": [uri.encode() for uri in uris]}


def test_identities_from_pem_and_from_a_call(job: Path) -> None:
    assert security.peer_identity((job / "server.pem").read_bytes()) == Identity("digits", "server")
    assert security.peer_identity((job / "worker-1.pem").read_bytes()) == Identity("digits", "worker", 1)
    assert security.peer_identity(names("ps", "laconic://a.b/worker-12")) == Identity("a.b", "worker", 12)
    assert security.require_worker(names("laconic://a.b/worker-12"), "a.b") == 12


@pytest.mark.parametrize(
    "peer",
    [
        {},
        {"transport_security_type": [b"insecure"]},
        {"x509_common_name": [b"worker-0"]},
        names(),
        names("worker-0"),
        names("laconic://a/worker-00"),
        names("laconic://a/worker-"),
        names("laconic://a/worker--1"),
        names("laconic://a/worker-0\n"),
        names("laconic://a/worker-٣"),
        names("laconic://a/worker-9999999999"),
        names("laconic:///worker-0"),
        names("laconic://a/b/worker-0"),
        names("laconic://a/worker-0", "laconic://a/worker-1"),
        {"x509_subject_alternative_name": [b"\xff\xfe"]},
        b"",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    ],
)
def test_nobody_in_particular_is_refused(peer: Any) -> None:
    with pytest.raises(FrameError) as error:
        security.peer_identity(peer)
    one_line(error)


def test_others_are_not_workers_of_this_job() -> None:
    for uri in ("laconic://b/worker-0", "laconic://a/server"):
        with pytest.raises(FrameError) as error:
            security.require_worker(names(uri), "a")
        one_line(error, "expected a worker of job 'a'")


def test_hostile_certificates_raise_one_kind_of_error(job: Path) -> None:
    whole = ssl.PEM_cert_to_DER_cert((job / "worker-0.pem").read_text())
    outcomes = set()
    for at in range(len(whole)):
        for flip in (1, 0x80):
            bad = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
            try:
                outcomes.add(type(security.peer_identity(ssl.DER_cert_to_PEM_cert(bad).encode())))
            except FrameError:
                outcomes.add(FrameError)
    assert outcomes == {Identity, FrameError}


# ------------------------------------------------------------------------------------------------------ on the wire


class WorkQueue:
    """A server on loopback that keeps every request that reached it, and answers workers who say who they are."""

    def __init__(self, credentials: Credentials, host: str = "127.0.0.1") -> None:
        self.read: list[bytes] = []
        self.host = host
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        hello = grpc.unary_unary_rpc_method_handler(self._hello, request_deserializer=self._keep)
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("desk", {"Hello": hello})])
        self.port = self.server.add_secure_port(f"{host}:0", security.server_credentials(credentials))
        self.server.start()

    def _keep(self, request: bytes) -> bytes:
        self.read.append(request)
        return request

    def _hello(self, request: bytes, context: Any) -> bytes:
        worker = security.require_worker(context.auth_context(), "digits")
        if int(request) != worker:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, f"the certificate is that of worker {worker}")
        return b"welcome"

    def greet(self, credentials: Any, worker: int = 0) -> Any:
        """The answer to a hello, or the status of its refusal."""
        address = f"{self.host}:{self.port}"
        channel = grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
        with channel:
            try:
                return channel.unary_unary("/desk/Hello")(str(worker).encode(), timeout=10)
            except grpc.RpcError as error:
                return error.code()


@pytest.fixture(scope="module")
def desk_of_job(job: Path) -> Iterator[WorkQueue]:
    desk = WorkQueue(security.load_server(job))
    yield desk
    desk.server.stop(0).wait()


@pytest.fixture
def desk(desk_of_job: WorkQueue) -> WorkQueue:
    desk_of_job.read.clear()
    return desk_of_job


def authority() -> tuple[security._Authority, Credentials]:
    """A CA that can still sign, and its server."""
    now = datetime.now(timezone.utc)
    ca = security._Authority("digits", now - DAY, now + DAY)
    return ca, issue(ca, Identity("digits", "server"), ["127.0.0.1"])


def issue(
    ca: security._Authority, who: Identity, hosts: list[str], since: timedelta = -HOUR, until: timedelta = HOUR
) -> Credentials:
    now = datetime.now(timezone.utc)
    certificate, key = ca.issue(who, hosts, now + since, now + until)
    return Credentials(who, now + until, ca.pem, certificate, key)


def test_members_get_through_as_who_they_are(desk: WorkQueue, job: Path) -> None:
    for worker in (0, 1):
        mine = security.channel_credentials(security.load_worker(job, worker))
        assert desk.greet(mine, worker) == b"welcome"
        assert desk.greet(mine, 1 - worker) == grpc.StatusCode.PERMISSION_DENIED
    assert desk.read == [b"0", b"1", b"1", b"0"]


def strangers(job: Path, folder: Path) -> dict[str, Any]:
    ours = security.load_worker(job, 0)
    security.new_job(folder / "other", name="digits", hosts=[], workers=1)
    other = security.load_worker(folder / "other", 0)
    return {
        "no certificate": grpc.ssl_channel_credentials(ours.ca),
        "a certificate of another job": security.channel_credentials(replace(other, ca=ours.ca)),
        "another job altogether": security.channel_credentials(other),
        "the server's own": security.channel_credentials(replace(security.load_server(job))),
        "plaintext": None,
    }


def test_strangers_are_refused_and_nothing_of_theirs_is_read(desk: WorkQueue, job: Path, tmp_path: Path) -> None:
    for who, credentials in strangers(job, tmp_path).items():
        assert desk.greet(credentials) == grpc.StatusCode.UNAVAILABLE, who
    assert desk.read == []
    assert desk.greet(security.channel_credentials(security.load_worker(job, 0))) == b"welcome"


@pytest.mark.parametrize("since, until", [(-HOUR, -HOUR / 2), (HOUR, HOUR * 2)], ids=["expired", "not yet valid"])
def test_dates_are_enforced_by_both_ends(since: timedelta, until: timedelta) -> None:
    ca, server = authority()
    good = issue(ca, Identity("digits", "worker", 0), [])
    late = issue(ca, Identity("digits", "worker", 0), [], since, until)
    late_server = issue(ca, Identity("digits", "server"), ["127.0.0.1"], since, until)
    for holder, visitor in ((server, late), (late_server, good)):
        desk = WorkQueue(holder)
        assert desk.greet(security.channel_credentials(visitor)) == grpc.StatusCode.UNAVAILABLE
        assert desk.read == []
        desk.server.stop(0).wait()


def test_workers_do_not_believe_a_false_server(job: Path) -> None:
    ca, server = authority()
    worker = security.channel_credentials(issue(ca, Identity("digits", "worker", 0), []))
    posing = issue(ca, Identity("digits", "worker", 1), ["127.0.0.1"])  # even if a CA had given it the server's hosts
    for holder, host, answer in (
        (server, "127.0.0.1", b"welcome"),
        (server, "127.0.0.2", grpc.StatusCode.UNAVAILABLE),  # which is not in its certificate
        (posing, "127.0.0.1", grpc.StatusCode.UNAVAILABLE),
        (security.load_server(job), "127.0.0.1", grpc.StatusCode.UNAVAILABLE),
    ):
        desk = WorkQueue(holder, host)
        assert desk.greet(worker) == answer
        assert desk.read == ([b"0"] if answer == b"welcome" else [])
        desk.server.stop(0).wait()


def test_hosts_of_the_certificate_are_where_a_server_may_be(job: Path) -> None:
    desk = WorkQueue(security.load_server(job), "127.0.0.2")
    assert desk.greet(security.channel_credentials(security.load_worker(job, 0))) == b"welcome"
    desk.server.stop(0).wait()


def test_a_handshake_is_no_welcome(desk: WorkQueue, job: Path) -> None:
    """Without a certificate a TLS 1.3 client sees its handshake succeed; the refusal comes with its first read."""
    context = ssl.create_default_context(cafile=str(job / "ca.pem"))
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection(("127.0.0.1", desk.port), timeout=10)
    with context.wrap_socket(plain, server_hostname="127.0.0.1") as line:
        assert line.version() == "TLSv1.3"
        with contextlib.suppress(OSError):  # the refusal may be here already
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert line.recv(1) == b""
    assert desk.read == []


def test_garbage_does_not_disturb_members(desk: WorkQueue, job: Path) -> None:
    for junk in (
        b"",
        b"\x00" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\xff\xff",
    ):
        with socket.create_connection(("127.0.0.1", desk.port), timeout=10) as line:
            line.sendall(junk)
    assert desk.greet(security.channel_credentials(security.load_worker(job, 0))) == b"welcome"
    assert desk.read == [b"0"]


# --------------------------------------------------------------------------------------------------------- loopback

HERE = ["localhost", "LOCALHOST:1", "127.0.0.1", "127.8.9.10:1", "::1", "[::1]", "[::1]:1", "[::ffff:127.0.0.1]:1"]
HERE += [
    "ipv4:127.0.0.1:1",
    "ipv6:[::1]:1",
    "ipv6:%5B::1%5D:1",
    "dns:localhost:1",
    "dns:///localhost:1",
    "unix:/a",
    "unix:a",
]
ELSEWHERE = ["", ":1", "0.0.0.0:1", "[::]:1", "::", "*:1", "10.0.0.5:1", "ps.example.org:1", "localhost.evil.org:1"]
ELSEWHERE += [
    "ipv4:127.0.0.1:1,10.0.0.5:1",
    "dns://8.8.8.8/localhost:1",
    "[::1]x:1",
    "127.1:1",
    "2130706433:1",
    "xds:localhost",
]
ELSEWHERE += [
    "127.0.0.1@evil.org:1",
    "[::ffff:10.0.0.5]:1",
    "http://localhost:1",
    " 127.0.0.1:1",
    "127.0.0.1:1\n",
    "fe80::1",
]


@pytest.mark.parametrize("address", HERE)
def test_plaintext_is_for_this_host(address: str) -> None:
    assert security.is_loopback(address)
    security.require_tls(address, None)


@pytest.mark.parametrize("address", ELSEWHERE)
def test_elsewhere_tls_is_required(address: str, job: Path) -> None:
    assert not security.is_loopback(address)
    with pytest.raises(ConfigError) as error:
        security.require_tls(address, None)
    assert "laconic certs new" in str(error.value) and address in str(error.value)
    security.require_tls(address, security.load_server(job))
