"""Sum: packets of summable codecs added as they arrive, without decoding."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from laconic import kernels, wire
from laconic.aggregate.homomorphic.families import family_of
from laconic.codecs import Chain, codec
from laconic.codecs.mean import FloatSumHeader
from laconic.codecs.packed_ints import INT_SUM_HEADER, IntSumHeader, PackedIntStage
from laconic.codecs.union import Union
from laconic.errors import ConfigError, FrameError
from laconic.frames import open_packet
from laconic.kernels.sections import GROUP, num_buckets, packed_int_count, packed_nbytes
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
    if family_of(chain) is None:
        raise FrameError(f"packets of {chain.text!r} cannot be added")
    chain.check(packet)
    if packet.spec.numel and not packet.sections and not isinstance(chain.selector, Union):
        raise FrameError("the frame holds zeros that were not encoded for a sum: use laconic.summing")
    return packet, chain


def packet(frame: Buffer, *, max_numel: int = MAX_NUMEL) -> Packet:
    """Return the packet of a frame that can be added; its sections are views."""
    return _open(frame, max_numel)[0]


def count(frame: Packet | Buffer, *, max_numel: int = MAX_NUMEL) -> int:
    """Return how many workers' tensors a frame is the sum of; 0 if it holds nothing but zeros."""
    opened, chain = _open(frame, max_numel)
    head = _head(opened, chain)
    return 0 if head is None else head.count


def _num_kept(packet: Packet, chain: Chain) -> int:
    n = packet.spec.numel
    return n if chain.selector is None else chain.selector.count(packet.sections[0], n)


def _head(packet: Packet, chain: Chain) -> IntSumHeader | FloatSumHeader | None:
    if not packet.sections:
        return None
    if isinstance(chain.values, PackedIntStage):
        return chain.values.read_header(packet.sections[-3:], _num_kept(packet, chain))
    return FloatSumHeader.read(packet.sections[-2])


def _require_equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], what: str) -> None:
    if len(ours) != len(theirs) or not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
        raise FrameError(f"the frame's {what} differ from the sum's: its sender has another agreed value or seed")


def _copy_of_scales(section: Tensor) -> Tensor:
    """Copy the scales that all later frames must have; ``FrameError`` unless they are finite and not negative."""
    scales = section.clone()
    low, high = torch.aminmax(scales.view(torch.int32))  # negative ones have the highest bit
    if int(low) < 0 or int(high) > _LARGEST:
        raise FrameError("a scale in the frame is negative or not finite")
    return scales


def _new_count(count: int, added: int, workers: int) -> int:
    if count + added > workers:
        raise FrameError(f"{added} senders more than {count} are too many: the sum is for {workers}")
    return count + added


class _IntegerSum:
    """Running sum of packed integers: 8, 16 or 32 bits a value, or the sender's own width for a ring."""

    def __init__(self, packet: Packet, chain: Chain, head: IntSumHeader, buffer: Tensor) -> None:
        assert isinstance(chain.values, PackedIntStage)
        self.head, self.count = head, 0
        self.num_values = packed_int_count(_num_kept(packet, chain), chain.values.rotation_seed is not None)
        *positions, _, clips, integers = packet.sections
        self.positions, self.clips = tuple(section.clone() for section in positions), _copy_of_scales(clips)
        largest = self.head.levels * self.head.workers
        self.bits = 8 if largest < 1 << 8 else 16 if largest < 1 << 16 else 32
        size = num_buckets(self.num_values, GROUP) * 32 * self.bits if self.head.packed else integers.numel()
        reusable = buffer.numel() == size and buffer.device == integers.device
        self.buffer = buffer.zero_() if reusable else torch.zeros(size, dtype=torch.uint8, device=integers.device)

    def add(self, packet: Packet, head: IntSumHeader | FloatSumHeader | None) -> None:
        assert isinstance(head, IntSumHeader)
        ours = self.head
        if (head.packed, head.levels, head.workers) != (ours.packed, ours.levels, ours.workers) or not (
            head.packed or head.width == ours.width
        ):
            raise FrameError(f"the sum has {ours.levels} levels for {ours.workers} workers, the frame {head}")
        count = _new_count(self.count, head.count, ours.workers)
        *positions, _, clips, integers = packet.sections
        if positions or self.positions:
            _require_equal(self.positions, tuple(positions), "positions")
        _require_equal((self.clips,), (clips,), "scales")
        backend = kernels.backend_for(integers)
        may_exceed = head.total != (1 << head.width) - 1
        if may_exceed and backend.packed_int_max(integers, self.num_values, head.coding) > head.total:
            raise FrameError(f"an integer in the frame is above {head.total}, the most its senders can make")
        if head.packed:
            backend.packed_int_accumulate(integers, self.num_values, head.width, self.bits, self.buffer)
        else:
            backend.packed_int_add(integers, self.buffer)
        self.count = count

    @property
    def _sum_head(self) -> IntSumHeader:
        head = replace(self.head, count=self.count)
        return IntSumHeader.for_server(head.levels, head.workers, head.count) if head.packed else head

    def section_nbytes(self) -> list[int]:
        packed = self.head.packed
        integers = packed_nbytes(self.num_values, self._sum_head.width) if packed else self.buffer.numel()
        return [*(section.numel() for section in self.positions), INT_SUM_HEADER, self.clips.numel(), integers]

    def sections(self, arena: Arena) -> tuple[Tensor, ...]:
        head = self._sum_head
        *positions, head_section, clips, integers = (arena.take(nbytes) for nbytes in self.section_nbytes())
        for section, ours in zip((*positions, clips), (*self.positions, self.clips), strict=True):
            section.copy_(ours)
        head.write(head_section)
        if head.packed:
            kernels.backend_for(integers).packed_int_repack(
                self.buffer, self.num_values, self.bits, head.width, integers
            )
        else:
            integers.copy_(self.buffer)
        return *positions, head_section, clips, integers


