"""Sum: packets added as they arrive, in integers, without decoding."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from laconic import kernels, wire
from laconic.codecs import Chain, codec
from laconic.codecs.lanes import LaneHead, LaneStage
from laconic.errors import ConfigError, FrameError
from laconic.frames import open_packet
from laconic.kernels.interface import lane_values, packed_nbytes
from laconic.packet import HeapArena, Packet, RoomFor
from laconic.wire import MAX_NUMEL, Buffer

__all__ = ["Sum", "add", "count"]


def _open(frame: Packet | Buffer, max_numel: int) -> tuple[Packet, Chain, LaneStage]:
    packet, chain = (
        (frame, codec(frame.codec)) if isinstance(frame, Packet) else open_packet(frame, max_numel=max_numel)
    )
    if not chain.summable or not isinstance(chain.values, LaneStage):
        raise FrameError(f"packets of {chain.text!r} cannot be added")
    chain.check(packet)
    if packet.spec.numel and not packet.sections:
        raise FrameError("the frame holds a tensor of zeros that was not encoded for a sum: use Summing.encode")
    return packet, chain, chain.values


def _head(packet: Packet, chain: Chain, stage: LaneStage) -> LaneHead:
    n = packet.spec.numel
    kept = n if chain.selector is None else chain.selector.count(packet.sections[0], n)
    return stage.read_head(packet.sections[-3:], kept)


def count(frame: Packet | Buffer, *, max_numel: int = MAX_NUMEL) -> int:
    """How many workers' tensors a frame is the sum of."""
    packet, chain, stage = _open(frame, max_numel)
    return _head(packet, chain, stage).count if packet.sections else 0


class Sum:
    """Adds packets of one tensor while they are compressed. Order and grouping make no difference, to the last bit.

    A frame that does not belong to the sum (another tensor, other scales, one sender more than there may be) raises
    ``FrameError`` and leaves the sum as it was. Memory: one, two or four bytes a value, by the largest sum possible.

    Args:
        max_numel: Frames that declare more values are refused.
    """

    def __init__(self, *, max_numel: int = MAX_NUMEL) -> None:
        self.max_numel = max_numel
        self._first: Packet | None = None
        self._head: LaneHead | None = None
        self._values = 0
        self._total = torch.empty(0, dtype=torch.uint8)

    @property
    def count(self) -> int:
        """How many workers' tensors have been added."""
        return 0 if self._head is None else self._head.count

    @property
    def nbytes(self) -> int:
        """Memory that the sum holds."""
        return self._total.numel() * self._total.element_size()

    def clear(self) -> None:
        """Start again; memory is kept for the next round."""
        self._first = self._head = None

    def add(self, frame: Packet | Buffer) -> None:
        """Add a worker's packet, or the sum of several."""
        packet, chain, stage = _open(frame, self.max_numel)
        if self._first is None:
            self._begin(packet, chain, stage)
            return
        if packet.codec != self._first.codec or packet.spec != self._first.spec:
            raise FrameError(
                f"the sum is of {self._first.codec!r} for {list(self._first.spec.shape)}, the frame of "
                f"{packet.codec!r} for {list(packet.spec.shape)}"
            )
        if not packet.sections:  # no values at all
            return
        head, ours = _head(packet, chain, stage), self._head
        assert ours is not None
        if (head.packed, head.levels, head.workers) != (ours.packed, ours.levels, ours.workers) or not (
            head.packed or head.width == ours.width
        ):
            raise FrameError(f"the sum has {ours.levels} levels for {ours.workers} workers, the frame {head}")
        if ours.count + head.count > ours.workers:
            raise FrameError(
                f"{head.count} more than {ours.count} senders are too many: this sum is for {ours.workers}"
            )
        for mine, other in zip(self._first.sections[:-3], packet.sections[:-3], strict=True):
            if not torch.equal(mine, other):
                raise FrameError("the frame's entries stand elsewhere: its sender used another seed")
        if not torch.equal(self._first.sections[-2], packet.sections[-2]):
            raise FrameError("the frame's scales are not those of the sum: its sender agreed on others")
        self._take(packet.sections[-1], head)
        self._head = replace(ours, count=ours.count + head.count)

    def _begin(self, packet: Packet, chain: Chain, stage: LaneStage) -> None:
        if packet.sections:
            head = _head(packet, chain, stage)
            n = packet.spec.numel
            kept = n if chain.selector is None else chain.selector.count(packet.sections[0], n)
            with RoomFor(n):
                self._values = lane_values(kept, stage.signs is not None)
                self._make_room(packet.sections[-1], head)
                self._take(packet.sections[-1], head)
                kept_sections = tuple(section.clone() for section in packet.sections[:-1])
            self._head = head
            packet = Packet(packet.codec, packet.spec, (*kept_sections, torch.empty(0, dtype=torch.uint8)))
        self._first = packet

    def _make_room(self, lanes: Tensor, head: LaneHead) -> None:
        size, dtype = lanes.numel(), torch.uint8
        if head.packed:
            most = head.levels * head.workers
            size, dtype = self._values, torch.uint8 if most < 1 << 8 else torch.int16 if most < 1 << 16 else torch.int32
        if (self._total.numel(), self._total.dtype, self._total.device) == (size, dtype, lanes.device):
            self._total.zero_()
        else:
            self._total = torch.zeros(size, dtype=dtype, device=lanes.device)

    def _take(self, lanes: Tensor, head: LaneHead) -> None:
        backend = kernels.of(lanes)
        if head.total != (1 << head.width) - 1 and backend.lane_largest(lanes, self._values, head.coding) > head.total:
            raise FrameError(f"an integer in the frame is above {head.total}, the most its senders can make")
        if head.packed:
            backend.lane_accumulate(lanes, head.width, self._total)
        else:
            backend.lane_add(lanes, self._total)

    def packet(self) -> Packet:
        """The sum so far, as a packet."""
        if self._first is None:
            raise ConfigError("nothing has been added yet")
        if self._head is None:
            return self._first
        first, head = self._first, self._head
        arena = HeapArena(self._total.device)
        if head.packed:
            head = LaneHead.for_server(head.levels, head.workers, head.count)
            lanes = arena.take(packed_nbytes(self._values, head.width))
            kernels.of(lanes).lane_pack(self._total, head.width, lanes)
        else:
            lanes = self._total
        top = torch.empty_like(first.sections[-3])
        head.write(top)
        return Packet(first.codec, first.spec, (*first.sections[:-3], top, first.sections[-2], lanes))

    def finish(self) -> bytearray:
        """The sum so far, as a frame: what workers decode, and what further sums can add."""
        return wire.pack(self.packet())


def add(*frames: Packet | Buffer, max_numel: int = MAX_NUMEL) -> bytearray:
    """The sum of frames, as a frame.

    >>> import laconic, torch
    >>> summing = laconic.summing("shared:8", workers=2)
    >>> xs = torch.tensor([1.0, -1.0]), torch.tensor([0.0, -1.0])
    >>> agreed = summing.agree([summing.probe(x) for x in xs])
    >>> laconic.decode(laconic.sums.add(*(summing.encode(x, agreed) for x in xs)))[1]
    tensor(-1.)
    """
    total = Sum(max_numel=max_numel)
    for frame in frames:
        total.add(frame)
    return total.finish()
