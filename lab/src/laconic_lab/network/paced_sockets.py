"""Slow sockets without root: processes of this host that send no faster than a rate.

A small library (csrc/pace.cpp) is preloaded into them, which holds back what goes into TCP sockets; so it does to
sockets that are not ours, such as gloo's, and needs no process between. What a process receives is not held back:
with two of them that is all the same, with more of them nobody's cable is full of what several others send.
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
from laconic.units import GOODPUT, parse_rate, shaper_burst
from laconic_lab.network.link import Link, measure_path

__all__ = ["PacedSockets", "paced_bytes"]

LOOPBACK = "127.0.0.1"


class PacedSockets:
    """How to start processes whose TCP sockets are slow, each process as if it had a cable of its own.

    Args:
        rate: Of what a process sends by all its sockets, ``"100mbit"``; as on a shaped cable 0.956 of it is for
            payload. None: as fast as the machine can.
    """

    def __init__(self, rate: str | None) -> None:
        self.rate = None if rate is None else parse_rate(rate)
        self._library = None if rate is None else _library()

    def popen(self, argv: list[str], *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """As ``subprocess.Popen``."""
        return subprocess.Popen(argv, env=self.environment(os.environ if env is None else env), **options)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """A process's environment, with what makes its sockets slow."""
        found = dict(base)
        if self.rate is not None:
            others = [found["LD_PRELOAD"]] if found.get("LD_PRELOAD") else []
            found["LD_PRELOAD"] = ":".join([str(self._library), *others])
            found["LACONIC_PACE"] = f"{self.rate / 8 * GOODPUT} {shaper_burst(self.rate)}"
        return found

    def measure(self, seconds: float = 1.5) -> Link:
        """How fast bytes go from one such process to another, while nothing else is sent."""
        return measure_path(self.popen, self.popen, LOOPBACK, self.rate, seconds, lambda port: (LOOPBACK, port))


def paced_bytes() -> int | None:
    """Bytes that this process has sent by slow sockets; None when its sockets are not slow."""
    try:
        count = ctypes.CDLL(None).laconic_paced_bytes
    except AttributeError:
        return None
    count.restype = ctypes.c_uint64
    return int(count())


def _library() -> Path:
    """Return the path of the preloadable library that paces a process's sockets."""
    candidates = (Path(folder) / "_pace.so" for folder in laconic_lab.__path__)
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        raise ConfigError(
            "slow sockets need laconic_lab's library _pace.so, which is built on Linux only: reinstall laconic-lab "
            "there, or run as root to use network namespaces"
        )
    if ":" in str(found) or " " in str(found):
        raise ConfigError(f"{str(found)!r} cannot be preloaded: LD_PRELOAD takes no path with a colon or a space")
    return found
