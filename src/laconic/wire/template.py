"""Frames of a known layout: their header is written and compared as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from laconic._core import bytes_at, crc32c, crc32c_of, set_bytes
from laconic.packet import Packet, TensorSpec
from laconic.wire.alignment import ALIGN, align, body_nbytes
from laconic.wire.header import CRC, FIXED, frame_header, is_wide

__all__ = ["FrameTemplate"]

COPIED_NBYTES: Final = 1 << 14
"""Up to this size, copying bytes costs less than releasing the interpreter's lock and waiting for it again."""


class FrameTemplate:
    """The header of frames whose codec, shape and section sizes are known; only the checksums differ.

    ``matches`` checks a received frame faster than ``unpack``, because it compares the header with known bytes. A frame
    that does not match goes to ``unpack``, which accepts it or names its error. ``write`` completes a frame.

    Attributes:
        nbytes: The bytes of a frame.
        section_offsets: Where each section starts in a frame.
    """

    def __init__(self, codec: str, spec: TensorSpec, lengths: Sequence[int]) -> None:
        payload = body_nbytes(lengths)
        header = frame_header(Packet(codec, spec, ()), lengths, payload, 0, is_wide(spec, payload))
        self._before_crc, self._after_crc = header[: FIXED.size - CRC.size], header[FIXED.size : -CRC.size]
        self._header, self._payload = len(header), payload
        self.nbytes = len(header) + payload
        self.section_offsets: list[int] = []
        self._padding: list[tuple[int, bytes]] = []
        offset = len(header)
        for nbytes in lengths:
            if gap := -offset & (ALIGN - 1):
                self._padding.append((offset, bytes(gap)))
            self.section_offsets.append(align(offset))
            offset = align(offset) + nbytes

    def write(self, address: int) -> None:
        """Write header, checksums and padding around sections that are already at their offsets."""
        for offset, zeros in self._padding:
            set_bytes(address + offset, zeros)
        head = self._before_crc + CRC.pack(crc32c(address + self._header, self._payload)) + self._after_crc
        set_bytes(address, head + CRC.pack(crc32c_of(head)))

    def matches(self, address: int) -> bool:
        """Return whether the ``nbytes`` at an address are an undamaged frame of this template."""
        head = bytes_at(address, self._header)
        if not head.startswith(self._before_crc) or head[FIXED.size : -CRC.size] != self._after_crc:
            return False
        (payload_crc,), (crc,) = CRC.unpack_from(head, len(self._before_crc)), CRC.unpack(head[-CRC.size :])
        if crc32c_of(head[: -CRC.size]) != crc:
            return False
        if any(bytes_at(address + offset, len(zeros)) != zeros for offset, zeros in self._padding):
            return False
        payload = address + self._header
        if self._payload < COPIED_NBYTES:
            return bool(crc32c_of(bytes_at(payload, self._payload)) == payload_crc)
        return bool(crc32c(payload, self._payload) == payload_crc)
