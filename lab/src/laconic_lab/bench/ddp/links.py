"""Links between the ranks of the DDP benchmark: hosts of a lab, or paced sockets on loopback without root."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from laconic.errors import LaconicError
from laconic.units import parse_time
from laconic_lab.network import Host, Lab, Link, unique_name
from laconic_lab.network.paced_sockets import LOOPBACK, PacedSockets

__all__ = ["NAMESPACES", "SOCKETS", "Links", "Namespaces", "connected"]

log = logging.getLogger("laconic")

NAMESPACES, SOCKETS, PLAIN = "network namespaces", "paced sockets", "loopback"
PORT = 29511


class Links(Protocol):
    """Where ranks run and how fast they are connected."""

    made_of: str
    interface: str
    """The network interface of the ranks."""

    def store(self) -> tuple[str, int]:
        """Address and port of rank 0's store."""
        ...

    def popen(self, rank: int, argv: list[str], **options: Any) -> subprocess.Popen[Any]: ...
    def measure(self) -> list[Link]:
        """Measure the link from rank 0 to rank 1, and the way back where it is another link."""
        ...


@dataclass
class Namespaces:
    """Hosts of a lab, each with one rank or several: only what leaves a host passes its link."""

    lab: Lab
    ranks_per_host: int = 1
    made_of: str = NAMESPACES
    interface: str = "eth0"

    def store(self) -> tuple[str, int]:
        return self.lab.address(1), PORT

    def popen(self, rank: int, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        return self.lab.popen(rank // self.ranks_per_host + 1, argv, **options)

    def measure(self) -> list[Link]:
        return [self.lab.measure(1, 2), self.lab.measure(2, 1)]


@dataclass
class _Sockets:
    sockets: PacedSockets
    made_of: str
    interface: str = "lo"

    def store(self) -> tuple[str, int]:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            return LOOPBACK, probe.getsockname()[1]

    def popen(self, rank: int, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        return self.sockets.popen(argv, **options)

    def measure(self) -> list[Link]:
        return [self.sockets.measure()]


@contextmanager
def connected(rate: str | None, ranks: int, *, paced: bool, delay: str = "0") -> Iterator[Links]:
    """Provide links of a rate between ranks for the duration of the block.

    Args:
        rate: As in ``laconic_lab.network``; None: unlimited.
        delay: From one rank to another, in each direction; needs a rate.
        paced: Use paced sockets even where namespaces are possible.
    """
    with ExitStack() as stack:
        if not paced and os.geteuid() == 0:
            try:
                yield Namespaces(stack.enter_context(_lab(rate, ranks, delay)))
                return
            except _NoLabError as error:  # root in a container may lack the rights
                log.warning("network namespaces cannot be made here (%s): sockets are paced instead", error)
        yield _Sockets(PacedSockets(rate, delay), PLAIN if rate is None else SOCKETS)


class _NoLabError(Exception):
    pass


@contextmanager
def _lab(rate: str | None, ranks: int, delay: str) -> Iterator[Lab]:
    # Packets pass the links of two hosts, and each adds its delay.
    half = f"{parse_time(delay) / 2:g}s"
    lab = Lab(unique_name("ddp"), [Host(rate=rate, delay=half)] * ranks)
    try:
        lab.__enter__()
    except LaconicError as error:
        raise _NoLabError(str(error)) from error
    try:
        yield lab
    finally:
        lab.down()
