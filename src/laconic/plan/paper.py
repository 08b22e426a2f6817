"""The time of an update by Jang, Na and Yoon 2017, to the letter.

M workers do what one node did in minibatches of C seconds, and exchange W bytes each after every i iterations, over a
link of ``bandwidth`` bytes per second that all share::

    T_cmt = i C / M                                         computation
    T_inf = M W / bandwidth                                 transfer, in one direction
    gzip at every update                                    T_inf times rho, and four times over: a worker compresses,
                                                            the server decompresses, compresses, a worker decompresses
    homomorphic: h T_cmt + rho T_inf                        compressed once, never decompressed

Rho is compressed over original. The paper does not say whether a server decompresses all M messages, or whether that is
hidden; ``server_decompressions`` is M by default, because it must have all of them to average them, and 1 for the most
favourable reading. Figures 4 to 7 are these functions; ``Bound`` is what section 5 derives from the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laconic.errors import ConfigError
from laconic.plan.bound import Bound

__all__ = ["Naive", "Training", "Update"]


@dataclass(frozen=True)
class Naive:
    """A compression at every update: its size over the original, and seconds for all of a model.

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
                raise ConfigError(f"{name} must be a finite number, not below 0, got {value!r}")

    @classmethod
    def of(cls, nbytes: float, *, times_smaller: float, compress_s: float, decompress_s: float) -> Naive:
        """As table 1 gives it: original over compressed."""
        if not 0 < times_smaller < math.inf or not nbytes > 0:
            raise ConfigError(f"a file of {nbytes} bytes cannot be {times_smaller} times smaller")
        return cls(1 / times_smaller, compress_s, decompress_s)


@dataclass(frozen=True)
class Update:
    """Seconds of one update, by what they go to."""

    compute: float
    transfer: float
    compress: float = 0.0
    decompress: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.transfer + self.compress + self.decompress


@dataclass(frozen=True)
class Training:
    """A training as the paper describes one.

    Args:
        nbytes: W.
        step_s: C, of a minibatch on one node.
        bandwidth: Bytes per second of the link that all share.
        every: i, iterations of one update.
    """

    nbytes: float
    step_s: float
    bandwidth: float
    every: int = 1

    def __post_init__(self) -> None:
        self.bound(1)  # which refuses nonsense

    def bound(self, workers: int) -> Bound:
        return Bound(workers, self.nbytes, self.step_s, self.bandwidth, self.every)

    def one_node(self) -> Update:
        """The same iterations without a network."""
        return Update(self.every * self.step_s, 0.0)

    def ideal(self, workers: int) -> Update:
        return Update(self.bound(workers).ideal_s, 0.0)

    def vanilla(self, workers: int) -> Update:
        bound = self.bound(workers)
        return Update(bound.ideal_s, workers * self.nbytes / self.bandwidth)

    def naive(self, workers: int, by: Naive, *, server_decompressions: int | None = None) -> Update:
        """With a compression at every update that cannot be computed with."""
        plain = self.vanilla(workers)
        at_server = workers if server_decompressions is None else server_decompressions
        return Update(
            plain.compute, by.rho * plain.transfer, 2 * by.compress_s, (1 + at_server) * by.decompress_s
        )  # fmt: skip

    def homomorphic(self, workers: int, *, rho: float, h: float) -> Update:
        plain, bound = self.vanilla(workers), self.bound(workers)
        bound.r_min(rho, h)  # which refuses nonsense
        return Update(h * plain.compute, rho * plain.transfer)

    def speed_up(self, update: Update) -> float:
        """Over one node."""
        return self.one_node().total / update.total

    @property
    def crossover(self) -> float:
        """The number of workers at which the transfer takes as long as the computation: sqrt(i C bandwidth / W)."""
        return math.sqrt(self.every * self.step_s * self.bandwidth / self.nbytes)

    @property
    def most_useful(self) -> float:
        """Workers beyond which the transfer alone takes longer than one node: i C bandwidth / W."""
        return self.crossover**2

    def total(self, update: Update, iterations: int, once: float = 0.0) -> float:
        """Seconds of so many iterations, all of them updates of ``every``; ``once`` is what is done once."""
        return once + update.total * iterations / self.every
