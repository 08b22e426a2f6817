"""Hosts in network namespaces on one switch, on this machine.

Each host is a namespace with one interface, ``eth0``; the switch is a namespace with a bridge and a port per host.
Nothing is made in the machine's own namespace. Needs root, ``ip`` and ``tc``; ``nft`` for loss.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from laconic.errors import ConfigError, LaconicError
from laconic.units import parse_time, queue_time, shaper_burst
from laconic_lab.network import delay_relay, state
from laconic_lab.network.hosts import Counters, Host
from laconic_lab.network.link import Link, measure_path
from laconic_lab.network.tools import batch, need, need_congestion, need_tun, query, tool

__all__ = ["Lab", "labs", "remove", "stale"]

MOST_HOSTS = 250
_LOSS_STEPS = 100_000  # loss in thousandths of a percent
_NAMESPACE = re.compile(r"laconic-(.+)-(?:sw|[0-9]+)")


class Lab:
    """Hosts 1 to n on one switch; up as long as the ``with`` block.

    All of it is removed at the end of the block, after an exception and after Ctrl-C: processes still running on its
    hosts are killed. ``remove`` clears up after an owner that was killed itself.

    Args:
        name: Several labs may be up at once, each with a name of its own; see ``unique_name``.
        hosts: What each is like.
        congestion: TCP's congestion control on all hosts, ``"reno"``; None: the machine's.

    >>> hosts = [Host(rate="100mbit"), Host(rate="100mbit", delay="5ms")]
    >>> with Lab("two", hosts) as lab:                        # doctest: +SKIP
    ...     lab.run(2, ["ping", "-c1", lab.address(1)])
    """

    def __init__(self, name: str, hosts: Sequence[Host], *, congestion: str | None = None) -> None:
        state.check_name(name)
        if not 1 <= len(hosts) <= MOST_HOSTS:
            raise ConfigError(f"a lab has 1 to {MOST_HOSTS} hosts, got {len(hosts)}")
        self.name = name
        self.hosts = tuple(hosts)
        self.congestion = congestion
        self._started: list[subprocess.Popen[Any]] = []

    @classmethod
    def attach(cls, name: str) -> Lab:
        """A lab that is up, perhaps by another process."""
        need("ip", "tc")
        found = state.load(name)
        return cls(name, found["hosts"], congestion=found["congestion"])

    def __enter__(self) -> Lab:
        self._up(owner=os.getpid())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def up(self) -> None:
        """Build it; it stays until ``down``, also after this process."""
        self._up(owner=None)

    def _up(self, owner: int | None) -> None:
        need("ip", "tc", *(["nft"] if any(host.loss for host in self.hosts) else []))
        if any(host.relayed for host in self.hosts):
            need_tun()
        if self.congestion is not None:
            need_congestion(self.congestion)
        state.claim(self.name, owner=owner, hosts=[asdict(host) for host in self.hosts], congestion=self.congestion)
        try:
            self._build()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Remove it, and what runs on its hosts."""
        with _deaf_to_interrupts():
            for process in self._started:  # also one that has not entered its namespace yet
                process.kill()
            remove(self.name)
            for process in self._started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5)
            self._started.clear()

    def address(self, host: int) -> str:
        self._check(host)
        return f"10.77.0.{host}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """What to run for argv to run on a host."""
        return [tool("ip"), "netns", "exec", self._namespace(host), *map(str, argv)]

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """``subprocess.Popen`` on a host. The process is killed with the lab if it still runs then."""
        process = subprocess.Popen(self.command(host, argv), **options)
        self._started.append(process)
        return process

    def run(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """``subprocess.run`` on a host."""
        return subprocess.run(self.command(host, argv), check=options.pop("check", False), **options)

    @property
    def owner(self) -> int | None:
        """The process whose ``with`` block it is; None if nobody waits to remove it."""
        return _owner(self.name)

    def pids(self, host: int) -> list[int]:
        """The processes on a host."""
        return _pids(self._namespace(host))

    def counters(self, host: int) -> Counters:
        """What passed a host's interface since the lab is up."""
        (link,) = query(["ip", "-n", self._namespace(host), "-s", "-j", "link", "show", "dev", "eth0"])
        rx, tx = link["stats64"]["rx"], link["stats64"]["tx"]
        return Counters(rx["bytes"], rx["packets"], tx["bytes"], tx["packets"], self._lost(host))

    def cut(self, host: int) -> None:
        """Pull a host's cable: silence, no reset, until ``mend``."""
        self._check(host)
        batch("ip", [f"link set p{host} down"], self._switch)

    def mend(self, host: int) -> None:
        self._check(host)
        batch("ip", [f"link set p{host} up"], self._switch)

    def measure(self, a: int, b: int, seconds: float = 1.5) -> Link:
        """How fast bytes go from a to b, while nothing else is sent."""
        if a == b:
            raise ConfigError(f"a link has two ends, got host {a} twice")
        rates = [rate for host in (a, b) if (rate := self.hosts[self._check(host)].bits_per_second) is not None]
        address = self.address(b)
        return measure_path(
            near=lambda argv, **options: subprocess.Popen(self.command(a, argv), **options),
            far=lambda argv, **options: subprocess.Popen(self.command(b, argv), **options),
            address=address,
            rate=min(rates, default=None),
            seconds=seconds,
            via=lambda port: (address, port),
        )

    @property
    def _switch(self) -> str:
        return f"laconic-{self.name}-sw"

    def _namespace(self, host: int) -> str:
        self._check(host)
        return f"laconic-{self.name}-{host}"

    def _check(self, host: int) -> int:
        """The host's place in ``hosts``."""
        if not 1 <= host <= len(self.hosts):
            raise ConfigError(f"lab {self.name!r} has hosts 1 to {len(self.hosts)}, got {host}")
        return host - 1

    def _build(self) -> None:
        numbers = range(1, len(self.hosts) + 1)
        batch("ip", [f"netns add {space}" for space in (self._switch, *map(self._namespace, numbers))])
        batch("ip", ["link add br0 type bridge mcast_snooping 0", *_raise("br0")], self._switch)
        for number, host in enumerate(self.hosts, 1):
            self._lay_cable(number, host)
        if any(host.relayed for host in self.hosts):
            self._start_relay()

    def _lay_cable(self, number: int, host: Host) -> None:
        space, port = self._namespace(number), f"p{number}"
        if host.relayed:
            batch("ip", ["tuntap add dev eth0 mode tap vnet_hdr"], space)
            batch("ip", [f"tuntap add dev {port} mode tap vnet_hdr"], self._switch)
        else:
            batch("ip", [f"link add eth0 netns {space} type veth peer name {port} netns {self._switch}"])
        # Loss is per packet, so with loss there must be none that stand for forty.
        single = [f"link set dev {end} gso_max_segs 1" for end in ("eth0", port)] if host.loss else ["", ""]
        inside = ["link set dev lo up", f"address add {self.address(number)}/24 dev eth0", single[0], *_raise("eth0")]
        batch("ip", inside, space)
        batch("ip", [f"link set dev {port} master br0", single[1], *_raise(port)], self._switch)
        if (rate := host.bits_per_second) is not None:
            for end, where in (("eth0", space), (port, self._switch)):
                batch("tc", [f"qdisc replace dev {end} root {_shaper(rate)}"], where)
        if self.congestion is not None:
            self._tell(number, ["tee", "/proc/sys/net/ipv4/tcp_congestion_control"], self.congestion)
        if host.loss:
            # nft 1.0.6 wants each statement on a line of its own.
            rule = f'iif "eth0" numgen random mod {_LOSS_STEPS} < {round(host.loss / 100 * _LOSS_STEPS)} counter drop'
            chain = f"chain in {{\ntype filter hook input priority 0;\n{rule}\n}}"
            self._tell(number, [tool("nft"), "-f", "-"], f"table inet lab {{\n{chain}\n}}\n")

    def _tell(self, host: int, argv: Sequence[str], text: str) -> None:
        done = self.run(host, argv, input=text, text=True, capture_output=True)
        if done.returncode != 0:
            said = " ".join(done.stderr.split())
            raise LaconicError(f"host {host} could not be told {text!r} by `{' '.join(argv)}`: {said}")

    def _lost(self, host: int) -> int:
        if not self.hosts[self._check(host)].loss:
            return 0
        listed = query(["ip", *self.command(host, [tool("nft"), "-j", "list", "table", "inet", "lab"])[1:]])
        rules = [entry["rule"]["expr"] for entry in listed["nftables"] if "rule" in entry]
        return sum(part["counter"]["packets"] for rule in rules for part in rule if "counter" in part)

    def _start_relay(self) -> None:
        """One process carries the frames of all cables with a delay. It lives in the switch's namespace."""
        cables = [
            delay_relay.Line(
                self._namespace(number),
                f"p{number}",
                parse_time(host.delay),
                parse_time(host.jitter),
                host.corrupt / 100,
            )
            for number, host in enumerate(self.hosts, 1)
            if host.relayed
        ]
        program = [sys.executable, "-I", str(Path(delay_relay.__file__)), delay_relay.as_json(cables)]
        done = subprocess.run(
            [tool("ip"), "netns", "exec", self._switch, *program], capture_output=True, text=True, timeout=30
        )
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise LaconicError(f"the relay that delays packets did not start: {said[-1]}")


