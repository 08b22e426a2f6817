"""Clients that implement the parameter server's protocol without laconic; a stand-alone program that needs gRPC only.

It is what a client in another language would be. The first byte of a message is its kind: ``N`` and a JSON object;
``F``, the slot number in 4 bytes, the frame length in 8, little-endian, and the first bytes of the frame; ``M`` and
more bytes of the frame. ``Hello``, ``Join`` and ``Snapshot`` start a worker; each ``Exchange`` streams a note, frames
and a note up, and a note and frames down.

Its argument is a JSON object; it runs one client per thread and prints their results as JSON.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

PROTOCOL, CHUNK = 1, 2 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", 13 + CHUNK),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per client, as from many hosts
)


def note(**values: Any) -> bytes:
    return b"N" + json.dumps(values).encode()


def read_note(message: bytes) -> dict[str, Any]:
    if message[:1] != b"N":
        raise ValueError(f"expected a note, got {message[:1]!r}")
    values: dict[str, Any] = json.loads(message[1:])
    return values


def messages_of(slot: int, frame: bytes) -> list[bytes]:
    first = b"F" + struct.pack("<IQ", slot, len(frame)) + frame[:CHUNK]
    return [first, *(b"M" + frame[at : at + CHUNK] for at in range(CHUNK, len(frame), CHUNK))]


class Plain:
    """One client."""

    def __init__(self, address: str, number: int, fingerprint: str, version: str, messages: list[bytes]) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._who = {"worker": number, "incarnation": 1}
        self._messages = messages
        self.acknowledged: list[tuple[float, float]] = []
        """Start of each push and seconds until its reply was complete."""
        self.error: str | None = None
        self._hello(fingerprint, version)
        self._exchange = self._channel.stream_stream("/laconic.ParameterServer/Exchange")

    def _hello(self, fingerprint: str, version: str) -> None:
        hello = self._channel.unary_unary("/laconic.ParameterServer/Hello")
        greeting = hello(note(**self._who, protocol=PROTOCOL, laconic=version, fingerprint=fingerprint), timeout=60)
        versions = read_note(greeting)["versions"]
        join = self._channel.unary_unary("/laconic.ParameterServer/Join")
        read_note(join(note(**self._who, attempt=1, versions=versions, lost=False), timeout=60))
        snapshot = self._channel.unary_stream("/laconic.ParameterServer/Snapshot")
        head, *frames = snapshot(note(**self._who), timeout=60)
        self._sequence = read_note(head)["sequence"]
        self._answer = sum(map(len, frames))

    def push(self) -> None:
        def outgoing() -> Iterator[bytes]:
            yield note(**self._who, sequence=self._sequence)
            yield from self._messages
            yield note(score=0.0)

        began = time.monotonic()
        head, *frames = self._exchange(outgoing(), timeout=60)
        took = time.monotonic() - began
        sequence = read_note(head)["sequence"]
        if sequence != self._sequence + 1 or sum(map(len, frames)) != self._answer:
            raise ValueError(f"push {self._sequence} got reply {sequence} with {sum(map(len, frames))} bytes")
        self._sequence = sequence
        self.acknowledged.append((began, took))

    def run(self, until: float) -> None:
        try:
            while time.monotonic() < until:
                self.push()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        leave = self._channel.unary_unary("/laconic.ParameterServer/Leave")
        try:
            leave(note(**self._who), timeout=10)
        finally:
            self._channel.close()


def main(order: dict[str, Any]) -> None:
    messages = [
        message for slot, path in enumerate(order["frames"]) for message in messages_of(slot, Path(path).read_bytes())
    ]
    clients = [
        Plain(order["address"], number, order["fingerprint"], order["version"], messages) for number in order["numbers"]
    ]
    print(json.dumps({"ready": len(clients), "torch": "torch" in sys.modules}), flush=True)
    until = float(sys.stdin.readline())
    threads = [threading.Thread(target=client.run, args=(until,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [client.error for client in clients if client.error is not None]
    acknowledged = [client.acknowledged for client in clients]
    print(json.dumps({"errors": errors, "acknowledged": acknowledged}), flush=True)
    sys.stdin.readline()  # connections stay until all have finished
    for client in clients:
        client.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
