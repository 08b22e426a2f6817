"""Packet <-> bytes: header, limits, checksums. Knows no codec. docs/wire-format.md says every byte.

Bytes from outside can only raise ``FrameError``: every length is checked against the bytes at hand before anything is
sliced, and nothing is allocated here.
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

from laconic._core import byte_view, bytes_at, crc32c, crc32c_of, set_bytes, zero_bytes
from laconic.errors import ConfigError, FrameError, InputError
from laconic.packet import Packet, TensorSpec, tensor_spec

__all__ = [
    "MAX_NUMEL",
    "Buffer",
    "BundleRoom",
    "FrameArena",
    "FramePlan",
    "FrameTemplate",
    "align",
    "body_nbytes",
    "bundle_header",
    "is_bundle",
    "pack",
    "pack_bundle",
    "seal",
    "unpack",
    "unpack_bundle",
]

if sys.byteorder != "little":
    raise ImportError("laconic frames are little-endian and written as they lie in memory: this machine is big-endian")

Buffer = bytes | bytearray | memoryview | Tensor
"""What frames are read from: anything with the buffer protocol, or a uint8 tensor."""

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
SMALL: Final = 1 << 14
"""Bytes of which a copy costs less than to let go of the interpreter while others want it."""
_SHORTEST: Final = 32  # bytes of a header, which ends on the alignment

DTYPES: Final[dict[int, torch.dtype]] = {
    1: torch.float32,
    2: torch.float64,
    3: torch.float16,
    4: torch.bfloat16,
    16: torch.uint8,
    17: torch.int8,
    18: torch.int16,
    19: torch.int32,
    20: torch.int64,
    21: torch.bool,
}
_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}


def align(nbytes: int) -> int:
    """The next place from there on where a section, or a frame of a bundle, may begin."""
    return (nbytes + ALIGN - 1) & -ALIGN


def _header_nbytes(codec: str, ndim: int, num_sections: int, wide: bool) -> int:
    return align(_FIXED.size + (8 if wide else 4) * (ndim + num_sections) + len(codec) + _CRC.size)


def body_nbytes(sections: Sequence[int]) -> int:
    """Bytes of parts that follow each other, each from a multiple of 16 on."""
    total = 0
    for nbytes in sections:
        total = align(total) + nbytes
    return total


def _is_wide(spec: TensorSpec, payload: int) -> bool:
    return payload >= 1 << 32 or any(size >= 1 << 32 for size in spec.shape)


class FramePlan(NamedTuple):
    """Where a frame's payload starts and how long the frame can get."""

    spec: TensorSpec
    start: int
    limit: int
    wide: bool

    @classmethod
    def of(cls, codec: str, spec: TensorSpec, sections: Sequence[int]) -> FramePlan:
        """The plan of a frame whose sections have at most these sizes."""
        if len(spec.shape) > MAX_DIMS:
            raise InputError(f"a tensor on the wire has at most {MAX_DIMS} dimensions, got {len(spec.shape)}")
        if any(size > MAX_DIM for size in spec.shape):
            raise InputError(f"a dimension on the wire is at most 2^48, got {list(spec.shape)}")
        if spec.numel > MAX_NUMEL:
            raise InputError(f"a tensor on the wire has at most 2^34 values, got {spec.numel}")
        payload = body_nbytes(sections)
        wide = _is_wide(spec, payload)
        start = _header_nbytes(codec, len(spec.shape), len(sections), wide)
        return cls(spec, start, start + payload, wide)


class FrameArena:
    """Sections laid straight into the frame that will carry them, behind the room its header needs.

    Args:
        buffer: A uint8 tensor to write the frame into.
        plan: What the codec that will write can need.
    """

    __slots__ = ("address", "buffer", "capacity", "end", "plan")

    def __init__(self, buffer: Tensor, plan: FramePlan) -> None:
        self.buffer = buffer
        self.address = buffer.data_ptr()
        self.capacity = buffer.numel()
        self.plan = plan
        self.end = plan.start

    def take(self, nbytes: int) -> Tensor:
        begin, end = align(self.end), align(self.end) + nbytes
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
        """Give back what the section taken last does not need; returns what is left of it."""
        self.end -= section.numel() - nbytes
        return section[:nbytes]


