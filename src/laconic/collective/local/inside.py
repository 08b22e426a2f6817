"""ReplicaRanks: the ranks of one DDP replica share its exchange, so that slow links carry the model once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective.consistency import peer_failure_as_error
from laconic.collective.groups import device_of, group_of_same_ranks, ranks_of
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce, broadcast_all
from laconic.errors import LaconicError, NonFiniteError

__all__ = ["ReplicaRanks"]


class ReplicaRanks:
    """Ranks with the same parameters. Each exchanges some slots with its counterparts and sends the others the means.

    Args:
        group: The ranks of the replica.
        timeout_s: How long they wait for each other; None: as long as those of ``group``.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float | None) -> None:
        self.stats = ExchangeStats()
        self.group = group_of_same_ranks(group, timeout_s, self.stats)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def mean(self, named: Sequence[tuple[str, Tensor]], mean: Callable[[list[tuple[str, Tensor]]], None]) -> None:
        """Replace tensors by their means, of which this rank computes its part by ``mean``."""
        owners = self._owners([x.numel() for _, x in named])
        parts: list[list[tuple[str, Tensor]]] = [[] for _ in range(self.size)]
        for pair, owner in zip(named, owners, strict=True):
            parts[owner].append(pair)
        error: LaconicError | None = None
        try:
            if parts[self.rank]:
                mean(parts[self.rank])
        except LaconicError as raised:  # the others must not wait for means that do not come
            error = raised
        with peer_failure_as_error(self.group, "shared means inside its replica"):
            failed = torch.tensor(
                [0 if error is None else 1 if isinstance(error, NonFiniteError) else 2], device=device_of(self.group)
            )
            all_reduce(failed, self.group, self.stats, dist.ReduceOp.MAX).wait()
            if error is not None:
                raise error
            if int(failed):
                kind = NonFiniteError if int(failed) == 1 else LaconicError
                raise kind("another rank of this replica could not exchange its part: see its error")
            for source, part in zip(ranks_of(self.group), parts, strict=True):
                broadcast_all([x for _, x in part], source, self.group, self.stats)

    def _owners(self, sizes: Sequence[int]) -> list[int]:
        """Return the rank that exchanges each slot: large slots first, each to the rank that has least so far."""
        load, owners = [0] * self.size, [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            owners[index] = load.index(min(load))
            load[owners[index]] += sizes[index]
        return owners
