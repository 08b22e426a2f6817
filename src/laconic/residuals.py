"""ResidualMemory: error feedback per slot, shared by channels and by the workers of a sum.

A residual is what a lossy codec did not send of a slot; the next round adds it to the tensor. Some codecs keep a second
tensor beside it: momentum's velocity, or the start of PowerSGD's power iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laconic.counters import LogOnce
from laconic.errors import InputError, NonFiniteError

__all__ = ["KeepsResiduals", "ResidualMemory", "SlotMemory"]

log = logging.getLogger("laconic")


class _Stats(Protocol):
    residual_resets: int


@dataclass
class SlotMemory:
    """Tensors that one slot keeps between rounds."""

    residual: Tensor | None = None
    previous: Tensor | None = None
    """The residual before the last round, for ``undo``."""
    companion: Tensor | None = None
    """Velocity of momentum, or start of a power iteration."""

    def undo(self) -> None:
        """Restore the residual from before the last round, which all workers dropped."""
        self.residual, self.previous = self.previous, None


class ResidualMemory:
    """Residuals by slot name, with the events that reset them and a state that can be saved.

    Args:
        companion: Name of the second tensor in ``state_dict``: ``velocity`` or ``start``.
        stats: Counts resets in ``residual_resets``.
    """

    def __init__(self, companion: str, stats: _Stats) -> None:
        self._companion, self._stats = companion, stats
        self._slots: dict[str, SlotMemory] = {}
        self._warn_once = LogOnce("stats")

    def __getitem__(self, slot: str) -> SlotMemory:
        memory = self._slots.get(slot)
        if memory is None:
            memory = self._slots[slot] = SlotMemory()
        return memory

    def residual(self, slot: str) -> Tensor | None:
        memory = self._slots.get(slot)
        return None if memory is None else memory.residual

    def fitting(self, slot: str, shape: tuple[int, ...], device: torch.device) -> SlotMemory:
        """Return a slot's memory on a device; a residual of another shape is reset, counted and logged."""
        memory = self[slot]
        residual = memory.residual
        if residual is None:
            return memory
        if residual.shape != shape:
            before, memory.previous = list(residual.shape), None
            self._reset(slot)
            log.warning("slot %r changed its shape from %s to %s: its residual is reset", slot, before, list(shape))
            return memory
        if residual.device != device:  # a state loaded on the CPU may serve a GPU
            memory.residual = residual.to(device)
            memory.companion = None if memory.companion is None else memory.companion.to(device)
        return memory

    def reset_overflowed(self, slot: str) -> None:
        """Drop a residual that is no longer finite."""
        self._reset(slot)
        log.warning("slot %r: its residual overflowed float32 and is reset", slot)

    def forget(self, slots: Iterable[str], reason: str) -> None:
        """Drop the residuals of these slots, because they no longer describe what is exchanged."""
        for slot in slots:
            if self.residual(slot) is None:
                continue
            self._slots[slot].previous = None
            self._reset(slot)
            self._warn_once(reason, f"residuals are reset: {reason}")

    def _reset(self, slot: str) -> None:
        memory = self._slots[slot]
        memory.residual = None
        if self._companion == "velocity":  # the start of a power iteration is the workers' common one: it stays valid
            memory.companion = None
        self._stats.residual_resets += 1

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{slot}/{part}": tensor.clone() for slot, part, tensor in self._tensors()}

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        for slot, memory in self._slots.items():
            for part, tensor in (("residual", memory.residual), (self._companion, memory.companion)):
                if tensor is not None:
                    yield slot, part, tensor

    def load_state_dict(self, state: Mapping[str, Tensor], *, flat: bool = False) -> None:
        """Replace all memory by a saved state; an invalid state changes nothing."""
        slots: dict[str, SlotMemory] = {}
        for key, tensor in state.items():
            slot, _, part = key.rpartition("/")
            valid = isinstance(tensor, Tensor) and tensor.is_floating_point()
            if not valid or part not in ("residual", self._companion):
                raise InputError(
                    f"expected float tensors named 'slot/residual' or 'slot/{self._companion}', got {key!r}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"{key!r} in the saved state is not finite")
            memory, loaded = (
                slots.setdefault(slot, SlotMemory()),
                tensor.detach().to(torch.float32).clone().contiguous(),
            )
            if part == "residual":
                memory.residual = loaded.view(-1) if flat else loaded
            else:
                memory.companion = loaded
        for slot, memory in slots.items():
            self._check_companion(slot, memory)
        self._slots = slots

    def _check_companion(self, slot: str, memory: SlotMemory) -> None:
        residual, companion = memory.residual, memory.companion
        if companion is None:
            return
        if self._companion == "velocity" and (residual is None or residual.shape != companion.shape):
            raise InputError(f"{slot + '/velocity'!r} must have a residual of the same shape beside it")
        if self._companion == "start" and companion.dim() != 2:
            raise InputError(f"{slot + '/start'!r} must be a matrix, got {companion.dim()} dimensions")


class KeepsResiduals:
    """Public methods of a class that keeps its residuals in ``_memory``."""

    _memory: ResidualMemory

    def forget(self, slots: Iterable[str], why: str) -> None:
        """Drop the residuals of these slots, because they no longer describe what is exchanged.

        Args:
            slots: Slots without a residual are ignored.
            why: Completes the log message "residuals are reset: ".
        """
        self._memory.forget(slots, why)

    def residual(self, slot: str) -> Tensor | None:
        """Return what a slot has yet to send; None if it has no residual."""
        return self._memory.residual(slot)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all memory, to be saved with the model: ``slot/residual``, ``slot/velocity`` or ``slot/start``."""
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the memory by a saved one; an invalid state changes nothing."""
        self._memory.load_state_dict(state)
