r"""A run for TensorBoard: event files of scalars, written without its package.

A file is a sequence of TFRecords: the length of a message (8 bytes), its masked CRC-32C (4), the message, its masked
CRC-32C (4), all little-endian. A message is a protobuf ``Event``: wall_time = 1 (double), step = 2 (varint),
file_version = 3 (string) in the first one, summary = 5 in the others; a ``Summary`` has values = 1, each with tag = 1
(string) and simple_value = 2 (float).
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from laconic.errors import FileError
from laconic.watch.view import View

__all__ = ["EventFile", "TensorBoard", "masked_crc"]

VERSION = b"brain.Event:2"
_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    _TABLE.append(_byte)


def crc32c(data: bytes) -> int:
    """Castagnoli's. The core has a faster one, but needs numpy to be loaded; these messages are short.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> bytes:
    """As TFRecords have it."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _bytes_field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + masked_crc(length) + message + masked_crc(message)


class EventFile:
    """A new file in a folder, under the name that TensorBoard looks for.

    Args:
        folder: Made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / f"events.out.tfevents.{int(time.time()):010d}.laconic.{os.getpid()}.{time.time_ns()}"
            self._file = self.path.open("xb")
        except OSError as error:
            raise FileError(f"cannot write for TensorBoard to {folder}: {error.strerror}") from None
        self._write(b"\x09" + struct.pack("<d", time.time()) + _bytes_field(3, VERSION))

    def add(self, step: int, at: float, scalars: Mapping[str, float]) -> None:
        """Scalars by their tags."""
        values = b"".join(
            _bytes_field(1, _bytes_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in scalars.items()
        )
        self._write(b"\x09" + struct.pack("<d", at) + b"\x10" + _varint(step) + _bytes_field(5, values))

    def _write(self, message: bytes) -> None:
        self._file.write(_record(message))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes what is new of a run each time it is shown.

    Args:
        folder: Of TensorBoard's files.
    """

    def __init__(self, folder: Path) -> None:
        self._events = EventFile(folder)
        self._written = -1.0
        self._ended = False

    def show(self, view: View) -> None:
        for point in view.points:
            if point["at"] <= self._written:
                continue
            self._written = point["at"]
            scalars = {
                "bytes/received": point["received"],
                "bytes/sent": point["sent"],
                "updates": point["version"],
                "staleness/updates missed": point["missed"],
                "faults": point["faults"],
            }
            if point["loss"] is not None:
                scalars["loss"] = point["loss"]
            self._events.add(point["iteration"], point["at"], scalars)
        if view.phase == "ended" and view.summary is not None and not self._ended:
            self._ended = True
            found = {
                f"summary/{name}": float(value)
                for name, value in view.summary.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
            if found:
                self._events.add(view.iterations, view.at, found)

    def close(self) -> None:
        self._events.close()
