"""Data shards: which examples each worker trains on in each iteration. Pure functions; there is no state to save."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.kernels import random

__all__ = ["Shards", "shuffled"]

SHARD_STREAM, ORDER_STREAM = 301, 302
"""Streams of the seed; codecs and studies use others."""


def shuffled(first: int, count: int, key: int) -> Tensor:
    """Return 0 to ``count`` - 1 in the order of the hashes of ``first``, ``first`` + 1, …: equal on every machine."""
    return random.hash32(torch.arange(first, first + count), key).argsort(stable=True)


@dataclass(frozen=True)
class Shards:
    """Disjoint shards of the training examples, one per worker, each in a new order every epoch.

    A shard has ``num_examples // workers`` examples and never changes; the remainder is not used. In an epoch a worker
    takes all full batches of its shard; which examples are left over changes with the order.

    Args:
        seed: Seed of shards and orders.

    >>> shards = Shards(num_examples=10, workers=2, batch=2, seed=0)
    >>> shards.iterations_per_epoch
    2
    >>> shards.indices(worker=1, iteration=1000)
    tensor([2, 6])
    """

    num_examples: int
    workers: int
    batch: int
    seed: int
    _orders: dict[int, tuple[int, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_examples", "workers", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch > self.shard_size:
            raise ConfigError(
                f"each of {self.workers} workers gets {self.shard_size} of {self.num_examples} examples, too few for a "
                f"batch of {self.batch}: use a smaller batch or fewer workers"
            )

    @property
    def shard_size(self) -> int:
        """Examples of each worker."""
        return self.num_examples // self.workers

    @property
    def iterations_per_epoch(self) -> int:
        return self.shard_size // self.batch

    def indices(self, worker: int, iteration: int) -> Tensor:
        """Return the example numbers (int64) of a worker in an iteration; both count from 0."""
        if not (0 <= worker < self.workers and iteration >= 0):
            raise ConfigError(
                f"worker must be from 0 to {self.workers - 1} and iteration at least 0, got worker {worker} and "
                f"iteration {iteration}"
            )
        epoch, step = divmod(iteration, self.iterations_per_epoch)
        return self._order(worker, epoch)[step * self.batch : (step + 1) * self.batch].clone()

    def epoch(self, worker: int, epoch: int) -> Tensor:
        """Return the example numbers of a worker in all iterations of an epoch, one after the other."""
        return self._order(worker, epoch)[: self.iterations_per_epoch * self.batch].clone()

    def joined(self, iteration: int) -> Tensor:
        """Return the example numbers of all workers in an iteration, for the same training in one process."""
        return torch.cat([self.indices(worker, iteration) for worker in range(self.workers)])

    def _order(self, worker: int, epoch: int) -> Tensor:
        """Return a worker's shard in the order of an epoch. The last order of each worker is cached."""
        cached = self._orders.get(worker)
        if cached is None or cached[0] != epoch:
            first = worker * self.shard_size
            order = shuffled(first, self.shard_size, random.key(random.key(self.seed, ORDER_STREAM), epoch))
            cached = self._orders[worker] = epoch, self._shards[first : first + self.shard_size][order]
        return cached[1]

    @cached_property
    def _shards(self) -> Tensor:
        """All shards, one after the other."""
        return shuffled(0, self.num_examples, random.key(self.seed, SHARD_STREAM))
