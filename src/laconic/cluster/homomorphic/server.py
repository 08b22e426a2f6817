"""The server's side of ``returns=sum``: integers added while they are compressed, and no float of a gradient, ever.

What a worker sends of a slot is a bundle of two frames: ``scales``, one float32 per block of 1,024 values, and ``sum``,
the values as integers on the scales that all workers agreed on before. The server adds the integers, takes the largest
of the scales, and answers with a bundle of the same kind: the sum, which counts its senders, and the scales that the
next round's integers shall be on.

Sums of integers are exact, so each frame is added when it arrives, in any order, and the memory of a round is one
running sum per slot; the answer of a slot leaves when its last frame has come, while other slots are still coming.
Scales are never numbers here either: the largest of floats that are not negative is the one with the largest bits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from laconic import wire
from laconic._core import bytes_at
from laconic.aggregate.homomorphic import Sum, Summing
from laconic.cluster.protocol import Frame
from laconic.codecs import parse
from laconic.codecs.memory import ErrorFeedback
from laconic.codecs.packed_ints import HEAD_NBYTES, PackedIntHead, PackedIntStage
from laconic.errors import ConfigError, FrameError
from laconic.frames import max_nbytes, open_packet
from laconic.kernels.sections import SUM_BLOCK, num_buckets, packed_int_count, packed_ints_nbytes
from laconic.packet import Packet, TensorSpec
from laconic.wire import Buffer

__all__ = ["UNUSABLE", "Additions", "Part", "SlotSum", "check_summable", "message_limit", "pack_part", "unpack_part"]

UNUSABLE = int(torch.tensor([torch.finfo(torch.float32).max]).view(torch.int32))
"""The bits of a scale that says: values are not finite. (The largest finite number.)"""
_SCALES, _SUM = "scales", "sum"


def check_summable(spec: str, workers: int) -> Summing:
    """The codec of a spec as that of a sum; ``ConfigError`` when it is none, or cannot take so many workers."""
    memories, chain = parse(spec)
    if any(not isinstance(stage, ErrorFeedback) for stage in memories):
        raise ConfigError(f"returns=sum keeps error feedback only, as in 'ef|thc:4', got {spec!r}")
    if chain.selector is not None or chain.coder is not None or not isinstance(chain.values, PackedIntStage):
        raise ConfigError(f"returns=sum adds integers on agreed scales: push and push_small take 'shared:8', 'thc:4' "
                          f"and the like, with 'ef|' or without, got {spec!r}")  # fmt: skip
    return Summing(chain, workers)


def num_scales(numel: int) -> int:
    return num_buckets(numel, SUM_BLOCK)


def message_limit(like: Tensor) -> int:
    """The most bytes that a bundle of a slot can have, be it of one worker or the sum of all; a weight's frame, too."""
    scales = num_scales(like.numel())
    room = max_nbytes("none", like) + 3 * max_nbytes("none", TensorSpec((scales,), torch.float32))
    return room + 4 * scales * SUM_BLOCK + 1024


def pack_scales(bits: Tensor) -> bytearray:
    """A frame of float32 scales from their bits, as int32."""
    return wire.pack(_scales_packet(bits))


def _scales_packet(bits: Tensor) -> Packet:
    return Packet("none", TensorSpec(tuple(bits.shape), torch.float32), (bits.contiguous().view(torch.uint8),))


def read_scales(frame: Buffer, count: int) -> Tensor:
    """Their bits; ``FrameError`` unless these are so many floats, not negative and finite."""
    packet, _ = open_packet(frame, max_numel=count)
    if packet.codec != "none" or packet.spec.shape != (count,) or packet.spec.dtype != torch.float32:
        raise FrameError(f"expected {count} scales, the frame holds {list(packet.spec.shape)} of {packet.codec!r}")
    if not packet.sections:
        return torch.zeros(count, dtype=torch.int32)
    if len(packet.sections) != 1 or packet.sections[0].numel() != 4 * count:
        raise FrameError(f"{count} scales take {4 * count} bytes")
    return _bits(packet.sections[0])


