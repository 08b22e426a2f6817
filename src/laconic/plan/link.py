"""The link to another host, measured from here, with ``laconic.link_probe`` listening at the other end."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from typing import Any

from laconic.errors import ConfigError, LaconicError

__all__ = ["measure_link", "parse_peer"]

PINGS, PING = 20, 64
WARM_UP_S = 0.5
TIMEOUT_S = 30.0
_TIOCOUTQ = 0x5411  # Linux: bytes that were given to the kernel and not taken by the other end yet


def measure_link(peer: str, seconds: float = 3.0) -> dict[str, Any]:
    """Payload per second that the other end takes, and the round trip of a small message.

    Args:
        peer: HOST:PORT, as the other end says it.
        seconds: How long to send, after a short warm-up.
    """
    host, port = parse_peer(peer)
    try:
        trip = _round_trip(host, port, seconds)
        goodput = _send(host, port, seconds)
    except OSError as error:
        raise LaconicError(f"no link to {peer}: {error.strerror or error}") from None
    return {"to": peer, "goodput": goodput, "round_trip": trip}


def parse_peer(peer: str) -> tuple[str, int]:
    host, _, port = peer.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"a peer is HOST:PORT, as `laconic calibrate --listen` says it; got {peer!r}")
    return host, int(port)


def _connect(host: str, port: int) -> socket.socket:
    there = socket.create_connection((host, port), timeout=TIMEOUT_S)
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return there


def _round_trip(host: str, port: int, seconds: float) -> float:
    trips = []
    with _connect(host, port) as there:
        for _ in range(PINGS):
            begin = time.monotonic()
            there.sendall(bytes(PING))
            left = PING
            while left:
                got = len(there.recv(left))
                if not got:
                    raise ConnectionError("the other end went away")
                left -= got
            trips.append(time.monotonic() - begin)
        there.sendall(f"{WARM_UP_S:.3f} {seconds:.3f}".ljust(PING).encode())
    return sorted(trips)[PINGS // 2]


def _send(host: str, port: int, seconds: float) -> float:
    """Bits per second that left the kernel's queue, after the warm-up; the other end closes when it has enough."""
    block, sent = bytes(1 << 16), 0
    seen: list[tuple[float, int]] = []
    with _connect(host, port) as there:
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - began < WARM_UP_S + seconds + 10:
                there.sendall(block)
                sent += len(block)
                now = time.monotonic()
                if now - began >= WARM_UP_S and (not seen or now - seen[-1][0] > 0.05):
                    seen.append((now, sent - _queued(there)))
    if len(seen) < 2:
        raise ConnectionError("the other end ended the measurement early")
    (first, before), (last, after) = seen[0], seen[-1]
    return 8 * (after - before) / (last - first)


def _queued(there: socket.socket) -> int:
    try:
        import fcntl

        return int(struct.unpack("i", fcntl.ioctl(there, _TIOCOUTQ, b"\0" * 4))[0])
    except (ImportError, OSError):
        return 0
