"""Fields of the headers of frames and bundles: constants, sizes, checksums, and the checks of their beginning."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from laconic._core import byte_view, crc32c_of
from laconic.errors import ConfigError, FrameError, InputError
from laconic.packet import EXACT, Packet, TensorSpec
from laconic.wire.alignment import align

__all__ = [
    "BUNDLE", "CRC", "DTYPES", "FIXED", "MAGIC", "MAX_DIM", "MAX_DIMS", "MAX_NUMEL", "MAX_SECTIONS",
    "MAX_SPEC", "VERSION", "WIDE", "Buffer", "as_bytes", "check_start",
    "frame_header", "header_nbytes", "is_wide", "numbers_struct", "with_checksum",
]  # fmt: skip

if sys.byteorder != "little":
    raise ImportError("laconic copies frames, which are little-endian, from memory: this machine is big-endian")

Buffer = bytes | bytearray | memoryview | Tensor
"""The source of a frame: anything with the buffer protocol, or a uint8 tensor."""

MAGIC: Final = b"LACO"
VERSION: Final = 1
BUNDLE: Final = 1
WIDE: Final = 2
MAX_NUMEL: Final = 1 << 34
MAX_DIMS: Final = 16
MAX_DIM: Final = 1 << 48
MAX_SECTIONS: Final = 8
MAX_SPEC: Final = 256

FIXED = struct.Struct("<4sBBBBHBBQI")  # magic, version, flags, dtype, ndim, spec bytes, sections, 0, payload, its crc
CRC = struct.Struct("<I")

DTYPES: Final = dict(zip((1, 2, 3, 4, 16, 17, 18, 19, 20, 21), EXACT, strict=True))
"""The dtypes by their code in a header."""
DTYPE_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}


def header_nbytes(codec: str, ndim: int, num_sections: int, wide: bool) -> int:
    return align(FIXED.size + (8 if wide else 4) * (ndim + num_sections) + len(codec) + CRC.size)


def is_wide(spec: TensorSpec, payload: int) -> bool:
    return payload >= 1 << 32 or any(size >= 1 << 32 for size in spec.shape)


@lru_cache(maxsize=64)
def numbers_struct(count: int, wide: bool) -> struct.Struct:
    return struct.Struct(f"<{count}{'Q' if wide else 'I'}")


def frame_header(packet: Packet, lengths: Sequence[int], payload: int, payload_crc: int, wide: bool) -> bytes:
    shape, codec = packet.spec.shape, packet.codec.encode("ascii")
    if len(codec) > MAX_SPEC:
        raise ConfigError(f"a codec spec on the wire has at most {MAX_SPEC} bytes, got {len(codec)}")
    dtype = DTYPE_CODES[packet.spec.dtype]
    fixed = FIXED.pack(
        MAGIC, VERSION, WIDE if wide else 0, dtype, len(shape), len(codec), len(lengths), 0, payload, payload_crc
    )
    return with_checksum(fixed + numbers_struct(len(shape) + len(lengths), wide).pack(*shape, *lengths) + codec)


def with_checksum(header: bytes) -> bytes:
    """Pad a header and append its checksum, so that it ends at a multiple of 16."""
    padded = header.ljust(align(len(header) + CRC.size) - CRC.size, b"\0")
    return padded + CRC.pack(crc32c_of(padded))


def check_start(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise FrameError(f"a frame starts with {MAGIC!r}, this starts with {magic!r}")
    if version != VERSION:
        raise FrameError(f"the frame has format version {version}, this laconic reads version {VERSION}")


def as_bytes(blob: Buffer) -> Tensor:
    """Return a buffer as a read-only uint8 tensor, without copying."""
    if isinstance(blob, Tensor):
        if blob.dtype != torch.uint8 or blob.dim() != 1 or not blob.is_contiguous() or not blob.is_cpu:
            raise InputError("a frame in a tensor must be a contiguous uint8 vector on the CPU")
        return blob
    try:
        return byte_view(blob)
    except (TypeError, BufferError) as error:
        raise InputError(f"expected bytes or a uint8 tensor, got {type(blob).__name__}") from error
