"""Contributor: one worker's side of sums, with a memory per slot of what was not sent."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels, wire
from laconic.aggregate.homomorphic.families import LowRank, PackedInts, Sender
from laconic.aggregate.homomorphic.summing import Summing, flat_values
from laconic.codecs import Chain, parse
from laconic.codecs.memory import ErrorFeedback
from laconic.codecs.powersgd import Matrix
from laconic.counters import LogOnce
from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.kernels.interface import SUM_BLOCK, num_buckets, packed_int_count
from laconic.packet import Arena, HeapArena, Packet, TensorSpec

__all__ = ["Contributor", "ContributorStats", "Joined"]

log = logging.getLogger("laconic")


@dataclass
class ContributorStats:
    """What a contributor has done so far."""

    rounds: int = 0
    skipped_nonfinite: int = 0
    residual_resets: int = 0


@dataclass
class _Slot:
    """What a slot remembers, and the values that wait for an agreement."""

    residual: Tensor | None = None
    waiting: Tensor | None = None
    start: Tensor | None = None
    before: Tensor | None = None
    spec: TensorSpec | None = None


@dataclass
class Joined:
    """Slots of one round whose values wait for an agreement together: blocks of all, one behind the other.

    Scales, integers and residuals are of blocks, so what is done for one tensor is done for all of them at once.
    """

    slots: Sequence[str]
    sizes: list[int]
    values: Tensor

    def parts(self, values: Tensor, rotated: bool) -> Iterable[Tensor]:
        """Each slot's part of something of this length, without what fills its last block unless that is rotated."""
        at = 0
        for size in self.sizes:
            yield values[at : at + packed_int_count(size, rotated)]
            at += num_buckets(size, SUM_BLOCK) * SUM_BLOCK


