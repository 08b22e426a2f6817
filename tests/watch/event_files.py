"""Reads TensorBoard's event files back: a second pair of eyes that knows the format from its description."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from laconic.watch.tensorboard import masked_crc


def read_events(path: Path) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Step, time and scalars of each event; ``ValueError`` where a file is damaged."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        head = data[at : at + 12]
        if len(head) < 12 or head[8:] != masked_crc(head[:8]):
            raise ValueError(f"{path} is damaged at byte {at}")
        (length,) = struct.unpack("<Q", head[:8])
        message = data[at + 12 : at + 12 + length]
        if data[at + 12 + length : at + 16 + length] != masked_crc(message):
            raise ValueError(f"{path} is damaged at byte {at + 12}")
        at += 16 + length
        fields = dict(_fields(message))
        (when,) = struct.unpack("<d", fields[1])
        scalars = {}
        for _, value in _fields(fields.get(5, b"")):
            parts = dict(_fields(value))
            (scalars[parts[1].decode()],) = struct.unpack("<f", parts[2])
        step = int.from_bytes(fields.get(2, b"\0"), "little")
        yield step, when, scalars


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers of a protobuf's fields and their bytes; a varint as eight."""
    at = 0
    while at < len(message):
        key = message[at]
        at += 1
        kind = key & 7
        if kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            value = shift = 0
            while True:
                value |= (message[at] & 0x7F) << shift
                shift += 7
                at += 1
                if not message[at - 1] & 0x80:
                    break
            if kind == 0:
                yield key >> 3, value.to_bytes(8, "little")
                continue
            size = value
        yield key >> 3, message[at : at + size]
        at += size
