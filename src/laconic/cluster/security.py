"""Who may talk to whom: certificates of a job, and mutual TLS for gRPC.

A job has a folder with a CA of its own, a certificate for the server and one per worker::

    ca.pem                        goes to every host
    server.pem    server.key      to the server's
    worker-0.pem  worker-0.key    to that of worker 0, and so on

The CA's key is thrown away as soon as it has signed them: no stolen file can make another member. A job that grows is
made anew. Each certificate names its holder in a URI, ``laconic://JOB/server`` or ``laconic://JOB/worker-0``, and is
good for one end of a connection only, so a worker cannot pose as the server.

Needs ``cryptography``, and gRPC for credentials: ``pip install 'laconic[cluster]'``.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from laconic import counters
from laconic.errors import ConfigError, FileError, FrameError
from laconic.fsync import sync_folder

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

__all__ = [
    "MAX_DAYS",
    "MAX_WORKERS",
    "Certificate",
    "Credentials",
    "Identity",
    "certificates",
    "channel_credentials",
    "is_loopback",
    "load_server",
    "load_worker",
    "new_job",
    "peer_identity",
    "require_tls",
    "require_worker",
    "server_credentials",
]

MAX_WORKERS = 4096
MAX_DAYS = 3650

AuthContext = Mapping[str, Iterable[bytes]]
"""What gRPC's ``context.auth_context()`` gives."""

_CA = "ca.pem"
_ALWAYS = ("localhost", "127.0.0.1", "::1")
_CLOCK_SKEW = timedelta(hours=1)
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_URI = re.compile(rf"laconic://(?P<job>{_JOB.pattern})/(?:server|worker-(?P<worker>0|[1-9][0-9]{{0,8}}))")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS = re.compile(rf"(?=.{{1,253}}$)(?:\*\.)?(?:{_LABEL}\.)*(?![0-9]+$){_LABEL}")


@dataclass(frozen=True)
class Identity:
    """The holder of a certificate. ``worker`` is None for a server."""

    job: str
    role: Literal["server", "worker"]
    worker: int | None = None

    @property
    def name(self) -> str:
        """``server`` or ``worker-3``: what its files are called."""
        return self.role if self.worker is None else f"{self.role}-{self.worker}"

    @property
    def uri(self) -> str:
        return f"laconic://{self.job}/{self.name}"


@dataclass(frozen=True)
class Credentials:
    """What one member of a job shows to others, and knows them by. ``ca``, ``certificate`` and ``key`` are PEM."""

    identity: Identity
    until: datetime
    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)  # a log line is no place for it


@dataclass(frozen=True)
class Certificate:
    """One certificate of a folder. ``fault`` says why its holder could not use it; the rest is None if unreadable."""

    file: str
    identity: Identity | None
    hosts: tuple[str, ...]
    since: datetime | None
    until: datetime | None
    fault: str | None


# -------------------------------------------------------------------------------------------------------------- new


def new_job(
    folder: str | os.PathLike[str], *, name: str, hosts: Sequence[str], workers: int, days: int = 365
) -> tuple[Certificate, ...]:
    """Make a job's folder of certificates, whole or not at all; returns what is in it.

    Args:
        folder: Where: a new folder, or an empty one. One that holds anything is refused.
        name: The job's name.
        hosts: Names and addresses by which workers reach the server. It can be reached by loopback anyway.
        workers: How many workers get a certificate.
        days: How long the certificates are good.
    """
    _require("cryptography")
    if not _JOB.fullmatch(name):
        raise ConfigError(
            f"a job's name must be 1 to 48 letters, digits, '.', '_' and '-', a letter or digit first, got {name!r}"
        )
    _check_whole("workers", workers, MAX_WORKERS)
    _check_whole("days", days, MAX_DAYS)
    names = list(dict.fromkeys([*map(_host_name, hosts), *_ALWAYS]))
    target = Path(folder).resolve()
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise FileError(f"{folder} exists and is not an empty folder: it stays as it is, name another")
        partial.mkdir(mode=0o700)
        _write_job(partial, name, names, workers, timedelta(days=days))
        partial.rename(target)  # an error if somebody has put anything there meanwhile
        sync_folder(target.parent)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"cannot make certificates in {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return certificates(target)


