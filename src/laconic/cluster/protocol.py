"""What a worker and a server share: RPC names, gRPC options, and the messages of a stream.

A message is one byte for its kind, then its content: a JSON object, or a piece of a frame. The receiver checks sizes
against the limits of the job before it allocates anything; a message that does not fit raises ``FrameError``.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from laconic import counters
from laconic.errors import FrameError

__all__ = [
    "CHUNK", "GRPC_OPTIONS", "MAX_MESSAGE", "NOTHING_LEFT", "PROTOCOL", "RPC_PATHS", "WORKER_STATS", "Assembler",
    "ByteCounter", "CutFrame", "Frame", "frame_messages", "is_json", "json_message", "read_finite", "read_integer",
    "read_json", "read_worker_stats", "shorten",
]  # fmt: skip

PROTOCOL = 1
RPC_PATHS = {
    name: f"/laconic.ParameterServer/{name}"
    for name in ("Hello", "Join", "Snapshot", "Exchange", "Agree", "Deposit", "Leave")
}
SERVER_FAILED = "the server failed"
"""Prefix of the status text of an internal error: a client does not try again."""

CHUNK = 2 << 20
"""Bytes of a frame in one message: large enough for the network, small enough to interleave."""

Frame = bytes | memoryview
"""The bytes of a frame; one that arrived in a single message is not copied."""

MAX_JSON = 1 << 16
MAX_INTEGER = 1 << 62
MAX_STAT = 1 << 53
"""The largest number that a worker may report about itself, but for its loss."""
NOTHING_LEFT = -1
"""The ticket in a reply to a worker for which there is no work left."""
WORKER_STATS = (
    "iteration", "loss", "bytes_sent", "bytes_received", "bytes_raw", "retries",
    "compute", "encode", "communication", "overlapped", "apply",
)  # fmt: skip
"""Finite numbers that a worker may report about itself with a push, for ``laconic watch``."""
JSON, FRAME, MORE = b"N", b"F", b"M"
_HEAD = struct.Struct("<IQ")
_NO_BUFFER = np.empty(0, np.uint8)
MAX_MESSAGE = 1 + _HEAD.size + CHUNK
"""The largest message that a peer may send: gRPC rejects larger ones before it reads them."""

GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    # A peer that is stopped or disconnected is detected within seconds; by default it never is.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),  # the option that newer gRPC uses; its default is a minute
    ("grpc.http2.max_pings_without_data", 0),  # a worker sends nothing while it computes
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.enable_http_proxy", 0),  # connections to this host must not go through a proxy
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server
)


@dataclass
class ByteCounter:
    """Bytes of frames received and sent, counted where they enter and leave."""

    received: int = 0
    sent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, *, received: int = 0, sent: int = 0) -> None:
        with self._lock:
            self.received += received
            self.sent += sent


def json_message(values: dict[str, Any]) -> bytes:
    """Return a JSON object as a message."""
    return JSON + json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def is_json(message: bytes) -> bool:
    return message[:1] == JSON


def read_json(message: bytes) -> dict[str, Any]:
    if not is_json(message) or len(message) > MAX_JSON:
        raise FrameError(
            f"expected a JSON message of at most {MAX_JSON} bytes, got {len(message)} bytes of {message[:1]!r}"
        )
    try:
        values = json.loads(message[1:])
    except (ValueError, RecursionError):
        raise FrameError("a JSON message cannot be parsed") from None
    if not isinstance(values, dict):
        raise FrameError("a JSON message is not an object")
    return values


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_INTEGER


def read_integer(values: dict[str, Any], name: str) -> int:
    """Return a field that must be an integer from 0."""
    value = values.get(name)
    if not is_integer(value):
        raise FrameError(f"{name!r} must be an integer from 0, got {shorten(value)}")
    return int(value)  # type: ignore[arg-type]


def read_finite(values: dict[str, Any], name: str) -> float:
    """Return a field that must be a finite number; 0 if it is missing."""
    value = values.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise FrameError(f"{name!r} must be a finite number, got {shorten(value)}")
    return float(value)


def read_worker_stats(values: dict[str, Any]) -> dict[str, float]:
    """Return the ``WORKER_STATS`` that a message carries under ``told``; other names are ignored.

    A value that is none is dropped and counted: it must hide nothing else from ``laconic watch``.
    """
    stats = values.get("told", {})
    if not isinstance(stats, dict):
        raise FrameError(f"'told' must be an object of numbers, got {shorten(stats)}")
    usable = {}
    for name in WORKER_STATS:
        if name not in stats:
            continue
        value = stats[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and (abs(value) < 1e300 if name == "loss" else 0 <= value < MAX_STAT):
            usable[name] = float(value)
        else:
            counters.count(
                "worker statistics", 1, f"a worker reports {name!r} as {shorten(value)}, which is ignored: expected a "
                "finite number, from 0 unless it is a loss"
            )  # fmt: skip
    return usable


def shorten(value: object) -> str:
    """Return a peer's value as printable text of at most 40 characters, for an error message."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text[:40]


