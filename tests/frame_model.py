"""A second implementation of frames and bundles, which also writes invalid ones with valid checksums."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from laconic._core import byte_view
from laconic._core import crc32c as core_crc32c

FIXED = struct.Struct("<4sBBBBHBBQI")
BUNDLE = struct.Struct("<4sBBHIIQ")
ENTRY = struct.Struct("<QH")
CODES = {1: torch.float32, 2: torch.float64, 3: torch.float16, 4: torch.bfloat16, 16: torch.uint8, 17: torch.int8,
         18: torch.int16, 19: torch.int32, 20: torch.int64, 21: torch.bool}  # fmt: skip


def crc32c(data: bytes) -> int:
    view = byte_view(data)
    return core_crc32c(view.data_ptr(), len(data))


def aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def laid_out(parts: list[bytes], padding: int = 0) -> bytes:
    blob = bytearray()
    for part in parts:
        blob += bytes([padding]) * (aligned(len(blob)) - len(blob)) + part
    return bytes(blob)


@dataclass
class Frame:
    """The fields of a frame. Fields that are None are computed from the others; set them to write an invalid frame."""

    shape: list[int]
    sections: list[bytes]
    spec: bytes
    dtype: int = 1
    wide: bool = False
    magic: bytes = b"LACO"
    version: int = 1
    flags: int | None = None
    zero: int = 0
    lengths: list[int] | None = None
    payload: int | None = None
    payload_crc: int | None = None
    header_crc: int | None = None
    header_padding: bytes = b""
    payload_padding: int = 0
    ndim: int | None = None
    num_sections: int | None = None
    spec_nbytes: int | None = None
    tail: bytes = b""

    @classmethod
    def read(cls, blob: bytes) -> Frame:
        magic, version, flags, dtype, ndim, text, count, zero, _, _ = FIXED.unpack_from(blob)
        numbers = struct.Struct(f"<{ndim + count}{'Q' if flags & 2 else 'I'}")
        values = numbers.unpack_from(blob, FIXED.size)
        at = FIXED.size + numbers.size
        spec, at = blob[at : at + text], aligned(at + text + 4)
        sections = []
        for nbytes in values[ndim:]:
            sections.append(bytes(blob[at : at + nbytes]))
            at = aligned(at + nbytes)
        return cls(list(values[:ndim]), sections, bytes(spec), dtype, bool(flags & 2), magic, version, None, zero)

    def write(self) -> bytes:
        lengths = [len(section) for section in self.sections] if self.lengths is None else self.lengths
        body = laid_out(self.sections, self.payload_padding)
        wide = self.wide or any(n >= 1 << 32 for n in (*self.shape, *lengths))
        fixed = FIXED.pack(
            self.magic, self.version, (2 if wide else 0) if self.flags is None else self.flags, self.dtype,
            (len(self.shape) if self.ndim is None else self.ndim) & 0xFF,
            (len(self.spec) if self.spec_nbytes is None else self.spec_nbytes) & 0xFFFF,
            (len(lengths) if self.num_sections is None else self.num_sections) & 0xFF, self.zero,
            len(body) if self.payload is None else self.payload,
            crc32c(body) if self.payload_crc is None else self.payload_crc,
        )  # fmt: skip
        numbers = struct.pack(f"<{len(self.shape) + len(lengths)}{'Q' if wide else 'I'}", *self.shape, *lengths)
        head = fixed + numbers + self.spec
        padding = aligned(len(head) + 4) - 4 - len(head)
        head += (self.header_padding + bytes(padding))[:padding]
        return head + struct.pack("<I", crc32c(head) if self.header_crc is None else self.header_crc) + body + self.tail


@dataclass
class Bundle:
    """The directory and frames of a bundle, and the sizes that its header declares."""

    names: list[bytes]
    frames: list[bytes]
    sizes: list[int] | None = None
    name_sizes: list[int] | None = None
    count: int | None = None
    directory: int | None = None
    body: int | None = None
    version: int = 1
    flags: int = 1
    zero: int = 0
    padding: int = 0

    @classmethod
    def read(cls, blob: bytes) -> Bundle:
        """Return what can be read as names and frames; ``struct.error`` if there is no directory."""
        _, version, flags, zero, count, directory, _ = BUNDLE.unpack_from(blob)
        names, sizes, at = [], [], BUNDLE.size
        for _ in range(min(count, 64)):
            nbytes, name_nbytes = ENTRY.unpack_from(blob, at)
            at += ENTRY.size
            names.append(bytes(blob[at : at + name_nbytes]))
            sizes.append(nbytes)
            at += name_nbytes
        frames, at = [], aligned(BUNDLE.size + directory + 4)
        for nbytes in sizes:
            frames.append(bytes(blob[at : at + nbytes]))
            at = aligned(at + nbytes)
        return cls(names, frames, version=version, flags=flags, zero=zero)

    def write(self) -> bytes:
        sizes = [len(frame) for frame in self.frames] if self.sizes is None else self.sizes
        name_sizes = [len(name) for name in self.names] if self.name_sizes is None else self.name_sizes
        directory = b"".join(
            ENTRY.pack(size, nbytes & 0xFFFF) + name
            for size, nbytes, name in zip(sizes, name_sizes, self.names, strict=True)
        )
        body = laid_out(self.frames, self.padding)
        head = BUNDLE.pack(
            b"LACO", self.version, self.flags, self.zero, len(self.frames) if self.count is None else self.count,
            len(directory) if self.directory is None else self.directory, len(body) if self.body is None else self.body,
        )  # fmt: skip
        head += directory
        head += bytes(aligned(len(head) + 4) - 4 - len(head))
        return head + struct.pack("<I", crc32c(head)) + body
