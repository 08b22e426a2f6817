"""Ranges of slots: how tensors are cut into shards, and residuals kept by range put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.channels import Channel

__all__ = ["PART", "Range", "cut_by_owner", "cut_into_parts", "join_residuals", "split_residual"]

PART = 1 << 22
"""The largest number of values of a tensor in one part: one part is encoded while another is on its way."""

SHARD_ALIGNMENT = 256
"""Shards begin at multiples of this, which suits packed bits."""


@dataclass(frozen=True)
class Range:
    """The part of a slot that one rank owns."""

    slot: int
    begin: int
    end: int
    owner: int
    name: str


def cut_into_parts(sizes: Sequence[tuple[str, int]], limit: int, ranks: int) -> Iterator[list[Range]]:
    """Yield parts of bounded size. A tensor's cuts depend on its size alone, so its residuals stay valid.

    Args:
        sizes: Name and number of values of each slot.
        limit: The largest number of values of several slots in one part.
        ranks: The number of shards of each slot.
    """
    part: list[Range] = []
    numel = 0
    for index, (slot, slot_numel) in enumerate(sizes):
        for begin in range(0, slot_numel, PART):
            end = min(begin + PART, slot_numel)
            if numel and numel + end - begin > limit:
                yield part
                part, numel = [], 0
            step = -(-(end - begin) // ranks)
            step = -(-step // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
            for owner, first in enumerate(range(begin, end, step)):
                last = min(first + step, end)
                part.append(Range(index, first, last, owner, f"{slot}[{first}:{last}]"))
            numel += end - begin
    if part:
        yield part


def cut_by_owner(sizes: Sequence[tuple[str, int]], limit: int, ranks: int) -> Iterator[list[Range]]:
    """Yield parts of bounded size of tensors whose shards are given: equally many values of each rank in its order.

    Args:
        sizes: Name and number of values per rank of each slot.
        limit: The largest number of values of all ranks in one part.
        ranks: The number of shards of each slot.
    """
    part: list[Range] = []
    numel = 0
    step = max(limit // ranks // SHARD_ALIGNMENT, 1) * SHARD_ALIGNMENT
    for index, (slot, shard_numel) in enumerate(sizes):
        for first in range(0, shard_numel, step):
            last = min(first + step, shard_numel)
            if numel and numel + (last - first) * ranks > limit:
                yield part
                part, numel = [], 0
            for owner in range(ranks):
                begin, end = owner * shard_numel + first, owner * shard_numel + last
                part.append(Range(index, begin, end, owner, f"{slot}[{begin}:{end}]"))
            numel += (last - first) * ranks
    if part:
        yield part


def _ranges_of(slot: str, numel: int, ranks: int) -> Iterator[Range]:
    for part in cut_into_parts([(slot, numel)], numel, ranks):
        yield from part


def join_residuals(channel: Channel, slot: str, numel: int, ranks: int, part: str = "residual") -> Tensor | None:
    """Return the residual, or velocity, of a slot, put together from its ranges; None if no range has one."""
    of = channel.residual if part == "residual" else channel.companion
    found = [(piece, of(piece.name)) for piece in _ranges_of(slot, numel, ranks)]
    kept = [(piece, residual) for piece, residual in found if residual is not None]
    if not kept:
        return None
    whole = torch.zeros(numel, device=kept[0][1].device)
    for piece, residual in kept:
        whole[piece.begin : piece.end] = residual.view(-1)
    return whole


def split_residual(whole: Tensor, slot: str, ranks: int) -> Iterator[tuple[Range, Tensor]]:
    """Yield the ranges of a slot and the part of its residual that belongs to each."""
    whole = whole.reshape(-1)
    for piece in _ranges_of(slot, whole.numel(), ranks):
        yield piece, whole[piece.begin : piece.end]
