"""What travels on a stream between a worker and a server: small JSON notes, and frames cut into pieces.

A message is a byte that says what it is, and the rest. Sizes are checked against what the receiver expects before
anything is allocated; whatever does not fit is a ``FrameError``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from laconic.errors import FrameError

__all__ = ["CHUNK", "MAX_MESSAGE", "PROTOCOL", "TOLD", "Assembler", "frame_messages", "note", "read_note"]

PROTOCOL = 1
CHUNK = 2 << 20
"""Bytes of a frame in one message: large enough for the wire, small enough to interleave."""

Frame = bytes | memoryview
"""What came in one piece is not copied again."""

MAX_NOTE = 1 << 16
TOLD = (
    "iteration", "loss", "bytes_sent", "bytes_received", "bytes_raw", "retries",
    "compute", "encode", "communication", "overlapped", "apply",
)  # fmt: skip
"""What a worker may tell of itself beside a push: finite numbers, for whoever watches."""
NOTE, FRAME, MORE = b"N", b"F", b"M"
_HEAD = struct.Struct("<IQ")
MAX_MESSAGE = 1 + _HEAD.size + CHUNK
"""The largest message that a peer may send: gRPC refuses larger ones before they are read."""


def note(values: dict[str, Any]) -> bytes:
    """A JSON object as a message."""
    return NOTE + json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def is_note(message: bytes) -> bool:
    return message[:1] == NOTE


def read_note(message: bytes) -> dict[str, Any]:
    if not is_note(message) or len(message) > MAX_NOTE:
        raise FrameError(f"expected a note of at most {MAX_NOTE} bytes, got {len(message)} bytes of {message[:1]!r}")
    try:
        values = json.loads(message[1:])
    except (ValueError, RecursionError):
        raise FrameError("a note is not JSON") from None
    if not isinstance(values, dict):
        raise FrameError("a note is not a JSON object")
    return values


def frame_messages(slot: int, frame: bytes | memoryview) -> Iterator[bytes]:
    """A frame in pieces, for the slot of that number."""
    view = memoryview(frame)
    yield b"".join((FRAME, _HEAD.pack(slot, len(view)), view[:CHUNK]))
    for at in range(CHUNK, len(view), CHUNK):
        yield b"".join((MORE, view[at : at + CHUNK]))


class Assembler:
    """Puts pieces together again, one frame at a time.

    Args:
        limits: The most bytes that a frame of each slot can have.
    """

    def __init__(self, limits: Sequence[int]) -> None:
        self._limits = limits
        self._slot = -1
        self._nbytes = 0
        self._pieces: list[memoryview] = []
        self._have = 0
        self.total = 0
        """Bytes of all frames so far."""

    @property
    def in_pieces(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._slot >= 0

    def feed(self, message: bytes) -> tuple[int, Frame] | None:
        """A slot and its frame once it is complete, None before."""
        kind = message[:1]
        if kind == FRAME and not self.in_pieces and len(message) >= 1 + _HEAD.size:
            slot, nbytes = _HEAD.unpack_from(message, 1)
            if slot >= len(self._limits):
                raise FrameError(f"a frame for slot {slot}, but there are {len(self._limits)}")
            if not 0 < nbytes <= self._limits[slot]:
                raise FrameError(
                    f"a frame of {nbytes} bytes for slot {slot}, at most {self._limits[slot]} are possible"
                )
            self._slot, self._nbytes, self._have = slot, nbytes, 0
            piece = memoryview(message)[1 + _HEAD.size :]
        elif kind == MORE and self.in_pieces:
            piece = memoryview(message)[1:]
        else:
            raise FrameError(f"a message of kind {kind!r} is out of place")
        # As ``frame_messages`` cuts them: a frame in crumbs would take a hundred times the memory that it says.
        wanted = min(CHUNK, self._nbytes - self._have)
        if len(piece) != wanted:
            raise FrameError(f"a piece of {len(piece)} bytes for a frame of {self._nbytes}, expected {wanted}")
        self._pieces.append(piece)
        self._have += wanted
        if self._have < self._nbytes:
            return None
        slot = self._slot
        frame: Frame = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._slot, self._pieces = -1, []
        self.total += len(frame)
        return slot, frame
