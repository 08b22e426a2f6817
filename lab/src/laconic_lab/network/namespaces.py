"""``Lab``: hosts in network namespaces on one switch.

Each host is a namespace with one interface, ``eth0``; the switch is a namespace with a bridge and a port per host.
The machine's own namespace is not changed. Needs root, ``ip`` and ``tc``; ``nft`` for loss.
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
    """Hosts 1 to n on one switch, for the duration of a ``with`` block.

    The end of the block removes everything, also after an exception or Ctrl-C, and kills processes that still run on
    the hosts. ``remove`` cleans up a lab whose owner was killed.

    Args:
        name: Unique among the labs of this machine; see ``unique_name``.
        congestion: TCP congestion control of all hosts, such as ``"reno"``; None: the machine's.

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
        """Return an existing lab, possibly built by another process."""
        need("ip", "tc")
        saved = state.load(name)
        return cls(name, saved["hosts"], congestion=saved["congestion"])

    def __enter__(self) -> Lab:
        self._up(owner=os.getpid())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def up(self) -> None:
        """Build the lab; it stays until ``down``, even after this process ends."""
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
        """Kill the processes on the hosts and remove the lab."""
        with _interrupts_deferred():
            for process in self._started:  # including one that has not entered its namespace yet
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
        """Return the command line that runs argv on a host."""
        return [tool("ip"), "netns", "exec", self._namespace(host), *map(str, argv)]

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host like ``subprocess.Popen``; removing the lab kills it."""
        process = subprocess.Popen(self.command(host, argv), **options)
        self._started.append(process)
        return process

    def run(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command on a host like ``subprocess.run``."""
        return subprocess.run(self.command(host, argv), check=options.pop("check", False), **options)

    @property
    def owner(self) -> int | None:
        """The process that removes the lab at the end of its ``with`` block; None if ``down`` must be called."""
        return _owner(self.name)

    def pids(self, host: int) -> list[int]:
        """Return the process ids on a host."""
        return _pids(self._namespace(host))

    def counters(self, host: int) -> Counters:
        """Return the traffic counters of a host's interface."""
        (link,) = query(["ip", "-n", self._namespace(host), "-s", "-j", "link", "show", "dev", "eth0"])
        rx, tx = link["stats64"]["rx"], link["stats64"]["tx"]
        return Counters(rx["bytes"], rx["packets"], tx["bytes"], tx["packets"], self._lost(host))

    def cut(self, host: int) -> None:
        """Cut a host's link without resetting connections, until ``mend``."""
        self._check(host)
        batch("ip", [f"link set p{host} down"], self._switch)

    def mend(self, host: int) -> None:
        self._check(host)
        batch("ip", [f"link set p{host} up"], self._switch)

    def measure(self, a: int, b: int, seconds: float = 1.5) -> Link:
        """Measure the path from host a to host b; nothing else should be sent meanwhile."""
        if a == b:
            raise ConfigError(f"a link needs two different hosts, got host {a} twice")
        rates = [rate for host in (a, b) if (rate := self.hosts[self._check(host)].bits_per_second) is not None]
        address = self.address(b)
        return measure_path(
            near=lambda argv, **options: subprocess.Popen(self.command(a, argv), **options),
            far=lambda argv, **options: subprocess.Popen(self.command(b, argv), **options), address=address,
            rate=min(rates, default=None), seconds=seconds, via=lambda port: (address, port),
        )  # fmt: skip

    @property
    def _switch(self) -> str:
        return f"laconic-{self.name}-sw"

    def _namespace(self, host: int) -> str:
        self._check(host)
        return f"laconic-{self.name}-{host}"

    def _check(self, host: int) -> int:
        """Return the index of a host in ``hosts``; ``ConfigError`` if there is no such host."""
        if not 1 <= host <= len(self.hosts):
            raise ConfigError(f"lab {self.name!r} has hosts 1 to {len(self.hosts)}, got {host}")
        return host - 1

    def _build(self) -> None:
        numbers = range(1, len(self.hosts) + 1)
        batch("ip", [f"netns add {space}" for space in (self._switch, *map(self._namespace, numbers))])
        batch("ip", ["link add br0 type bridge mcast_snooping 0", *_set_up("br0")], self._switch)
        for number, host in enumerate(self.hosts, 1):
            self._connect(number, host)
        if any(host.relayed for host in self.hosts):
            self._start_relay()

    def _connect(self, number: int, host: Host) -> None:
        space, port = self._namespace(number), f"p{number}"
        if host.relayed:
            batch("ip", ["tuntap add dev eth0 mode tap vnet_hdr"], space)
            batch("ip", [f"tuntap add dev {port} mode tap vnet_hdr"], self._switch)
        else:
            batch("ip", [f"link add eth0 netns {space} type veth peer name {port} netns {self._switch}"])
        # Loss is per packet, so large packets that stand for forty must be off.
        single = [f"link set dev {end} gso_max_segs 1" for end in ("eth0", port)] if host.loss else ["", ""]
        inside = ["link set dev lo up", f"address add {self.address(number)}/24 dev eth0", single[0], *_set_up("eth0")]
        batch("ip", inside, space)
        batch("ip", [f"link set dev {port} master br0", single[1], *_set_up(port)], self._switch)
        if (rate := host.bits_per_second) is not None:
            for end, where in (("eth0", space), (port, self._switch)):
                batch("tc", [f"qdisc replace dev {end} root {_shaper(rate)}"], where)
        if self.congestion is not None:
            self._write(number, ["tee", "/proc/sys/net/ipv4/tcp_congestion_control"], self.congestion)
        if host.loss:
            # nft 1.0.6 requires each statement on its own line.
            rule = f'iif "eth0" numgen random mod {_LOSS_STEPS} < {round(host.loss / 100 * _LOSS_STEPS)} counter drop'
            chain = f"chain in {{\ntype filter hook input priority 0;\n{rule}\n}}"
            self._write(number, [tool("nft"), "-f", "-"], f"table inet lab {{\n{chain}\n}}\n")

    def _write(self, host: int, argv: Sequence[str], text: str) -> None:
        done = self.run(host, argv, input=text, text=True, capture_output=True)
        if done.returncode != 0:
            reason = " ".join(done.stderr.split())
            raise LaconicError(f"host {host}: `{' '.join(argv)}` with input {text!r} failed: {reason}")

    def _lost(self, host: int) -> int:
        if not self.hosts[self._check(host)].loss:
            return 0
        listed = query(["ip", *self.command(host, [tool("nft"), "-j", "list", "table", "inet", "lab"])[1:]])
        rules = [entry["rule"]["expr"] for entry in listed["nftables"] if "rule" in entry]
        return sum(part["counter"]["packets"] for rule in rules for part in rule if "counter" in part)

    def _start_relay(self) -> None:
        """Start the process that carries the frames of all delayed links, in the switch's namespace."""
        links = [
            delay_relay.RelayedLink(
                self._namespace(number), f"p{number}", parse_time(host.delay), parse_time(host.jitter),
                host.corrupt / 100,
            )
            for number, host in enumerate(self.hosts, 1)
            if host.relayed
        ]  # fmt: skip
        program = [sys.executable, "-I", str(Path(delay_relay.__file__)), delay_relay.as_json(links)]
        done = subprocess.run(
            [tool("ip"), "netns", "exec", self._switch, *program], capture_output=True, text=True, timeout=30
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no error output"]
            raise LaconicError(f"the relay that delays packets did not start: {lines[-1]}")


def labs() -> list[str]:
    """Return the names of all labs on this machine, including those whose owner is gone."""
    need("ip")
    return sorted({*state.known(), *(match[1] for space in _namespaces() if (match := _NAMESPACE.fullmatch(space)))})


def stale() -> list[str]:
    """Return the names of labs whose owner was killed before it could remove them."""
    need("ip")
    return [name for name in state.known() if (owner := _owner(name)) is not None and not _is_running(owner)]


def _owner(name: str) -> int | None:
    try:
        owner: int | None = state.load(name)["owner"]
    except LaconicError:  # just removed, or unreadable, which `laconic lab status` reports
        return None
    return owner


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def remove(name: str) -> bool:
    """Remove what is left of a lab, by any process; return whether there was anything."""
    state.check_name(name)
    need("ip")
    registered = name in state.known()
    mine = [space for space in _namespaces() if (match := _NAMESPACE.fullmatch(space)) and match[1] == name]
    _kill(mine)
    if mine:
        batch("ip", [f"netns delete {space}" for space in mine])
    state.forget(name)
    return registered or bool(mine)


def _kill(spaces: list[str]) -> None:
    """Kill the processes in namespaces, repeatedly, because they may start others meanwhile."""
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


def _set_up(device: str) -> list[str]:
    """Return the commands that bring a device up without an IPv6 address, so that it sends nothing by itself."""
    return [f"link set dev {device} addrgenmode none", f"link set dev {device} up"]


def _shaper(rate: float) -> str:
    return f"tbf rate {round(rate)}bit burst {shaper_burst(rate)}b latency {queue_time(rate) * 1e3:.0f}ms"


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the block has ended, because a half-removed lab would stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received and callable(before):
            before(*received[0])
