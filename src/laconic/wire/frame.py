"""Packet <-> frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from laconic._core import bytes_at, crc32c, read_frame, set_bytes, zero_bytes
from laconic.errors import ConfigError, FrameError, InputError
from laconic.packet import Packet, TensorSpec, has_huge_strides, tensor_spec
from laconic.wire.alignment import ALIGN, align, aligned_parts, body_nbytes
from laconic.wire.header import (
    BUNDLE,
    CRC,
    DTYPES,
    FIXED,
    MAX_DIM,
    MAX_DIMS,
    MAX_NUMEL,
    MAX_SECTIONS,
    MAX_SPEC,
    WIDE,
    Buffer,
    as_bytes,
    check_start,
    frame_header,
    header_nbytes,
    is_wide,
    numbers_struct,
)

__all__ = ["FrameArena", "FramePlan", "frame_nbytes", "header_of_section", "pack", "seal", "unpack"]


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
        wide = is_wide(spec, payload)
        start = header_nbytes(codec, len(spec.shape), len(sections), wide)
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
        wide = is_wide(packet.spec, 0)
        start = end = header_nbytes(packet.codec, len(packet.spec.shape), 0, wide)
        if end > arena.capacity:
            raise InputError(f"the buffer holds {arena.capacity} bytes, the frame needs {end}")
    lengths = [section.numel() for section in packet.sections]
    header = frame_header(packet, lengths, end - start, crc32c(arena.address + start, end - start), wide)
    if len(header) != start:
        raise ConfigError(f"codec {packet.codec!r} wrote {len(lengths)} sections, but declares another number")
    set_bytes(arena.address, header)
    return end


def header_of_section(packet: Packet) -> bytes:
    """Return what comes before the section in the frame of a packet that has one."""
    (section,) = packet.sections
    payload = section.numel()
    return frame_header(packet, [payload], payload, crc32c(section.data_ptr(), payload), is_wide(packet.spec, payload))


def pack(packet: Packet) -> bytearray:
    """Return the frame of a packet."""
    plan = FramePlan.of(packet.codec, packet.spec, [section.numel() for section in packet.sections])
    frame = bytearray(plan.limit)
    arena = FrameArena(torch.frombuffer(frame, dtype=torch.uint8), plan)
    for section in packet.sections:
        arena.take(section.numel()).copy_(section)
    seal(packet, arena)
    return frame


def frame_nbytes(blob: Buffer) -> int:
    """Return the length of the frame that a buffer begins with; only the fields that decide the length are checked."""
    data = as_bytes(blob)
    head = bytes_at(data.data_ptr(), min(data.numel(), FIXED.size))
    flags, _, ndim, spec_nbytes, num_sections, payload, _ = _fixed_fields(head, data.numel())
    numbers = numbers_struct(ndim + num_sections, bool(flags & WIDE)).size
    nbytes = align(FIXED.size + numbers + spec_nbytes + CRC.size) + payload
    if nbytes > data.numel():
        raise FrameError(f"the frame declares {nbytes} bytes, the buffer has {data.numel()}: the frame is truncated")
    return nbytes


def unpack(blob: Buffer, *, max_numel: int = MAX_NUMEL) -> Packet:
    """Return the packet of a frame; its sections are views of ``blob``. Invalid bytes raise ``FrameError`` only."""
    data = as_bytes(blob)
    if (fields := read_frame(data.data_ptr(), data.numel())) is None:
        return _unpack_stepwise(data, max_numel)
    codec, shape, dtype_code, sizes = fields
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
    numbers = numbers_struct(ndim + num_sections, bool(flags & WIDE))
    text_at = FIXED.size + numbers.size
    padding_at = text_at + spec_nbytes
    header = align(padding_at + CRC.size)
    if size < header:
        raise FrameError(f"the frame's header has {header} bytes, the buffer has {size}: the frame is truncated")
    (crc,) = CRC.unpack_from(head, header - CRC.size)
    if crc != crc32c(address, header - CRC.size):
        raise FrameError("the frame's header does not match its checksum: the frame is damaged")
    if head[padding_at : header - CRC.size].strip(b"\0"):
        raise FrameError("the padding of the frame's header must be zero")
    values = numbers.unpack_from(head, FIXED.size)
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
    return Packet(codec, tensor_spec(shape, DTYPES[dtype_code]), aligned_parts(data, header, lengths))


def _fixed_fields(head: bytes, size: int) -> tuple[int, int, int, int, int, int, int]:
    if size < FIXED.size:
        raise FrameError(f"a frame has at least {FIXED.size} bytes, got {size}")
    magic, version, flags, dtype, ndim, spec_nbytes, num_sections, zero, payload, crc = FIXED.unpack_from(head)
    check_start(magic, version)
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