class Contributor:
    """One worker's tensors for sums, round by round, with error feedback when the spec begins with ``ef``.

    A round of a slot is ``probe``, then ``encode`` with what was agreed, or ``skip``. The residual changes in
    ``encode`` alone, so a round that all workers skip leaves no trace but a count.

    With ``ef|thc`` the residual is kept as it is after the rotation, which is the same in every round: one
    transform a round, and none back.

    Args:
        spec: ``ef|thc:4``, ``shared:8,round=stochastic``, …
        workers: The most that will be added up.
        worker: Which one this is.
        ring: See ``Summing``.
    """

    def __init__(self, spec: str, *, workers: int, worker: int = 0, ring: bool = False) -> None:
        memories, chain = parse(spec)
        if any(not isinstance(stage, ErrorFeedback) for stage in memories):
            raise ConfigError(f"{spec!r}: sums keep error feedback ('ef') only")
        self.spec = spec
        self.feedback = bool(memories)
        self.summing = Summing(chain, workers, ring)
        self.worker = worker
        self.stats = ContributorStats()
        self._slots: dict[str, _Slot] = {}
        self._warn_once = LogOnce("contributor.stats")
        if self.feedback and not chain.contractive:
            log.warning("%s: an encoding may add more error than it removes, so the residual can grow", spec)

    @property
    def chain(self) -> Chain:
        return self.summing.chain

    @property
    def _fused(self) -> PackedInts | None:
        """The family, if the residual is kept where integers are made: nothing stands before the rotation."""
        method = self.summing.method
        return method if self.feedback and isinstance(method, PackedInts) and method.selector is None else None

    def probe(self, slot: str, x: Tensor, *, seed: int = 0) -> Tensor:
        """Begin a round of a slot: what this worker brings to the agreement."""
        flat = flat_values(x)
        mine = self._slots.setdefault(slot, _Slot())
        room, mine.before = mine.before, None
        mine.spec, fused, method = TensorSpec.of(x), self._fused, self.summing.method
        signs = None if fused is None else fused.stage.signs
        if not self.feedback or not flat.numel():
            mine.waiting = flat
        else:
            size = packed_int_count(flat.numel(), signs is not None)
            memory = self._memory(slot, mine, size, flat)
            if room is None or room.numel() != size or room.device != flat.device:
                room = torch.empty(size, device=flat.device)  # otherwise two take turns
            if signs is not None:
                kernels.backend_for(flat).rotate(flat, signs, memory, room)
            elif memory is None:
                room.copy_(flat)
            else:
                torch.add(flat, memory, out=room)
            mine.waiting = room
        if not flat.numel():
            return self.summing.nothing(flat)
        if isinstance(method, LowRank):
            return method.probe(mine.waiting, mine.spec, seed, self._start(slot, mine, method.matrix(mine.spec), flat))
        return method.probe(mine.waiting, mine.spec, seed)

    def _memory(self, slot: str, mine: _Slot, size: int, like: Tensor) -> Tensor | None:
        memory = mine.residual
        if memory is not None and memory.numel() != size:
            self.stats.residual_resets += 1
            log.warning("slot %r changed its size: its residual is reset", slot)
            memory = mine.residual = None
        if memory is not None and memory.device != like.device:
            memory = mine.residual = memory.to(like.device)
        return memory

    def _start(self, slot: str, mine: _Slot, matrix: Matrix, like: Tensor) -> Tensor | None:
        """Where power iteration goes on from."""
        if mine.start is not None and tuple(mine.start.shape) != (matrix.r, matrix.columns):
            log.warning("slot %r changed its shape: its warm start is dropped", slot)
            mine.start = None
        if mine.start is not None and mine.start.device != like.device:
            mine.start = mine.start.to(like.device)
        return mine.start

    def join(self, slots: Sequence[str], tensors: Sequence[Tensor]) -> Joined | None:
        """Begin a round of many slots of a GPU; None, and nothing has happened, where they cannot be joined."""
        method, first = self.summing.method, tensors[0]
        if (
            not isinstance(method, PackedInts)
            or method.selector is not None
            or len(tensors) < 2
            or not self.summing.ring
        ):
            return None
        alike = all(
            x.device == first.device and x.dtype == torch.float32 and x.is_contiguous() and x.numel() for x in tensors
        )
        backend = kernels.multi_tensor_backend_for(first) if alike else None
        if backend is None:
            return None
        signs, sizes = method.stage.signs, [x.numel() for x in tensors]
        blocks = sum(num_buckets(size, SUM_BLOCK) for size in sizes)
        residuals: list[Tensor | None] = []
        for slot, x in zip(slots, tensors, strict=True):
            mine = self._slots.setdefault(slot, _Slot())
            mine.spec, mine.waiting, mine.before = TensorSpec.of(x), None, None
            size = packed_int_count(x.numel(), signs is not None)
            residuals.append(self._memory(slot, mine, size, x) if self.feedback else None)
        values = torch.empty(blocks * SUM_BLOCK, device=first.device)
        backend.gather_blocks(tensors, residuals, signs, values)
        return Joined(slots, sizes, values)

    def probe_joined(self, joined: Joined) -> Tensor:
        """What this worker brings to the agreement: a scale for each block."""
        method = self._packed_ints
        return method.bounded(method.stage.scales(joined.values, kernels.backend_for(joined.values)))

    def encode_joined(self, joined: Joined, agreed: Tensor, *, seed: int, arena: Arena) -> tuple[Tensor, Tensor]:
        """End the round: clips of all blocks, and their integers. What these fail to say is kept for the next round."""
        method, summing, values = self._packed_ints, self.summing, joined.values
        head = method.head(summing.workers, summing.ring)
        rounding_seed = Sender(summing.workers, summing.ring, seed, self.worker).rounding_seed
        clips = method.stage.clips(agreed, head)
        integers = method.stage.encode_packed_ints(
            values,
            head,
            clips,
            kernels.backend_for(values),
            arena,
            rotation_seed=None,
            rounding_seed=rounding_seed,
            feedback=self.feedback,
        )
        if self.feedback:
            rotated = method.stage.signs is not None
            for slot, part in zip(joined.slots, joined.parts(values, rotated), strict=True):
                self._slots[slot].residual = part
        self.stats.rounds += len(joined.slots)
        return clips, integers

    def check_joined(self, joined: Joined) -> None:
        """Begin residuals anew that have left float32. Waits for the device, so it comes when all else is under way."""
        if not self.feedback or kernels.backend_for(joined.values).all_finite(joined.values):
            return
        for slot in joined.slots:
            residual = self._slots[slot].residual
            if residual is not None and not bool(residual.isfinite().all()):
                self._overflowed(slot)

    @property
    def _packed_ints(self) -> PackedInts:
        method = self.summing.method
        assert isinstance(method, PackedInts)
        return method

    def _overflowed(self, slot: str) -> None:
        self._slots[slot].residual = None
        self.stats.residual_resets += 1
        log.warning("slot %r: its residual overflowed float32 and is reset", slot)

    def usable(self, agreed: Tensor) -> bool:
        return self.summing.usable(agreed)

    def packet(self, slot: str, agreed: Tensor, *, seed: int = 0, arena: Arena | None = None) -> Packet:
        """End the round: this worker's packet. What it fails to say is kept for the next round."""
        mine = self._slots.get(slot)
        if mine is None or mine.waiting is None or mine.spec is None:
            raise InputError(f"slot {slot!r} has no values waiting: probe comes first")
        values, summing, fused = mine.waiting, self.summing, self._fused
        sections: tuple[Tensor, ...] = ()
        if values.numel():
            summing.refuse_unusable(agreed)
            arena = arena or HeapArena(values.device)
            sender = Sender(summing.workers, summing.ring, seed, self.worker)
            if fused is not None:
                sections = fused.sections(values, mine.spec, agreed, arena, sender, feedback=True)
            else:
                sections = summing.method.sections(values, mine.spec, agreed, arena, sender)
        packet = Packet(self.chain.text, mine.spec, sections)
        if self.feedback and values.numel():
            if fused is None:
                self.chain.accumulate(packet, values.view(mine.spec.shape), -1.0)
            mine.before, mine.residual = mine.residual, values
            if not kernels.backend_for(values).all_finite(values):
                self._overflowed(slot)
        mine.waiting = None
        self.stats.rounds += 1
        return packet

    def received(self, slot: str, total: Packet) -> None:
        """What the workers' sum was: ``powersgd`` starts from it in the next round. Others have no use for it."""
        method, mine = self.summing.method, self._slots.get(slot)
        if isinstance(method, LowRank) and mine is not None and total.sections and total.spec == mine.spec:
            matrix = method.matrix(total.spec)
            q = total.sections[-1].clone().view(torch.float32).view(matrix.r, matrix.columns)
            norms = q.abs().amax(1, keepdim=True)
            fresh = matrix.start(0, q)
            # Of unit size, so that a start of any age is usable; a row that has died is drawn again.
            mine.start = torch.where(norms > 0, q / torch.where(norms > 0, norms, 1.0), fresh)

    def encode(self, slot: str, agreed: Tensor, *, seed: int = 0) -> bytearray:
        """The same as a frame."""
        return wire.pack(self.packet(slot, agreed, seed=seed))

    def skip(self, slot: str) -> None:
        """End the round without sending: this worker's or another's values were not finite. The residual stays."""
        mine = self._slots.get(slot)
        if mine is None or mine.waiting is None:
            raise InputError(f"slot {slot!r} has no values waiting: probe comes first")
        mine.waiting = None
        self.stats.skipped_nonfinite += 1
        self._warn_once("nonfinite", f"slot {slot!r}: a value of some worker is not finite, all workers skip the round")

    def undo(self, slot: str) -> None:
        """The round that was encoded last is dropped by all: the residual is again what it was before."""
        mine = self._slots.get(slot)
        if mine is None or mine.waiting is not None:
            raise InputError(f"slot {slot!r} has no round to undo")
        mine.residual, mine.before = mine.before, None
        self.stats.skipped_nonfinite += 1

    def forget(self, slots: Iterable[str], why: str) -> None:
        """Begin these slots' memory anew, because it would mean something else from now on: counted, and said once.

        Args:
            slots: Those that remember nothing are passed over.
            why: Completes "what was not sent is dropped: ".
        """
        for slot in slots:
            mine = self._slots.get(slot)
            if mine is None or mine.residual is None:
                continue
            mine.residual = mine.before = None
            self.stats.residual_resets += 1
            self._warn_once("reset", f"residuals are reset: {why}")

    def residual(self, slot: str) -> Tensor | None:
        """What a slot has yet to send, flat; for ``thc`` as it is after the rotation. None if nothing is kept."""
        mine = self._slots.get(slot)
        return None if mine is None else mine.residual

    def state_dict(self) -> dict[str, Tensor]:
        """Everything remembered: save it with the model.

        ``slot/residual`` is this worker's own; ``slot/start``, from where ``powersgd`` goes on, is all workers' alike.
        """
        state = {}
        for slot, mine in self._slots.items():
            for part, tensor in (("residual", mine.residual), ("start", mine.start)):
                if tensor is not None:
                    state[f"{slot}/{part}"] = tensor.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the memory by a saved one. Nothing changes unless all of it makes sense."""
        slots: dict[str, _Slot] = {}
        for key, tensor in state.items():
            slot, _, part = key.rpartition("/")
            known = isinstance(tensor, Tensor) and tensor.is_floating_point() and part in ("residual", "start")
            if not known or (part == "start" and tensor.dim() != 2):
                raise InputError(f"expected float tensors named 'slot/residual' or 'slot/start', got {key!r}")
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"{key!r} in the saved state is not finite")
            kept = tensor.detach().to(torch.float32).clone().contiguous()
            mine = slots.setdefault(slot, _Slot())
            if part == "residual":
                mine.residual = kept.view(-1)
            else:
                mine.start = kept
        self._slots = slots
