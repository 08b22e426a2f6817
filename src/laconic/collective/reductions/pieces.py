"""Tensors, or parts of large ones, on their way through one sum of packets, and the memory of their sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.packet import Packet, TensorSpec, allocate

__all__ = ["PendingSum", "Piece", "SumArena", "grouped"]

LARGE = 1 << 20
"""From this number of values on a tensor is summed in place. Smaller ones are gathered into one sum."""


class SumArena:
    """Memory for sections, each with one more 32-bit word, in which the sum counts its ranks."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.with_count = torch.empty(0, dtype=torch.uint8)
        """The section taken last, and the word behind it."""
        self._buffers: list[Tensor] = []
        self._taken = 0

    def reset(self, device: torch.device) -> SumArena:
        """Reuse the memory for new packets."""
        self.device, self._taken = device, 0
        return self

    def take(self, nbytes: int) -> Tensor:
        if self._taken == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        buffer = self._buffers[self._taken]
        if buffer.numel() < nbytes + 4 or buffer.device != self.device:
            buffer = self._buffers[self._taken] = allocate(TensorSpec((nbytes + 4,), torch.uint8), self.device)
        self._taken += 1
        self.with_count = buffer[: nbytes + 4]
        return buffer[:nbytes]

    def trim(self, section: Tensor, nbytes: int) -> Tensor:
        self.with_count = self._buffers[self._taken - 1][: nbytes + 4]
        return section[:nbytes]


@dataclass
class Piece:
    """A tensor, or a part of a large one, in one round."""

    name: str
    slot: str
    x: Tensor
    out: Tensor
    agreed: Tensor
    """This rank's probe until the agreement, then the agreed value."""
    packet: Packet | None = None


@dataclass
class PendingSum:
    """Pieces whose values are summed by one all-reduce."""

    pieces: list[Piece]
    words: Tensor
    work: Any


def grouped(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield large pieces alone and small ones in groups."""
    group: list[Piece] = []
    numel = 0
    for piece in pieces:
        if piece.x.numel() >= LARGE:
            yield [piece]
            continue
        group.append(piece)
        numel += piece.x.numel()
        if numel >= LARGE:
            yield group
            group, numel = [], 0
    if group:
        yield group
