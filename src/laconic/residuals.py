"""KeepsResiduals: error feedback per slot, the base of channels and of the workers of a sum.

A residual is what a lossy codec did not send of a slot; the next round adds it, times its decay, to the tensor. Some
codecs keep a second tensor beside it: momentum's velocity, or the start of PowerSGD's power iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from laconic import counters
from laconic.counters import LogOnce
from laconic.errors import InputError, NonFiniteError
from laconic.residual_storage import ResidualStorage

__all__ = ["KeepsResiduals", "RoundStats", "SlotMemory", "saved_by_name", "saved_floats"]

log = logging.getLogger("laconic")


@dataclass
class RoundStats:
    """Counts of what happened to slots over the rounds; each event was also logged once."""

    rounds: int = 0
    skipped_nonfinite: int = 0
    residual_resets: int = 0


@dataclass
class SlotMemory:
    """Tensors that one slot keeps between rounds."""

    residual: Tensor | None = None
    previous: Tensor | None = None
    """The residual before the last round, which restores it if all workers drop that round."""
    companion: Tensor | None = None
    """Velocity of momentum, or start of a power iteration."""


_residual = attrgetter("residual")


class KeepsResiduals:
    """Residuals by slot name, with the events that reset them and a state that can be saved.

    Args:
        companion: Name of the second tensor in ``state_dict``: ``velocity`` or ``start``.
        stats: Counts resets in ``residual_resets``.
        storage: In which dtype and where residuals are kept between rounds.
    """

    def __init__(self, companion: str, stats: RoundStats, storage: ResidualStorage | None = None) -> None:
        self._companion, self._reset_stats = companion, stats
        self.storage = ResidualStorage() if storage is None else storage
        self._memories: dict[str, SlotMemory] = {}
        self._warn_once = LogOnce("stats")

    def _memory(self, slot: str) -> SlotMemory:
        memory = self._memories.get(slot)
        if memory is None:
            memory = self._memories[slot] = SlotMemory()
        return memory

    def _fitting_memory(self, slot: str, shape: tuple[int, ...], device: torch.device) -> SlotMemory:
        """Return a slot's memory on a device; a residual of another shape is reset, counted and logged."""
        memory = self._memory(slot)
        residual = memory.residual
        if residual is None:
            return memory
        if residual.shape != shape:
            before, memory.previous = list(residual.shape), None
            self._reset(memory)
            log.warning("slot %r changed its shape from %s to %s: its residual is reset", slot, before, list(shape))
        elif not self.storage.fits(residual, device):  # a state loaded on the CPU may serve a GPU
            memory.residual, companion = self.storage.moved(residual, device), memory.companion
            if companion is not None:
                kept = self._companion == "velocity"
                memory.companion = self.storage.moved(companion, device) if kept else companion.to(device)
        return memory

    def _reset_overflowed(self, slot: str) -> None:
        self._reset(self._memories[slot])
        log.warning("slot %r: its residual overflowed float32 and is reset", slot)

    def _reset(self, memory: SlotMemory) -> None:
        self._finish_writes()
        memory.residual = None
        if self._companion == "velocity":  # the start of a power iteration is common to all workers: it stays valid
            memory.companion = None
        self._reset_stats.residual_resets += 1

    def forget(self, slots: Iterable[str], why: str) -> None:
        """Drop the residuals of these slots, because they no longer describe what is exchanged.

        Args:
            slots: Slots without a residual are ignored.
            why: Completes the log message "residuals are reset: ".
        """
        for slot in slots:
            memory = self._memories.get(slot)
            if memory is not None and memory.residual is not None:
                memory.previous = None
                self._reset(memory)
                self._warn_once(why, f"residuals are reset: {why}")

    def residual(self, slot: str) -> Tensor | None:
        """Return what a slot has yet to send, in float32; None if it has no residual."""
        stored = self.stored(slot)
        if stored is not None:
            self._finish_writes()
        return None if stored is None else stored.to(torch.float32)

    def stored(self, slot: str) -> Tensor | None:
        """Return the residual of a slot as it is kept; None if it has none."""
        memory = self._memories.get(slot)
        return None if memory is None else memory.residual

    def watch(self, slots: Sequence[str], residuals: Sequence[Tensor]) -> Callable[[], bool]:
        """Return a function that says whether these are still the residuals of the slots: the same tensors."""
        memories, kept = self._memories, [self._memory(slot) for slot in slots]
        # Without Python's own loop: an attached step on a GPU asks for every DDP bucket.
        return lambda: self._memories is memories and all(map(is_, map(_residual, kept), residuals))

    def companion(self, slot: str) -> Tensor | None:
        """Return the second tensor of a slot, in float32; None if it has none."""
        memory = self._memories.get(slot)
        if memory is None or memory.companion is None:
            return None
        self._finish_writes()
        return memory.companion.to(torch.float32)

    @property
    def residual_nbytes(self) -> int:
        """The bytes that residuals, and velocities of momentum, take between rounds."""
        kept = [x for memory in self._memories.values() for x in (memory.residual, memory.previous)]
        if self._companion == "velocity":
            kept += [memory.companion for memory in self._memories.values()]
        return sum(x.nbytes for x in kept if x is not None)

    def _finish_writes(self) -> None:
        """Wait for a GPU that writes residuals in the memory of the host, before the host reads or releases them."""
        if self.storage.device is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let the rounds of the block neither use nor change residuals: what this worker contributes is not its own.

        The start of a power iteration is common to all workers and takes part.
        """
        common = self._companion == "start"
        kept, self._memories = self._memories, {}
        if common:
            self._memories = {slot: SlotMemory(companion=memory.companion) for slot, memory in kept.items()}
        try:
            yield
        finally:
            if common:
                for slot, memory in self._memories.items():
                    kept.setdefault(slot, SlotMemory()).companion = memory.companion
            self._memories = kept

    def copy_memories(self, into: Mapping[str, SlotMemory] | None = None) -> dict[str, SlotMemory]:
        """Return a copy of all memory, in the tensors of an earlier copy where they fit."""
        self._finish_writes()
        reused, copies = into or {}, {}
        for slot, memory in self._memories.items():
            earlier = reused.get(slot) or SlotMemory()
            copies[slot] = SlotMemory(
                _copy(memory.residual, earlier.residual), None, _copy(memory.companion, earlier.companion)
            )
        return copies

    def restore_memories(self, copies: Mapping[str, SlotMemory]) -> None:
        """Return to the memory of a copy, whose tensors must not be used for another copy afterwards."""
        self._finish_writes()
        self._memories = dict(copies)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all memory, to be saved with the model: ``slot/residual``, ``slot/velocity`` or ``slot/start``.

        Residuals have the dtype in which they are kept, so that a resumed run has the same bits.
        """
        self._finish_writes()
        state = {}
        for slot, memory in self._memories.items():
            for part, tensor in (("residual", memory.residual), (self._companion, memory.companion)):
                if tensor is not None:
                    state[f"{slot}/{part}"] = tensor.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the memory by a saved one; an invalid state changes nothing."""
        self.checked_state(state)()

    def checked_state(self, state: Mapping[str, Tensor]) -> Callable[[], None]:
        """Check a saved state; return the function that replaces the memory by it."""
        memories: dict[str, SlotMemory] = {}
        converted = 0
        for key, tensor in saved_by_name(state).items():
            slot, _, part = key.rpartition("/")
            if part not in ("residual", self._companion):
                raise InputError(
                    f"expected float tensors named 'slot/residual' or 'slot/{self._companion}', got {key!r}"
                )
            loaded = saved_floats(key, tensor).contiguous()
            if part != "start":
                kept = self._kept_as_saved(key, tensor, loaded)
                converted += kept is None
                loaded = self.storage.rounded(loaded, key, 0) if kept is None else kept
            setattr(memories.setdefault(slot, SlotMemory()), "residual" if part == "residual" else "companion", loaded)
        for slot, memory in memories.items():
            residual, companion = memory.residual, memory.companion
            if companion is None:
                continue
            if self._companion == "velocity" and (residual is None or residual.shape != companion.shape):
                raise InputError(f"{slot + '/velocity'!r} must have a residual of the same shape beside it")
            if self._companion == "start":
                _check_start(f"{slot}/start", companion)

        def replace() -> None:
            self._finish_writes()
            self._memories = memories
            if converted:
                name = str(self.storage.dtype).removeprefix("torch.")
                counters.count("residual_conversions", converted, f"saved residuals of another dtype become {name}")

        return replace

    def _kept_as_saved(self, key: str, saved: Tensor, loaded: Tensor) -> Tensor | None:
        """Return a saved tensor in the dtype in which it is kept; None if it was saved in another."""
        if saved.dtype == self.storage.dtype:
            return loaded.to(saved.dtype)
        if self.storage.dtype == torch.bfloat16:  # a state that is always float32, as that of FSDP, may hold the same
            short = loaded.to(torch.bfloat16)
            return short if torch.equal(short.to(torch.float32), loaded) else None
        return None


def saved_by_name(state: object) -> Mapping[str, Any]:
    """Return a saved state, or a part of one; an error if it is not a mapping from names."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise InputError(f"expected the result of state_dict, a mapping from names, got {repr(state)[:60]}")
    return state


def saved_floats(key: str, tensor: object) -> Tensor:
    """Return a copy of a saved tensor in float32; an error names its key if it is not finite there."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(f"{key!r} in the saved state must be a float tensor, got {kind}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise InputError(f"{key!r} in the saved state must be a dense tensor with values, got {tensor.layout}")
    # Converted first: a float64 value may be finite and infinite in float32.
    loaded = tensor.detach().to(torch.float32).clone()
    if not bool(torch.isfinite(loaded).all()):
        raise NonFiniteError(
            f"{key!r} in the saved state is not finite in float32: load an earlier state, or leave this tensor out"
        )
    return loaded


def _check_start(key: str, start: Tensor) -> None:
    """Check where a power iteration continues: a larger start would overflow in every round."""
    if start.dim() != 2:
        raise InputError(f"{key!r} must be a matrix, got {start.dim()} dimensions")
    if start.numel() and not float(start.abs().max()) <= 1.0:
        raise InputError(f"{key!r} must hold values from -1 to 1, got {float(start.abs().max()):g}")


def _copy(x: Tensor | None, into: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    if into is None or into.shape != x.shape or into.device != x.device or into.dtype != x.dtype:
        into = torch.empty_like(x)
    return into.copy_(x)
