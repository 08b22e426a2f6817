"""Certificates that a server no longer accepts, from a file that may change while the server runs.

``denied.txt`` in the folder of the server's certificates has a certificate's SHA-256 at the beginning of each line;
the rest of a line, and lines that begin with ``#``, are comments. ``laconic certs deny`` adds lines.
"""

from __future__ import annotations

import hashlib
import logging
import re
import ssl
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from laconic import counters
from laconic.cluster.replies import RefusedError
from laconic.cluster.security import AuthContext, list_certificates, read_file
from laconic.errors import ConfigError, FileError, FrameError
from laconic.fsync import os_error_as_file_error
from laconic.json_files import read_regular_text

__all__ = ["DENIED_FILE", "DenyList", "deny", "fingerprint"]

log = logging.getLogger("laconic")

DENIED_FILE = "denied.txt"
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@lru_cache(maxsize=4096)
def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of a certificate in PEM form, as ``openssl x509 -fingerprint -sha256`` computes it."""
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii").strip())).hexdigest()
    except ValueError:
        raise FrameError("expected a certificate in PEM form, got something else") from None


class DenyList:
    """The certificates of a file; none if there is no file.

    Raises:
        FileError: The file is there and cannot be read, or a line is not that of a certificate. Later, while the server
            runs, this is logged, and the certificates denied until then stay denied.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = self._state()
        self.denied = self._read()

    def refresh(self) -> bool:
        """Read the file again if it has changed; return whether it has."""
        stamp = self._state()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.denied = self._read()
        except FileError as error:
            log.error("%s: the certificates that were denied before stay denied, and no others", error)
            return False
        log.warning("%s denies %d certificates", self.path, len(self.denied))
        return True

    def is_denied(self, peer: AuthContext) -> bool:
        """Whether the certificate of a call's peer is denied, or is missing."""
        if not self.denied:
            return False
        certificate = next(iter(peer.get("x509_pem_cert", ())), b"")
        try:
            return fingerprint(certificate) in self.denied
        except FrameError:
            return True

    def check(self, peer: AuthContext, name: str) -> None:
        """Raise ``RefusedError`` for a denied certificate, and count it."""
        if self.is_denied(peer):
            counters.count("denied certificates", 1, f"the certificate of {name} is denied by {self.path}: refused")
            raise RefusedError(
                "denied", f"the server denies the certificate of {name}: make new ones with `laconic certs new`"
            )

    def _state(self) -> tuple[int, int, int] | None:
        try:
            state = self.path.stat()
        except OSError:
            return None
        return state.st_mtime_ns, state.st_size, state.st_ino

    def _read(self) -> frozenset[str]:
        try:
            lines = read_regular_text(self.path).splitlines()
        except FileNotFoundError:
            return frozenset()
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"cannot read {self.path}: {error}") from None
        denied = set()
        for number, line in enumerate(lines, 1):
            first = line.split(maxsplit=1)[0] if line.strip() else "#"
            digits = first.replace(":", "").lower()
            if _FINGERPRINT.fullmatch(digits):
                denied.add(digits)
            elif not first.startswith("#"):
                raise FileError(
                    f"{self.path}, line {number}: expected the SHA-256 of a certificate, 64 hexadecimal digits, got "
                    f"{first[:80]!a}: use `laconic certs deny`"
                )
        return frozenset(denied)


def deny(folder: Path, members: Sequence[str]) -> list[str]:
    """Add members' certificates to the deny list of a folder; return the members that were not in it.

    Args:
        members: Names such as ``worker-1``, whose ``.pem`` file is in the folder.
    """
    names = {certificate.file.removesuffix(".pem") for certificate in list_certificates(folder)}
    unknown = [member for member in members if member not in names or member == "server"]
    if unknown:
        workers = sorted(names - {"server"}, key=lambda name: (len(name), name))
        raise ConfigError(f"expected a worker of {folder}: {', '.join(workers) or 'there is none'}; got {unknown[0]!r}")
    path, lines = folder / DENIED_FILE, dict[str, str]()
    before = DenyList(path)
    for member in dict.fromkeys(members):
        digits = fingerprint(read_file(folder, f"{member}.pem"))
        if digits not in before.denied:
            lines[member] = f"{digits} {member}\n"
    partial = path.with_name(path.name + ".partial")
    with os_error_as_file_error(f"write {path}"):
        text = read_regular_text(path) if path.exists() else ""
        partial.write_text(text + ("" if text.endswith("\n") or not text else "\n") + "".join(lines.values()))
        partial.replace(path)  # a running server reads all of it or nothing new
    return list(lines)
