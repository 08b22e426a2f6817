"""Starts and controls the benchmark's processes: on this host, on the hosts of a lab, or behind a paced proxy."""

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
from laconic.errors import ConfigError, LaconicError, WrongResultError
from laconic.units import parse_time
from laconic_lab.network import Host, Lab, Link, unique_name
from laconic_lab.network.paced_proxy import PacedProxy

__all__ = ["LAB", "LOOPBACK", "PACED", "Network", "Peer", "all_do", "best_network", "network", "started"]

Start = Callable[..., "subprocess.Popen[Any]"]

LOOPBACK = "127.0.0.1"
LAB, PACED = "network namespaces", "a paced proxy"
"""How links are emulated: with root and without."""


class Peer:
    """A running process of ``laconic_lab.bench.cluster.roles``."""

    def __init__(self, process: subprocess.Popen[Any], name: str) -> None:
        self.process, self.name = process, name

    def send(self, do: str, **values: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer is reported when it is read

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise LaconicError(f"the {self.name} has ended ({self.process.wait()}); its error output is above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WrongResultError(f"the {self.name} failed: {answer['error']}")
        return answer

    def do(self, do: str, **values: Any) -> dict[str, Any]:
        self.send(do, **values)
        return self.answer()


def all_do(peers: Sequence[Peer], do: str, **values: Any) -> list[dict[str, Any]]:
    """Send the request to all processes, then read all answers."""
    for peer in peers:
        peer.send(do, **values)
    return [peer.answer() for peer in peers]


@contextmanager
def started(role: str, threads: int, start: Start = subprocess.Popen) -> Iterator[Peer]:
    """Run a process for the duration of the block."""
    program = [sys.executable, "-m", "laconic_lab.bench.cluster.roles", role, str(threads)]
    # In a new session: Ctrl-C ends the block, and the block ends the process.
    process = start(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield Peer(process, role)
    finally:
        process.kill()
        process.communicate()


class Network(Protocol):
    """The hosts of server and workers and the links between them."""

    made_of: str
    certs: str | None

    @property
    def host(self) -> str:
        """The address on which the server listens."""
        ...

    def start(self, host: int) -> Start:
        """Return how to start a process on a host: 0 is the server's, workers follow."""
        ...

    def reach(self, port: int) -> str:
        """Return the address at which workers reach the server."""
        ...

    def counters(self) -> tuple[int, int]:
        """Return the bytes that the server's link received and sent."""
        ...

    def measure(self) -> list[Link]:
        """Measure the link to the server, and from it where possible."""
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
        counters = self.lab.counters(1)
        return counters.rx_bytes, counters.tx_bytes

    def measure(self) -> list[Link]:
        return [self.lab.measure(2, 1), self.lab.measure(1, 2)]


@dataclass
class _Proxied:
    proxy: PacedProxy
    certs: str | None = None
    made_of: str = PACED
    host: str = LOOPBACK

    def start(self, host: int) -> Start:
        return subprocess.Popen

    def reach(self, port: int) -> str:
        there, behind = self.proxy.address_of((self.host, port))
        return f"{there}:{behind}"

    def counters(self) -> tuple[int, int]:
        counters = self.proxy.counters()
        return counters.up_bytes, counters.down_bytes

    def measure(self) -> list[Link]:
        return [self.proxy.measure()]


@contextmanager
def network(
    made_of: str, rate: str | None, workers: int, delay: str = "0", *, slow: str | None = None
) -> Iterator[Network]:
    """Provide hosts for a server and its workers with links of a rate.

    Args:
        made_of: ``LAB``, which needs root, or ``PACED``: one proxy in front of the server, shared by all workers.
        rate: As in ``laconic_lab.network``; None: unlimited.
        delay: From one host to another, in each direction; needs ``LAB``.
        slow: Rate of the last worker's link, if it is another.
    """
    with ExitStack() as stack:
        if made_of == PACED:
            if slow is not None:
                raise ConfigError("one slow link needs network namespaces, which need root: a proxy has one rate")
            yield _Proxied(stack.enter_context(PacedProxy(rate=rate)))
            return
        # Packets pass the links of two hosts, and each adds its delay.
        half = f"{parse_time(delay) / 2:g}s"
        hosts = [*[Host(rate=rate, delay=half)] * workers, Host(rate=slow or rate, delay=half)]
        lab = stack.enter_context(Lab(unique_name("bench"), hosts))
        certs = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "certs"
        certificates.new_job(certs, name="bench", hosts=[lab.address(1)], workers=workers, days=1)
        yield _Namespaces(lab, str(certs))


def best_network() -> str:
    """Return ``LAB`` for root, else ``PACED``."""
    return LAB if os.geteuid() == 0 else PACED
