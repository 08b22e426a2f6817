"""Certificates of a job: makes the folder with its CA, one certificate for the server and one per worker.

A job has a folder::

    ca.pem                        for every host
    server.pem    server.key      for the server's host
    worker-0.pem  worker-0.key    for the host of worker 0, and so on

The CA's key is discarded as soon as it has signed them, so no stolen file can make another member. A job that grows
gets a new folder. Each certificate names its holder in a URI, ``laconic://JOB/server`` or ``laconic://JOB/worker-0``,
and is valid for one end of a connection only, so a worker cannot act as the server.

Needs ``cryptography``: ``pip install 'laconic[cluster]'``.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.cluster.security import (
    CA_FILE,
    JOB_NAME,
    Certificate,
    Identity,
    list_certificates,
    require_module,
    utc_now,
)
from laconic.errors import ConfigError, FileError
from laconic.fsync import os_error_as_file_error, sync_folder

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

__all__ = ["MAX_DAYS", "MAX_WORKERS", "new_job"]

MAX_WORKERS = 4096
MAX_DAYS = 3650

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_CLOCK_SKEW = timedelta(hours=1)
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS = re.compile(rf"(?=.{{1,253}}$)(?:\*\.)?(?:{_LABEL}\.)*(?![0-9]+$){_LABEL}")


def new_job(
    folder: str | os.PathLike[str], *, name: str, hosts: Sequence[str], workers: int, days: int = 365
) -> tuple[Certificate, ...]:
    """Make a job's folder of certificates, completely or not at all, and return its certificates.

    Args:
        folder: A new or empty folder.
        hosts: Names and addresses by which workers reach the server. Loopback is always included.
    """
    require_module("cryptography")
    if not JOB_NAME.fullmatch(name):
        raise ConfigError(
            f"a job's name must have 1 to 48 letters, digits, '.', '_' or '-' and begin with a letter or digit, got "
            f"{name!r}"
        )
    _check_range("workers", workers, MAX_WORKERS)
    _check_range("days", days, MAX_DAYS)
    names = list(dict.fromkeys([*map(_host_name, hosts), *_LOOPBACK_NAMES]))
    target = Path(folder).resolve()
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        with os_error_as_file_error(f"make certificates in {folder}"):
            if target.exists() and not (target.is_dir() and not any(target.iterdir())):
                raise FileError(f"{folder} exists and is not an empty folder: choose another")
            partial.mkdir(mode=0o700)
            _write_job(partial, name, names, workers, timedelta(days=days))
            partial.rename(target)  # fails if the folder is no longer empty
            sync_folder(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return list_certificates(target)


def _check_range(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} must be an integer from 1 to {most}, got {value!r}")


def _host_name(host: str) -> str:
    """Return a DNS name or IP address in the form of certificates."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        if _DNS.fullmatch(host):
            return host.lower()
        raise ConfigError(
            f"a host must be a DNS name or an IP address, without port or scheme, got {host!r}"
            + ("" if host.isascii() else " (names outside ASCII in their xn-- form)")
        ) from None
    if address.is_unspecified:
        raise ConfigError(f"a host must be a name or address that workers connect to, got {host}")
    return str(address)


def _write_job(folder: Path, job: str, hosts: list[str], workers: int, valid: timedelta) -> None:
    since = utc_now().replace(microsecond=0) - _CLOCK_SKEW  # certificates have whole seconds
    until = since + _CLOCK_SKEW + valid
    authority = Authority(job, since, until)
    _write(folder / CA_FILE, authority.pem, 0o644)
    members = [(Identity(job, "server"), hosts), *((Identity(job, "worker", n), list[str]()) for n in range(workers))]
    for identity, names in members:
        certificate, key = authority.issue(identity, names, since, until)
        _write(folder / f"{identity.name}.pem", certificate, 0o644)
        _write(folder / f"{identity.name}.key", key, 0o600)
    sync_folder(folder)


class Authority:
    """A job's CA; its key is only in memory."""

    def __init__(self, job: str, since: datetime, until: datetime) -> None:
        self._job = job
        self._key = _new_key()
        self.pem = self._sign("laconic CA", self._key, since, until)

    def issue(self, identity: Identity, hosts: list[str], since: datetime, until: datetime) -> tuple[bytes, bytes]:
        """Return a member's certificate and key as PEM."""
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = _new_key()
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if identity.role == "server" else ExtendedKeyUsageOID.CLIENT_AUTH
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri), *map(_general_name, hosts)])
        certificate = self._sign(identity.name, key, since, until, x509.ExtendedKeyUsage([purpose]), names)
        return certificate, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def _sign(
        self, name: str, key: EllipticCurvePrivateKey, since: datetime, until: datetime, *more: x509.ExtensionType
    ) -> bytes:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.x509.oid import NameOID

        def subject(common_name: str) -> x509.Name:
            parts = {NameOID.ORGANIZATION_NAME: self._job, NameOID.COMMON_NAME: common_name}
            return x509.Name([x509.NameAttribute(oid, text) for oid, text in parts.items()])

        is_ca = key is self._key
        issuer = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = (
            x509.CertificateBuilder(subject("laconic CA"), subject(name), key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(since)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
            .add_extension(_key_usage(is_ca), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
        )
        for extension in more:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_usage(is_ca: bool) -> x509.KeyUsage:
    from cryptography import x509

    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
              "decipher_only")  # fmt: skip
    return x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, **dict.fromkeys(unused, False)
    )


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, data: bytes, mode: int) -> None:
    # The file is created with its mode, so that a key is never readable by others.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
