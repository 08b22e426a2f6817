"""Rounds one after the other: what workers push is summed as it comes, and a round that is complete becomes an update.

How pushes come in, who may push and who is told stays with the core. Whoever calls has the shared's lock only where it
says so: sums are made beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from laconic.aggregate.homomorphic import Sum
from laconic.cluster.backpressure import ByteBudget
from laconic.cluster.homomorphic.server import Additions, Part, SlotSum, pack_scales, read_scales
from laconic.cluster.job import Job
from laconic.cluster.membership import WorkerSession
from laconic.cluster.protocol import Frame
from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.replies import RefusedError, Reply, regather
from laconic.cluster.reply_stream import ReplyStream
from laconic.cluster.round import Best, Mean, Push, Round
from laconic.cluster.shared_state import SharedState
from laconic.cluster.weights import Weights
from laconic.errors import FrameError

__all__ = ["Rounds"]

log = logging.getLogger("laconic")


class Rounds:
    """The rounds of a job; one that never ends where a job has none.

    Args:
        shared: Where handlers meet.
        weights: What an update changes.
        sessions: Who is answered.
        room: What pushes that wait are counted in.
        spoilt: Told why, with the lock, when a round must be made anew.
    """

    def __init__(
        self,
        shared: SharedState,
        weights: Weights,
        sessions: Sequence[WorkerSession],
        room: ByteBudget,
        spoilt: Callable[[str], None],
    ) -> None:
        self._shared, self._weights, self._sessions, self._room, self._spoilt = shared, weights, sessions, room, spoilt
        self._job: Job = weights.job
        self.how: list[SlotSum] = weights.job.slot_sums(weights.parameters) if weights.job.returns == "sum" else []
        """With returns=sum: how each slot is summed."""
        self._updating = False
        self._updater = ThreadPoolExecutor(1, thread_name_prefix="laconic-update")
        self._means: list[Tensor] = []
        self._sums: list[Sum] = []
        self.this = self._new()

    @property
    def quorum(self) -> int:
        """How many pushes make a round."""
        return self._job.workers - self._job.backup

    def _new(self) -> Round:
        if self._job.mode != "sync":
            return Round(None)
        if self._job.returns == "sum":
            sums = Additions(self.how, self.quorum, self._sums)
            self._sums = sums.rooms()
            return Round(sums, answer=ReplyStream(len(self.how)) if self._job.exact else None)
        like = self._weights.like
        if self._job.after == "best":
            return Round(Best(like))
        mean = Mean(self._weights.slots, like, self.quorum, self._means)
        self._means = mean.tensors()
        return Round(mean)

    def void(self, *, keep_sums: bool = False) -> None:
        """Begin a round anew, with the lock."""
        if not keep_sums:
            self._means, self._sums = [], []  # there may be something in them, and somebody still adding to them
            if self.this.answer is not None:
                self.this.answer.end(regather())
        self._room.used -= sum(push.nbytes for push in self.this.waiting.values())
        self.this = self._new()
        for session in self._sessions:
            session.receiver = None

    # -------------------------------------------------------------------------------------------------- what comes in

    def take(self, receiver: PushReceiver, push: Push) -> None:
        """A push that is all there."""
        if self._job.returns == "sum":
            self._take_summands(receiver, push)
        elif self._job.backup:
            self._take_some(receiver, push)
        else:
            self._take_all(receiver, push)

    def missing(self) -> str:
        """Who has not pushed."""
        there = self.this.pushed
        missing = ", ".join(str(worker) for worker in range(self._job.workers) if worker not in there)
        return f"worker {missing or 'nobody'} to push exchange {self._weights.version}"

    def _take_all(self, receiver: PushReceiver, push: Push) -> None:
        with self._shared.changed:
            receiver.check()
            self._put(receiver, push)
        self._sum(receiver.of_round)

    def _take_some(self, receiver: PushReceiver, push: Push) -> None:
        """Rounds that do not wait for backup workers. Who is late is a matter of time, so are the bits."""
        if not push.frames:
            return  # it is in the round already
        push.decode(self._weights.like)  # the round cannot fail on it later
        this = receiver.of_round
        assert isinstance(this.total, Mean)
        with self._shared.changed:
            self.settle()
            receiver.check()
            if this is not self.this:  # too late: what it is answered takes it on to the next round
                self._shared.event("late", worker=push.worker, sequence=push.sequence)
                return
            self._put(receiver, push)
            this.total.add(this.waiting.pop(push.worker))
            self._room.used -= push.nbytes
            if len(this.pushed) == self.quorum:
                self._close(this)
            self._shared.changed.notify_all()

    def _put(self, receiver: PushReceiver, push: Push) -> None:
        """Into the round, once."""
        if push.worker not in receiver.of_round.pushed:
            receiver.of_round.pushed.add(push.worker)
            receiver.of_round.waiting[push.worker] = push
            receiver.hand_over()
            self._sessions[receiver.worker].let_go(receiver)
            self._room.let_go(receiver)
            self._shared.event("push", worker=push.worker, incarnation=push.incarnation, sequence=push.sequence)

    # -------------------------------------------------------------------------------------------------- of integers

    def agree(self, worker: int, scales: Sequence[Tensor], deadline: float, alive: Callable[[], bool]) -> list[bytes]:
        """Before the pushes of a round that has no scales: the largest of all workers' scales. With the lock."""
        this = self.this
        this.settle(worker, scales, self.quorum)
        self._shared.changed.notify_all()
        self._shared.wait(
            lambda: this.settled or this is not self.this,
            deadline,
            alive,
            lambda: f"{self.quorum - len(this.settling)} workers to tell their scales",
        )
        if not this.settled:
            raise regather()
        return [bytes(pack_scales(one)) for one in this.scales]

    def read_scales(self, frames: Sequence[Frame]) -> list[Tensor]:
        """One worker's, as bits."""
        if len(frames) != len(self.how):
            raise FrameError(f"expected the scales of {len(self.how)} slots, got {len(frames)}")
        return [read_scales(frame, how.num_scales) for frame, how in zip(frames, self.how, strict=True)]

    def add_part(self, receiver: PushReceiver, slot: int, frame: Frame) -> None:
        """One slot's integers, into the sum. Nothing is known of a round before all of it is there."""
        part = Part.of(self.how[slot], frame)
        with self._shared.changed:
            receiver.check()
        total, answer = receiver.of_round.total, receiver.of_round.answer
        assert isinstance(total, Additions) and answer is not None
        message = total.add(slot, receiver.worker, part)
        if message is not None:
            answer.put(message, slot)

    def _take_summands(self, receiver: PushReceiver, push: Push) -> None:
        """Integers are added in any order; with all workers they have been, as they came."""
        this = receiver.of_round
        with self._shared.changed:
            receiver.check()
            if this is not self.this:  # too late, as a backup worker may be
                self._shared.event("late", worker=push.worker, sequence=push.sequence)
                return
            if this.answer is None and not push.parts:
                return  # it is in the round already
            self._put(receiver, push)
            if this.answer is not None:
                this.waiting.clear()
                if len(this.pushed) == self._job.workers:
                    self._close(this)
                self._shared.changed.notify_all()
                return
        self._sum(this)

    # ------------------------------------------------------------------------------------------------------- summing

    def _sum(self, this: Round) -> None:
        """Sum what waits, as far as it is in turn; whoever completes the round closes it."""
        assert this.total is not None
        self.settle()
        while True:
            with self._shared.changed:
                worker = this.next()
                if this is not self.this or this.busy or worker is None:
                    return
                push = this.waiting.pop(worker)
                this.busy = True
            try:
                if isinstance(this.total, Additions):
                    for slot, part in enumerate(push.parts):
                        message = this.total.add(slot, push.worker, part)
                        if message is not None:
                            this.made[slot] = message
                else:
                    this.total.add(push)
            except FrameError as error:
                with self._shared.changed:  # the sum is spoilt: the others must push again
                    self._room.used -= push.nbytes
                    this.faults[push.worker] = error
                    self._shared.event("spoilt", worker=push.worker, sequence=push.sequence)
                    if this is self.this:
                        self._spoilt(f"worker {push.worker} pushed what cannot be read")
                    self._shared.changed.notify_all()
                return
            with self._shared.changed:
                this.busy = False
                this.turn += 1
                self._room.used -= push.nbytes
                if this is self.this and this.turn == self.quorum:
                    self._close(this)
                self._shared.changed.notify_all()

    def _close(self, this: Round) -> None:
        """Make the update, in a thread of its own: the answer goes out slot by slot while it is made."""
        assert this.total is not None
        frames = this.answer or ReplyStream(len(self._weights.slots))
        reply = Reply(self._weights.version + 1, frames)
        for session in self._sessions:  # those not waited for are answered with the same when they ask
            session.clock, session.reply = self._weights.version + 1, reply
        self._updating = True
        summed = sorted(this.pushed - this.waiting.keys())
        self.void(keep_sums=True)  # the update clears them
        self._shared.changed.notify_all()
        self._updater.submit(self._update, this, summed, frames)

    def _update(self, this: Round, pushed: Sequence[int], frames: ReplyStream) -> None:
        failure: BaseException | None = None
        shared, weights, total = self._shared, self._weights, this.total
        assert total is not None
        try:
            with shared.watching(weights.version):
                if isinstance(total, Additions):
                    made: Iterator[Frame] = iter([this.made[slot] for slot in sorted(this.made)])
                elif isinstance(total, Best) and self._job.returns == "gradients":
                    made = iter(total.frames())  # as they came: nothing more is lost
                    weights.step(total.result())
                else:
                    made = weights.update(total.result())
                for frame in made:
                    frames.put(frame)
            with shared.changed:
                if isinstance(total, Additions):
                    weights.agree(total.scales())
                weights.version += 1
                weights.settle()
                for worker in pushed:
                    shared.event("applied", worker=worker, sequence=weights.version - 1, version=weights.version)
                if self._job.returns != "sum":  # else when somebody deposits them
                    shared.updated(weights.version)
        except BaseException as error:
            failure = error
            if not isinstance(error, RefusedError):
                log.exception("the server failed to update its weights")
                shared.failure = shared.failure or f"the server failed to update its weights: {error}"
        finally:
            frames.end(failure)
            if isinstance(total, Mean):
                total.clear()  # for the next round, while workers are busy with this one
            with shared.changed:
                self._updating = False
                shared.changed.notify_all()

    def settle(self) -> None:
        """Wait until no update is being made. Not for ``on_update``, which is part of one."""
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: not self._updating)
