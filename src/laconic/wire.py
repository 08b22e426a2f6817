"""Packet <-> frame: headers, limits and checksums, without knowledge of codecs. See docs/wire-format.md.

Bytes from other processes raise ``FrameError`` only: every length is checked against the buffer before anything is
sliced, and nothing is allocated.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from laconic._core import byte_view, bytes_at, crc32c, crc32c_of, read_frame, set_bytes, zero_bytes
from laconic.errors import ConfigError, FrameError, InputError
from laconic.packet import EXACT, Packet, TensorSpec, has_huge_strides, tensor_spec

__all__ = [
    "MAX_NUMEL", "Buffer", "BundleWriter", "FrameArena", "FramePlan", "FrameTemplate", "align", "body_nbytes",
    "bundle_header", "frame_nbytes", "is_bundle", "pack", "pack_bundle", "seal", "unpack", "unpack_bundle",
]  # fmt: skip

if sys.byteorder != "little":
    raise ImportError("laconic copies frames, which are little-endian, from memory: this machine is big-endian")

Buffer = bytes | bytearray | memoryview | Tensor
"""The source of a frame: anything with the buffer protocol, or a uint8 tensor."""

MAGIC: Final = b"LACO"
VERSION: Final = 1
BUNDLE: Final = 1
WIDE: Final = 2
ALIGN: Final = 16
MAX_NUMEL: Final = 1 << 34
MAX_DIMS: Final = 16
MAX_DIM: Final = 1 << 48
MAX_SECTIONS: Final = 8
MAX_SPEC: Final = 256
MAX_NAME: Final = 1024
MAX_PACKETS: Final = 1 << 20

_FIXED = struct.Struct("<4sBBBBHBBQI")  # magic, version, flags, dtype, ndim, spec bytes, sections, 0, payload, its crc
_BUNDLE = struct.Struct("<4sBBHIIQ")  # magic, version, flags, 0, packets, directory bytes, body bytes
_ENTRY = struct.Struct("<QH")  # frame bytes, name bytes
_CRC = struct.Struct("<I")
COPIED_NBYTES: Final = 1 << 14
"""Up to this size, copying bytes costs less than releasing the interpreter's lock and waiting for it again."""
_MIN_FRAME: Final = 32  # the bytes of the smallest header, padded

DTYPES: Final = dict(zip((1, 2, 3, 4, 16, 17, 18, 19, 20, 21), EXACT, strict=True))
"""The dtypes by their code in a header."""
_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}


def align(nbytes: int) -> int:
    """Round up to a multiple of 16, where sections, and the frames of a bundle, start."""
    return (nbytes + ALIGN - 1) & -ALIGN


def _header_nbytes(codec: str, ndim: int, num_sections: int, wide: bool) -> int:
    return align(_FIXED.size + (8 if wide else 4) * (ndim + num_sections) + len(codec) + _CRC.size)


def body_nbytes(sections: Sequence[int]) -> int:
    """Return the bytes of consecutive parts, each of which starts at a multiple of 16."""
    total = 0
    for nbytes in sections:
        total = align(total) + nbytes
    return total


def _is_wide(spec: TensorSpec, payload: int) -> bool:
    return payload >= 1 << 32 or any(size >= 1 << 32 for size in spec.shape)


class FramePlan(NamedTuple):
    """Where the payload of a frame starts and how long the frame can be."""

    spec: TensorSpec
    start: int
    limit: int
    wide: bool

    @classmethod
    def of(cls, codec: str, spec: TensorSpec, sections: Sequence[int]) -> FramePlan:
        """Return the plan of a frame whose sections have at most these sizes."""
        if len(spec.shape) > MAX_DIMS:
            raise InputError(f"a tensor on the wire has at most {MAX_DIMS} dimensions, got {len(spec.shape)}")
        if any(size > MAX_DIM for size in spec.shape):
            raise InputError(f"a dimension on the wire is at most 2^48, got {list(spec.shape)}")
        if spec.numel > MAX_NUMEL or has_huge_strides(spec.shape):
            raise InputError(
                f"a tensor on the wire has at most 2^34 values, 2^62 without zeros, got {list(spec.shape)}"
            )
        payload = body_nbytes(sections)
        wide = _is_wide(spec, payload)
        start = _header_nbytes(codec, len(spec.shape), len(sections), wide)
        return cls(spec, start, start + payload, wide)