def seal(packet: Packet, arena: FrameArena) -> int:
    """Write the header of a packet whose sections lie in the arena; returns the bytes of the frame."""
    start, end, wide = arena.plan.start, arena.end, arena.plan.wide
    if not packet.sections:  # nothing to carry, whatever room the encoder had taken before it found out
        wide = _is_wide(packet.spec, 0)
        start = end = _header_nbytes(packet.codec, len(packet.spec.shape), 0, wide)
        if end > arena.capacity:
            raise InputError(f"the buffer holds {arena.capacity} bytes, the frame needs {end}")
    lengths = [section.numel() for section in packet.sections]
    header = _header(packet, lengths, end - start, crc32c(arena.address + start, end - start), wide)
    if len(header) != start:
        raise ConfigError(f"codec {packet.codec!r} wrote {len(lengths)} sections, another number than it declares")
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
    text = fixed + _numbers(len(shape) + len(lengths), wide).pack(*shape, *lengths) + codec
    return _checked(text)


def _checked(header: bytes) -> bytes:
    """A header padded so that it ends, its checksum included, on the alignment."""
    padded = header.ljust(align(len(header) + _CRC.size) - _CRC.size, b"\0")
    return padded + _CRC.pack(crc32c_of(padded))


def pack(packet: Packet) -> bytearray:
    """One packet as a frame."""
    plan = FramePlan.of(packet.codec, packet.spec, [section.numel() for section in packet.sections])
    frame = bytearray(plan.limit)
    arena = FrameArena(torch.frombuffer(frame, dtype=torch.uint8), plan)
    for section in packet.sections:
        arena.take(section.numel()).copy_(section)
    seal(packet, arena)
    return frame


def as_bytes(blob: Buffer) -> Tensor:
    """A buffer as a uint8 tensor, without copying. What it shows is only read."""
    if isinstance(blob, Tensor):
        if blob.dtype != torch.uint8 or blob.dim() != 1 or not blob.is_contiguous() or blob.device.type != "cpu":
            raise InputError("a frame in a tensor must be a contiguous uint8 vector on the CPU")
        return blob
    try:
        return byte_view(blob)
    except (TypeError, BufferError) as error:
        raise InputError(f"expected bytes or a uint8 tensor, got {type(blob).__name__}") from error


def unpack(blob: Buffer, *, max_numel: int = MAX_NUMEL) -> Packet:
    """One packet from a frame; its sections are views into ``blob``. Raises ``FrameError`` and nothing else."""
    data = as_bytes(blob)
    size, address = data.numel(), data.data_ptr()
    head = bytes_at(address, min(size, 1024))
    flags, dtype_code, ndim, spec_nbytes, num_sections, payload, payload_crc = _fixed_fields(head, size)
    numbers = _numbers(ndim + num_sections, bool(flags & WIDE))
    text_at = _FIXED.size + numbers.size
    padding_at = text_at + spec_nbytes
    header = align(padding_at + _CRC.size)
    if size < header:
        raise FrameError(f"the frame's header has {header} bytes, only {size} are here: it was cut short")
    (crc,) = _CRC.unpack_from(head, header - _CRC.size)
    if crc != crc32c(address, header - _CRC.size):
        raise FrameError("the frame's header does not match its checksum: it was damaged on the way")
    if head[padding_at : header - _CRC.size].strip(b"\0"):
        raise FrameError("the frame's header has something in its padding")
    values = numbers.unpack_from(head, _FIXED.size)
    shape, lengths = values[:ndim], values[ndim:]
    numel = math.prod(shape)
    if numel > max_numel:
        raise FrameError(f"the frame declares {numel} values, more than the {max_numel} allowed")
    if numel == 0 and max(shape) > MAX_DIM:
        raise FrameError(f"the frame declares a dimension of {max(shape)}, more than {MAX_DIM}")
    if body_nbytes(lengths) != payload:
        raise FrameError(f"sections of {lengths} bytes do not make the payload of {payload} bytes")
    if size - header != payload:
        raise FrameError(f"the frame promises {payload} payload bytes and carries {size - header}")
    if crc32c(address + header, payload) != payload_crc:
        raise FrameError("the frame's payload does not match its checksum: it was damaged on the way")
    try:
        codec = head[text_at:padding_at].decode("ascii")
    except UnicodeDecodeError:
        raise FrameError("the frame's codec is not plain ASCII") from None
    return Packet(codec, tensor_spec(shape, DTYPES[dtype_code]), _aligned_parts(data, header, lengths))


