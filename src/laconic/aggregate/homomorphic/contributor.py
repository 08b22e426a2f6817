"""Contributor: one worker's side of sums, with error feedback per slot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from laconic import kernels, wire
from laconic.aggregate.homomorphic.families import LowRank, PackedInts, Sender
from laconic.aggregate.homomorphic.summing import Summing, flat_values
from laconic.codecs import Chain, parse
from laconic.codecs.memory import ErrorFeedback, residual_decay
from laconic.codecs.powersgd import Matrix
from laconic.errors import ConfigError, InputError
from laconic.kernels.reference.packed_ints import rotate_back
from laconic.kernels.sections import packed_int_count
from laconic.packet import Arena, HeapArena, Packet, TensorSpec
from laconic.residual_storage import ResidualStorage
from laconic.residuals import KeepsResiduals, RoundStats, SlotMemory

__all__ = ["Contributor", "ContributorStats"]

log = logging.getLogger("laconic")


class ContributorStats(RoundStats):
    """Counts of a contributor."""


class Contributor(KeepsResiduals):
    """One worker's tensors for sums, round by round, with error feedback if the spec begins with ``ef``.

    A round of a slot is ``probe``, then ``encode`` with the agreed value, or ``skip``. Only ``encode`` changes the
    residual, so a round that all workers skip changes nothing but a count.

    With ``ef|thc`` the residual is kept after the rotation, which is the same in every round: this takes one transform
    a round, and none back. Residuals are flat; ``slot/start`` in ``state_dict``, where ``powersgd`` continues, is the
    same on all workers.

    Args:
        spec: ``ef|thc:4``, ``ef:0.95|thc:4``, ``shared:8,round=stochastic``, …
        workers: The largest number of packets that will be added.
        ring: See ``Summing``.
        storage: In which dtype and where residuals are kept between rounds.
    """

    def __init__(
        self, spec: str, *, workers: int, worker: int = 0, ring: bool = False, storage: ResidualStorage | None = None
    ) -> None:
        memories, chain = parse(spec)
        if any(not isinstance(stage, ErrorFeedback) for stage in memories):
            raise ConfigError(f"{spec!r}: sums support error feedback ('ef') only")
        self.spec = spec
        self.feedback, self.decay = bool(memories), residual_decay(memories)
        self.summing = Summing(chain, workers, ring)
        self.worker = worker
        self.stats = ContributorStats()
        super().__init__("start", self.stats, storage)
        self._pending: dict[str, Tensor] = {}
        """Values between ``probe`` and ``packet``."""
        self._inputs: dict[str, tuple[Tensor, Tensor, int]] = {}
        """Flat input, probe and seed of slots with a residual, until ``packet`` or ``skip``."""
        self._specs: dict[str, TensorSpec] = {}
        if self.feedback and not chain.contractive:
            log.warning("%s: an encoding may add more error than it removes, so the residual can grow", spec)

    @property
    def chain(self) -> Chain:
        return self.summing.chain

    @property
    def _fused(self) -> PackedInts | None:
        """The family, if its kernel updates the residual while it encodes: no selector runs before it."""
        family = self.summing.family
        return family if self.feedback and isinstance(family, PackedInts) and family.selector is None else None

    @property
    def rotation_seed(self) -> int | None:
        """The seed of the rotation after which residuals are kept; None if they are kept as they are."""
        fused = self._fused
        return None if fused is None else fused.stage.rotation_seed

    def kept_numel(self, numel: int) -> int:
        """Return the number of values of the residual of a slot: a rotated one ends with a whole block."""
        return packed_int_count(numel, self.rotation_seed is not None)

    def start_shape(self, spec: TensorSpec) -> tuple[int, int] | None:
        """Return the shape of the matrix that ``powersgd`` continues from; None for other codecs."""
        family = self.summing.family
        if not isinstance(family, LowRank) or not spec.numel:
            return None
        matrix = family.matrix(spec)
        return matrix.r, matrix.columns

    def _sender(self, seed: int) -> Sender:
        return Sender(self.summing.workers, self.summing.ring, seed, self.worker)

    def probe(self, slot: str, x: Tensor, *, seed: int = 0) -> Tensor:
        """Begin a round of a slot: return this worker's probe."""
        flat, spec = flat_values(x), TensorSpec.of(x)
        values = self._add_residual(slot, flat) if self.feedback and flat.numel() else flat
        self._pending[slot], self._specs[slot] = values, spec
        if not flat.numel():
            return self.summing.empty_probe(flat)
        probe = self._probe(slot, values, spec, seed)
        if self.feedback:
            self._inputs[slot] = flat, probe, seed
        return probe

    def _probe(self, slot: str, values: Tensor, spec: TensorSpec, seed: int) -> Tensor:
        family = self.summing.family
        if isinstance(family, LowRank):
            return family.probe(values, spec, seed, self.start(slot, family.matrix(spec), values))
        return family.probe(values, spec, seed)

    def _add_residual(self, slot: str, flat: Tensor) -> Tensor:
        """Return the values plus the decayed residual, rotated if the codec rotates, in an earlier round's buffer."""
        signs, size = self.rotation_seed, self.kept_numel(flat.numel())
        memory = self._fitting_memory(slot, (size,), flat.device)
        buffer, memory.previous = memory.previous, None
        in_place = self.storage.in_place(flat.device)
        if buffer is None or buffer.numel() != size or buffer.device != flat.device or not in_place:
            buffer = torch.empty(size, device=flat.device)
        residual = None if memory.residual is None else self.storage.load(memory.residual, flat.device)
        if residual is not None and self.decay != 1.0:  # the residual itself stays, in case the round is dropped
            residual = torch.mul(residual, self.decay, out=buffer)
        if signs is not None:
            kernels.backend_for(flat).rotate(flat, signs, residual, buffer)
        elif residual is None:
            buffer.copy_(flat)
        else:
            torch.add(flat, residual, out=buffer)
        return buffer

    def start(self, slot: str, matrix: Matrix, like: Tensor) -> Tensor | None:
        """Return the matrix that power iteration continues from; None at first."""
        memory = self._memory(slot)
        if memory.companion is not None and tuple(memory.companion.shape) != (matrix.r, matrix.columns):
            log.warning("slot %r changed its shape: its warm start is dropped", slot)
            memory.companion = None
        if memory.companion is not None and memory.companion.device != like.device:
            memory.companion = memory.companion.to(like.device)
        return memory.companion

    def usable(self, agreed: Tensor) -> bool:
        return self.summing.usable(agreed)

    def packet(self, slot: str, agreed: Tensor, *, seed: int = 0, arena: Arena | None = None) -> Packet:
        """End the round: return this worker's packet and keep what it does not send as the residual."""
        if slot not in self._pending:
            raise InputError(f"slot {slot!r} has no values waiting: call probe first")
        values, spec, summing, fused = self._pending[slot], self._specs[slot], self.summing, self._fused
        sections: tuple[Tensor, ...] = ()
        if values.numel():
            summing.require_usable(agreed)
            arena, sender = arena or HeapArena(values.device), self._sender(seed)
            if fused is not None:
                sections = fused.sections(values, spec, agreed, arena, sender, feedback=True)
            else:
                sections = summing.family.sections(values, spec, agreed, arena, sender)
        packet = Packet(self.chain.text, spec, sections)
        if self.feedback and values.numel():
            if fused is None:
                self.chain.accumulate(packet, values.view(spec.shape), -1.0)
            memory = self._memory(slot)
            memory.previous, memory.residual = memory.residual, values
            if not kernels.backend_for(values).all_finite(values):
                self._reset_overflowed(slot)
            elif not self.storage.in_place(values.device):
                memory.residual = self.storage.zeros(values.shape, values.device)
                self.storage.store(values, memory.residual, slot, self.rounding_seed(seed))
        del self._pending[slot]
        self._inputs.pop(slot, None)
        self.stats.rounds += 1
        return packet

    def encode(self, slot: str, agreed: Tensor, *, seed: int = 0) -> bytearray:
        """End the round: return this worker's frame. See ``packet``."""
        return wire.pack(self.packet(slot, agreed, seed=seed))

    def received(self, slot: str, total: Packet) -> None:
        """Take the workers' sum as the start of the next round's power iteration; only ``powersgd`` uses it."""
        family = self.summing.family
        if not isinstance(family, LowRank) or not total.sections or total.spec != self._specs.get(slot):
            return
        matrix = family.matrix(total.spec)
        q = total.sections[-1].clone().view(torch.float32).view(matrix.r, matrix.columns)
        norms = q.abs().amax(1, keepdim=True)
        fresh = matrix.start(0, q)
        # Of unit size, so that a start of any age is usable; a row that has become zero is drawn again.
        self._memory(slot).companion = torch.where(norms > 0, q / torch.where(norms > 0, norms, 1.0), fresh)

    def skip(self, slot: str) -> None:
        """End the round without sending: a worker's values are not finite.

        The residual stays, unless it is the reason: then it is reset, or no round would ever succeed again.
        """
        if self._pending.pop(slot, None) is None:
            raise InputError(f"slot {slot!r} has no values waiting: call probe first")
        self._reset_unusable(slot)
        self.stats.skipped_nonfinite += 1
        self._warn_once("nonfinite", f"slot {slot!r}: a worker's values are not finite, all workers skip the round")

    def _reset_unusable(self, slot: str) -> None:
        """Reset the residual of a slot whose values would do without it."""
        flat, probe, seed = self._inputs.pop(slot, (None, None, 0))
        if flat is None or probe is None or self.residual(slot) is None:
            return
        family, workers = self.summing.family, self.summing.workers
        if family.fits(probe, workers) or not family.fits(self._probe(slot, flat, self._specs[slot], seed), workers):
            return
        self._reset_overflowed(slot)

    def undo(self, slot: str) -> None:
        """Restore the residual from before the round that was encoded last, because all workers drop it."""
        if slot in self._pending or slot not in self._specs:
            raise InputError(f"slot {slot!r} has no round to undo")
        memory = self._memory(slot)
        memory.residual, memory.previous = memory.previous, None
        self.stats.skipped_nonfinite += 1

    # ------------------------------------------------------------------------------------- many slots at once on a GPU

    def residuals_of(self, slots: Sequence[str], sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Return the residuals of slots as they are kept, flat and of these sizes, for an encoder that updates them."""
        residuals = []
        for slot, size in zip(slots, sizes, strict=True):
            memory = self._fitting_memory(slot, (size,), device)
            memory.previous = None
            if memory.residual is None:
                memory.residual = self.storage.zeros((size,), device)
            residuals.append(memory.residual)
        return residuals

    def keep_starts(self, slots: Sequence[str], starts: Sequence[Tensor]) -> None:
        """Let power iteration continue from these matrices, which are updated in place."""
        for slot, start in zip(slots, starts, strict=True):
            self._memory(slot).companion = start

    def rounding_seed(self, seed: int) -> int:
        """Return this worker's rounding seed in a round."""
        return self._sender(seed).rounding_seed

    def unsent(self, slot: str, numel: int) -> Tensor | None:
        """Return what a slot has yet to send as flat values: its residual, rotated back if the codec rotates."""
        residual, signs = self.residual(slot), self.rotation_seed
        if residual is None or signs is None:
            return residual
        return rotate_back(residual, signs)[:numel]

    def restore_memories(self, copies: Mapping[str, SlotMemory]) -> None:
        super().restore_memories(copies)
        self._pending.clear()
        self._inputs.clear()

    def checked_state(self, state: Mapping[str, Tensor]) -> Callable[[], None]:
        replace = super().checked_state(state)

        def replace_all() -> None:
            replace()
            for memory in self._memories.values():
                memory.residual = None if memory.residual is None else memory.residual.view(-1)
            self._pending.clear()
            self._inputs.clear()
            self._specs.clear()

        return replace_all