class _FloatSum:
    """Running sum of float32 values. Additions round, so the last bits depend on the order of packets."""

    def __init__(self, packet: Packet, head: FloatSumHeader, buffer: Tensor) -> None:
        self.head = replace(head, count=0)
        *positions, _, values = packet.sections
        self.positions = tuple(section.clone() for section in positions)
        reusable = buffer.numel() == values.numel() and buffer.device == values.device
        self.buffer = buffer.zero_() if reusable else torch.zeros_like(values)

    @property
    def count(self) -> int:
        return self.head.count

    def add(self, packet: Packet, head: IntSumHeader | FloatSumHeader | None) -> None:
        assert isinstance(head, FloatSumHeader)
        if head.workers != self.head.workers:
            raise FrameError(f"the sum is for {self.head.workers} workers, the frame for {head.workers}")
        count = _new_count(self.head.count, head.count, self.head.workers)
        *positions, _, values = packet.sections
        _require_equal(self.positions, tuple(positions), "positions")
        total = self.buffer.view(torch.float32) + values.clone().view(torch.float32)
        if not kernels.backend_for(total).all_finite(total):
            raise FrameError("the sum would overflow float32, or the frame holds a value that is not finite")
        self.buffer.view(torch.float32).copy_(total)
        self.head = replace(self.head, count=count)

    def section_nbytes(self) -> list[int]:
        return [*(section.numel() for section in self.positions), 8, self.buffer.numel()]

    def sections(self, arena: Arena) -> tuple[Tensor, ...]:
        *positions, head_section, values = (arena.take(nbytes) for nbytes in self.section_nbytes())
        for section, ours in zip((*positions, values), (*self.positions, self.buffer), strict=True):
            section.copy_(ours)
        self.head.write(head_section)
        return *positions, head_section, values


class Sum:
    """Adds packets of one tensor while they are compressed.

    With ``shared`` and ``thc`` the values are integers, so the result does not depend on order or grouping. A frame
    that does not belong to the sum (another tensor, other scales, more senders than allowed) raises ``FrameError`` and
    leaves the sum unchanged. Memory: one, two or four bytes a value, by the largest possible sum.

    Args:
        workers: The number of workers that frames must be encoded for, so that no sender can request a wider sum; any
            by default.
        max_numel: Frames that declare more values are rejected.
    """

    def __init__(self, *, workers: int | None = None, max_numel: int = MAX_NUMEL) -> None:
        self.workers = workers
        self.max_numel = max_numel
        self._first: Packet | None = None
        self._total: _IntegerSum | _FloatSum | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def count(self) -> int:
        """How many workers' tensors have been added."""
        return 0 if self._total is None else self._total.count

    @property
    def nbytes(self) -> int:
        """Memory of the running sum."""
        return self._buffer.numel()

    def clear(self) -> None:
        """Start a new sum in the same memory."""
        self._first = self._total = None

    def add(self, frame: Packet | Buffer) -> None:
        """Add a worker's packet, or the sum of several."""
        packet, chain = _open(frame, self.max_numel)
        self._add(packet, chain, _head(packet, chain))

    def add_integers(self, packet: Packet, head: IntSumHeader) -> None:
        """Add a packet of ``shared`` or ``thc`` whose head and sizes the caller has checked."""
        self._add(packet, codec(packet.codec), head)

    def _add(self, packet: Packet, chain: Chain, head: IntSumHeader | FloatSumHeader | None) -> None:
        if self._first is None:
            if head is not None:
                self._begin(packet, chain, head)
            self._first = Packet(packet.codec, packet.spec, ())
            return
        if packet.codec != self._first.codec or packet.spec != self._first.spec:
            raise FrameError(
                f"the sum is of {self._first.codec!r} for {list(self._first.spec.shape)}, the frame of "
                f"{packet.codec!r} for {list(packet.spec.shape)}"
            )
        if (head is not None) != (self._total is not None):
            raise FrameError("one of the frames holds nothing but zeros: their senders have different agreed values")
        if self._total is not None:
            self._total.add(packet, head)

    def _begin(self, packet: Packet, chain: Chain, head: IntSumHeader | FloatSumHeader) -> None:
        if self.workers not in (None, head.workers):
            raise FrameError(f"the sum is for {self.workers} workers, the frame for {head.workers}")
        with oom_as_frame_error(packet.spec.numel):
            total: _IntegerSum | _FloatSum
            if isinstance(head, IntSumHeader):
                total = _IntegerSum(packet, chain, head, self._buffer)
            else:
                total = _FloatSum(packet, head, self._buffer)
            total.add(packet, head)
        self._total, self._buffer = total, total.buffer

    def packet_layout(self) -> tuple[str, TensorSpec, list[int]]:
        """Return codec, tensor spec and section sizes of the packet that ``packet`` will return."""
        if self._first is None:
            raise ConfigError("nothing has been added yet")
        return self._first.codec, self._first.spec, [] if self._total is None else self._total.section_nbytes()

    def packet(self, arena: Arena | None = None) -> Packet:
        """Return the sum so far as a packet, with its sections in the arena if there is one."""
        if self._first is None:
            raise ConfigError("nothing has been added yet")
        if self._total is None:
            return self._first
        return replace(self._first, sections=self._total.sections(arena or HeapArena(self._total.buffer.device)))

    def finish(self) -> bytearray:
        """Return the sum so far as a frame, which workers decode and which further sums can add."""
        return wire.pack(self.packet())


def add(*frames: Packet | Buffer, max_numel: int = MAX_NUMEL) -> bytearray:
    """Return the sum of frames as a frame.

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
