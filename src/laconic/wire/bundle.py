"""Bundles: many named frames behind one header."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from laconic._core import bytes_at, crc32c, set_bytes, zero_bytes
from laconic.errors import ConfigError, FrameError, InputError
from laconic.packet import Packet, TensorSpec
from laconic.wire.alignment import align, aligned_parts, body_nbytes
from laconic.wire.frame import FrameArena, FramePlan, seal
from laconic.wire.header import BUNDLE, CRC, MAGIC, VERSION, Buffer, as_bytes, check_start, with_checksum

__all__ = ["MAX_NAME", "MAX_PACKETS", "BundleWriter", "bundle_header", "is_bundle", "pack_bundle", "unpack_bundle"]

MAX_NAME: Final = 1024
MAX_PACKETS: Final = 1 << 20

_BUNDLE = struct.Struct("<4sBBHIIQ")  # magic, version, flags, 0, packets, directory bytes, body bytes
_ENTRY = struct.Struct("<QH")  # frame bytes, name bytes
_MIN_FRAME: Final = 32  # the bytes of the smallest header, padded


def bundle_header(names: Sequence[str], sizes: Sequence[int]) -> bytes:
    """Return the header of a bundle of frames of these sizes; each frame starts at the next multiple of 16."""
    if len(names) > MAX_PACKETS:
        raise InputError(f"a bundle has at most {MAX_PACKETS} packets, got {len(names)}")
    encoded = [name.encode() for name in names]
    for name in encoded:
        if len(name) > MAX_NAME:
            raise InputError(f"a slot name has at most {MAX_NAME} bytes, got {len(name)}: {name[:40]!r}…")
    directory = b"".join(_ENTRY.pack(size, len(name)) + name for size, name in zip(sizes, encoded, strict=True))
    fixed = _BUNDLE.pack(MAGIC, VERSION, BUNDLE, 0, len(names), len(directory), body_nbytes(sizes))
    return with_checksum(fixed + directory)


def pack_bundle(frames: Sequence[tuple[str, Buffer]]) -> bytearray:
    """Return the bundle of many frames, each with a name (which may be empty)."""
    views = [as_bytes(frame) for _, frame in frames]
    sizes = [view.numel() for view in views]
    header = bundle_header([name for name, _ in frames], sizes)
    bundle = bytearray(len(header) + body_nbytes(sizes))
    bundle[: len(header)] = header
    buffer = torch.frombuffer(bundle, dtype=torch.uint8)
    offset = len(header)
    for view in views:
        offset = align(offset)
        buffer[offset : offset + view.numel()] = view
        offset += view.numel()
    return bundle


class BundleWriter:
    """Writes a bundle in place: an arena for each packet, whose section sizes are known.

    Args:
        parts: The name, codec, tensor spec and section sizes of each packet.
    """

    def __init__(self, parts: Sequence[tuple[str, str, TensorSpec, Sequence[int]]]) -> None:
        plans = [FramePlan.of(codec, spec, sizes) for _, codec, spec, sizes in parts]
        limits = [plan.limit for plan in plans]
        header = bundle_header([name for name, *_ in parts], limits)
        self._buffer = torch.empty(len(header) + body_nbytes(limits), dtype=torch.uint8)
        self.arenas: list[FrameArena] = []
        address, offset = self._buffer.data_ptr(), len(header)
        set_bytes(address, header)
        for plan in plans:
            zero_bytes(address + offset, align(offset) - offset)
            offset = align(offset)
            self.arenas.append(FrameArena(self._buffer[offset : offset + plan.limit], plan))
            offset += plan.limit

    def seal(self, packets: Sequence[Packet]) -> memoryview:
        """Write all headers and return the bundle; all sections must be in their arenas."""
        for packet, arena in zip(packets, self.arenas, strict=True):
            if seal(packet, arena) != arena.plan.limit:
                raise ConfigError(f"codec {packet.codec!r} wrote less than it declared")
        return self._buffer.numpy().data


def is_bundle(blob: Buffer) -> bool:
    """Return whether the bytes start like a bundle."""
    data = as_bytes(blob)
    return data.numel() >= 6 and bytes_at(data.data_ptr(), 4) == MAGIC and bool(int(data[5]) & BUNDLE)


def unpack_bundle(blob: Buffer) -> list[tuple[str, Tensor]]:
    """Return the names and frames of a bundle, in order; the frames are views and not yet checked."""
    data = as_bytes(blob)
    size = data.numel()
    if size < _BUNDLE.size:
        raise FrameError(f"a bundle has at least {_BUNDLE.size} bytes, got {size}")
    magic, version, flags, zero, count, directory, body = _BUNDLE.unpack(bytes_at(data.data_ptr(), _BUNDLE.size))
    check_start(magic, version)
    if flags != BUNDLE or zero:
        raise FrameError("expected a bundle, got something else: read a single frame with laconic.decode")
    header = align(_BUNDLE.size + directory + CRC.size)
    if count > MAX_PACKETS or directory > count * (_ENTRY.size + MAX_NAME) or size != header + body:
        raise FrameError(f"a bundle of {count} packets, {directory} and {body} bytes cannot have {size} bytes")
    head = bytes_at(data.data_ptr(), header)
    if CRC.unpack_from(head, header - CRC.size)[0] != crc32c(data.data_ptr(), header - CRC.size):
        raise FrameError("the bundle's directory does not match its checksum: the bundle is damaged")
    entries = list(_entries(head, count, _BUNDLE.size + directory))
    if body_nbytes([nbytes for _, nbytes in entries]) != body or any(
        head[_BUNDLE.size + directory : header - CRC.size]
    ):
        raise FrameError("the bundle's frames do not fill its body")
    views = aligned_parts(data, header, [nbytes for _, nbytes in entries])
    return [(name, view) for (name, _), view in zip(entries, views, strict=True)]


def _entries(head: bytes, count: int, end: int) -> Iterator[tuple[str, int]]:
    offset = _BUNDLE.size
    for _ in range(count):
        if offset + _ENTRY.size > end:
            raise FrameError("the bundle's directory is shorter than its entries")
        nbytes, name_nbytes = _ENTRY.unpack_from(head, offset)
        offset += _ENTRY.size
        if nbytes < _MIN_FRAME:  # a view of 0 bytes takes a hundred times the memory of its entry
            raise FrameError(f"a frame has at least {_MIN_FRAME} bytes, the bundle's directory declares {nbytes}")
        if name_nbytes > MAX_NAME or offset + name_nbytes > end:
            raise FrameError(f"a name of {name_nbytes} bytes does not fit into the bundle's directory")
        try:
            yield head[offset : offset + name_nbytes].decode(), nbytes
        except UnicodeDecodeError:
            raise FrameError("a name in the bundle is not UTF-8") from None
        offset += name_nbytes
    if offset != end:
        raise FrameError("the bundle's directory is longer than its entries")
