"""The server without its network: membership, dispatch of pushes to the job's mode, checkpoints and rejoining.

A push takes one way: ``Server.exchange`` (gRPC) -> ``Core.receive`` -> ``PushReceiver`` -> the mode (``modes``,
``homomorphic.rounds``) -> ``Weights``. One lock (``SharedState.changed``) guards the state; the threads of many workers
wait in it and decode outside it. Every event is logged, so that these invariants can be checked from the log:

- P1: an acknowledged push is applied exactly once. A push is identified by worker, incarnation and sequence number.
- P3: with ``bounded:S`` no gradient is applied that is more than S updates stale.
- P4: a synchronous job that lost a worker or its server resumes from a version that all of them can restore exactly, so
  it ends with the same bits as without the failure.
- P5: a push that is malformed, has another shape, is of an older incarnation, or is not finite changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.cluster.homomorphic.rounds import SumRounds
from laconic.cluster.job import Job, Slots
from laconic.cluster.membership import Membership
from laconic.cluster.modes.async_ import PushByPush, WorkQueue
from laconic.cluster.modes.base import ServerMode
from laconic.cluster.modes.bounded import BoundedQueue
from laconic.cluster.modes.sync import BackupRounds, Rounds
from laconic.cluster.protocol import Frame
from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.rejoin import Offer, agree
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.shared_state import ByteBudget, EventLog, FrameMemory, SharedState
from laconic.cluster.weight_uploads import DIGEST_NBYTES
from laconic.cluster.weights import Optimizer, Resident, Weights
from laconic.errors import FileError, FrameError
from laconic.frames import max_nbytes
from laconic.packet import TensorSpec

__all__ = ["CheckpointStore", "Core"]

log = logging.getLogger("laconic")

BYTE_BUDGET = 256 << 20
"""Bytes of pushes that may wait in memory."""


class CheckpointStore(Protocol):
    """Checkpoints to which a core can go back, by version."""

    def versions(self) -> Sequence[int]: ...
    def fetch(self, version: int) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]: ...
    def forget(self, after: int) -> None: ...


class Core:
    """One job's server.

    Args:
        parameters: Float32 tensors by name; changed in place.
        learning_rate: The learning rate of an update, by its number.
        event_log: Receives every event as a dict; None drops them.
        exchanges: Number of exchanges of the job; None if it is unknown.
        checkpoint_store: Earlier states to go back to.
        byte_budget: Bytes of pushes that may wait in memory; further pushes block, except the one that is needed next.
        resident: Tensors of slots that are not exchanged; for synchronous jobs.
    """

    def __init__(
        self, job: Job, parameters: Mapping[str, Tensor], optimizer: Optimizer, learning_rate: Callable[[int], float],
        event_log: EventLog | None = None, *, exchanges: int | None = None,
        checkpoint_store: CheckpointStore | None = None, byte_budget: int = BYTE_BUDGET,
        resident: Resident | None = None,
    ) -> None:  # fmt: skip
        self.job = job
        self.exchanges, self.checkpoint_store = exchanges, checkpoint_store
        self._weights = Weights(job, parameters, optimizer, learning_rate, resident)
        self._shared = SharedState(event_log)
        self._members = Membership(job, self._shared)
        self._budget = ByteBudget(self._shared, byte_budget)
        self._mode = self._start_mode()

    def _start_mode(self) -> ServerMode:
        job, parts = self.job, (self._shared, self._weights, self._members, self._budget)
        if job.update_mode.in_rounds:
            if not job.reply_kind.server_has_weights:
                return SumRounds(*parts)
            return BackupRounds(*parts) if job.backup else Rounds(*parts)
        tickets = None if self.exchanges is None else self.exchanges * job.workers
        bound = job.update_mode.staleness_bound
        return PushByPush(*parts, WorkQueue(tickets) if bound is None else BoundedQueue(tickets, bound))

    @property
    def failure(self) -> str | None:
        """Why the job cannot continue."""
        return self._shared.failure

    @property
    def parameters(self) -> dict[str, Tensor]:
        return self._weights.parameters

    @property
    def resident(self) -> dict[str, Tensor]:
        """The tensors of slots that are not exchanged, by slot."""
        return self._weights.resident

    @property
    def upload_limits(self) -> list[int]:
        """The largest possible frames of the largest weight upload, in bytes."""
        return self.job.push_limits(self._weights.upload_layouts[-1])

    @property
    def digest_limits(self) -> list[int]:
        """The largest possible frame of a slot's digest, in bytes."""
        return [max_nbytes("none", TensorSpec((DIGEST_NBYTES,), torch.uint8))] * len(self.slots)

    @property
    def scale_limits(self) -> list[int]:
        """The largest possible frame of scales of each slot, in bytes."""
        return self._sum_rounds().scale_limits

    @property
    def slots(self) -> Slots:
        return self._weights.slots

    @property
    def version(self) -> int:
        """Updates applied; in a synchronous job also the number of the current exchange."""
        return self._weights.version

    @property
    def queued_nbytes(self) -> int:
        """Bytes of pushes that wait in memory."""
        return self._budget.used

    @property
    def holds_current_weights(self) -> bool:
        """Whether the parameters are those of the current version. With returns=sum only workers may have these."""
        return self._mode.weights_status == "here"

    # -------------------------------------------------------------------------------------------------- membership

    def welcome(self, worker: int, incarnation: int, fingerprint: str) -> dict[str, Any]:
        """Open a worker's session and return what it needs to begin; raise ``RefusedError`` if it is not of the job."""
        with self._shared.changed:
            self.settle()
            self._shared.require_running()
            session = self._members.at(worker)
            if fingerprint != self.slots.fingerprint:
                raise RefusedError(
                    "model",
                    f"worker {worker} trains another model than the server (fingerprint {fingerprint}, expected "
                    f"{self.slots.fingerprint}): start both with the same --model or script",
                )
            if incarnation < session.incarnation:
                raise session.replaced(incarnation)
            self._members.check_incarnation(worker, incarnation)
            if incarnation > session.incarnation or not session.present:
                session.begin(incarnation)
                if self._members.offers is not None:
                    self._members.offers.pop(worker, None)  # of the earlier incarnation
                self._mode.restarted(worker)
                self._shared.changed.notify_all()
                self._shared.event("welcome", worker=worker, incarnation=incarnation, clock=session.clock)
                if self.job.exact and not self._over:
                    self._mode.regather(f"worker {worker} has restarted")
            return {
                "version": self.version, "versions": self._versions(), "over": self._over,
                "weights": self._mode.weights_status, "job": self.job.to_json(),
            }  # fmt: skip

    def join(
        self, worker: int, incarnation: int, attempt: int, offer: Offer, *, deadline: float,
        alive: Callable[[], bool] = lambda: True,
    ) -> tuple[int, bool]:  # fmt: skip
        """Return the exchange at which the worker continues, and whether it must drop its residuals.

        In a job whose result must not depend on failures all workers wait here for each other and continue from one
        version.

        Args:
            attempt: Counts the worker's joins: the same number again is the same request.
            offer: The versions it can restore.
            deadline: On ``time.monotonic``'s clock.
            alive: Whether the worker still waits.
        """
        self.offer(worker, incarnation, attempt, offer)
        with self._shared.changed:
            session = self._members.session(worker, incarnation)
            self._shared.wait(lambda: session.join_answered == attempt, deadline, alive, self._members.missing_offers)
            return session.clock, session.lost

    def offer(self, worker: int, incarnation: int, attempt: int, offer: Offer) -> None:
        """Take a worker's offer without waiting for the others: the first half of ``join``."""
        with self._shared.changed:
            self.settle()
            session = self._members.session(worker, incarnation)
            if session.join_requested == attempt:
                return
            session.join_requested, session.lost = attempt, offer.lost
            if not self.job.exact or self._over:
                session.join_answered = attempt
                self._shared.event("join", worker=worker, version=session.clock, lost=offer.lost)
                return
            self._mode.regather(f"worker {worker} joins")
            assert self._members.offers is not None
            self._members.offers[worker] = offer
            if len(self._members.offers) == self.job.workers:
                self._agree(self._members.offers)

    def check_member(self, worker: int, incarnation: int) -> None:
        """Raise unless the caller is the worker's current incarnation."""
        with self._shared.changed:
            self._members.session(worker, incarnation)

    def leave(self, worker: int, incarnation: int | None = None) -> None:
        """Remove a worker that does not come back; where a job can do without it, the others stop waiting for it.

        Args:
            incarnation: The process that leaves; the current one by default.
        """
        with self._shared.changed:
            session = self._members.at(worker)
            if incarnation in (None, session.incarnation) and session.present:
                session.present = False
                self._mode.left(worker)
                self._shared.event("leave", worker=worker, incarnation=session.incarnation)
                self._shared.changed.notify_all()

    def disconnected(self, worker: int, incarnation: int) -> None:
        """A worker's connection broke during a push. That of an earlier incarnation does not disturb its successor."""
        with self._shared.changed:
            if self._members.at(worker).incarnation == incarnation:
                self._shared.event("lost", worker=worker, incarnation=incarnation)
                self._mode.disconnected(worker)
            self._shared.changed.notify_all()

    def snapshot(
        self, worker: int, incarnation: int, *, deadline: float, alive: Callable[[], bool] = lambda: True
    ) -> Reply:
        """Return the weights from which a worker continues; see ``Weights.snapshot``."""
        with self._shared.changed:
            self.settle()
            self._shared.require_running()
            return self._mode.snapshot(self._members.session(worker, incarnation), deadline, alive)

    def on_update(self, listener: Callable[[int], None]) -> None:
        """Call ``listener(version)`` after each update, before any worker gets the reply.

        With returns=sum: when the weights of a version have been uploaded.
        """
        self._shared.on_update(listener)

    def finished(self, exchanges: int) -> bool:
        """Whether the work of that many exchanges of each worker is done."""
        return self.version >= exchanges * self.job.updates_per_exchange

    def all_gone(self) -> bool:
        return self._members.all_gone()

    @property
    def _over(self) -> bool:
        return self.exchanges is not None and self.finished(self.exchanges)

    # ----------------------------------------------------------------------------------------------------- rejoining

    def _versions(self) -> list[int]:
        """Return the current version and those of recent checkpoints: a job goes back by two checkpoints at most."""
        oldest = self.version - 2 * self.job.exchanges_per_checkpoint
        saved = self.checkpoint_store.versions() if self.checkpoint_store is not None else ()
        return sorted({self.version, *(version for version in saved if oldest < version < self.version)})

    def _agree(self, offers: Mapping[int, Offer]) -> None:
        """Go to the newest version that all workers and this server can restore; end the job if there is none."""
        unusable: set[int] = set()
        previous = self.version
        while True:
            available = set(self._versions()) - unusable
            if not available:
                self._shared.fail(
                    "workers have lost their weights and no checkpoint holds them: start again without --resume"
                )
                return
            agreed = agree(offers, available)
            if agreed.version == self.version:
                if not agreed.lost or self.holds_current_weights:
                    break
                unusable.add(self.version)  # a worker without state needs the weights
                continue
            assert self.checkpoint_store is not None
            try:
                self.load(*self.checkpoint_store.fetch(agreed.version))
            except FileError as error:
                log.warning("cannot go back to exchange %d: %s", agreed.version, error)
                unusable.add(agreed.version)
        if self.version != previous:
            self._shared.event("rewound", version=self.version, was=previous)
        if self.checkpoint_store is not None:
            self.checkpoint_store.forget(self.version)
        for session in self._members.sessions:
            session.clock, session.join_answered = self.version, session.join_requested
            session.lost = session.worker in agreed.lost
            if session.lost:
                self._shared.event("memory_lost", worker=session.worker, version=self.version)
        self._shared.event("agreed", version=self.version)
        self._members.offers = None
        self._shared.changed.notify_all()

    # ---------------------------------------------------------------------------------------------------------- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return a checkpoint: tensors by name, and numbers."""
        with self._shared.changed:
            weights = self._weights
            version = weights.version if self.job.reply_kind.server_has_weights else weights.uploaded_version
            sessions = self._members.sessions
            meta = {
                "version": version,
                "fingerprint": self.slots.fingerprint,
                "clocks": [min(session.clock, version) for session in sessions],
                "incarnations": self._members.saved_incarnations(),
                "tickets": self._mode.queue_state(),
            }
            return weights.state(), meta

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore a checkpoint; raise ``RefusedError`` if it is of another model."""
        if meta.get("fingerprint") != self.slots.fingerprint:
            raise RefusedError("model", "the checkpoint is of another model: resume with the same --model or script")
        with self._shared.changed:
            sessions = self._members.sessions
            clocks, incarnations = ([int(x) for x in meta[name]] for name in ("clocks", "incarnations"))
            if not len(clocks) == len(incarnations) == len(sessions):
                raise ValueError(f"it is of a job with {len(clocks)} workers, not {len(sessions)}")
            queue = {"next": int(meta["tickets"]["next"]), "open": [int(x) for x in meta["tickets"]["open"]]}
            self._weights.load(tensors, meta)  # everything else has been read: nothing is half loaded
            self._mode.load_queue(queue)
            for session, clock in zip(sessions, clocks, strict=True):
                session.clock, session.reply = clock, None
            self._members.restore_incarnations(incarnations)

    # ---------------------------------------------------------------------------------------------------- exchange

    def receive(
        self, worker: int, incarnation: int, sequence: int, *, alive: Callable[[], bool] = lambda: True
    ) -> PushReceiver:
        """Begin to receive a push, or recognise one that was applied before."""
        with self._shared.changed:
            session = self._members.session(worker, incarnation)
            repeatable = session.reply is not None or not self.job.keeps_replies
            applied = sequence == session.clock - 1 and repeatable
            if not applied:
                self._members.check_turn(session, sequence)
            # The first push of an exchange that the others ended without it is late, and no repetition.
            repeated, session.received = sequence <= session.received, max(sequence, session.received)
            receiver = PushReceiver(self._mode, session, sequence, alive, applied=applied, repeated=repeated)
            if not applied:
                session.begin_push(receiver)
            return receiver

    def exchange(
        self, worker: int, incarnation: int, sequence: int, frames: Sequence[Frame], score: float = 0.0, *,
        deadline: float,
    ) -> Reply:  # fmt: skip
        """Take a whole push, one frame per slot, and return the complete reply.

        Args:
            sequence: The number of the exchange, from 0.
            frames: One per slot, in the slots' order.
            score: With ``after=best``: the worker's loss on held-out data.
            deadline: On ``time.monotonic``'s clock.
        """
        with self.receive(worker, incarnation, sequence) as receiver:
            for slot, frame in enumerate(frames):
                receiver.add(slot, frame, deadline=deadline)
            reply = receiver.finish(score, deadline=deadline)
            return Reply(reply.sequence, tuple(reply.frames), reply.ticket)

    def settle(self) -> None:
        """Wait until no update is in progress. Not from ``on_update`` listeners, which are part of one."""
        self._mode.settle()

    def wake(self) -> None:
        """Wake all waiters."""
        self._shared.wake()

    # ----------------------------------------------------------------------------------------- only with returns=sum

    def agree_scales(
        self, worker: int, incarnation: int, sequence: int, scales: Sequence[Frame], *, deadline: float,
        alive: Callable[[], bool] = lambda: True,
    ) -> list[bytes]:  # fmt: skip
        """Return the maximum of all workers' scales, before the pushes of a round without scales of an earlier one."""
        sums = self._sum_rounds()
        bits = sums.read_scales(scales)
        with self._shared.changed:
            self.settle()
            session = self._members.session(worker, incarnation)
            self._members.check_turn(session, sequence)
            return sums.agree_scales(session, bits, deadline, alive)

    def frame_memory(self, alive: Callable[[], bool] = lambda: True) -> FrameMemory:
        """Return the memory for a call's frames of scales or weights, which counts in the byte budget."""
        return FrameMemory(self._shared, self._budget, alive)

    def receiving_upload(self, worker: int) -> AbstractContextManager[None]:
        """Count a weight upload while it arrives; raise if this worker must not upload."""
        return self._sum_rounds().uploads.incoming(worker, final=self._over)

    def upload_weights(self, worker: int, incarnation: int, version: int, frames: Sequence[Frame]) -> None:
        """Take a worker's weights of a version, the optimizer's state and resident tensors."""
        uploads = self._sum_rounds().uploads
        tensors = uploads.read(worker, frames)
        with self._shared.changed:
            self.settle()
            self._members.session(worker, incarnation)
            uploads.store(worker, version, tensors, final=self._over)

    def compare_weights(self, worker: int, incarnation: int, version: int, digests: Sequence[Frame]) -> None:
        """Compare the weights that a worker holds with those that were uploaded, or will be; differences are logged."""
        uploads = self._sum_rounds().uploads
        hashes = uploads.read_digests(digests)
        with self._shared.changed:
            self._members.session(worker, incarnation)
            uploads.compare(worker, version, hashes)

    def repeats_upload(self, worker: int, version: int) -> bool:
        """Whether a worker has uploaded or announced weights of this version or a later one before."""
        return not self._sum_rounds().uploads.is_first(worker, version)

    def _sum_rounds(self) -> SumRounds:
        if not isinstance(self._mode, SumRounds):
            raise FrameError("this call is for jobs with returns=sum")
        return self._mode
