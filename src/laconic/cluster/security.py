"""Mutual TLS between a server and its workers: loads credentials, checks them, and identifies peers.

``certificates.new_job`` makes the files. Needs ``cryptography``, and gRPC for credentials:
``pip install 'laconic[cluster]'``.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from laconic import counters
from laconic.errors import ConfigError, FileError, FrameError
from laconic.json_files import open_regular

if TYPE_CHECKING:
    from cryptography import x509

__all__ = [
    "Certificate", "Credentials", "Identity", "channel_credentials", "is_loopback", "list_certificates", "load_server",
    "load_worker", "peer_identity", "read_file", "require_tls", "require_worker", "server_credentials",
]  # fmt: skip

AuthContext = Mapping[str, Iterable[bytes]]
"""The type of gRPC's ``context.auth_context()``."""

CA_FILE = "ca.pem"
MAX_FILE = 1 << 20
"""The most bytes of a certificate or a key; ours have about a thousand."""
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_URI = re.compile(rf"laconic://(?P<job>{JOB_NAME.pattern})/(?:server|worker-(?P<worker>0|[1-9][0-9]{{0,8}}))")


@dataclass(frozen=True)
class Identity:
    """The holder of a certificate. ``worker`` is None for a server."""

    job: str
    role: Literal["server", "worker"]
    worker: int | None = None

    @property
    def name(self) -> str:
        """``server`` or ``worker-3``, as in the names of its files."""
        return self.role if self.worker is None else f"{self.role}-{self.worker}"

    @property
    def uri(self) -> str:
        return f"laconic://{self.job}/{self.name}"


@dataclass(frozen=True)
class Credentials:
    """A member's certificate and key, and the CA by which it checks others; all as PEM."""

    identity: Identity
    until: datetime
    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)  # keeps it out of logs


@dataclass(frozen=True)
class Certificate:
    """One certificate of a folder. ``fault`` is why it is unusable; other fields are None if it is unreadable."""

    file: str
    identity: Identity | None
    hosts: tuple[str, ...]
    since: datetime | None
    until: datetime | None
    fault: str | None


# ------------------------------------------------------------------------------------------------------------- load


def load_server(folder: str | os.PathLike[str]) -> Credentials:
    """Load the server's credentials from a job's folder; raise ``FileError`` if they are unusable."""
    return _load(Path(folder), "server")


def load_worker(folder: str | os.PathLike[str], worker: int) -> Credentials:
    """Load a worker's credentials from a job's folder; raise ``FileError`` if they are unusable."""
    return _load(Path(folder), f"worker-{worker}")


def list_certificates(folder: str | os.PathLike[str]) -> tuple[Certificate, ...]:
    """Return all certificates of a job's folder except the CA's, the server's first, with their faults."""
    require_module("cryptography")
    folder = Path(folder)
    read_file(folder, CA_FILE)
    names = [path.stem for path in folder.glob("*.pem") if path.name != CA_FILE]
    names.sort(key=lambda name: (name != "server", len(name), name))  # by length: worker-10 comes after worker-9
    return tuple(_describe(folder, name) for name in names)


def _describe(folder: Path, name: str) -> Certificate:
    file, fault = f"{name}.pem", None
    try:
        _load(folder, name)
    except FileError as error:
        fault = str(error)
    try:
        certificate = _certificate(folder, file)[1]
        identity, hosts = _holder(certificate)
    except (FileError, FrameError) as error:
        return Certificate(file, None, (), None, None, fault or str(error))
    return Certificate(file, identity, hosts, certificate.not_valid_before_utc, certificate.not_valid_after_utc, fault)


def _load(folder: Path, name: str) -> Credentials:
    require_module("cryptography")
    ca_pem, ca = _certificate(folder, CA_FILE)
    pem, certificate = _certificate(folder, f"{name}.pem")
    path = folder / f"{name}.pem"
    _check_signature(certificate, ca, path)
    _check_dates(certificate, path)
    _check_dates(ca, folder / CA_FILE)
    try:
        identity, _ = _holder(certificate)
    except FrameError as error:
        raise FileError(f"{path}: {error}") from None
    if identity.name != name:
        raise FileError(f"{path} must be the certificate of {name}, it is that of {identity.name}")
    key = read_file(folder, f"{name}.key")
    _check_key(key, certificate, folder / f"{name}.key")
    return Credentials(identity, certificate.not_valid_after_utc, ca_pem, pem, key)


def read_file(folder: Path, name: str) -> bytes:
    """Return the bytes of a certificate or a key; ``FileError`` if it is missing, no regular file or too long."""
    path = folder / name
    try:
        with open_regular(path) as file:
            data = file.read(MAX_FILE + 1)
    except FileNotFoundError:
        if not folder.is_dir():
            raise FileError(f"no such folder: {folder}: make one with `laconic certs new`") from None
        raise FileError(
            f"no such file: {path}: a host needs {CA_FILE} and its member's .pem and .key from the folder that "
            "`laconic certs new` made"
        ) from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > MAX_FILE:
        raise FileError(f"{path} must have at most {MAX_FILE >> 10} KiB: it is no certificate and no key")
    return data


def _certificate(folder: Path, name: str) -> tuple[bytes, x509.Certificate]:
    pem = read_file(folder, name)
    try:
        return pem, _parse(pem)
    except FrameError:
        raise FileError(f"{folder / name} must be an undamaged certificate in PEM form") from None


def _check_signature(certificate: x509.Certificate, ca: x509.Certificate, path: Path) -> None:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise FileError(
            f"{path} was not signed by {path.with_name(CA_FILE)}: copy both from the folder of one job"
        ) from None