def _bits(section: Tensor) -> Tensor:
    # By numpy, as is the maximum below: torch lets go of the interpreter for each of such small things, and with many
    # workers' threads around, getting it back costs more than doing them.
    bits = section.numpy().copy().view(np.uint32)
    if bits.size and int(bits.max()) > UNUSABLE:  # negative ones have the highest bit
        raise FrameError("a scale is negative or not finite")
    return torch.from_numpy(bits.view(np.int32))


def pack_part(scales: Buffer, summand: Buffer | None) -> Frame:
    """What travels of a slot."""
    frames = [(_SCALES, scales), *([(_SUM, summand)] if summand is not None else [])]
    return memoryview(wire.pack_bundle(frames))


def unpack_part(message: Buffer) -> tuple[Tensor, Tensor | None]:
    """The frame of the scales, and that of the sum unless there is none; views, not checked."""
    frames = wire.unpack_bundle(message)
    if [name for name, _ in frames] not in ([_SCALES], [_SCALES, _SUM]):
        raise FrameError("a slot's bundle holds its scales, and its sum if there is one")
    return frames[0][1], frames[1][1] if len(frames) > 1 else None


@dataclass(frozen=True)
class SlotSum:
    """How one slot is summed."""

    name: str
    shape: tuple[int, ...]
    summing: Summing

    @cached_property
    def stage(self) -> PackedIntStage:
        stage = self.summing.chain.values
        assert isinstance(stage, PackedIntStage)
        return stage

    @cached_property
    def head(self) -> PackedIntHead:
        """How each worker lays out its integers."""
        return self.stage.head(self.summing.workers, ring=False)

    @property
    def lanes(self) -> int:
        """Integers of a worker: a rotation's blocks are full."""
        return packed_int_count(self.numel, self.stage.signs is not None)

    @cached_property
    def mould(self) -> PartMould | None:
        """None where there is nothing to send."""
        return PartMould(self) if self.numel else None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_scales(self) -> int:
        return num_scales(self.numel)


class PartMould:
    """What a worker's bundle of a slot is like, byte by byte, but for its numbers and their checksums.

    Whatever looks different may still be right (scales that are all zero, nothing but scales): that is read the long
    way, which also says what is wrong where something is.
    """

    def __init__(self, how: SlotSum) -> None:
        scales, lanes = 4 * how.num_scales, packed_ints_nbytes(how.lanes, how.head.coding)
        self._codec, self._spec = how.summing.chain.text, TensorSpec(how.shape, torch.float32)
        self._scales = wire.FrameTemplate("none", TensorSpec((how.num_scales,), torch.float32), [scales])
        self._sum = wire.FrameTemplate(self._codec, self._spec, [HEAD_NBYTES, scales, lanes])
        self._bundle = wire.bundle_header([_SCALES, _SUM], [self._scales.nbytes, self._sum.nbytes])
        self._head = how.head.to_bytes()
        first = len(self._bundle)
        end = first + self._scales.nbytes
        second = end + (-end & (wire.ALIGN - 1))
        self._gap, self._second, self._nbytes = (end, bytes(second - end)), second, second + self._sum.nbytes
        self._head_at = second + self._sum.sections[0]
        self._sizes: list[int] = []
        """Of what lies between the sections, and of these, in turns."""
        starts = [first + self._scales.sections[0], *(second + at for at in self._sum.sections)]
        at = 0
        for start, nbytes in zip(starts, (scales, HEAD_NBYTES, scales, lanes), strict=True):
            self._sizes += [start - at, nbytes]
            at = start + nbytes

    def read(self, message: Buffer) -> tuple[Tensor, Packet] | None:
        """The bits of the scales, and the packet; None where it looks different."""
        data = wire.as_bytes(message)
        if data.numel() != self._nbytes:
            return None
        address, (gap, zeros) = data.data_ptr(), self._gap
        if (
            bytes_at(address, len(self._bundle)) != self._bundle
            or bytes_at(address + gap, len(zeros)) != zeros
            or bytes_at(address + self._head_at, HEAD_NBYTES) != self._head
            or not self._scales.fits(address + len(self._bundle))
            or not self._sum.fits(address + self._second)
        ):
            return None
        scales, *sections = data.split_with_sizes(self._sizes)[1::2]
        return _bits(scales), Packet(self._codec, self._spec, tuple(sections))


