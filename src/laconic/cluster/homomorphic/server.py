"""The server's side of ``returns=sum``: adds compressed integers and never decodes a gradient.

A worker sends each slot as a bundle of two frames: ``scales``, one float32 per block of 1,024 values, and ``sum``, the
values as integers on the scales that all workers agreed on before. The server adds the integers, takes the maximum of
the scales, and answers with a bundle of the same kind: the sum, which counts its senders, and the scales for the next
round's integers.

Sums of integers are exact, so each frame is added when it arrives, in any order, and a round needs the memory of one
running sum per slot. Scales are compared by their bits: among non-negative floats the largest has the largest bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from laconic import wire
from laconic._core import bytes_at
from laconic.aggregate import BundleTemplate
from laconic.aggregate.homomorphic import Sum, Summing
from laconic.cluster.protocol import Frame
from laconic.codecs import parse
from laconic.codecs.memory import ErrorFeedback
from laconic.codecs.packed_ints import INT_SUM_HEADER, IntSumHeader, PackedIntStage
from laconic.errors import ConfigError, FrameError
from laconic.frames import max_nbytes, open_packet
from laconic.kernels.sections import SUM_BLOCK, num_buckets, packed_int_count, packed_ints_nbytes
from laconic.packet import Packet, TensorSpec
from laconic.wire import Buffer

if TYPE_CHECKING:
    from laconic.cluster.round import Push

__all__ = [
    "UNUSABLE", "Contribution", "RoundSums", "SlotSum", "check_summable", "message_limit", "pack_contribution",
    "unpack_contribution",
]  # fmt: skip

UNUSABLE = int(torch.tensor([torch.finfo(torch.float32).max]).view(torch.int32))
"""The bits of a scale that marks values which are not finite: those of the largest finite number."""
_SCALES, _SUM = "scales", "sum"


def check_summable(spec: str, workers: int) -> Summing:
    """Return the codec of a spec as a codec of sums; raise ``ConfigError`` if it is not one for so many workers."""
    channel_stages, chain = parse(spec)
    if any(not isinstance(stage, ErrorFeedback) for stage in channel_stages):
        raise ConfigError(f"returns=sum allows error feedback only, as in 'ef|thc:4', got {spec!r}")
    if chain.selector is not None or chain.coder is not None or not isinstance(chain.values, PackedIntStage):
        raise ConfigError(
            f"returns=sum adds integers on agreed scales: push and push_small must be 'shared:B' or 'thc:B', with or "
            f"without 'ef|', got {spec!r}"
        )
    return Summing(chain, workers)


def num_scales(numel: int) -> int:
    return num_buckets(numel, SUM_BLOCK)


def message_limit(like: Tensor) -> int:
    """Return the largest possible bundle of a slot (a contribution, a sum or a weight's frame), in bytes."""
    scales = num_scales(like.numel())
    headers = max_nbytes("none", like) + 3 * max_nbytes("none", TensorSpec((scales,), torch.float32))
    return headers + 4 * scales * SUM_BLOCK + 1024


def pack_scales(bits: Tensor) -> bytearray:
    """Return a frame of float32 scales from their bits, given as int32."""
    return wire.pack(_scales_packet(bits))


def _scales_packet(bits: Tensor) -> Packet:
    return Packet("none", TensorSpec(tuple(bits.shape), torch.float32), (bits.contiguous().view(torch.uint8),))


def read_scales(frame: Buffer, count: int) -> Tensor:
    """Return the bits of ``count`` scales; raise ``FrameError`` unless they are finite and not negative."""
    packet, _ = open_packet(frame, max_numel=count)
    if packet.codec != "none" or packet.spec.shape != (count,) or packet.spec.dtype != torch.float32:
        raise FrameError(f"expected {count} scales, the frame holds {list(packet.spec.shape)} of {packet.codec!r}")
    if not packet.sections:
        return torch.zeros(count, dtype=torch.int32)
    if len(packet.sections) != 1 or packet.sections[0].numel() != 4 * count:
        raise FrameError(f"{count} scales take {4 * count} bytes")
    return _scale_bits(packet.sections[0])


def _scale_bits(section: Tensor) -> Tensor:
    # numpy here and in RoundSums: torch releases the GIL for each operation on these small tensors, and with the
    # threads of many workers taking it back costs more than the operation.
    bits = section.numpy().copy().view(np.uint32)
    if bits.size and int(bits.max()) > UNUSABLE:  # negative numbers have the highest bit set
        raise FrameError("a scale is negative or not finite")
    return torch.from_numpy(bits.view(np.int32))


def pack_contribution(scales: Buffer, summand: Buffer | None) -> Frame:
    """Return a slot's bundle of its scales and, if there is one, its sum."""
    frames = [(_SCALES, scales), *([(_SUM, summand)] if summand is not None else [])]
    return memoryview(wire.pack_bundle(frames))


def unpack_contribution(message: Buffer) -> tuple[Tensor, Tensor | None]:
    """Return views of a bundle's frames: the scales and, if there is one, the sum. The frames are not checked."""
    frames = wire.unpack_bundle(message)
    if [name for name, _ in frames] not in ([_SCALES], [_SCALES, _SUM]):
        raise FrameError("a slot's bundle must hold its scales, and may hold its sum")
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
    def head(self) -> IntSumHeader:
        """The layout of each worker's integers."""
        return self.stage.header(self.summing.workers, ring=False)

    @property
    def num_integers(self) -> int:
        """Number of a worker's integers: a rotated slot is padded to full blocks."""
        return packed_int_count(self.numel, self.stage.rotation_seed is not None)

    @cached_property
    def template(self) -> ContributionTemplate | None:
        """The template of a worker's bundle; None for an empty slot."""
        return ContributionTemplate(self) if self.numel else None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_scales(self) -> int:
        return num_scales(self.numel)


class ContributionTemplate:
    """The bytes of a worker's bundle that do not depend on its values, for a fast validity check.

    A bundle that differs may still be valid (all scales zero, no sum). It is parsed in full, which also finds what is
    wrong with an invalid one.
    """

    def __init__(self, how: SlotSum) -> None:
        section_nbytes = [4 * how.num_scales, INT_SUM_HEADER, 4 * how.num_scales]
        section_nbytes.append(packed_ints_nbytes(how.num_integers, how.head.coding))
        self._codec, self._spec = how.summing.chain.text, TensorSpec(how.shape, torch.float32)
        scales = wire.FrameTemplate("none", TensorSpec((how.num_scales,), torch.float32), section_nbytes[:1])
        summand = wire.FrameTemplate(self._codec, self._spec, section_nbytes[1:])
        self._bundle = BundleTemplate([_SCALES, _SUM], [scales, summand])
        scales_start, sum_start = self._bundle.offsets
        self._head, self._head_start = how.head.to_bytes(), sum_start + summand.section_offsets[0]
        self._split_sizes: list[int] = []
        """Sizes of the bytes before each section and of the section, alternating."""
        starts = [scales_start + scales.section_offsets[0], *(sum_start + offset for offset in summand.section_offsets)]
        end = 0
        for start, nbytes in zip(starts, section_nbytes, strict=True):
            self._split_sizes += [start - end, nbytes]
            end = start + nbytes

    def read(self, message: Buffer) -> tuple[Tensor, Packet] | None:
        """Return the bits of the scales and the packet, or None if the bundle differs from the template."""
        data = wire.as_bytes(message)
        if not self._bundle.matches(data) or bytes_at(data.data_ptr() + self._head_start, INT_SUM_HEADER) != self._head:
            return None
        scales, *sections = data.split_with_sizes(self._split_sizes)[1::2]
        return _scale_bits(scales), Packet(self._codec, self._spec, tuple(sections))


@dataclass(frozen=True)
class Contribution:
    """A worker's part of a slot's sum: the bits of its scales and, unless its values are not finite, its integers."""

    slot: str
    scales: Tensor
    packet: Packet | None
    head: IntSumHeader

    @classmethod
    def of(cls, how: SlotSum, message: Frame) -> Contribution:
        try:
            known = None if how.template is None else how.template.read(message)
            scales, packet = known or _parse(how, message)
        except FrameError as error:
            raise FrameError(f"slot {how.name!r}: {error}") from None
        return cls(how.name, scales, packet, how.head)


def _parse(how: SlotSum, message: Frame) -> tuple[Tensor, Packet | None]:
    scales, summand = unpack_contribution(message)
    return read_scales(scales, how.num_scales), None if summand is None else _open_summand(how, summand)


def _open_summand(how: SlotSum, summand: Buffer) -> Packet:
    """Return a worker's integers if they have the job's layout; others must not become the sum's reference."""
    packet, chain = open_packet(summand, max_numel=how.numel)
    if packet.spec.shape != how.shape or packet.spec.dtype != torch.float32:
        raise FrameError(
            f"expected {list(how.shape)} of torch.float32, the frame holds {list(packet.spec.shape)} of "
            f"{packet.spec.dtype}"
        )
    if packet.codec != how.summing.chain.text:
        raise FrameError(f"expected codec {how.summing.chain.text!r}, the frame has {packet.codec!r}")
    chain.check(packet)
    if not packet.sections:
        if how.numel:
            raise FrameError("the frame holds zeros that were not encoded for a sum")
        return packet
    if (head := how.stage.read_header(packet.sections[-3:], how.numel)) != how.head:
        raise FrameError(f"expected a worker's integers as {how.head}, got {head}")
    return packet


class RoundSums:
    """The sums of one round. Several threads may add to different slots at a time.

    Args:
        slots: How each slot is summed.
        workers: Number of contributions that make a slot complete.
        running: Cleared sums of an earlier round, used again.
    """

    in_order = False

    def __init__(self, slots: Sequence[SlotSum], workers: int, running: Sequence[Sum] = ()) -> None:
        self._workers = workers
        self.running = list(running) or [Sum(workers=how.summing.workers, max_numel=max(1, how.numel)) for how in slots]
        self._scales = [torch.zeros(how.num_scales, dtype=torch.int32) for how in slots]
        self._has_values = [False] * len(slots)
        self._added: list[set[int]] = [set() for _ in slots]
        self._locks = [threading.Lock() for _ in slots]
        self._messages: dict[int, Frame] = {}
        self._offers: dict[int, Sequence[Tensor]] = {}
        self.offered_scales: list[Tensor] | None = None
        """The maximum of the scales that workers offered before their pushes; None until enough have."""

    def add(self, push: Push) -> None:
        """Add a complete push."""
        for slot, contribution in enumerate(push.contributions):
            message = self.add_slot(slot, push.worker, contribution)
            if message is not None:
                self._messages[slot] = message

    def messages(self) -> Iterator[Frame]:
        """Yield the replies of all slots, after the last ``add``."""
        return (self._messages[slot] for slot in sorted(self._messages))

    def add_slot(self, slot: int, worker: int, contribution: Contribution) -> Frame | None:
        """Add a worker's contribution to a slot, once; return the reply if it was the last. Errors change nothing."""
        with self._locks[slot]:
            if worker in self._added[slot]:
                return None  # sent again after an interrupted push
            if contribution.packet is not None:
                try:
                    if contribution.packet.sections:
                        self.running[slot].add_integers(contribution.packet, contribution.head)
                    else:
                        self.running[slot].add(contribution.packet)
                except FrameError as error:
                    raise FrameError(f"slot {contribution.slot!r}: {error}") from None
                self._has_values[slot] = True
            largest = self._scales[slot].numpy()
            np.maximum(largest, contribution.scales.numpy(), out=largest)
            self._added[slot].add(worker)
            return self._reply(slot) if len(self._added[slot]) == self._workers else None

    def _reply(self, slot: int) -> Frame:
        """Return a slot's bundle and clear its sum for the next round."""
        total, packets = self.running[slot], [_scales_packet(self._scales[slot])]
        parts = [(_SCALES, packets[0].codec, packets[0].spec, [packets[0].sections[0].numel()])]
        if self._has_values[slot]:
            parts.append((_SUM, *total.packet_layout()))
        room = wire.BundleWriter(parts)
        room.arenas[0].take(parts[0][3][0]).copy_(packets[0].sections[0])
        if self._has_values[slot]:
            packets.append(total.packet(room.arenas[1]))
        total.clear()
        return room.seal(packets)

    def clear(self) -> None:
        """Each slot was cleared when its reply was made."""

    def agreed_scales(self) -> list[Tensor | None]:
        """Return the bits of each slot's new scales; None where a worker's values were not finite."""
        return [None if scales.numel() and int(scales.max()) >= UNUSABLE else scales for scales in self._scales]

    def offer_scales(self, worker: int, scales: Sequence[Tensor]) -> None:
        """Take a worker's scales before its push; the maximum counts when enough workers have offered theirs."""
        if self.offered_scales is None:
            self._offers[worker] = scales
            if self.missing_offers == 0:
                by_slot = zip(*self._offers.values(), strict=True)
                self.offered_scales = [torch.from_numpy(np.maximum.reduce([x.numpy() for x in xs])) for xs in by_slot]

    @property
    def missing_offers(self) -> int:
        return self._workers - len(self._offers)

    @property
    def nbytes(self) -> int:
        """Memory of the running sums."""
        return sum(total.nbytes for total in self.running)