class FrameArena:
    """Arena whose sections are parts of the frame, after the space of its header.

    Args:
        buffer: A uint8 tensor to write the frame into.
        plan: The plan for the codec and tensor.
    """

    __slots__ = ("address", "buffer", "capacity", "end", "plan")

    def __init__(self, buffer: Tensor, plan: FramePlan) -> None:
        self.buffer = buffer
        self.address = buffer.data_ptr()
        self.capacity = buffer.numel()
        self.plan = plan
        self.end = plan.start

    def take(self, nbytes: int) -> Tensor:
        begin = (self.end + ALIGN - 1) & -ALIGN
        end = begin + nbytes
        if end > self.capacity:
            raise InputError(
                f"the buffer holds {self.capacity} bytes, the frame needs more (at most {self.plan.limit}): "
                "size it with laconic.max_nbytes"
            )
        if begin > self.end:
            zero_bytes(self.address + self.end, begin - self.end)
        self.end = end
        return self.buffer[begin:end]

    def trim(self, section: Tensor, nbytes: int) -> Tensor:
        """Shrink the last section; return it."""
        self.end -= section.numel() - nbytes
        return section[:nbytes]


def seal(packet: Packet, arena: FrameArena) -> int:
    """Write the header of a packet whose sections are in the arena; return the bytes of the frame."""
    start, end, wide = arena.plan.start, arena.end, arena.plan.wide
    if not packet.sections:  # the encoder may have taken sections before it knew that every value is zero
        wide = _is_wide(packet.spec, 0)
        start = end = _header_nbytes(packet.codec, len(packet.spec.shape), 0, wide)
        if end > arena.capacity:
            raise InputError(f"the buffer holds {arena.capacity} bytes, the frame needs {end}")
    lengths = [section.numel() for section in packet.sections]
    header = _header(packet, lengths, end - start, crc32c(arena.address + start, end - start), wide)
    if len(header) != start:
        raise ConfigError(f"codec {packet.codec!r} wrote {len(lengths)} sections, but declares another number")
    set_bytes(arena.address, header)
    return end


@lru_cache(maxsize=64)
def _numbers(count: int, wide: bool) -> struct.Struct:
    return struct.Struct(f"<{count}{'Q' if wide else 'I'}")


def _header(packet: Packet, lengths: Sequence[int], payload: int, payload_crc: int, wide: bool) -> bytes:
    shape, codec = packet.spec.shape, packet.codec.encode("ascii")
    if len(codec) > MAX_SPEC:
        raise ConfigError(f"a codec spec on the wire has at most {MAX_SPEC} bytes, got {len(codec)}")
    dtype = _CODES[packet.spec.dtype]
    fixed = _FIXED.pack(
        MAGIC, VERSION, WIDE if wide else 0, dtype, len(shape), len(codec), len(lengths), 0, payload, payload_crc
    )
    return _with_checksum(fixed + _numbers(len(shape) + len(lengths), wide).pack(*shape, *lengths) + codec)


def _with_checksum(header: bytes) -> bytes:
    """Pad a header and append its checksum, so that it ends at a multiple of 16."""
    padded = header.ljust(align(len(header) + _CRC.size) - _CRC.size, b"\0")
    return padded + _CRC.pack(crc32c_of(padded))


def pack(packet: Packet) -> bytearray:
    """Return the frame of a packet."""
    plan = FramePlan.of(packet.codec, packet.spec, [section.numel() for section in packet.sections])
    frame = bytearray(plan.limit)
    arena = FrameArena(torch.frombuffer(frame, dtype=torch.uint8), plan)
    for section in packet.sections:
        arena.take(section.numel()).copy_(section)
    seal(packet, arena)
    return frame


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