def frame_messages(slot: int, *parts: Frame) -> Iterator[bytes]:
    """Yield the messages that carry one slot's frame, which may be given in parts."""
    head = FRAME + _HEAD.pack(slot, sum(map(len, parts)))
    room, pieces = CHUNK, [memoryview(head)]
    for part in parts:
        rest = memoryview(part)
        while len(rest) > room:
            yield b"".join((*pieces, rest[:room]))
            rest, room, pieces = rest[room:], CHUNK, [memoryview(MORE)]
        pieces.append(rest)
        room -= len(rest)
    yield b"".join(pieces)


@dataclass(frozen=True)
class CutFrame:
    """A frame as the messages that carry it: cut once, however many workers it is sent to."""

    messages: tuple[bytes, ...]
    nbytes: int
    """Bytes of the frame."""

    @classmethod
    def of(cls, slot: int, *parts: Frame) -> CutFrame:
        return cls(tuple(frame_messages(slot, *parts)), sum(map(len, parts)))

    def joined(self) -> Frame:
        """Return the frame."""
        start, more = memoryview(self.messages[0])[1 + _HEAD.size :], self.messages[1:]
        return b"".join((start, *(memoryview(message)[1:] for message in more))) if more else start


class Assembler:
    """Joins the messages of a stream into frames, one frame at a time.

    Args:
        limits: The largest possible frame of each slot, in bytes.
        keep: Whether to return the frames; otherwise they are checked for their sizes only, and are returned empty.
        on_begin: Called with the slot and the size of each frame before its first byte is kept.
    """

    def __init__(
        self, limits: Sequence[int], *, keep: bool = True, on_begin: Callable[[int, int], None] | None = None
    ) -> None:
        self._limits, self._keep, self._on_begin = limits, keep, on_begin
        self._slot = -1
        self._nbytes = 0
        self._frame: Frame = b""
        self._buffer = _NO_BUFFER
        """The memory of ``_frame`` while its pieces arrive."""
        self._received = 0
        self.total = 0
        """Bytes of all complete frames."""

    @property
    def incomplete(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._slot >= 0

    def feed(self, message: bytes) -> tuple[int, Frame] | None:
        """Take one message; return a slot and its frame when this message completes it."""
        kind = message[:1]
        if kind == FRAME and not self.incomplete and len(message) >= 1 + _HEAD.size:
            slot, nbytes = _HEAD.unpack_from(message, 1)
            if slot >= len(self._limits):
                raise FrameError(f"expected a slot below {len(self._limits)}, got a frame for slot {slot}")
            if not 0 < nbytes <= self._limits[slot]:
                raise FrameError(
                    f"a frame for slot {slot} must have 1 to {self._limits[slot]} bytes, its header says {nbytes}"
                )
            if self._on_begin is not None:
                self._on_begin(slot, nbytes)
            self._slot, self._nbytes, self._received = slot, nbytes, 0
            piece = memoryview(message)[1 + _HEAD.size :]
        elif kind == MORE and self.incomplete:
            piece = memoryview(message)[1:]
        else:
            raise FrameError(f"a message of kind {kind!r} is not allowed at this point of the stream")
        # Pieces must have the sizes that frame_messages makes: tiny ones would take a hundred times the frame's memory.
        expected = min(CHUNK, self._nbytes - self._received)
        if len(piece) != expected:
            raise FrameError(f"expected a piece of {expected} bytes of a frame of {self._nbytes}, got {len(piece)}")
        if self._keep:
            self._take(piece)
        self._received += expected
        if self._received < self._nbytes:
            return None
        slot, frame = self._slot, self._frame
        self._slot, self._frame, self._buffer = -1, b"", _NO_BUFFER
        self.total += self._nbytes
        return slot, frame

    def _take(self, piece: memoryview) -> None:
        """Keep a piece: a whole frame as it is, another one in its place of a buffer."""
        if len(piece) == self._nbytes:
            self._frame = piece
            return
        if not self._received:
            self._buffer = np.empty(self._nbytes, np.uint8)
            self._frame = self._buffer.data
        # numpy copies without Python's lock, unlike bytes.join, and while the message is in the cache.
        self._buffer[self._received : self._received + len(piece)] = np.asarray(piece)
