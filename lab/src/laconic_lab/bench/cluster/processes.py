"""Starting and ordering about the processes of a cluster bench, on this host, in a lab's hosts or behind a cable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from laconic.cluster import certificates
from laconic.errors import LaconicError, WrongResultError
from laconic_lab.network import Host, Lab, Link, unique_name
from laconic_lab.network.paced_proxy import PacedProxy

__all__ = ["LAB", "LOOPBACK", "PACED", "Network", "Peer", "all_do", "best_network", "network", "started"]

Start = Callable[..., "subprocess.Popen[Any]"]

LOOPBACK = "127.0.0.1"
LAB, PACED = "network namespaces", "a paced proxy"
"""What links are made of: with root, and without."""


class Peer:
    """A process of ``laconic_lab.bench.cluster.roles``."""

    def __init__(self, process: subprocess.Popen[Any], name: str) -> None:
        self.process, self.name = process, name

    def send(self, do: str, **values: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its answer will be missing, which is told there

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise LaconicError(f"the {self.name} of a bench has ended ({self.process.wait()}); what it said is above")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise WrongResultError(f"the {self.name} of a bench failed: {told['error']}")
        return told

    def do(self, do: str, **values: Any) -> dict[str, Any]:
        self.send(do, **values)
        return self.answer()


def all_do(peers: Sequence[Peer], do: str, **values: Any) -> list[dict[str, Any]]:
    """The same of all at once."""
    for peer in peers:
        peer.send(do, **values)
    return [peer.answer() for peer in peers]


@contextmanager
def started(role: str, threads: int, start: Start = subprocess.Popen) -> Iterator[Peer]:
    """A process, there as long as the block."""
    program = [sys.executable, "-m", "laconic_lab.bench.cluster.roles", role, str(threads)]
    # A session of its own: Ctrl-C ends the block, and the block ends the process.
    process = start(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield Peer(process, role)
    finally:
        process.kill()
        process.communicate()


class Network(Protocol):
    """A server's host, workers' hosts, and the links between them."""

    made_of: str
    certs: str | None

    @property
    def host(self) -> str:
        """Where the server listens."""
        ...

    def start(self, host: int) -> Start:
        """How processes start on a host: 0 is the server's, workers have the following."""
        ...

    def reach(self, port: int) -> str:
        """The address at which workers reach the server."""
        ...

    def counters(self) -> tuple[int, int]:
        """Bytes that the server's link has brought, and taken."""
        ...

    def measure(self) -> list[Link]:
        """To the server, and from it where that can be measured."""
        ...


@dataclass
class _Namespaces:
    lab: Lab
    certs: str | None
    made_of: str = LAB

    @property
    def host(self) -> str:
        return self.lab.address(1)

    def start(self, host: int) -> Start:
        return lambda argv, **options: self.lab.popen(host + 1, argv, **options)

    def reach(self, port: int) -> str:
        return f"{self.host}:{port}"

    def counters(self) -> tuple[int, int]:
        found = self.lab.counters(1)
        return found.rx_bytes, found.tx_bytes

    def measure(self) -> list[Link]:
        return [self.lab.measure(2, 1), self.lab.measure(1, 2)]


@dataclass
class _Proxied:
    cable: PacedProxy
    certs: str | None = None
    made_of: str = PACED
    host: str = LOOPBACK

    def start(self, host: int) -> Start:
        return subprocess.Popen

    def reach(self, port: int) -> str:
        there, behind = self.cable.address_of((self.host, port))
        return f"{there}:{behind}"

    def counters(self) -> tuple[int, int]:
        found = self.cable.counters()
        return found.up_bytes, found.down_bytes

    def measure(self) -> list[Link]:
        return [self.cable.measure()]


@contextmanager
def network(made_of: str, rate: str | None, workers: int) -> Iterator[Network]:
    """Hosts for a server and its workers, all links of that rate.

    Args:
        made_of: ``LAB``, which needs root, or ``PACED``: one proxy in front of the server, shared by all workers, as
            its link would be.
        rate: As in ``laconic_lab.network``; None: as fast as the machine can.
        workers: How many.
    """
    with ExitStack() as stack:
        if made_of == PACED:
            yield _Proxied(stack.enter_context(PacedProxy(rate=rate)))
            return
        lab = stack.enter_context(Lab(unique_name("bench"), [Host(rate=rate)] * (workers + 1)))
        certs = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "certs"
        certificates.new_job(certs, name="bench", hosts=[lab.address(1)], workers=workers, days=1)
        yield _Namespaces(lab, str(certs))


def best_network() -> str:
    """Namespaces where we are root."""
    return LAB if os.geteuid() == 0 else PACED