def frame_nbytes(blob: Buffer) -> int:
    """Return the length of the frame that a buffer begins with; only the fields that decide the length are checked."""
    data = as_bytes(blob)
    head = bytes_at(data.data_ptr(), min(data.numel(), _FIXED.size))
    flags, _, ndim, spec_nbytes, num_sections, payload, _ = _fixed_fields(head, data.numel())
    numbers = _numbers(ndim + num_sections, bool(flags & WIDE)).size
    nbytes = align(_FIXED.size + numbers + spec_nbytes + _CRC.size) + payload
    if nbytes > data.numel():
        raise FrameError(f"the frame declares {nbytes} bytes, the buffer has {data.numel()}: the frame is truncated")
    return nbytes


def unpack(blob: Buffer, *, max_numel: int = MAX_NUMEL) -> Packet:
    """Return the packet of a frame; its sections are views of ``blob``. Invalid bytes raise ``FrameError`` only."""
    data = as_bytes(blob)
    if (found := read_frame(data.data_ptr(), data.numel())) is None:
        return _unpack_stepwise(data, max_numel)
    codec, shape, dtype_code, sizes = found
    if dtype_code not in DTYPES or not 0 < math.prod(shape) <= max_numel:
        return _unpack_stepwise(data, max_numel)
    return Packet(codec, tensor_spec(shape, DTYPES[dtype_code]), tuple(data.split_with_sizes(sizes)[2::2]))


def _unpack_stepwise(data: Tensor, max_numel: int) -> Packet:
    """``unpack`` of a frame that ``read_frame`` does not accept: raises an error that names the defect.

    Only frames without values, which are rare, pass.
    """
    size, address = data.numel(), data.data_ptr()
    head = bytes_at(address, min(size, 1024))
    flags, dtype_code, ndim, spec_nbytes, num_sections, payload, payload_crc = _fixed_fields(head, size)
    numbers = _numbers(ndim + num_sections, bool(flags & WIDE))
    text_at = _FIXED.size + numbers.size
    padding_at = text_at + spec_nbytes
    header = align(padding_at + _CRC.size)
    if size < header:
        raise FrameError(f"the frame's header has {header} bytes, the buffer has {size}: the frame is truncated")
    (crc,) = _CRC.unpack_from(head, header - _CRC.size)
    if crc != crc32c(address, header - _CRC.size):
        raise FrameError("the frame's header does not match its checksum: the frame is damaged")
    if head[padding_at : header - _CRC.size].strip(b"\0"):
        raise FrameError("the padding of the frame's header must be zero")
    values = numbers.unpack_from(head, _FIXED.size)
    shape, lengths = values[:ndim], values[ndim:]
    numel = math.prod(shape)
    if numel > max_numel:
        raise FrameError(f"the frame declares {numel} values, more than the {max_numel} allowed")
    if numel == 0 and (max(shape) > MAX_DIM or has_huge_strides(shape)):
        raise FrameError(
            f"a dimension of {list(shape)} is above 2^48, or they multiply, without zeros, to more than 2^62"
        )
    if body_nbytes(lengths) != payload:
        raise FrameError(f"sections of {lengths} bytes do not add up to the payload of {payload} bytes")
    if size - header != payload:
        raise FrameError(f"the frame declares {payload} payload bytes and has {size - header}")
    if crc32c(address + header, payload) != payload_crc:
        raise FrameError("the frame's payload does not match its checksum: the frame is damaged")
    try:
        codec = head[text_at:padding_at].decode("ascii")
    except UnicodeDecodeError:
        raise FrameError("the frame's codec spec must be ASCII") from None
    return Packet(codec, tensor_spec(shape, DTYPES[dtype_code]), _aligned_parts(data, header, lengths))


