"""Accumulate the frames of many senders into float32 sums, in a fixed order.

Each packet is decoded straight into the sum: there is no tensor per sender, and a sparse packet touches only its own
entries. The parameter server, the two-shot reduction and ``mean`` all sum here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from laconic.codecs import Chain, codec
from laconic.errors import FrameError, InputError
from laconic.frames import open_packet
from laconic.packet import Packet, TensorSpec, allocate
from laconic.wire import MAX_NUMEL, Buffer

__all__ = ["MeanAccumulator", "OpenedFrame", "SenderMeanAccumulator", "mean", "weighted_sum"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenedFrame:
    """A frame whose checksum, codec, shape and dtype are valid. Decoding checks its content.

    Errors name the slot, if there is one.
    """

    packet: Packet
    chain: Chain
    slot: str = ""

    @classmethod
    def of(cls, frame: Buffer, like: Tensor, slot: str = "") -> OpenedFrame:
        """Open a frame that must hold a tensor of the shape and dtype of ``like``."""
        try:
            packet, chain = open_packet(frame, max_numel=like.numel())
            if packet.spec.shape != tuple(like.shape) or packet.spec.dtype != like.dtype:
                raise FrameError(
                    f"expected {list(like.shape)} of {like.dtype}, the frame holds {list(packet.spec.shape)} of "
                    f"{packet.spec.dtype}"
                )
        except FrameError as error:
            raise _about(slot, error) from None
        return cls(packet, chain, slot)

    def decode(self, device: torch.device) -> Tensor:
        return self._with_slot_in_errors(lambda: self.chain.decode(self.packet).to(device))

    def decode_into(self, out: Tensor) -> None:
        self._with_slot_in_errors(lambda: self.chain.decode(self.packet.to(out.device), out=out))

    def add_to(self, out: Tensor, weight: float) -> None:
        """Add the decoded values ``weight`` times, without a tensor in between."""
        self._with_slot_in_errors(lambda: self.chain.accumulate(self.packet.to(out.device), out, weight))

    def _with_slot_in_errors(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except FrameError as error:
            raise _about(self.slot, error) from None


def _about(slot: str, error: FrameError) -> FrameError:
    return FrameError(f"slot {slot!r}: {error}") if slot else error


class MeanAccumulator:
    """Running means of several slots over a known number of senders.

    A float sum depends on its order: for reproducible bits the caller adds senders in the order of their numbers.

    Args:
        sums: One contiguous float32 tensor per slot, which the frames are added to.
        senders: How many senders make up the mean.
    """

    def __init__(self, sums: Sequence[Tensor], senders: int) -> None:
        self.sums, self.weight = sums, 1.0 / senders

    def add(self, frames: Iterable[OpenedFrame | None]) -> None:
        """Add one sender's frames, one per slot; None leaves a slot out. After an error the sums are invalid."""
        for index, (frame, _) in enumerate(zip(frames, self.sums, strict=True)):
            if frame is not None:
                self.add_frame(index, frame)

    def add_frame(self, index: int, frame: OpenedFrame) -> None:
        """Add one frame to the sum of one slot."""
        frame.add_to(self.sums[index], self.weight)

    def finish(self) -> None:
        """Complete the means, after the last sender."""

    def add_values(self, tensors: Sequence[Tensor]) -> None:
        """Make tensors that are themselves among the sums the contribution of their owner."""
        if tensors and self.weight != 1.0:
            torch._foreach_mul_(list(tensors), self.weight)

    def clear(self) -> None:
        torch._foreach_zero_(list(self.sums))


class SenderMeanAccumulator(MeanAccumulator):
    """Means over senders: each value is divided by the number of frames that hold it, and not by all senders.

    A value that no frame holds is zero.
    """

    def __init__(self, sums: Sequence[Tensor], senders: int) -> None:
        super().__init__(sums, senders)
        self.weight = 1.0
        self._counts = [torch.zeros_like(x, memory_format=torch.contiguous_format).view(-1) for x in sums]

    def add_frame(self, index: int, frame: OpenedFrame) -> None:
        super().add_frame(index, frame)  # it checks the frame, so its positions are valid
        if frame.packet.sections:
            counts, packet = self._counts[index], frame.packet
            positions = frame.chain.positions(packet)
            if positions is None:
                counts.add_(1.0)
            else:
                at = positions.to(counts.device, torch.int64)
                counts.index_add_(0, at, torch.ones(at.numel(), device=counts.device))

    def finish(self) -> None:
        for x, counts in zip(self.sums, self._counts, strict=True):
            x.view(-1).div_(counts.clamp_(min=1.0))


def weighted_sum(
    packets: Sequence[Packet | Buffer], weights: Sequence[float], *, out: Tensor | None = None,
    max_numel: int = MAX_NUMEL,
) -> Tensor:  # fmt: skip
    """Return the sum of weight × decoded tensor, in float32, added in the given order.

    Args:
        packets: Packets or frames of one shape; their codecs may differ.
        out: A contiguous float32 tensor for the sum; its old values are overwritten.
        max_numel: Frames that declare more values are rejected.
    """
    if not packets or len(packets) != len(weights):
        raise InputError(f"expected as many weights as packets, at least one; got {len(packets)} and {len(weights)}")
    opened = [
        (packet, codec(packet.codec)) if isinstance(packet, Packet) else open_packet(packet, max_numel=max_numel)
        for packet in packets
    ]
    if out is None:
        first = opened[0][0]
        device = first.sections[0].device if first.sections else None
        out = allocate(TensorSpec(first.spec.shape, torch.float32), device, zero=True)
    else:
        out.zero_()
    for (packet, chain), weight in zip(opened, weights, strict=True):
        chain.accumulate(packet, out, weight)
    return out


def mean(
    packets: Sequence[Packet | Buffer], *, weights: Sequence[float] | None = None, out: Tensor | None = None,
    max_numel: int = MAX_NUMEL,
) -> Tensor:  # fmt: skip
    """Return the mean of what many senders sent, in float32; weights may have any sum but zero."""
    if weights is None:
        weights = [1.0] * len(packets)
    total = sum(weights)
    if packets and (total == 0 or not all(weight >= 0 for weight in weights)):
        raise InputError(f"weights must be non-negative and not all zero, got {list(weights)}")
    return weighted_sum(packets, [weight / total for weight in weights], out=out, max_numel=max_numel)
