"""DeviceResiduals: the residuals of the slots of one message or sum on a GPU, as float32 for the time of a round.

Encoders update float32 residuals in place. Residuals that are kept otherwise are loaded before and stored after them,
each by one launch for all slots, in memory that the rounds of an exchange share because they run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from laconic import kernels
from laconic.aggregate.homomorphic.contributor import Contributor
from laconic.kernels.random import hash_of, splitmix64
from laconic.residuals import KeepsResiduals

__all__ = ["DeviceResiduals", "RoundNumbers", "Workspace", "residuals_of"]


class Workspace:
    """Memory that rounds share, as large as the largest of them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def floats(self, numel: int, device: torch.device) -> Tensor:
        """Return the first values of the memory, which grows if need be."""
        if self._memory.numel() < numel or self._memory.device != device:
            self._memory = torch.empty(numel, device=device)
        return self._memory[:numel]

    def split(self, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Return memory for tensors of these sizes, each at a multiple of 16 bytes."""
        begins = list(accumulate((-(-size // 4) * 4 for size in sizes), initial=0))
        memory = self.floats(begins[-1], device)
        return [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]


class RoundNumbers:
    """The round of each slot, counted on the device, and the keys that follow from it.

    Nothing is copied from the host unless rounds do not follow one another.

    Args:
        inner: A number for each slot; the seed of a round is ``splitmix64(round ^ inner)``.
        names: The slots, for the keys of their residuals; None for the keys of rounding.
    """

    def __init__(self, inner: Sequence[int], names: Sequence[str] | None, device: torch.device) -> None:
        self._inner = _int64(inner, device)
        self._names = None if names is None else _int64([hash_of(name) for name in names], device)
        self._rounds, self._next = torch.zeros_like(self._inner), [1] * len(inner)
        self.keys = torch.zeros(len(inner), 2, dtype=torch.int32, device=device)

    def begin(self, rounds: Sequence[int]) -> None:
        """Let these be the rounds of the slots."""
        wanted = list(rounds)
        if wanted != self._next:
            self._rounds.copy_(torch.tensor(wanted, dtype=torch.int64) - 1, non_blocking=True)
        self._next = [number + 1 for number in wanted]

    def draw(self, backend: kernels.MultiTensorKernels) -> Tensor:
        """Count a round on the device, and return its keys."""
        backend.next_round_keys(self._rounds, self._inner, self.keys, self._names)
        return self.keys


class DeviceResiduals:
    """Residuals for encoders that update float32 in place.

    Args:
        keeper: Who keeps them.
        slots: Their names.
        stored: The residuals as they are kept.
        inner: A number for each slot; the seed of a round is ``splitmix64(round ^ inner)``.
        device: Where the encoders run.
    """

    def __init__(
        self, keeper: KeepsResiduals, slots: Sequence[str], stored: list[Tensor], inner: Sequence[int],
        device: torch.device, workspace: Workspace,
    ) -> None:  # fmt: skip
        self._stored, self._storage, self._are_kept = stored, keeper.storage, keeper.watch(slots, stored)
        self._in_place = self._storage.in_place(device)
        self._rounds: RoundNumbers | None = None
        self.floats = stored
        if not self._in_place:
            self.floats = workspace.split([x.numel() for x in stored], device)
            if self._storage.dtype != torch.float32:
                self._rounds = RoundNumbers(inner, slots, device)
        self._keys = torch.zeros(len(stored), 2, dtype=torch.int32, device=device)

    @property
    def current(self) -> bool:
        """Whether the same residuals are still kept."""
        return self._are_kept()

    def begin_round(self, rounds: Sequence[int]) -> None:
        """Note the round of each slot, before the work of the round is launched or replayed."""
        if self._rounds is not None:
            self._rounds.begin(rounds)

    def load(self) -> None:
        """Begin a round: let ``floats`` hold the residuals."""
        if not self._in_place:
            self._storage.load_all(self._stored, self.floats)

    def store(self, backend: kernels.MultiTensorKernels) -> None:
        """End a round: keep ``floats``. A residual that did not change is kept as it is."""
        if not self._in_place:
            keys = self._keys if self._rounds is None else self._rounds.draw(backend)
            self._storage.store_all(self.floats, self._stored, keys)


def residuals_of(
    contributor: Contributor, slots: Sequence[str], sizes: Sequence[int], device: torch.device, workspace: Workspace
) -> DeviceResiduals:
    """Return the residuals of a contributor to sums."""
    stored, inner = contributor.residuals_of(slots, sizes, device), [splitmix64(contributor.worker)] * len(slots)
    return DeviceResiduals(contributor, slots, stored, inner, device, workspace)


def _int64(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return unsigned 64-bit numbers as a tensor with the same bits."""
    import numpy as np

    return torch.from_numpy(np.array(numbers, dtype=np.uint64).view(np.int64)).to(device, non_blocking=True)
