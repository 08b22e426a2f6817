"""Processes whose TCP sockets send no faster than a given rate, and with a delay; needs no root.

A small library (csrc/pace.cpp) is preloaded into the processes and paces what they write to TCP sockets, including
sockets of other libraries such as gloo, without a proxy process. Received data is not paced: with two processes that
makes no difference; with more, a receiver's link is never saturated by several senders. A delay holds for data only:
connections are set up without it, and TCP does not notice it, so that it has no slow start.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import laconic_lab
from laconic.errors import ConfigError
from laconic.units import GOODPUT, parse_rate, parse_time, shaper_burst
from laconic_lab.network.link import Link, measure_path

__all__ = ["PacedSockets", "paced_bytes"]

LOOPBACK = "127.0.0.1"


class PacedSockets:
    """Starts processes whose TCP sockets are paced, each process as if it had its own link.

    Args:
        rate: Rate of all sockets of a process together, ``"100mbit"``; as on a shaped link 0.956 of it is payload.
            None: unlimited.
        delay: Time from one process to another, added to all they send; needs a rate.
    """

    def __init__(self, rate: str | None, delay: str = "0") -> None:
        self.rate = None if rate is None else parse_rate(rate)
        self.delay = parse_time(delay)
        if self.delay and self.rate is None:
            raise ConfigError(f"delay needs a rate with paced sockets, got delay {delay!r} without one")
        self._library = None if rate is None else _library()

    def popen(self, argv: list[str], *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a process like ``subprocess.Popen``."""
        return subprocess.Popen(argv, env=self.environment(os.environ if env is None else env), **options)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which a process's sockets are paced."""
        environment = dict(base)
        if self.rate is not None:
            others = [environment["LD_PRELOAD"]] if environment.get("LD_PRELOAD") else []
            environment["LD_PRELOAD"] = ":".join([str(self._library), *others])
            environment["LACONIC_PACE"] = f"{self.rate / 8 * GOODPUT} {shaper_burst(self.rate)} {self.delay}"
        return environment

    def measure(self, seconds: float = 1.5) -> Link:
        """Measure the path between two such processes; nothing else should be sent meanwhile."""
        return measure_path(self.popen, self.popen, LOOPBACK, self.rate, seconds, lambda port: (LOOPBACK, port))


def paced_bytes() -> int | None:
    """Return the bytes that this process has sent through paced sockets; None if its sockets are not paced."""
    try:
        count = ctypes.CDLL(None).laconic_paced_bytes
    except AttributeError:
        return None
    count.restype = ctypes.c_uint64
    return int(count())


def _library() -> Path:
    """Return the path of the preloadable library that paces a process's sockets."""
    candidates = (Path(folder) / "_pace.so" for folder in laconic_lab.__path__)
    library = next((path for path in candidates if path.exists()), None)
    if library is None:
        raise ConfigError(
            "slow sockets need laconic_lab's library _pace.so, which is built on Linux only: reinstall laconic-lab "
            "there, or run as root to use network namespaces"
        )
    if ":" in str(library) or " " in str(library):
        raise ConfigError(f"{str(library)!r} cannot be preloaded: LD_PRELOAD takes no path with a colon or a space")
    return library
