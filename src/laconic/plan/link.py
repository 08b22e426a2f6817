"""Measure the link to another host, where ``laconic.link_probe`` listens."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from typing import Any

from laconic.errors import ConfigError, LaconicError

__all__ = ["measure_link", "parse_peer"]

PINGS, PING_NBYTES = 20, 64
WARM_UP_S = 0.5
TIMEOUT_S = 30.0
_TIOCOUTQ = 0x5411  # Linux: bytes in the send queue that the peer has not acknowledged


def measure_link(peer: str, seconds: float = 3.0) -> dict[str, Any]:
    """Return the payload bits per second that the peer acknowledges, and the round trip of a small message.

    Args:
        peer: HOST:PORT, as ``laconic calibrate --listen`` prints it.
        seconds: Seconds of sending, after a short warm-up.
    """
    host, port = parse_peer(peer)
    try:
        round_trip = _round_trip(host, port, seconds)
        goodput = _goodput(host, port, seconds)
    except OSError as error:
        raise LaconicError(f"no link to {peer}: {error.strerror or error}") from None
    return {"to": peer, "goodput": goodput, "round_trip": round_trip}


def parse_peer(peer: str) -> tuple[str, int]:
    host, _, port = peer.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--peer must be HOST:PORT, as `laconic calibrate --listen` prints it; got {peer!r}")
    return host, int(port)


def _connect(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _round_trip(host: str, port: int, seconds: float) -> float:
    """Return the median round trip of small messages, and announce how long the goodput will be measured."""
    trips = []
    with _connect(host, port) as connection:
        for _ in range(PINGS):
            begin = time.monotonic()
            connection.sendall(bytes(PING_NBYTES))
            left = PING_NBYTES
            while left:
                received = len(connection.recv(left))
                if not received:
                    raise ConnectionError("the peer closed the connection")
                left -= received
            trips.append(time.monotonic() - begin)
        connection.sendall(f"{WARM_UP_S:.3f} {seconds:.3f}".ljust(PING_NBYTES).encode())
    return sorted(trips)[PINGS // 2]


def _goodput(host: str, port: int, seconds: float) -> float:
    """Return the bits per second that left the send queue after the warm-up; the peer closes the connection."""
    block, sent = bytes(1 << 16), 0
    samples: list[tuple[float, int]] = []
    with _connect(host, port) as connection:
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - began < WARM_UP_S + seconds + 10:
                connection.sendall(block)
                sent += len(block)
                now = time.monotonic()
                if now - began >= WARM_UP_S and (not samples or now - samples[-1][0] > 0.05):
                    samples.append((now, sent - _queued(connection)))
    if len(samples) < 2:
        raise ConnectionError("the peer ended the measurement early")
    (first, before), (last, after) = samples[0], samples[-1]
    return 8 * (after - before) / (last - first)


def _queued(connection: socket.socket) -> int:
    try:
        import fcntl

        return int(struct.unpack("i", fcntl.ioctl(connection, _TIOCOUTQ, b"\0" * 4))[0])
    except (ImportError, OSError):
        return 0
