"""A relay that delays frames between hosts and the switch; a stand-alone program.

The program returns when the links work; a child process in the switch's namespace carries the frames until it is
killed.

The kernel may lack netem, so the delay is made here. A delayed link has a TAP device at each end, in the host's
namespace and in the switch's; this process reads frames from one and writes them to the other when they are due.
With the header IFF_VNET_HDR the kernel passes packets of up to 64 kB whole and computes checksums afterwards:
so a relay in Python is fast enough, and TCP does not notice a bit flipped on the way.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["RelayedLink", "as_json"]

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 1, 2, 4
_FRAME = 1 << 17
_HEADERS = 10 + 14 + 60 + 60  # vnet, Ethernet, and the longest of IP and TCP: no bit is flipped in these
_QUEUE = 64 << 20
_AT_ONCE = 64


@dataclass(frozen=True)
class RelayedLink:
    """A delayed link: the host's namespace, its switch port, delay and jitter in seconds, corruption probability."""

    namespace: str
    port: str
    delay: float
    jitter: float
    corrupt: float


def as_json(links: Sequence[RelayedLink]) -> str:
    return json.dumps([asdict(link) for link in links])


@dataclass
class _Pipe:
    """One direction of a link."""

    source: int
    sink: int
    link: RelayedLink
    random: random.Random
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    nbytes: int = 0
    last: float = 0.0

    def read(self) -> None:
        """Read the waiting frames and schedule them."""
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(self.source, _FRAME)
            except OSError:  # nothing more to read, or the device is down because the link was cut
                return
            if self.nbytes + len(frame) > _QUEUE:
                continue
            if self.link.corrupt and len(frame) > _HEADERS and self.random.random() < self.link.corrupt:
                frame = self._flip(frame)
            due = time.monotonic() + self.link.delay + self.random.random() * self.link.jitter
            self.last = max(due, self.last)  # jitter does not reorder
            self.queue.append((self.last, frame))
            self.nbytes += len(frame)

    def write_due(self, now: float) -> None:
        """Write the frames that are due."""
        while self.queue and self.queue[0][0] <= now:
            _, frame = self.queue.popleft()
            self.nbytes -= len(frame)
            try:
                os.write(self.sink, frame)
            except OSError:
                continue  # the device is down: the frame is lost

    def _flip(self, frame: bytes) -> bytes:
        damaged = bytearray(frame)
        damaged[self.random.randrange(_HEADERS, len(frame))] ^= 1 << self.random.randrange(8)
        return bytes(damaged)


def _tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return device


def _tap_in(namespace: str, name: str) -> int:
    """Open a TAP device in another namespace and return to this one."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as home, Path("/run/netns", namespace).open() as there:
        for target in (there, home):
            if libc.setns(target.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
            if target is there:
                device = _tap(name)
    return device


def main(links: Sequence[RelayedLink]) -> None:
    pipes: dict[int, _Pipe] = {}
    for number, link in enumerate(links):
        host, port = _tap_in(link.namespace, "eth0"), _tap(link.port)
        pipes[host] = _Pipe(host, port, link, random.Random(2 * number))
        pipes[port] = _Pipe(port, host, link, random.Random(2 * number + 1))
    with suppress(PermissionError):
        os.nice(-10)  # a link must not wait for the processes that use it
    if os.fork():
        return
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    _carry(pipes)


def _carry(pipes: dict[int, _Pipe]) -> None:
    while True:
        due = min((pipe.queue[0][0] for pipe in pipes.values() if pipe.queue), default=None)
        # select and not epoll: Python's epoll rounds up to whole milliseconds.
        ready, _, _ = select.select(list(pipes), [], [], None if due is None else max(0.0, due - time.monotonic()))
        for source in ready:
            pipes[source].read()
        for pipe in pipes.values():
            pipe.write_due(time.monotonic())


if __name__ == "__main__":
    main([RelayedLink(**link) for link in json.loads(sys.argv[1])])
