"""ReduceScatter and AllGather: each round of ``ShardRounds`` alone, for tensors whose shards are given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.collective.reductions.ranges import Range, cut_by_owner
from laconic.collective.reductions.shards import GATHER, SCATTER, Part, Plan, Shard, ShardRounds
from laconic.collective.reductions.two_shot import PART_BY_DEVICE
from laconic.collective.transport import all_reduce

__all__ = ["AllGather", "ReduceScatter", "Rows"]

Rows = list[Tensor]
"""A slot's shards by owner: flat, contiguous, float32."""


class _OwnedShards(ShardRounds):
    """Rounds of tensors of shape (ranks, values per rank): row r belongs to rank r."""

    def _cut(self, sizes: Sequence[tuple[str, int]], device: torch.device) -> list[list[Range]]:
        return list(cut_by_owner(sizes, PART_BY_DEVICE.get(device.type, PART_BY_DEVICE["cpu"]), self.transport.size))

    def _parts(self, slots: Sequence[tuple[str, Rows]]) -> list[Part]:
        """Begin a round: return its parts with all receives posted."""
        for slot, rows in slots:
            self._next_round(slot, sum(row.numel() for row in rows))
        self.stats.rounds += 1
        if not slots:
            return []
        device = slots[0][1][0].device
        plans = self._plans_for(tuple((slot, rows[0].numel()) for slot, rows in slots), device)
        return [self._begin_rows(plan, slots, i) for i, plan in enumerate(plans)]

    def _begin_rows(self, plan: Plan, slots: Sequence[tuple[str, Rows]], index: int) -> Part:
        shards: dict[int, list[Shard]] = {}
        for piece in plan.ranges:
            slot, rows = slots[piece.slot]
            row = rows[piece.owner]
            skipped = piece.owner * row.numel()
            values = row[piece.begin - skipped : piece.end - skipped]
            shards.setdefault(piece.owner, []).append(Shard(piece.name, values, self._rounds[slot]))
        return self._begin(plan, shards, (0, index), pinned=slots[0][1][0].is_cuda)


class ReduceScatter(_OwnedShards):
    """Means or sums of which each rank receives its own shard. See ``ShardRounds`` for the arguments.

    A rank's own contribution is not encoded, except with ``momentum``. With ``nonfinite="raise"`` ranks exchange one
    number more, so that all of them raise.
    """

    directions = (SCATTER,)

    def reduce_all(self, slots: Sequence[tuple[str, Rows]], *, mean: bool) -> None:
        """Replace this rank's row of each slot by the mean or the sum over ranks. The other rows are only read."""
        parts = self._parts(slots)
        for i in range(len(parts) + 1):  # one part is encoded while the one before is on its way
            if i < len(parts):
                self._send_shards(parts[i])
            if i > 0:
                unusable = self._add_shards(parts[i - 1], mean=mean)
                for shard in parts[i - 1].of(self.transport.rank):
                    if shard.name in unusable:
                        self._fill_nonfinite(shard)
        if self.nonfinite == "raise":
            self._spread_failure()
        self._finish(parts)

    def _spread_failure(self) -> None:
        found = torch.tensor([len(self._nonfinite_shards)], device=self.transport.device)
        work = all_reduce(found, self.transport.group, self.stats)
        with self.stats.during("wire_s"):
            work.wait()
        if int(found) and not self._nonfinite_shards:
            self._nonfinite_shards.append("a shard of another rank")


class AllGather(_OwnedShards):
    """Shards of all ranks, decoded from the same bytes everywhere. See ``ShardRounds`` for the arguments."""

    directions = (GATHER,)

    def gather_all(self, slots: Sequence[tuple[str, Rows]]) -> None:
        """Replace all rows of each slot by what their owners sent; this rank's own row is what it sends."""
        parts = self._parts(slots)
        for i in range(len(parts) + 1):
            if i < len(parts):
                self._send_own(parts[i], self.transport.rank)
            if i > 0:
                self._receive_all(parts[i - 1])
        self._finish(parts)
