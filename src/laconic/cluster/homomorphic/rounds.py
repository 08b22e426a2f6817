"""Rounds with ``returns=sum``: contributions are added while compressed, and workers hold the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from laconic.aggregate import OpenedFrame
from laconic.aggregate.homomorphic import Sum
from laconic.cluster.homomorphic.server import Contribution, RoundSums, pack_scales, read_scales
from laconic.cluster.membership import Membership, WorkerSession
from laconic.cluster.modes.sync import Rounds
from laconic.cluster.protocol import CHUNK, Frame
from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.replies import Reply, ReplyStream, regather
from laconic.cluster.round import Push, Round
from laconic.cluster.shared_state import ByteBudget, SharedState
from laconic.cluster.weight_uploads import WeightUploads
from laconic.cluster.weights import Weights
from laconic.errors import FrameError
from laconic.frames import max_nbytes
from laconic.packet import TensorSpec

__all__ = ["SumRounds"]


class SumRounds(Rounds):
    """Rounds of compressed sums; see ``ServerMode`` for the arguments.

    Integers can be added in any order. With all workers each slot is added as it arrives, and its sum leaves when the
    last contribution is in. With backup workers a push is added when it is complete, because it may be late.
    """

    def __init__(self, shared: SharedState, weights: Weights, members: Membership, budget: ByteBudget) -> None:
        self._slot_sums = weights.job.slot_sums(weights.parameters)
        self._running: list[Sum] = []
        self.uploads = WeightUploads(shared, weights, members)
        super().__init__(shared, weights, members, budget)

    def _new_round(self) -> Round:
        sums = RoundSums(self._slot_sums, self._quorum, self._running)
        self._running = sums.running
        return Round(sums, ReplyStream(self.num_slots) if self._job.exact else None)

    def _discard_sums(self) -> None:
        self._running = []

    def is_superseded(self, receiver: PushReceiver) -> bool:
        return self._job.exact and super().is_superseded(receiver)

    def reserve(self, receiver: PushReceiver, nbytes: int, deadline: float) -> None:
        assert receiver.round is not None
        if receiver.round.reply is None or nbytes > CHUNK:  # a smaller one arrives whole and is added at once
            super().reserve(receiver, nbytes, deadline)

    def add_frame(self, receiver: PushReceiver, slot: int, frame: Frame) -> OpenedFrame | Contribution | None:
        round_ = receiver.round
        assert round_ is not None and isinstance(round_.total, RoundSums)
        if round_.reply is None:
            return Contribution.of(self._slot_sums[slot], frame)
        contribution = Contribution.of(self._slot_sums[slot], frame)
        with self._shared.changed:
            receiver.check()
        message = round_.total.add_slot(slot, receiver.worker, contribution)  # needs no memory beyond the sum
        if message is not None:
            round_.reply.put(message, index=slot)
        if receiver.reservation.nbytes:
            self._budget.release(receiver.reservation)
        return None

    def _add_push(self, receiver: PushReceiver, push: Push, round_: Round) -> None:
        with self._shared.changed:
            receiver.check()
            if round_ is not self._round:  # late, as a backup worker may be
                self._shared.event("late", worker=push.worker, sequence=push.sequence)
                return
            if round_.reply is None and not push.contributions:
                return  # it is in the round already
            self._accept(receiver, push, round_)
            if round_.reply is not None:
                round_.waiting.clear()
                if len(round_.pushed) == self._quorum:
                    self._close(round_)
                self._shared.changed.notify_all()
                return
        self._add_waiting(round_)

    def _make_reply(self, round_: Round) -> Iterator[Sequence[Frame]]:
        total = round_.total
        assert isinstance(total, RoundSums)
        if round_.reply is None:
            yield from ((message,) for message in total.messages())
        with self._shared.changed:
            self._weights.set_scales(total.agreed_scales())

    @property
    def scale_limits(self) -> list[int]:
        return [max_nbytes("none", TensorSpec((how.num_scales,), torch.float32)) for how in self._slot_sums]

    def read_scales(self, frames: Sequence[Frame]) -> list[Tensor]:
        if len(frames) != self.num_slots:
            raise FrameError(f"expected the scales of {self.num_slots} slots, got {len(frames)}")
        return [read_scales(frame, how.num_scales) for frame, how in zip(frames, self._slot_sums, strict=True)]

    def agree_scales(
        self, session: WorkerSession, scales: Sequence[Tensor], deadline: float, alive: Callable[[], bool]
    ) -> list[bytes]:
        round_ = self._round
        agreement = round_.total
        assert isinstance(agreement, RoundSums)
        agreement.offer_scales(session.worker, scales)
        self._shared.changed.notify_all()
        self._shared.wait(
            lambda: agreement.offered_scales is not None or round_ is not self._round,
            deadline,
            alive,
            lambda: f"{agreement.missing_offers} workers to offer their scales",
        )
        if agreement.offered_scales is None:
            raise regather()
        return [bytes(pack_scales(bits)) for bits in agreement.offered_scales]

    def _needs_upload(self, worker: int) -> bool:
        return self.uploads.asks(worker)

    def snapshot(self, session: WorkerSession, deadline: float, alive: Callable[[], bool]) -> Reply:
        return self.uploads.fetch(session.worker, deadline, alive)

    @property
    def weights_status(self) -> str:
        return self.uploads.status

    def restarted(self, worker: int) -> None:
        self.uploads.stop_asking(worker)

    left = disconnected = restarted