def _aligned_parts(data: Tensor, at: int, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of parts that follow each other from ``at`` on, each from a multiple of 16, with zeros between."""
    address, sizes = data.data_ptr(), [at]
    for nbytes in lengths:
        gap = -at & (ALIGN - 1)
        if gap and bytes_at(address + at, gap).strip(b"\0"):
            raise FrameError("there is something in the padding between sections")
        sizes += [gap, nbytes]
        at += gap + nbytes
    return tuple(data.split_with_sizes(sizes)[2::2])


def _fixed_fields(head: bytes, size: int) -> tuple[int, int, int, int, int, int, int]:
    if size < _FIXED.size:
        raise FrameError(f"a frame has at least {_FIXED.size} bytes, got {size}")
    magic, version, flags, dtype, ndim, spec_nbytes, num_sections, zero, payload, crc = _FIXED.unpack_from(head)
    _check_start(magic, version)
    if flags & BUNDLE:
        raise FrameError("this is a bundle of packets: read it with laconic.decode_bundle")
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
        raise FrameError(f"a frame begins with {MAGIC!r}, this begins with {magic!r}")
    if version != VERSION:
        raise FrameError(f"the frame is of format {version}, this laconic reads {VERSION}")


class FrameTemplate:
    """What frames are like whose codec, shape and sections' sizes are known beforehand: all but checksums.

    Who expects many of these sees at a glance that one is in order, without reading what it knows. A frame that does
    not fit is for ``unpack``, which takes it or says what is wrong. And who writes many of them writes no more than
    what changes.
    """

    def __init__(self, codec: str, spec: TensorSpec, lengths: Sequence[int]) -> None:
        payload = body_nbytes(lengths)
        header = _header(Packet(codec, spec, ()), lengths, payload, 0, _is_wide(spec, payload))
        self._checksum = _FIXED.size - _CRC.size
        self._start, self._rest = header[: self._checksum], header[_FIXED.size : -_CRC.size]
        self._header, self._payload = len(header), payload
        self.nbytes = len(header) + payload
        self.sections: list[int] = []
        """Where each begins."""
        self._gaps: list[tuple[int, bytes]] = []
        at = len(header)
        for nbytes in lengths:
            if gap := -at & (ALIGN - 1):
                self._gaps.append((at, bytes(gap)))
            self.sections.append(align(at))
            at = align(at) + nbytes

    def stamp(self, address: int) -> None:
        """Make a frame of sections that lie there already: header, checksums, and zeros between."""
        for at, zeros in self._gaps:
            set_bytes(address + at, zeros)
        head = self._start + _CRC.pack(crc32c(address + self._header, self._payload)) + self._rest
        set_bytes(address, head + _CRC.pack(crc32c_of(head)))

    def fits(self, address: int) -> bool:
        """Whether the ``nbytes`` there are such a frame, undamaged."""
        head = bytes_at(address, self._header)
        if not head.startswith(self._start) or head[_FIXED.size : -_CRC.size] != self._rest:
            return False
        (payload_crc,), (crc,) = _CRC.unpack_from(head, self._checksum), _CRC.unpack(head[-_CRC.size :])
        if crc32c_of(head[: -_CRC.size]) != crc:
            return False
        if any(bytes_at(address + at, len(zeros)) != zeros for at, zeros in self._gaps):
            return False
        payload = address + self._header
        if self._payload < SMALL:
            return bool(crc32c_of(bytes_at(payload, self._payload)) == payload_crc)
        return bool(crc32c(payload, self._payload) == payload_crc)


# ---------------------------------------------------------------------------------------------------------- bundles


def bundle_header(names: Sequence[str], sizes: Sequence[int]) -> bytes:
    """The header of a bundle of frames of these sizes; each frame follows at the next multiple of 16."""
    if len(names) > MAX_PACKETS:
        raise InputError(f"a bundle has at most {MAX_PACKETS} packets, got {len(names)}")
    words = [name.encode() for name in names]
    for word in words:
        if len(word) > MAX_NAME:
            raise InputError(f"a slot name has at most {MAX_NAME} bytes, got {len(word)}: {word[:40]!r}…")
    directory = b"".join(_ENTRY.pack(size, len(word)) + word for size, word in zip(sizes, words, strict=True))
    fixed = _BUNDLE.pack(MAGIC, VERSION, BUNDLE, 0, len(names), len(directory), body_nbytes(sizes))
    return _checked(fixed + directory)


def pack_bundle(frames: Sequence[tuple[str, Buffer]]) -> bytearray:
    """Many frames as one, each with a name (which may be empty)."""
    views = [as_bytes(frame) for _, frame in frames]
    sizes = [view.numel() for view in views]
    header = bundle_header([name for name, _ in frames], sizes)
    bundle = bytearray(len(header) + body_nbytes(sizes))
    bundle[: len(header)] = header
    room = torch.frombuffer(bundle, dtype=torch.uint8)
    at = len(header)
    for view in views:
        at = align(at)
        room[at : at + view.numel()] = view
        at += view.numel()
    return bundle


class BundleRoom:
    """A bundle to be written in place: an arena for the sections of each packet, whose sizes are known beforehand.

    Args:
        parts: Name, codec, tensor and sections' sizes of each packet.
    """

    def __init__(self, parts: Sequence[tuple[str, str, TensorSpec, Sequence[int]]]) -> None:
        plans = [FramePlan.of(codec, spec, sizes) for _, codec, spec, sizes in parts]
        limits = [plan.limit for plan in plans]
        header = bundle_header([name for name, *_ in parts], limits)
        self._room = torch.empty(len(header) + body_nbytes(limits), dtype=torch.uint8)
        self.arenas: list[FrameArena] = []
        address, at = self._room.data_ptr(), len(header)
        set_bytes(address, header)
        for plan in plans:
            zero_bytes(address + at, align(at) - at)
            at = align(at)
            self.arenas.append(FrameArena(self._room[at : at + plan.limit], plan))
            at += plan.limit

    def seal(self, packets: Sequence[Packet]) -> memoryview:
        """The bundle, once all sections are in their arenas."""
        for packet, arena in zip(packets, self.arenas, strict=True):
            if seal(packet, arena) != arena.plan.limit:
                raise ConfigError(f"codec {packet.codec!r} wrote less than it said")
        return self._room.numpy().data


def is_bundle(blob: Buffer) -> bool:
    """Whether these bytes begin as a bundle does."""
    data = as_bytes(blob)
    return data.numel() >= 6 and bytes_at(data.data_ptr(), 4) == MAGIC and bool(int(data[5]) & BUNDLE)


def unpack_bundle(blob: Buffer) -> list[tuple[str, Tensor]]:
    """Names and frames of a bundle, in order; the frames are views, not yet checked themselves."""
    data = as_bytes(blob)
    size = data.numel()
    if size < _BUNDLE.size:
        raise FrameError(f"a bundle has at least {_BUNDLE.size} bytes, got {size}")
    magic, version, flags, zero, count, directory, body = _BUNDLE.unpack(bytes_at(data.data_ptr(), _BUNDLE.size))
    _check_start(magic, version)
    if flags != BUNDLE or zero:
        raise FrameError("this is no bundle of packets: read a single packet with laconic.decode")
    header = align(_BUNDLE.size + directory + _CRC.size)
    if count > MAX_PACKETS or directory > count * (_ENTRY.size + MAX_NAME) or size != header + body:
        raise FrameError(f"a bundle of {count} packets, {directory} and {body} bytes does not have {size} bytes")
    head = bytes_at(data.data_ptr(), header)
    if _CRC.unpack_from(head, header - _CRC.size)[0] != crc32c(data.data_ptr(), header - _CRC.size):
        raise FrameError("the bundle's directory does not match its checksum: it was damaged on the way")
    entries = list(_entries(head, count, _BUNDLE.size + directory))
    if body_nbytes([nbytes for _, nbytes in entries]) != body or any(
        head[_BUNDLE.size + directory : header - _CRC.size]
    ):
        raise FrameError("the bundle's frames do not fill its body")
    views = _aligned_parts(data, header, [nbytes for _, nbytes in entries])
    return [(name, view) for (name, _), view in zip(entries, views, strict=True)]


def _entries(head: bytes, count: int, end: int) -> Iterator[tuple[str, int]]:
    at = _BUNDLE.size
    for _ in range(count):
        if at + _ENTRY.size > end:
            raise FrameError("the bundle's directory is shorter than its entries")
        nbytes, name_nbytes = _ENTRY.unpack_from(head, at)
        at += _ENTRY.size
        if nbytes < _SHORTEST:  # a view of nothing takes a hundred times the entry
            raise FrameError(f"a frame has at least {_SHORTEST} bytes, the bundle's directory says {nbytes}")
        if name_nbytes > MAX_NAME or at + name_nbytes > end:
            raise FrameError(f"a name of {name_nbytes} bytes does not fit the bundle's directory")
        try:
            yield head[at : at + name_nbytes].decode(), nbytes
        except UnicodeDecodeError:
            raise FrameError("a name in the bundle is not UTF-8") from None
        at += name_nbytes
    if at != end:
        raise FrameError("the bundle's directory is longer than its entries")
