"""Sum: packets added as they arrive, without decoding."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from laconic import kernels, wire
from laconic.aggregate.homomorphic.families import method_of
from laconic.codecs import Chain, codec
from laconic.codecs.mean import FloatHead
from laconic.codecs.packed_ints import HEAD_NBYTES, PackedIntHead, PackedIntStage
from laconic.codecs.union import Union
from laconic.errors import ConfigError, FrameError
from laconic.frames import open_packet
from laconic.kernels.interface import GROUP, num_buckets, packed_int_count, packed_nbytes
from laconic.packet import Arena, HeapArena, Packet, TensorSpec, oom_as_frame_error
from laconic.wire import MAX_NUMEL, Buffer

__all__ = ["Sum", "add", "count", "packet"]

_LARGEST = 0x7F7FFFFF
"""The bits of the largest finite float32."""


def _open(frame: Packet | Buffer, max_numel: int) -> tuple[Packet, Chain]:
    if isinstance(frame, Packet):
        packet, chain = frame, codec(frame.codec)
    else:
        packet, chain = open_packet(frame, max_numel=max_numel)
    if method_of(chain) is None:
        raise FrameError(f"packets of {chain.text!r} cannot be added")
    chain.check(packet)
    if packet.spec.numel and not packet.sections and not isinstance(chain.selector, Union):
        raise FrameError("the frame holds zeros that were not encoded for a sum: use laconic.summing")
    return packet, chain


def packet(frame: Buffer, *, max_numel: int = MAX_NUMEL) -> Packet:
    """The packet of a frame that can be added; its sections are views."""
    return _open(frame, max_numel)[0]


def count(frame: Packet | Buffer, *, max_numel: int = MAX_NUMEL) -> int:
    """How many workers' tensors a frame is the sum of; 0 for one that holds nothing but zeros."""
    found, chain = _open(frame, max_numel)
    if not found.sections:
        return 0
    return _integers_head(found, chain).count if _is_integers(chain) else _float_head(found).count


def _is_integers(chain: Chain) -> bool:
    return isinstance(chain.values, PackedIntStage)


def _kept(packet: Packet, chain: Chain) -> int:
    n = packet.spec.numel
    return n if chain.selector is None else chain.selector.head(packet.sections[0], n).kept


def _integers_head(packet: Packet, chain: Chain) -> PackedIntHead:
    assert isinstance(chain.values, PackedIntStage)
    return chain.values.read_head(packet.sections[-3:], _kept(packet, chain))


def _float_head(packet: Packet) -> FloatHead:
    return FloatHead.read(packet.sections[-2])


def _same(mine: tuple[Tensor, ...], other: tuple[Tensor, ...], what: str) -> None:
    if len(mine) != len(other) or not all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)):
        raise FrameError(
            f"the frame's {what} are not those of the sum: its sender agreed on others, or has another seed"
        )


def _scales(section: Tensor) -> Tensor:
    """A copy of what all later frames are held against; ``FrameError`` unless these are numbers, not negative."""
    found = section.clone()
    low, high = torch.aminmax(found.view(torch.int32))  # negative ones have the highest bit
    if int(low) < 0 or int(high) > _LARGEST:
        raise FrameError("a scale in the frame is negative or not finite")
    return found


def _fitting(count: int, more: int, workers: int) -> int:
    if count + more > workers:
        raise FrameError(f"{more} senders more than {count} are too many: the sum is for {workers}")
    return count + more


