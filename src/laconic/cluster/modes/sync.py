"""Mode ``sync``: rounds. Pushes are combined as they arrive, and a complete round becomes one update.

The lock is held only where a method says so: pushes are added beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from laconic.cluster.homomorphic.server import RoundSums
from laconic.cluster.membership import Membership, WorkerSession, listed
from laconic.cluster.modes.base import ServerMode
from laconic.cluster.protocol import Frame
from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.replies import RefusedError, Reply, ReplyStream, regather
from laconic.cluster.robust import Robust
from laconic.cluster.round import Best, Mean, Push, Round
from laconic.cluster.shared_state import ByteBudget, SharedState
from laconic.cluster.weights import Weights
from laconic.errors import FrameError
from laconic.frames import encode

__all__ = ["BackupRounds", "Rounds"]

log = logging.getLogger("laconic")


class Rounds(ServerMode):
    """Rounds with all workers; see ``ServerMode`` for the arguments."""

    def __init__(self, shared: SharedState, weights: Weights, members: Membership, budget: ByteBudget) -> None:
        super().__init__(shared, weights, members, budget)
        self._quorum = self._job.workers - self._job.backup
        """Number of pushes in a round."""
        self._updating = False
        self._updater = ThreadPoolExecutor(1, thread_name_prefix="laconic-update")
        self._sums: list[Tensor] = []
        """Tensors for the next round's sums."""
        self._round = self._new_round()

    @property
    def current_round(self) -> Round:
        return self._round

    def _new_round(self) -> Round:
        if self._job.after == "best":
            return Round(Best(self._weights.like))
        if self._job.trim is not None:
            return Round(Robust(self._weights.like, self._job.trim))
        self._sums = self._sums or [torch.zeros_like(x) for x in self._weights.like]
        return Round(Mean(self._weights.slots, self._sums, self._quorum))

    def _discard_sums(self) -> None:
        """Use new sums in the next round: the old ones hold values, and a thread may still be adding to them."""
        self._sums = []

    def _begin_round(self) -> None:
        """Replace the current round. The caller holds the lock."""
        for push in self._round.waiting.values():
            self._release(push)
        self._round = self._new_round()
        for session in self._members.sessions:
            session.receiver = None

    def _abandon_round(self) -> None:
        """Start the current round again. The caller holds the lock."""
        self._discard_sums()
        if self._round.reply is not None:
            self._round.reply.end(regather())
        self._begin_round()

    def regather(self, why: str) -> None:
        if self._members.gather(why, self._weights.version):
            self._abandon_round()

    # ------------------------------------------------------------------------------------------------------ a push

    def is_superseded(self, receiver: PushReceiver) -> bool:
        return receiver.round is not self._round

    def has_turn(self, receiver: PushReceiver) -> bool | None:
        assert receiver.round is not None
        return receiver.worker == receiver.round.added if receiver.round.total.in_order else None

    def apply(self, receiver: PushReceiver, push: Push, deadline: float) -> Reply:
        round_ = receiver.round
        assert round_ is not None
        session = receiver.session

        def must_upload() -> bool:
            return session.clock <= push.sequence and round_ is self._round and self._needs_upload(push.worker)

        with self._shared.changed:  # before the push, which may end the round
            if must_upload():
                raise RefusedError("deposit", "a worker needs the weights of this exchange")
        self._add_push(receiver, push, round_)
        with self._shared.changed:
            session.require(push.incarnation)
            self._shared.wait(
                lambda: (
                    session.clock > push.sequence
                    or round_ is not self._round
                    or push.worker in round_.faults
                    or must_upload()
                ),
                deadline,
                receiver.alive,
                self._missing_pushes,
            )
            if must_upload():
                raise RefusedError("deposit", "a worker needs the weights of this exchange")
            if push.worker in round_.faults:
                raise RefusedError("spoilt", str(round_.faults[push.worker]))  # it would fail again
            if session.clock <= push.sequence:
                raise regather()
            return self._kept_reply(session, push.sequence)

    def _needs_upload(self, worker: int) -> bool:
        """Whether this worker must upload its weights."""
        return False

    def _missing_pushes(self) -> str:
        missing = (worker for worker in range(self._job.workers) if worker not in self._round.pushed)
        return f"worker {listed(missing)} to push exchange {self._weights.version}"

    def _kept_reply(self, session: WorkerSession, sequence: int) -> Reply:
        """Return the last reply, if the worker can continue with it: a change needs the replies before it, too."""
        reply = session.reply
        if reply is None or (reply.sequence != sequence + 1 and not self._job.reply_kind.is_weights):
            raise RefusedError("stale", f"the other workers are at {session.clock}", resume_at=session.clock)
        return reply

    def reply_again(self, receiver: PushReceiver, deadline: float) -> Reply:
        with self._shared.changed:
            session = receiver.session.require(receiver.incarnation)
            self._shared.event("duplicate", worker=receiver.worker, sequence=receiver.sequence)
            return self._kept_reply(session, receiver.sequence)

    def snapshot(self, session: WorkerSession, deadline: float, alive: Callable[[], bool]) -> Reply:
        return Reply(session.clock, tuple(encode(x, "none") for x in self._weights.snapshot()))

    # ------------------------------------------------------------------------------------------------------ adding

    def _add_push(self, receiver: PushReceiver, push: Push, round_: Round) -> None:
        with self._shared.changed:
            receiver.check()
            self._accept(receiver, push, round_)
        self._add_waiting(round_)

    def _accept(self, receiver: PushReceiver, push: Push, round_: Round) -> None:
        """Make a push part of the round, once. The caller holds the lock."""
        if push.worker not in round_.pushed:
            round_.pushed.add(push.worker)
            round_.waiting[push.worker] = push
            receiver.hand_over(push)
            receiver.session.end_push(receiver)
            if push.reservation is not None:
                self._budget.end_exemption(push.reservation)
            self._shared.event("push", worker=push.worker, incarnation=push.incarnation, sequence=push.sequence)

    def _release(self, push: Push) -> None:
        if push.reservation is not None:
            self._budget.release(push.reservation)

    def _add_waiting(self, round_: Round) -> None:
        """Add complete pushes as far as it is their turn; the thread that adds the last one closes the round."""
        self.settle()
        while True:
            with self._shared.changed:
                worker = round_.next_worker()
                if round_ is not self._round or round_.busy or worker is None:
                    return
                push = round_.waiting.pop(worker)
                round_.busy = True
            try:
                round_.total.add(push)
            except FrameError as error:
                with self._shared.changed:
                    self._release(push)
                    self._give_up(round_, push, error)
                return
            with self._shared.changed:
                round_.busy = False
                round_.added += 1
                self._release(push)
                if round_ is self._round and round_.added == self._quorum:
                    self._close(round_)
                self._shared.changed.notify_all()

    def _give_up(self, round_: Round, push: Push, error: FrameError) -> None:
        """A push could not be decoded and the sum is invalid: the others must push again. The caller holds the lock."""
        round_.faults[push.worker] = error
        self._shared.event("spoilt", worker=push.worker, sequence=push.sequence)
        if round_ is self._round:
            if self._job.exact:
                self.regather(f"worker {push.worker} pushed frames that cannot be decoded")
            else:
                self._abandon_round()
        self._shared.changed.notify_all()

    # ----------------------------------------------------------------------------------------------------- updating

    def _close(self, round_: Round) -> None:
        """Make the update in a thread of its own, so that the reply leaves slot by slot. The caller holds the lock."""
        frames = round_.reply or ReplyStream(self.num_slots)
        reply = Reply(self._weights.version + 1, frames)
        for session in self._members.sessions:  # backup workers that are late get the same reply
            session.clock, session.reply = self._weights.version + 1, reply
        self._updating = True
        added = sorted(round_.pushed - round_.waiting.keys())
        self._begin_round()
        self._shared.changed.notify_all()
        self._updater.submit(self._update, round_, added, frames)

    def _update(self, round_: Round, workers: Sequence[int], frames: ReplyStream) -> None:
        failure: BaseException | None = None
        shared, weights = self._shared, self._weights
        try:
            with shared.overflow_ends_job(weights.version):
                for parts in self._make_reply(round_):
                    frames.put(*parts)
                with shared.changed:
                    weights.complete_update(encoded=self._job.reply_kind.is_weights)
            with shared.changed:
                for worker in workers:
                    shared.event("applied", worker=worker, sequence=weights.version - 1, version=weights.version)
                if self._job.reply_kind.server_has_weights:  # otherwise when a worker uploads them
                    shared.updated(weights.version)
        except BaseException as error:
            failure = error
            if not isinstance(error, RefusedError):
                log.exception("the server failed to update its weights")
                shared.failure = shared.failure or f"the server failed to update its weights: {error}"
        finally:
            frames.end(failure)
            round_.total.clear()  # for the next round, while workers compute
            with shared.changed:
                self._updating = False
                shared.changed.notify_all()

    def _make_reply(self, round_: Round) -> Iterator[Sequence[Frame]]:
        """Update the weights by a complete round; yield the frames that are not in its reply yet, in parts."""
        total = round_.total
        assert not isinstance(total, RoundSums)
        return self._job.reply_kind.update(self._weights, total)

    def settle(self) -> None:
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: not self._updating)


class BackupRounds(Rounds):
    """Rounds that do not wait for backup workers. Which workers are late depends on timing, and so do the bits."""

    def is_superseded(self, receiver: PushReceiver) -> bool:
        return False  # a late push is answered with the reply of its round

    def has_turn(self, receiver: PushReceiver) -> bool | None:
        return None

    def _add_push(self, receiver: PushReceiver, push: Push, round_: Round) -> None:
        if not push.frames:
            return  # it is in the round already
        push.decode(self._weights.like)  # so that adding it cannot fail
        with self._shared.changed:
            self.settle()
            receiver.check()
            if round_ is not self._round:
                self._shared.event("late", worker=push.worker, sequence=push.sequence)
                return
            self._accept(receiver, push, round_)
            push = round_.waiting.pop(push.worker)
            round_.total.add(push)
            self._release(push)
            if len(round_.pushed) == self._quorum:
                self._close(round_)
            self._shared.changed.notify_all()
