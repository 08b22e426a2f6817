"""Which examples each worker takes in each iteration: a function of the numbers alone, with no state to save."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.kernels import random

__all__ = ["Shards", "shuffled"]

SHARES, ORDER = 301, 302
"""Streams of the seed, apart from those that codecs and studies draw from."""


def shuffled(first: int, count: int, key: int) -> Tensor:
    """0 to ``count`` - 1, in the order of the hashes of ``first``, ``first`` + 1 …: the same on every machine."""
    return random.hash32(torch.arange(first, first + count), key).argsort(stable=True)


@dataclass(frozen=True)
class Shards:
    """Exclusive shares of the training examples, one a worker, each in a new order every epoch.

    A share is ``num_examples // workers`` examples and stays the same; what does not divide is left out for good. In
    an epoch a worker takes as many whole batches of its share as there are; the rest changes with the order.

    Args:
        num_examples: How many there are to share.
        workers: How many share them.
        batch: Examples that a worker takes in an iteration.
        seed: Decides shares and orders.

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
        if self.batch > self.share:
            raise ConfigError(
                f"of {self.num_examples} examples each of {self.workers} workers gets {self.share}, too few for a "
                f"batch of {self.batch}: take a smaller batch or fewer workers"
            )

    @property
    def share(self) -> int:
        """Examples of each worker."""
        return self.num_examples // self.workers

    @property
    def iterations_per_epoch(self) -> int:
        return self.share // self.batch

    def indices(self, worker: int, iteration: int) -> Tensor:
        """The numbers of the examples (int64) that a worker takes in an iteration; both count from 0."""
        if not (0 <= worker < self.workers and iteration >= 0):
            raise ConfigError(
                f"there are workers 0 to {self.workers - 1} and iterations from 0 on, got worker {worker}, "
                f"iteration {iteration}"
            )
        epoch, step = divmod(iteration, self.iterations_per_epoch)
        return self._order(worker, epoch)[step * self.batch : (step + 1) * self.batch].clone()

    def joined(self, iteration: int) -> Tensor:
        """What all workers take in an iteration, one after the other: for the same training in one process."""
        return torch.cat([self.indices(worker, iteration) for worker in range(self.workers)])

    def _order(self, worker: int, epoch: int) -> Tensor:
        """A worker's share in an epoch's order. The last one asked for is kept: the next iteration wants it again."""
        kept = self._orders.get(worker)
        if kept is None or kept[0] != epoch:
            first = worker * self.share
            order = shuffled(first, self.share, random.key(random.key(self.seed, ORDER), epoch))
            kept = self._orders[worker] = epoch, self._shares[first : first + self.share][order]
        return kept[1]

    @cached_property
    def _shares(self) -> Tensor:
        """All shares, one behind the other."""
        return shuffled(0, self.num_examples, random.key(self.seed, SHARES))