@dataclass(frozen=True)
class Part:
    """What came of one slot: the bits of its scales, and its integers, if it has sent any."""

    slot: str
    frame: Frame
    scales: Tensor
    packet: Packet | None
    head: PackedIntHead

    @classmethod
    def of(cls, how: SlotSum, message: Frame) -> Part:
        try:
            known = None if how.mould is None else how.mould.read(message)
            scales, packet = known or _read(how, message)
        except FrameError as error:
            raise FrameError(f"slot {how.name!r}: {error}") from None
        return cls(how.name, message, scales, packet, how.head)


def _read(how: SlotSum, message: Frame) -> tuple[Tensor, Packet | None]:
    scales, summand = unpack_part(message)
    return read_scales(scales, how.num_scales), None if summand is None else _opened(how, summand)


def _opened(how: SlotSum, summand: Buffer) -> Packet:
    """A worker's integers, if they are of the job: a stranger's must not be what others are held against."""
    packet, chain = open_packet(summand, max_numel=how.numel)
    if packet.spec.shape != how.shape or packet.spec.dtype != torch.float32:
        raise FrameError(f"expected {list(how.shape)} of torch.float32, the frame holds {list(packet.spec.shape)} of "
                         f"{packet.spec.dtype}")  # fmt: skip
    if packet.codec != how.summing.chain.text:
        raise FrameError(f"expected {how.summing.chain.text!r}, the frame is of {packet.codec!r}")
    chain.check(packet)
    if not packet.sections:
        if how.numel:
            raise FrameError("the frame holds zeros that were not encoded for a sum")
        return packet
    if (head := how.stage.read_head(packet.sections[-3:], how.numel)) != how.head:
        raise FrameError(f"expected a worker's integers as {how.head}, got {head}")
    return packet


class Additions:
    """The sums of one round. Several threads may add at a time.

    Args:
        slots: How each is summed.
        workers: How many make a slot complete.
        rooms: Sums of an earlier round, cleared and used again.
    """

    def __init__(self, slots: Sequence[SlotSum], workers: int, rooms: Sequence[Sum] = ()) -> None:
        self._workers = workers
        self._rooms = list(rooms) or [Sum(workers=how.summing.workers, max_numel=max(1, how.numel)) for how in slots]
        self._scales = [torch.zeros(how.num_scales, dtype=torch.int32) for how in slots]
        self._any = [False] * len(slots)
        self._added: list[set[int]] = [set() for _ in slots]
        self._locks = [threading.Lock() for _ in slots]

    def add(self, slot: int, worker: int, part: Part) -> Frame | None:
        """Add what a worker sends of a slot, once; the answer when this was the last. An error changes nothing."""
        with self._locks[slot]:
            if worker in self._added[slot]:
                return None  # sent again because the rest of it had broken off
            if part.packet is not None:
                try:
                    if part.packet.sections:
                        self._rooms[slot].add_integers(part.packet, part.head)
                    else:
                        self._rooms[slot].add(part.packet)
                except FrameError as error:
                    raise FrameError(f"slot {part.slot!r}: {error}") from None
                self._any[slot] = True
            most = self._scales[slot].numpy()
            np.maximum(most, part.scales.numpy(), out=most)
            self._added[slot].add(worker)
            return self._message(slot) if len(self._added[slot]) == self._workers else None

    def _message(self, slot: int) -> Frame:
        sums, packets = self._rooms[slot], [_scales_packet(self._scales[slot])]
        parts = [(_SCALES, packets[0].codec, packets[0].spec, [packets[0].sections[0].numel()])]
        if self._any[slot]:
            parts.append((_SUM, *sums.packet_layout()))
        room = wire.BundleRoom(parts)
        room.arenas[0].take(parts[0][3][0]).copy_(packets[0].sections[0])
        if self._any[slot]:
            packets.append(sums.packet(room.arenas[1]))
        sums.clear()  # for the next round, while workers are busy with this one
        return room.seal(packets)

    def scales(self) -> list[Tensor | None]:
        """The bits of what was agreed; None for a slot where somebody's values are not finite."""
        return [None if scales.numel() and int(scales.max()) >= UNUSABLE else scales for scales in self._scales]

    def rooms(self) -> list[Sum]:
        """For the next round, once the answer is made."""
        return self._rooms

    @property
    def nbytes(self) -> int:
        """Memory that the running sums hold."""
        return sum(room.nbytes for room in self._rooms)
