"""Measures a link by TCP sockets: runs as a program, once per end, without the rest of the package.

``link_probe.py serve ADDRESS`` prints its port, answers small messages on one connection, receives bytes on another and
prints the goodput. ``link_probe.py send ADDRESS PORT SECONDS`` is the other end and prints the round-trip time. Goodput
is measured by the receiver, because sent bytes may still be in a queue. There are two connections, because bbr takes
the rate of small messages for the rate of the link: 40 to 68 of 100 Mbit/s at a round trip of 20 ms.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from contextlib import suppress
from typing import Any

__all__ = ["send", "serve"]

WARMUP_S, WARMUP_TRIPS, LONGEST_WARMUP_S = 0.4, 20, 4.0
PINGS = 20
PING = 64
TIMEOUT_S = 30.0


def serve(address: str) -> dict[str, Any]:
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        server.settimeout(TIMEOUT_S)
        with _accept(server) as peer:
            for _ in range(PINGS):
                peer.sendall(_receive_exactly(peer, PING))
            warmup, seconds = map(float, _receive_exactly(peer, PING).split())
        with _accept(server) as peer:
            return _receive(peer, warmup, seconds)


def _accept(server: socket.socket) -> socket.socket:
    peer, _ = server.accept()
    return _configure(peer)


def _connect(address: str, port: int) -> socket.socket:
    return _configure(socket.create_connection((address, port), timeout=TIMEOUT_S))


def _configure(peer: socket.socket) -> socket.socket:
    peer.settimeout(TIMEOUT_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def _receive(peer: socket.socket, warmup: float, seconds: float) -> dict[str, Any]:
    """Return the goodput after a warm-up, in which queues and windows fill and bursts end.

    The receiver ends the measurement by closing the connection: the sender does not know when its bytes arrive.
    """
    buffer = bytearray(1 << 18)
    now = first = time.monotonic() if peer.recv_into(buffer) else 0.0
    start, nbytes = first, 0
    while now - first < warmup + seconds and (received := peer.recv_into(buffer)):
        now = time.monotonic()
        if now - first < warmup:
            start = now
        else:
            nbytes += received
    return {"goodput": nbytes * 8 / (now - start) if now > start else 0.0}


def send(address: str, port: int, seconds: float) -> dict[str, Any]:
    trips = []
    with _connect(address, port) as peer:
        for _ in range(PINGS):
            start = time.monotonic()
            peer.sendall(bytes(PING))
            _receive_exactly(peer, PING)
            trips.append(time.monotonic() - start)
        trips.sort()
        warmup = min(WARMUP_S + WARMUP_TRIPS * trips[PINGS // 2], LONGEST_WARMUP_S)
        peer.sendall(f"{warmup:.3f} {seconds:.3f}".ljust(PING).encode())
    with _connect(address, port) as peer:
        congestion = "unknown"
        if hasattr(socket, "TCP_CONGESTION"):
            congestion = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()
        block = bytes(1 << 16)
        with suppress(ConnectionError):  # the receiver closes the connection when it is done
            while True:
                peer.sendall(block)
    return {"round_trip": trips[PINGS // 2], "congestion": congestion}


def _receive_exactly(peer: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = peer.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("the other end closed the connection")
        data += part
    return data


if __name__ == "__main__":
    role, where, *rest = sys.argv[1:]
    print(json.dumps(serve(where) if role == "serve" else send(where, int(rest[0]), float(rest[1]))), flush=True)
