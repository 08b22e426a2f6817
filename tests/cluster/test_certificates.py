"""Certificates of a job: how they are made, and which faults are found when they are loaded."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint import check_one_line, names_in

from laconic import counters
from laconic.cluster import certificates, security
from laconic.cluster.security import Identity
from laconic.errors import ConfigError, FileError

DAY = timedelta(days=1)


@pytest.fixture
def copy(job_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(job_folder, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_job_has_a_certificate_per_member_and_no_key_of_the_ca(job_folder: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    members = ("server", "worker-0", "worker-1")
    assert set(contents(job_folder)) == {"ca.pem"} | {f"{name}.{kind}" for name in members for kind in ("pem", "key")}
    ca = x509.load_pem_x509_certificate((job_folder / "ca.pem").read_bytes())
    for path in job_folder.glob("*.key"):
        assert load_pem_private_key(path.read_bytes(), None).public_key() != ca.public_key()
    result = security.list_certificates(job_folder)
    assert [certificate.identity for certificate in result] == [
        Identity("digits", "server"),
        Identity("digits", "worker", 0),
        Identity("digits", "worker", 1),
    ]
    assert set(result[0].hosts) == {"ps.example.org", "localhost", "10.0.0.5", "127.0.0.2", "127.0.0.1", "::1"}
    assert result[1].hosts == () and all(certificate.fault is None for certificate in result)
    assert all(DAY * 364 < c.until - datetime.now(timezone.utc) <= DAY * 365 for c in result if c.until)


@pytest.mark.parametrize("umask", [0, 0o077])
def test_keys_are_readable_by_their_owner_only(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        certificates.new_job(tmp_path / "job", name="a", hosts=[], workers=1)
    finally:
        os.umask(before)
    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "job").glob("*.key")} == {0o600}


def test_existing_folder_is_not_changed(copy: Path) -> None:
    before = contents(copy)
    with pytest.raises(FileError) as error:
        certificates.new_job(copy, name="digits", hosts=[], workers=2)
    check_one_line(error, str(copy), "not an empty folder")
    assert contents(copy) == before and names_in(copy.parent) == ["copy"]
    with pytest.raises(FileError, match="not an empty folder"):
        certificates.new_job(copy / "ca.pem", name="digits", hosts=[], workers=2)
    (copy.parent / "empty").mkdir()
    assert len(certificates.new_job(copy.parent / "empty", name="digits", hosts=[], workers=2)) == 3


def test_folder_that_another_process_fills_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sync = tmp_path / "job", certificates.sync_folder

    def fill_target(folder: Path) -> None:
        if not target.exists():
            target.mkdir()
            (target / "theirs").touch()
        sync(folder)

    monkeypatch.setattr(certificates, "sync_folder", fill_target)
    with pytest.raises(FileError) as error:
        certificates.new_job(target, name="a", hosts=[], workers=1)
    check_one_line(error, "cannot make certificates")
    assert names_in(tmp_path) == ["job"] and names_in(target) == ["theirs"]


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
@pytest.mark.parametrize("at", range(7))
def test_interrupted_creation_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, at: int
) -> None:
    calls, fsync = iter(range(100)), os.fsync

    def failing(handle: int) -> None:
        if next(calls) == at:  # 5 files, their folder, then the parent folder
            raise fault
        fsync(handle)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises((FileError, KeyboardInterrupt)) as error:
        certificates.new_job(tmp_path / "job", name="a", hosts=[], workers=1)
    assert names_in(tmp_path) == ([] if at < 6 else ["job"])
    if isinstance(fault, OSError):
        check_one_line(error, "No space left on device")
    if at == 6:
        assert security.load_worker(tmp_path / "job", 0).identity.worker == 0


@pytest.mark.parametrize("wrong, words", [
    ({"name": ""}, "a job's name"), ({"name": "a/b"}, "a job's name"), ({"name": "a\n"}, "a job's name"),
    ({"name": "x" * 49}, "a job's name"), ({"workers": 0}, "workers must be an integer from 1 to 4096, got 0"),
    ({"workers": 5000}, "got 5000"), ({"days": 0}, "days must be an integer from 1 to 3650, got 0"),
    ({"days": 10**9}, "days must be"), ({"hosts": ["ps:50051"]}, "without port"),
    ({"hosts": ["https://ps"]}, "without port or scheme"), ({"hosts": [""]}, "a DNS name or an IP address"),
    ({"hosts": ["10.0.0.256"]}, "a DNS name or an IP address"), ({"hosts": ["bücher.example"]}, "xn--"),
    ({"hosts": ["-a"]}, "a DNS name"), ({"hosts": ["a" * 64]}, "a DNS name"),
    ({"hosts": [".".join(["a" * 60] * 5)]}, "a DNS name"), ({"hosts": ["0.0.0.0"]}, "that workers connect to"),
    ({"hosts": ["::"]}, "that workers connect to"),
])  # fmt: skip
def test_invalid_job_options_are_refused(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        certificates.new_job(tmp_path / "job", **({"name": "a", "hosts": [], "workers": 1} | wrong))
    check_one_line(error, words)
    assert names_in(tmp_path) == []


def test_hosts_are_normalised_and_unique(tmp_path: Path) -> None:
    hosts = ["PS", "ps", "*.cluster.local", "node_1", "fe80::1%eth0", "2001:DB8:0::5", "localhost", "127.0.0.1"]
    result = certificates.new_job(tmp_path / "job", name="a", hosts=hosts, workers=1)[0].hosts
    expected = ["*.cluster.local", "127.0.0.1", "2001:db8::5", "::1", "fe80::1", "localhost", "node_1", "ps"]
    assert sorted(result) == expected


def test_new_certificates_can_be_loaded(job_folder: Path) -> None:
    server, worker = security.load_server(job_folder), security.load_worker(job_folder, 1)
    assert server.identity == Identity("digits", "server") and worker.identity == Identity("digits", "worker", 1)
    assert server.ca == worker.ca == (job_folder / "ca.pem").read_bytes()
    assert (worker.certificate, worker.key) == (
        (job_folder / "worker-1.pem").read_bytes(),
        (job_folder / "worker-1.key").read_bytes(),
    )
    assert "PRIVATE" not in repr(worker)


def test_missing_files_are_named_in_the_error(copy: Path) -> None:
    with pytest.raises(FileError, match=r"no such file: .*worker-7\.pem"):
        security.load_worker(copy, 7)
    with pytest.raises(FileError) as error:
        security.load_server(copy / "nowhere")
    check_one_line(error, "no such folder", "nowhere", "laconic certs new")
    for name in ("worker-0.key", "worker-0.pem", "ca.pem"):
        (copy / name).unlink()
        with pytest.raises(FileError) as error:
            security.load_worker(copy, 0)
        check_one_line(error, f"no such file: {copy / name}", "laconic certs new")


@pytest.mark.parametrize("days, words", [(366, "expired on"), (-1, "is not valid before")])
def test_invalid_dates_are_named_in_the_error(
    job_folder: Path, monkeypatch: pytest.MonkeyPatch, days: int, words: str
) -> None:
    now = datetime.now(timezone.utc) + days * DAY
    monkeypatch.setattr(security, "utc_now", lambda: now)
    with pytest.raises(FileError) as error:
        security.load_server(job_folder)
    until = (
        security.list_certificates(job_folder)[0].until if days > 0 else security.list_certificates(job_folder)[0].since
    )
    assert until is not None
    check_one_line(error, "server.pem", words, f"{until:%Y-%m-%d %H:%M} UTC", f"it is {now:%Y-%m-%d %H:%M}")
    assert all(words in (certificate.fault or "") for certificate in security.list_certificates(job_folder))


def test_certificates_are_valid_on_a_host_whose_clock_is_50_minutes_behind(
    job_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(timezone.utc) - timedelta(minutes=50)
    monkeypatch.setattr(security, "utc_now", lambda: now)
    security.load_worker(job_folder, 0)


def test_certificate_of_another_job_is_refused(copy: Path, tmp_path: Path) -> None:
    certificates.new_job(tmp_path / "other", name="digits", hosts=[], workers=1)  # the same name
    for kind in ("pem", "key"):
        shutil.copy(tmp_path / "other" / f"worker-0.{kind}", copy)
    with pytest.raises(FileError) as error:
        security.load_worker(copy, 0)
    check_one_line(error, "worker-0.pem was not signed by", "ca.pem", "folder of one job")


def test_swapped_files_are_refused(copy: Path) -> None:
    shutil.copy(copy / "worker-1.key", copy / "worker-0.key")
    with pytest.raises(FileError) as error:
        security.load_worker(copy, 0)
    check_one_line(error, "worker-0.key does not belong to", "worker-0.pem")
    shutil.copy(copy / "worker-1.pem", copy / "worker-0.pem")
    with pytest.raises(FileError) as error:
        security.load_worker(copy, 0)
    check_one_line(error, "must be the certificate of worker-0, it is that of worker-1")


def test_damaged_files_are_refused(copy: Path) -> None:
    for name in ("worker-0.key", "worker-0.pem", "ca.pem"):
        whole = (copy / name).read_bytes()
        for bad in (b"", b"hello", whole[: len(whole) // 2], whole.replace(b"A", b"-"), bytes(100)):
            (copy / name).write_bytes(bad)
            with pytest.raises(FileError) as error:
                security.load_worker(copy, 0)
            check_one_line(error, name)
    (copy / "worker-0.key").unlink()
    (copy / "worker-0.key").mkdir()
    with pytest.raises(FileError):
        security.load_worker(copy, 0)


def test_key_with_a_password_is_refused(copy: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form

    path = copy / "worker-0.key"
    key = form.load_pem_private_key(path.read_bytes(), None)
    locked = form.BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, locked))
    with pytest.raises(FileError) as error:
        security.load_worker(copy, 0)
    check_one_line(error, "without a password")


def test_world_readable_key_is_logged_and_counted(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    security.load_worker(copy, 0)
    assert not caplog.records
    (copy / "worker-0.key").chmod(0o644)
    before = counters.counts().get("world-readable key", 0)
    security.load_worker(copy, 0)
    assert "chmod 600" in caplog.text and counters.counts()["world-readable key"] == before + 1


def test_missing_libraries_are_named_in_the_error(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = security.load_server(job_folder)
    for module in ("cryptography", "grpc"):
        monkeypatch.setitem(sys.modules, module, None)
    for call in (
        lambda: certificates.new_job("x", name="a", hosts=[], workers=1),
        lambda: security.load_server(job_folder),
        lambda: security.list_certificates(job_folder),
        lambda: security.peer_identity(credentials.certificate),
        lambda: security.server_credentials(credentials),
        lambda: security.channel_credentials(credentials),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        check_one_line(error, "pip install 'laconic[cluster]'")


def test_import_loads_neither_grpc_nor_cryptography() -> None:
    code = "import sys, laconic.cluster.security; print({'grpc', 'cryptography'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["ca.pem", "server.pem", "worker-1.pem", "worker-1.key"])
@pytest.mark.parametrize("kind", ["fifo", "zero", "long"])
def test_file_that_never_ends_is_reported_in_one_line(copy: Path, name: str, kind: str) -> None:
    path = copy / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"x" * (security.MAX_FILE + 1))
    expected = "must have at most 1024 KiB" if kind == "long" else "not a regular file"
    if name == "ca.pem":
        with pytest.raises(FileError, match=expected) as error:
            security.list_certificates(copy)
        check_one_line(error, name)
    else:
        faults = {certificate.file: certificate.fault for certificate in security.list_certificates(copy)}
        assert expected in str(faults[name.replace(".key", ".pem")])