class _Integers:
    """Packed vertically in lanes of 8, 16 or 32 bits; or in the words of lanes that a ring sends."""

    def __init__(self, packet: Packet, chain: Chain, head: PackedIntHead, room: Tensor) -> None:
        assert isinstance(chain.values, PackedIntStage)
        self.head, self.count = head, 0
        self.values = packed_int_count(_kept(packet, chain), chain.values.signs is not None)
        *side, _, clips, lanes = packet.sections
        self.side, self.clips = tuple(section.clone() for section in side), _scales(clips)
        most = self.head.levels * self.head.workers
        self.lane = 8 if most < 1 << 8 else 16 if most < 1 << 16 else 32
        size = num_buckets(self.values, GROUP) * 32 * self.lane if self.head.packed else lanes.numel()
        fits = room.numel() == size and room.device == lanes.device
        self.room = room.zero_() if fits else torch.zeros(size, dtype=torch.uint8, device=lanes.device)

    def add(self, packet: Packet, head: PackedIntHead | FloatHead | None) -> None:
        assert isinstance(head, PackedIntHead)
        ours = self.head
        if (head.packed, head.levels, head.workers) != (ours.packed, ours.levels, ours.workers) or not (
            head.packed or head.width == ours.width
        ):
            raise FrameError(f"the sum has {ours.levels} levels for {ours.workers} workers, the frame {head}")
        count = _fitting(self.count, head.count, ours.workers)
        *side, _, clips, lanes = packet.sections
        if side or self.side:
            _same(self.side, tuple(side), "entries")
        _same((self.clips,), (clips,), "scales")
        backend = kernels.backend_for(lanes)
        if head.total != (1 << head.width) - 1 and backend.packed_int_max(lanes, self.values, head.coding) > head.total:
            raise FrameError(f"an integer in the frame is above {head.total}, the most its senders can make")
        if head.packed:
            backend.packed_int_accumulate(lanes, self.values, head.width, self.lane, self.room)
        else:
            backend.packed_int_add(lanes, self.room)
        self.count = count

    @property
    def _head_now(self) -> PackedIntHead:
        head = replace(self.head, count=self.count)
        return PackedIntHead.for_server(head.levels, head.workers, head.count) if head.packed else head

    def section_nbytes(self) -> list[int]:
        lanes = packed_nbytes(self.values, self._head_now.width) if self.head.packed else self.room.numel()
        return [*(section.numel() for section in self.side), HEAD_NBYTES, self.clips.numel(), lanes]

    def sections(self, arena: Arena) -> tuple[Tensor, ...]:
        head = self._head_now
        *side, top, clips, lanes = (arena.take(nbytes) for nbytes in self.section_nbytes())
        for section, mine in zip((*side, clips), (*self.side, self.clips), strict=True):
            section.copy_(mine)
        head.write(top)
        if head.packed:
            kernels.backend_for(lanes).packed_int_repack(self.room, self.values, self.lane, head.width, lanes)
        else:
            lanes.copy_(self.room)
        return *side, top, clips, lanes


class _Floats:
    """Float32 values. Additions round, so the order of packets shows in the last bits."""

    def __init__(self, packet: Packet, head: FloatHead, room: Tensor) -> None:
        self.head = replace(head, count=0)
        *side, _, values = packet.sections
        self.side = tuple(section.clone() for section in side)
        fits = room.numel() == values.numel() and room.device == values.device
        self.room = room.zero_() if fits else torch.zeros_like(values)

    @property
    def count(self) -> int:
        return self.head.count

    def add(self, packet: Packet, head: PackedIntHead | FloatHead | None) -> None:
        assert isinstance(head, FloatHead)
        if head.workers != self.head.workers:
            raise FrameError(f"the sum is for {self.head.workers} workers, the frame for {head.workers}")
        count = _fitting(self.head.count, head.count, self.head.workers)
        *side, _, values = packet.sections
        _same(self.side, tuple(side), "entries")
        total = self.room.view(torch.float32) + values.clone().view(torch.float32)
        if not kernels.backend_for(total).all_finite(total):
            raise FrameError("the sum would leave float32, or the frame holds a value that is not finite")
        self.room.view(torch.float32).copy_(total)
        self.head = replace(self.head, count=count)

    def section_nbytes(self) -> list[int]:
        return [*(section.numel() for section in self.side), 8, self.room.numel()]

    def sections(self, arena: Arena) -> tuple[Tensor, ...]:
        *side, top, values = (arena.take(nbytes) for nbytes in self.section_nbytes())
        for section, mine in zip((*side, values), (*self.side, self.room), strict=True):
            section.copy_(mine)
        self.head.write(top)
        return *side, top, values


