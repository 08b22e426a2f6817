"""The time of an update by the model of Jang, Na and Yoon 2017.

M workers share the minibatches of one node, C seconds each, and send W bytes each after every i iterations, over a
shared link of ``bandwidth`` bytes per second::

    T_cmt = i C / M                                         computation
    T_inf = M W / bandwidth                                 transfer, in one direction
    gzip at every update                                    rho T_inf; a worker compresses, the server decompresses
                                                            and compresses, a worker decompresses
    homomorphic: h T_cmt + rho T_inf                        compressed once, never decompressed

Rho is compressed over original size. The paper does not say whether the server decompresses all M messages or whether
that is hidden: ``server_decompressions`` is M by default, because an average needs all of them; 1 is the best case.
The paper's figures 4 to 7 plot these functions; ``Bound`` is what its section 5 derives from the last one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laconic.errors import ConfigError
from laconic.plan import formulas
from laconic.plan.bound import Bound

__all__ = ["Naive", "Training", "Update"]


@dataclass(frozen=True)
class Naive:
    """Compression at every update: compressed over original size, and seconds for a whole model.

    >>> Naive.of(233e6, times_smaller=1.079, compress_s=8.079, decompress_s=1.898).rho
    0.9267840593141798
    """

    rho: float
    compress_s: float
    decompress_s: float

    def __post_init__(self) -> None:
        for name in ("rho", "compress_s", "decompress_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be finite and at least 0, got {value!r}")

    @classmethod
    def of(cls, nbytes: float, *, times_smaller: float, compress_s: float, decompress_s: float) -> Naive:
        """Return a compression as table 1 of the paper states it: original over compressed size."""
        if not 0 < times_smaller < math.inf or not nbytes > 0:
            raise ConfigError(
                f"nbytes must be above 0 and times_smaller finite and above 0, got {nbytes} and {times_smaller}"
            )
        return cls(1 / times_smaller, compress_s, decompress_s)


@dataclass(frozen=True)
class Update:
    """Seconds of one update, by purpose."""

    compute: float
    transfer: float
    compress: float = 0.0
    decompress: float = 0.0

    @property
    def total(self) -> float:
        return formulas.total_s([self.compute, self.transfer, self.compress, self.decompress])


@dataclass(frozen=True)
class Training:
    """A training in the paper's terms.

    Args:
        nbytes: W, bytes of the dense parameters.
        step_s: C, seconds of a minibatch on one node.
        bandwidth: Bytes per second of the shared link.
        every: i, iterations between two updates.
    """

    nbytes: float
    step_s: float
    bandwidth: float
    every: int = 1

    def __post_init__(self) -> None:
        self.bound(1)  # validates the fields

    def bound(self, workers: int) -> Bound:
        return Bound(workers, self.nbytes, self.step_s, self.bandwidth, self.every)

    def one_node(self) -> Update:
        """Return an update of one node, which needs no network."""
        return Update(self.every * self.step_s, 0.0)

    def ideal(self, workers: int) -> Update:
        return Update(self.bound(workers).ideal_s, 0.0)

    def vanilla(self, workers: int) -> Update:
        bound = self.bound(workers)
        return Update(bound.ideal_s, formulas.transfer_s(workers, self.nbytes, self.bandwidth))

    def naive(self, workers: int, by: Naive, *, server_decompressions: int | None = None) -> Update:
        """Return an update whose messages are decompressed before anything is computed with them."""
        plain = self.vanilla(workers)
        at_server = workers if server_decompressions is None else server_decompressions
        return Update(
            *formulas.naive_update(plain.compute, plain.transfer, by.rho, by.compress_s, by.decompress_s, at_server)
        )

    def homomorphic(self, workers: int, *, rho: float, h: float) -> Update:
        plain, bound = self.vanilla(workers), self.bound(workers)
        bound.r_min(rho, h)  # validates rho and h
        return Update(*formulas.homomorphic_update(plain.compute, plain.transfer, rho, h))

    def speed_up(self, update: Update) -> float:
        """Return the speed-up over one node."""
        return formulas.speed_up(self.one_node().total, update.total)

    @property
    def crossover(self) -> float:
        """The number of workers at which transfer and computation take as long: sqrt(i C bandwidth / W)."""
        return formulas.crossover(self.nbytes, self.step_s, self.bandwidth, self.every)

    @property
    def most_useful(self) -> float:
        """The number of workers beyond which the transfer alone takes longer than one node: i C bandwidth / W."""
        return self.crossover**2

    def total(self, update: Update, iterations: int, once: float = 0.0) -> float:
        """Return the seconds of a training of so many iterations; ``once`` is added once."""
        return once + formulas.training_s(update.total, iterations, self.every)
