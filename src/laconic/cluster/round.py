"""One synchronous round: what workers push is summed as it comes, in the order of their numbers.

The order is fixed because a sum of floats depends on it, and a run must end with the same bits every time. So a push
waits until those before it are summed; what waits is counted, and beyond a limit the handler of a worker that is not
next stops reading, which stops the worker itself: the server's memory does not grow with the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.cluster.homomorphic.server import Additions, Part
from laconic.cluster.job import Slots
from laconic.cluster.protocol import Frame
from laconic.cluster.reply_stream import ReplyStream
from laconic.codecs import Chain
from laconic.errors import FrameError
from laconic.frames import open_packet
from laconic.packet import Packet

__all__ = ["Best", "Contribution", "Mean", "OpenFrame", "Push", "Round"]


@dataclass(frozen=True)
class Contribution:
    """What a worker pushes for one exchange.

    Args:
        worker: Its number.
        incarnation: Grows with each start of that worker.
        sequence: The exchange it is for, from 0 on.
        frames: One per slot, in the slots' order.
        score: With ``after=best``: its loss on held-out data.
    """

    worker: int
    incarnation: int
    sequence: int
    frames: Sequence[Frame]
    score: float = 0.0


@dataclass(frozen=True)
class OpenFrame:
    """A frame whose checksum, shape and codec are right; whether its content can be decoded shows when it is."""

    slot: str
    frame: Frame
    packet: Packet
    chain: Chain

    @classmethod
    def of(cls, slot: str, frame: Frame, like: Tensor) -> OpenFrame:
        try:
            packet, chain = open_packet(frame, max_numel=like.numel())
        except FrameError as error:
            raise FrameError(f"slot {slot!r}: {error}") from None
        if packet.spec.shape != tuple(like.shape) or packet.spec.dtype != like.dtype:
            raise FrameError(
                f"slot {slot!r}: expected {list(like.shape)} of {like.dtype}, the frame holds "
                f"{list(packet.spec.shape)} of {packet.spec.dtype}"
            )
        return cls(slot, frame, packet, chain)

    def decode(self, device: torch.device) -> Tensor:
        try:
            return self.chain.decode(self.packet).to(device)
        except FrameError as error:
            raise FrameError(f"slot {self.slot!r}: {error}") from None

    def add_to(self, out: Tensor, weight: float) -> None:
        try:
            self.chain.accumulate(self.packet.to(out.device), out, weight)
        except FrameError as error:
            raise FrameError(f"slot {self.slot!r}: {error}") from None


@dataclass(frozen=True)
class Push:
    """A contribution that has come in whole."""

    worker: int
    incarnation: int
    sequence: int
    frames: Sequence[OpenFrame]
    score: float
    parts: Sequence[Part] = ()
    """With returns=sum and backup workers, instead of frames. With all workers they are in the sums already."""

    @property
    def nbytes(self) -> int:
        return sum(len(one.frame) for one in self.frames) + sum(len(part.frame) for part in self.parts)

    def decode(self, like: Sequence[Tensor]) -> dict[str, Tensor]:
        return {one.slot: one.decode(x.device) for one, x in zip(self.frames, like, strict=True)}


class Mean:
    """The mean of all workers' pushes.

    Args:
        slots: What is exchanged.
        like: Tensors of the slots' shapes; sums are made beside them.
        workers: How many pushes make a round.
        sums: Tensors of an earlier round, cleared and used again.
    """

    def __init__(self, slots: Slots, like: Sequence[Tensor], workers: int, sums: Sequence[Tensor] = ()) -> None:
        self._slots, self._workers = slots, workers
        self._sums = list(sums) or [torch.zeros_like(x) for x in like]

    def add(self, push: Push) -> None:
        """Sum a push. After an error the sum is good for nothing: the round must be made anew."""
        for one, out in zip(push.frames, self._sums, strict=True):
            one.add_to(out, 1.0 / self._workers)

    def result(self) -> dict[str, Tensor]:
        return dict(zip(self._slots.names, self._sums, strict=True))

    def clear(self) -> None:
        torch._foreach_zero_(self._sums)

    def tensors(self) -> list[Tensor]:
        """For the next round, once the result is used up."""
        return self._sums


class Best:
    """The push of the worker with the least score; of equals the first."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = like
        self._push: Push | None = None
        self._update: dict[str, Tensor] = {}

    def add(self, push: Push) -> None:
        update = push.decode(self._like)  # the round cannot fail on it later
        if self._push is None or (push.score, push.worker) < (self._push.score, self._push.worker):
            self._push, self._update = push, update

    def result(self) -> dict[str, Tensor]:
        return self._update

    def frames(self) -> tuple[Frame, ...]:
        """What the best worker sent."""
        return tuple(one.frame for one in self._push.frames) if self._push is not None else ()


@dataclass
class Round:
    """What is going on between two updates of a synchronous job."""

    total: Mean | Best | Additions | None
    waiting: dict[int, Push] = field(default_factory=dict)
    """Complete, not summed yet."""
    pushed: set[int] = field(default_factory=set)
    turn: int = 0
    """How many are summed; of floats, also whose turn it is."""
    busy: bool = False
    faults: dict[int, FrameError] = field(default_factory=dict)
    answer: ReplyStream | None = None
    """Where it is made while pushes come in, where that can be done."""
    made: dict[int, Frame] = field(default_factory=dict)
    """Sums that are complete where it cannot: backup workers may still be too late."""
    scales: list[Tensor] = field(default_factory=list)
    """Of workers that settle them before they push: the largest so far, as bits."""
    settling: set[int] = field(default_factory=set)
    settled: bool = False

    @property
    def ordered(self) -> bool:
        """Whether pushes must be summed in the order of their workers; integers need not."""
        return not isinstance(self.total, Additions)

    def next(self) -> int | None:
        """Whose push is to be summed next, if it is there."""
        if self.ordered:
            return self.turn if self.turn in self.waiting else None
        return next(iter(self.waiting), None)

    def settle(self, worker: int, scales: Sequence[Tensor], workers: int) -> None:
        """A worker's scales before its push; when so many have told theirs, the largest are what counts."""
        if self.settled:
            return
        if self.scales:
            for mine, bits in zip(self.scales, scales, strict=True):
                torch.maximum(mine, bits, out=mine)
        else:
            self.scales = list(scales)
        self.settling.add(worker)
        self.settled = len(self.settling) >= workers