def labs() -> list[str]:
    """The names of all labs on this machine, also of those whose owner is gone."""
    need("ip")
    return sorted({*state.known(), *(found[1] for space in _namespaces() if (found := _NAMESPACE.fullmatch(space)))})


def stale() -> list[str]:
    """The names of labs whose owner was killed before it could remove them."""
    need("ip")
    return [name for name in state.known() if (owner := _owner(name)) is not None and not _runs(owner)]


def _owner(name: str) -> int | None:
    try:
        owner: int | None = state.load(name)["owner"]
    except LaconicError:  # removed a moment ago, or not to be read, which `laconic lab status` says
        return None
    return owner


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def remove(name: str) -> bool:
    """Remove a lab, whoever made it and however much of it is left. Says whether there was any."""
    state.check_name(name)
    need("ip")
    there = name in state.known()
    mine = [space for space in _namespaces() if (found := _NAMESPACE.fullmatch(space)) and found[1] == name]
    _kill(mine)
    if mine:
        batch("ip", [f"netns delete {space}" for space in mine])
    state.forget(name)
    return there or bool(mine)


def _kill(spaces: list[str]) -> None:
    """Kill what runs in namespaces, and what that may have started meanwhile."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        alive = [pid for space in spaces for pid in _pids(space) if pid != os.getpid()]
        if not alive:
            return
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _pids(space: str) -> list[int]:
    done = subprocess.run([tool("ip"), "netns", "pids", space], capture_output=True, text=True, timeout=30)
    return [int(pid) for pid in done.stdout.split()]


def _namespaces() -> list[str]:
    return [entry["name"] for entry in query(["ip", "-j", "netns", "list"])]


def _raise(device: str) -> list[str]:
    """Up, and silent: without an IPv6 address it asks for nothing on its own."""
    return [f"link set dev {device} addrgenmode none", f"link set dev {device} up"]


def _shaper(rate: float) -> str:
    return f"tbf rate {round(rate)}bit burst {shaper_burst(rate)}b latency {queue_time(rate) * 1e3:.0f}ms"


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the block has ended: what is removed by half stays for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])