class Sum:
    """Adds packets of one tensor while they are compressed.

    With ``shared`` and ``thc`` these are integers, and order and grouping make no difference, to the last bit. A
    frame that does not belong to the sum (another tensor, other scales, one sender more than there may be) raises
    ``FrameError`` and leaves the sum as it was. Memory: one, two or four bytes a value, by the largest sum possible.

    Args:
        workers: How many the frames must be made for, so that no sender can ask for a wider sum; any by default.
        max_numel: Frames that declare more values are refused.
    """

    def __init__(self, *, workers: int | None = None, max_numel: int = MAX_NUMEL) -> None:
        self.workers = workers
        self.max_numel = max_numel
        self._first: Packet | None = None
        self._total: _Integers | _Floats | None = None
        self._room = torch.empty(0, dtype=torch.uint8)

    @property
    def count(self) -> int:
        """How many workers' tensors have been added."""
        return 0 if self._total is None else self._total.count

    @property
    def nbytes(self) -> int:
        """Memory that the sum holds."""
        return self._room.numel()

    def clear(self) -> None:
        """Start again; memory is kept for the next round."""
        self._first = self._total = None

    def add(self, frame: Packet | Buffer) -> None:
        """Add a worker's packet, or the sum of several."""
        packet, chain = _open(frame, self.max_numel)
        head: PackedIntHead | FloatHead | None = None
        if packet.sections:
            head = _integers_head(packet, chain) if _is_integers(chain) else _float_head(packet)
        self._add(packet, chain, head)

    def add_integers(self, packet: Packet, head: PackedIntHead) -> None:
        """Add a packet of ``shared`` or ``thc`` that the caller has read and checked: its head, and all sizes."""
        self._add(packet, codec(packet.codec), head)

    def _add(self, packet: Packet, chain: Chain, head: PackedIntHead | FloatHead | None) -> None:
        if self._first is None:
            if head is not None:
                if self.workers not in (None, head.workers):
                    raise FrameError(f"the sum is for {self.workers} workers, the frame for {head.workers}")
                with oom_as_frame_error(packet.spec.numel):
                    total = (
                        _Integers(packet, chain, head, self._room)
                        if isinstance(head, PackedIntHead)
                        else _Floats(packet, head, self._room)
                    )
                    total.add(packet, head)
                self._total, self._room = total, total.room
            self._first = Packet(packet.codec, packet.spec, ())
            return
        if packet.codec != self._first.codec or packet.spec != self._first.spec:
            raise FrameError(
                f"the sum is of {self._first.codec!r} for {list(self._first.spec.shape)}, the frame of "
                f"{packet.codec!r} for {list(packet.spec.shape)}"
            )
        if (head is not None) != (self._total is not None):
            raise FrameError("one of the frames holds nothing but zeros: their senders did not agree on the same")
        if self._total is not None:
            self._total.add(packet, head)

    def form(self) -> tuple[str, TensorSpec, list[int]]:
        """What the sum's packet will be like: codec, tensor, and the sizes of its sections."""
        if self._first is None:
            raise ConfigError("nothing has been added yet")
        return self._first.codec, self._first.spec, [] if self._total is None else self._total.section_nbytes()

    def packet(self, arena: Arena | None = None) -> Packet:
        """The sum so far, as a packet, its sections in the arena where there is one."""
        if self._first is None:
            raise ConfigError("nothing has been added yet")
        if self._total is None:
            return self._first
        return replace(self._first, sections=self._total.sections(arena or HeapArena(self._total.room.device)))

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
