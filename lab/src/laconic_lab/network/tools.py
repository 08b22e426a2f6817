"""Calls of the programs that build a lab: ``ip``, ``tc`` and, for loss, ``nft``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError, LaconicError

__all__ = ["batch", "need", "need_congestion", "need_tun", "query", "tool"]

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}
_TIMEOUT_S = 30.0
_SBIN = os.pathsep.join(("/usr/sbin", "/sbin"))  # not on every user's PATH


def need(*programs: str) -> None:
    """Raise ``ConfigError`` unless these programs exist and the user is root."""
    for program in programs:
        tool(program)
    if os.geteuid() != 0:
        raise ConfigError(
            "network namespaces need root: run this as root, or use laconic_lab.network.paced_proxy, which needs none"
        )


def need_tun() -> None:
    """Raise ``ConfigError`` without TAP devices, which delayed links are made of."""
    if not Path("/dev/net/tun").exists():
        raise ConfigError("delay, jitter and corruption need TAP devices, and /dev/net/tun is missing")


def need_congestion(name: str) -> None:
    """Raise ``ConfigError`` for a congestion control that the kernel does not allow in namespaces."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    if name not in allowed:
        raise ConfigError(
            f"congestion control {name!r} is not allowed in namespaces of this machine: expected one of "
            f"{', '.join(allowed)} (allow others with sysctl net.ipv4.tcp_allowed_congestion_control)"
        )


def tool(program: str) -> str:
    """Return the path of a program."""
    path = shutil.which(program) or shutil.which(program, path=_SBIN)
    if path is None:
        raise ConfigError(f"{program!r} is missing: install it (Debian: apt-get install {_PACKAGES[program]})")
    return path


def batch(program: str, lines: Iterable[str], netns: str | None = None) -> None:
    """Run many commands of ``ip`` or ``tc`` in one process; stop at the first failure."""
    where = ["-n", netns] if netns else []
    _call([tool(program), *where, "-batch", "-"], "".join(f"{line}\n" for line in lines))


def query(argv: list[str]) -> Any:
    """Return the JSON that a program prints."""
    text = _call([tool(argv[0]), *argv[1:]], None)
    return json.loads(text) if text.strip() else []


def _call(argv: list[str], text: str | None) -> str:
    # In a new session, so that Ctrl-C reaches only us: a half-built or half-removed lab would stay.
    done = subprocess.run(
        argv, input=text or "", capture_output=True, text=True, timeout=_TIMEOUT_S, start_new_session=True
    )
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        command = " ".join([Path(argv[0]).name, *argv[1:]])
        raise LaconicError(f"`{command}` failed: {reason}" + (f" (commands: {text.splitlines()})" if text else ""))
    return done.stdout