def _check_whole(what: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{what} must be a whole number from 1 to {most}, got {value!r}")


def _host_name(host: str) -> str:
    """A DNS name or an address as certificates spell it."""
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
        raise ConfigError(f"{host} is where a server listens, not where it is found: name what workers connect to")
    return str(address)


def _write_job(folder: Path, job: str, hosts: list[str], workers: int, valid: timedelta) -> None:
    since = _now().replace(microsecond=0) - _CLOCK_SKEW  # certificates know whole seconds
    until = since + _CLOCK_SKEW + valid
    authority = _Authority(job, since, until)
    _write(folder / _CA, authority.pem, 0o644)
    members = [(Identity(job, "server"), hosts), *((Identity(job, "worker", n), list[str]()) for n in range(workers))]
    for identity, names in members:
        certificate, key = authority.issue(identity, names, since, until)
        _write(folder / f"{identity.name}.pem", certificate, 0o644)
        _write(folder / f"{identity.name}.key", key, 0o600)
    sync_folder(folder)


class _Authority:
    """A job's CA, while its key is in memory."""

    def __init__(self, job: str, since: datetime, until: datetime) -> None:
        self._job = job
        self._key = _new_key()
        self.pem = self._sign("laconic CA", self._key, since, until)

    def issue(self, identity: Identity, hosts: list[str], since: datetime, until: datetime) -> tuple[bytes, bytes]:
        """A member's certificate and key, in PEM form."""
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

        def full(common_name: str) -> x509.Name:
            parts = {NameOID.ORGANIZATION_NAME: self._job, NameOID.COMMON_NAME: common_name}
            return x509.Name([x509.NameAttribute(oid, text) for oid, text in parts.items()])

        is_ca, by = key is self._key, x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = (
            x509.CertificateBuilder(full("laconic CA"), full(name), key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(since)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
            .add_extension(_key_usage(is_ca), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(by), critical=False)
        )
        for extension in more:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_usage(is_ca: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, data: bytes, mode: int) -> None:
    # The mode comes with the file: a key must not be readable for a moment either.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


# ------------------------------------------------------------------------------------------------------------- load


def load_server(folder: str | os.PathLike[str]) -> Credentials:
    """The server's credentials from a job's folder; ``FileError`` says what is wrong with them."""
    return _load(Path(folder), "server")


def load_worker(folder: str | os.PathLike[str], worker: int) -> Credentials:
    """A worker's credentials from a job's folder; ``FileError`` says what is wrong with them."""
    return _load(Path(folder), f"worker-{worker}")


def certificates(folder: str | os.PathLike[str]) -> tuple[Certificate, ...]:
    """Every certificate in a job's folder but the CA's, the server's first, with what is wrong with it."""
    _require("cryptography")
    folder = Path(folder)
    _read(folder, _CA)
    found = [path.stem for path in folder.glob("*.pem") if path.name != _CA]
    found.sort(key=lambda name: (name != "server", len(name), name))  # by length: worker-10 comes after worker-9
    return tuple(_describe(folder, name) for name in found)


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
    _require("cryptography")
    ca_pem, ca = _certificate(folder, _CA)
    pem, certificate = _certificate(folder, f"{name}.pem")
    path = folder / f"{name}.pem"
    _check_signature(certificate, ca, path)
    _check_dates(certificate, path)
    _check_dates(ca, folder / _CA)
    try:
        identity, _ = _holder(certificate)
    except FrameError as error:
        raise FileError(f"{path}: {error}") from None
    if identity.name != name:
        raise FileError(f"{path} is the certificate of {identity.name} under another name: take that of {name}")
    key = _read(folder, f"{name}.key")
    _check_key(key, certificate, folder / f"{name}.key")
    return Credentials(identity, certificate.not_valid_after_utc, ca_pem, pem, key)


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        return path.read_bytes()
    except FileNotFoundError:
        if not folder.is_dir():
            raise FileError(f"no such folder: {folder}: `laconic certs new` makes one") from None
        raise FileError(
            f"no such file: {path}: a host needs {_CA} and its member's .pem and .key from the folder that "
            "`laconic certs new` made"
        ) from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None


def _certificate(folder: Path, name: str) -> tuple[bytes, x509.Certificate]:
    pem = _read(folder, name)
    try:
        return pem, _parse(pem)
    except FrameError:
        raise FileError(f"{folder / name} is not a certificate in PEM form, or a damaged one") from None


def _check_signature(certificate: x509.Certificate, ca: x509.Certificate, path: Path) -> None:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise FileError(
            f"{path} was not signed by {path.with_name(_CA)}: they are of different jobs, copy both from one folder"
        ) from None


def _check_dates(certificate: x509.Certificate, path: Path) -> None:
    now, since, until = _now(), certificate.not_valid_before_utc, certificate.not_valid_after_utc
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
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it asks for a password
        raise FileError(f"{path} is not a private key in PEM form without a password, or a damaged one") from None
    if key.public_key() != certificate.public_key():
        raise FileError(f"{path} is not the key of {path.with_suffix('.pem')}: copy both from one job's folder")
    with contextlib.suppress(OSError):
        if os.name == "posix" and path.stat().st_mode & stat.S_IROTH:
            counters.count("world-readable key", 1, f"everybody on this host can read {path}: chmod 600 {path}")


# --------------------------------------------------------------------------------------------------------- identity


def peer_identity(peer: bytes | AuthContext) -> Identity:
    """Who a certificate was made for: from its PEM, or from what gRPC's ``context.auth_context()`` says of a peer.

    Raises ``FrameError`` where there is no certificate, or none of a job.
    """
    if isinstance(peer, bytes):
        _require("cryptography")
        return _holder(_parse(peer))[0]
    return _identity(name.decode("utf-8", "replace") for name in peer.get("x509_subject_alternative_name", ()))


def require_worker(peer: AuthContext, job: str) -> int:
    """The worker's number that a peer's certificate gives it in this job; ``FrameError`` for everybody else."""
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
    except Exception:  # those of the library have no common root, and nothing else may come out of foreign bytes
        raise FrameError("expected a certificate in PEM form, got something else") from None


def _holder(certificate: x509.Certificate) -> tuple[Identity, tuple[str, ...]]:
    """Whom a certificate names, and the hosts it is good for."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # as above
        raise FrameError("the certificate names nobody: it was not made by `laconic certs new`") from None
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    hosts = (*names.get_values_for_type(x509.DNSName), *addresses)
    return _identity(names.get_values_for_type(x509.UniformResourceIdentifier)), hosts


def _identity(names: Iterable[str]) -> Identity:
    found = [match for name in names if (match := _URI.fullmatch(name))]
    if len(found) != 1:
        raise FrameError("expected a certificate that `laconic certs new` made for one member of a job, got none")
    worker = found[0]["worker"]
    return Identity(found[0]["job"], "server") if worker is None else Identity(found[0]["job"], "worker", int(worker))


# ------------------------------------------------------------------------------------------------------------- gRPC


def server_credentials(credentials: Credentials) -> Any:
    """``grpc.ServerCredentials`` that refuse every peer without a certificate of this job."""
    _require("grpc")
    import grpc

    pair = (credentials.key, credentials.certificate)
    return grpc.ssl_server_credentials([pair], root_certificates=credentials.ca, require_client_auth=True)


def channel_credentials(credentials: Credentials) -> Any:
    """``grpc.ChannelCredentials`` that show this certificate and accept this job's server only.

    Under TLS 1.3 a client's handshake ends before the server has judged its certificate: a worker is connected when a
    call has been answered, not before.
    """
    _require("grpc")
    import grpc

    return grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)


def is_loopback(address: str) -> bool:
    """Whether an address, as gRPC writes them, cannot be reached from other hosts.

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
        address = rest.removeprefix("///")  # with an authority in between it is not ours to say
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
    """Refuse plaintext anywhere but on loopback."""
    if credentials is None and not is_loopback(address):
        raise ConfigError(
            f"{address} can be reached by other hosts, where only TLS is allowed: make certificates with "
            "`laconic certs new` and give their folder with --certs, or use 127.0.0.1"
        )


def _require(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"a cluster needs {module}, and {error}: pip install 'laconic[cluster]'") from None


def _now() -> datetime:
    return datetime.now(timezone.utc)