def _check_dates(certificate: x509.Certificate, path: Path) -> None:
    now, since, until = utc_now(), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > until:
        raise FileError(
            f"{path} expired on {until:%Y-%m-%d %H:%M} UTC and it is {now:%Y-%m-%d %H:%M}: make new ones with "
            "`laconic certs new`"
        )
    if now < since:
        raise FileError(
            f"{path} is not valid before {since:%Y-%m-%d %H:%M} UTC and it is {now:%Y-%m-%d %H:%M}: check this host's "
            "clock"
        )


def _check_key(pem: bytes, certificate: x509.Certificate, path: Path) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a password
        raise FileError(f"{path} must be an undamaged private key in PEM form without a password") from None
    if key.public_key() != certificate.public_key():
        raise FileError(f"{path} does not belong to {path.with_suffix('.pem')}: copy both from one job's folder")
    with contextlib.suppress(OSError):
        if os.name == "posix" and path.stat().st_mode & stat.S_IROTH:
            counters.count("world-readable key", 1, f"all users of this host can read {path}: chmod 600 {path}")


# --------------------------------------------------------------------------------------------------------- identity


def peer_identity(peer: bytes | AuthContext) -> Identity:
    """Return the holder of a certificate, from its PEM or from gRPC's ``context.auth_context()``.

    Raises ``FrameError`` without a certificate of a job.
    """
    if isinstance(peer, bytes):
        require_module("cryptography")
        return _holder(_parse(peer))[0]
    return _identity(name.decode("utf-8", "replace") for name in peer.get("x509_subject_alternative_name", ()))


def require_worker(peer: AuthContext, job: str) -> int:
    """Return the worker number in a peer's certificate; raise ``FrameError`` if it is not a worker of the job."""
    identity = peer_identity(peer)
    if identity.worker is None or identity.job != job:
        raise FrameError(
            f"expected a worker of job {job!r}, got the certificate of {identity.name} of job {identity.job!r}"
        )
    return identity.worker


def _parse(pem: bytes) -> x509.Certificate:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(pem)
    except Exception:  # its errors have no common base, and foreign bytes must raise nothing but FrameError
        raise FrameError("expected a certificate in PEM form, got something else") from None


def _holder(certificate: x509.Certificate) -> tuple[Identity, tuple[str, ...]]:
    """Return the holder of a certificate and the hosts it is valid for."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # as above
        raise FrameError("the certificate names no member of a job: it was not made by `laconic certs new`") from None
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    hosts = (*names.get_values_for_type(x509.DNSName), *addresses)
    return _identity(names.get_values_for_type(x509.UniformResourceIdentifier)), hosts


def _identity(names: Iterable[str]) -> Identity:
    matches = [match for name in names if (match := _URI.fullmatch(name))]
    if len(matches) != 1:
        raise FrameError("expected a certificate that `laconic certs new` made for one member of a job, got none")
    job, worker = matches[0]["job"], matches[0]["worker"]
    return Identity(job, "server") if worker is None else Identity(job, "worker", int(worker))


# ------------------------------------------------------------------------------------------------------------- gRPC


def server_credentials(credentials: Credentials) -> Any:
    """Return ``grpc.ServerCredentials`` that refuse every peer without a certificate of this job."""
    require_module("grpc")
    import grpc

    pair = (credentials.key, credentials.certificate)
    return grpc.ssl_server_credentials([pair], root_certificates=credentials.ca, require_client_auth=True)


def channel_credentials(credentials: Credentials) -> Any:
    """Return ``grpc.ChannelCredentials`` that present this certificate and accept only this job's server.

    In TLS 1.3 a client's handshake ends before the server has checked its certificate: a worker is connected only when
    a call has been answered.
    """
    require_module("grpc")
    import grpc

    return grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)


def is_loopback(address: str) -> bool:
    """Whether an address in gRPC's notation cannot be reached from other hosts.

    >>> [is_loopback(a) for a in ("localhost:50", "127.0.0.1:50", "[::1]:50", "ipv6:%5B::1%5D:50", "unix:/run/a")]
    [True, True, True, True, True]
    >>> [is_loopback(a) for a in (":50", "0.0.0.0:50", "[::]:50", "10.0.0.1:50", "node-1:50", "dns://8.8.8.8/localhost")]
    [False, False, False, False, False, False]
    """
    scheme, _, rest = address.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    if scheme in ("ipv4", "ipv6"):
        address = unquote(rest)  # gRPC escapes the brackets of a peer's address
    elif scheme == "dns":
        address = rest.removeprefix("///")  # with an authority another resolver decides
    bare = re.fullmatch(r"\[(?P<v6>[^]]*)\](:\d+)?|(?P<name>[^:]*)(:\d+)?", address)
    host = (bare["v6"] or bare["name"] or "") if bare else address
    if host.lower() == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.is_loopback or bool(ip.version == 6 and ip.ipv4_mapped and ip.ipv4_mapped.is_loopback)


def require_tls(address: str, credentials: Credentials | None) -> None:
    """Raise ``ConfigError`` for plaintext on anything but loopback."""
    if credentials is None and not is_loopback(address):
        raise ConfigError(
            f"{address} can be reached by other hosts and needs TLS: make certificates with `laconic certs new` and "
            "give their folder with --certs, or use 127.0.0.1"
        )


def require_module(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        reason = "" if isinstance(error, ModuleNotFoundError) and error.name == module else f" ({error})"
        raise ConfigError(f"a cluster needs the package {module}{reason}: pip install 'laconic[cluster]'") from None


def utc_now() -> datetime:
    return datetime.now(timezone.utc)