def _aligned_parts(data: Tensor, offset: int, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Return views of consecutive parts, each of which starts at a multiple of 16; the padding must be zero."""
    address, sizes = data.data_ptr(), [offset]
    for nbytes in lengths:
        gap = -offset & (ALIGN - 1)
        if gap and bytes_at(address + offset, gap).strip(b"\0"):
            raise FrameError("the padding between sections must be zero")
        sizes += [gap, nbytes]
        offset += gap + nbytes
    return tuple(data.split_with_sizes(sizes)[2::2])


def _fixed_fields(head: bytes, size: int) -> tuple[int, int, int, int, int, int, int]:
    if size < _FIXED.size:
        raise FrameError(f"a frame has at least {_FIXED.size} bytes, got {size}")
    magic, version, flags, dtype, ndim, spec_nbytes, num_sections, zero, payload, crc = _FIXED.unpack_from(head)
    _check_start(magic, version)
    if flags & BUNDLE:
        raise FrameError("expected a frame, got a bundle: read it with laconic.decode_bundle")
    if flags & ~WIDE or zero:
        raise FrameError(f"the frame has unknown flags ({flags:#x}, {zero:#x}): it may come from a newer laconic")
    if dtype not in DTYPES:
        raise FrameError(f"unknown dtype code {dtype}; known: {', '.join(map(str, DTYPES))}")
    if ndim > MAX_DIMS:
        raise FrameError(f"the frame declares {ndim} dimensions, at most {MAX_DIMS} are allowed")
    if num_sections > MAX_SECTIONS:
        raise FrameError(f"the frame declares {num_sections} sections, at most {MAX_SECTIONS} are allowed")
    if not 1 <= spec_nbytes <= MAX_SPEC:
        raise FrameError(f"a codec spec has 1 to {MAX_SPEC} bytes, the frame declares {spec_nbytes}")
    return flags, dtype, ndim, spec_nbytes, num_sections, payload, crc


def _check_start(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise FrameError(f"a frame starts with {MAGIC!r}, this starts with {magic!r}")
    if version != VERSION:
        raise FrameError(f"the frame has format version {version}, this laconic reads version {VERSION}")


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
        header = _header(Packet(codec, spec, ()), lengths, payload, 0, _is_wide(spec, payload))
        self._before_crc, self._after_crc = header[: _FIXED.size - _CRC.size], header[_FIXED.size : -_CRC.size]
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
        head = self._before_crc + _CRC.pack(crc32c(address + self._header, self._payload)) + self._after_crc
        set_bytes(address, head + _CRC.pack(crc32c_of(head)))

    def matches(self, address: int) -> bool:
        """Return whether the ``nbytes`` at an address are an undamaged frame of this template."""
        head = bytes_at(address, self._header)
        if not head.startswith(self._before_crc) or head[_FIXED.size : -_CRC.size] != self._after_crc:
            return False
        (payload_crc,), (crc,) = _CRC.unpack_from(head, len(self._before_crc)), _CRC.unpack(head[-_CRC.size :])
        if crc32c_of(head[: -_CRC.size]) != crc:
            return False
        if any(bytes_at(address + offset, len(zeros)) != zeros for offset, zeros in self._padding):
            return False
        payload = address + self._header
        if self._payload < COPIED_NBYTES:
            return bool(crc32c_of(bytes_at(payload, self._payload)) == payload_crc)
        return bool(crc32c(payload, self._payload) == payload_crc)


# ---------------------------------------------------------------------------------------------------------- bundles


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
    return _with_checksum(fixed + directory)


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
    _check_start(magic, version)
    if flags != BUNDLE or zero:
        raise FrameError("expected a bundle, got something else: read a single frame with laconic.decode")
    header = align(_BUNDLE.size + directory + _CRC.size)
    if count > MAX_PACKETS or directory > count * (_ENTRY.size + MAX_NAME) or size != header + body:
        raise FrameError(f"a bundle of {count} packets, {directory} and {body} bytes cannot have {size} bytes")
    head = bytes_at(data.data_ptr(), header)
    if _CRC.unpack_from(head, header - _CRC.size)[0] != crc32c(data.data_ptr(), header - _CRC.size):
        raise FrameError("the bundle's directory does not match its checksum: the bundle is damaged")
    entries = list(_entries(head, count, _BUNDLE.size + directory))
    if body_nbytes([nbytes for _, nbytes in entries]) != body or any(
        head[_BUNDLE.size + directory : header - _CRC.size]
    ):
        raise FrameError("the bundle's frames do not fill its body")
    views = _aligned_parts(data, header, [nbytes for _, nbytes in entries])
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
