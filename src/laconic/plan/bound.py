"""The bound of Jang, Na and Yoon 2017: when training with compressed layers pays.

M workers share one link to a server. A dense model of W bytes takes C seconds for one minibatch on one node; workers
exchange every ``i`` iterations. A model compressed to ``rho`` of its bytes computes in ``h`` times the time::

    T(rho, h) = h i C / M + rho M W / BW        seconds between two exchanges; M nodes share the work of one
    k         = M² W / (i C BW)                 time of a dense exchange, in units of the ideal i C / M
    r_min     = h + k rho                       T in these units: 1 is as fast as M nodes without a network

A target of r times the ideal time is feasible if r_min <= r. As in the paper, only one direction of the exchange
counts. The time to encode and decode belongs to h: see ``with_encoding``. Rho is compressed over original size
throughout (the paper uses the letter for both).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from laconic.errors import ConfigError
from laconic.plan import formulas

__all__ = ["Bound"]


@dataclass(frozen=True)
class Bound:
    """A distributed training, for the bound on h and rho.

    Args:
        workers: M.
        nbytes: W, bytes of the dense parameters.
        step_s: C, seconds of one minibatch of the dense model on one node.
        bandwidth: BW, bytes per second of the server's link.
        every: i, iterations between two exchanges.

    >>> alexnet = Bound(workers=16, nbytes=244.4e6, step_s=0.6, bandwidth=125e6, every=200)
    >>> round(alexnet.slope, 2), round(alexnet.r_min(0.057, 0.29), 2), alexnet.feasible(0.057, 0.29, target=1.0)
    (4.17, 0.53, True)
    """

    workers: int
    nbytes: float
    step_s: float
    bandwidth: float
    every: int = 1

    def __post_init__(self) -> None:
        for name in ("workers", "every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("nbytes", "step_s", "bandwidth"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be finite and above 0, got {value!r}")

    @property
    def ideal_s(self) -> float:
        """i C / M: seconds between exchanges if the network took no time."""
        return formulas.ideal_s(self.workers, self.step_s, self.every)

    @property
    def slope(self) -> float:
        """k: the time of a dense exchange over the ideal time."""
        return formulas.slope(self.workers, self.nbytes, self.step_s, self.bandwidth, self.every)

    def seconds(self, rho: float = 1.0, h: float = 1.0) -> float:
        """T(rho, h): seconds between two exchanges."""
        _check(rho, h)
        transfer_s = formulas.transfer_s(self.workers, self.nbytes, self.bandwidth)
        return formulas.total_s(formulas.homomorphic_update(self.ideal_s, transfer_s, rho, h))

    def r_min(self, rho: float = 1.0, h: float = 1.0) -> float:
        """T(rho, h) over the ideal time: the smallest feasible target."""
        _check(rho, h)
        return formulas.r_min(self.slope, rho, h)

    def feasible(self, rho: float, h: float, *, target: float) -> bool:
        """Whether h <= r - k rho."""
        return self.r_min(rho, h) <= target

    def over_one_node(self, rho: float = 1.0, h: float = 1.0) -> float:
        """Return the speed-up over one node with the dense model."""
        _check(rho, h)
        return formulas.over_one_node(self.slope, self.workers, rho, h)

    def over_vanilla(self, rho: float, h: float) -> float:
        """Return the speed-up over the same workers with the dense model."""
        _check(rho, h)
        return formulas.over_vanilla(self.slope, rho, h)

    def beats_one_node(self, rho: float, h: float) -> bool:
        return self.r_min(rho, h) < self.workers

    def beats_vanilla(self, rho: float, h: float) -> bool:
        """Whether h < 1 + k (1 - rho)."""
        _check(rho, h)
        return h < formulas.limit_of_h(self.slope, rho)

    def largest_rho(self, h: float, *, target: float) -> float:
        """Return the largest feasible rho, at most 1; 0 if h alone already takes too long."""
        _check(1.0, h)
        return min(1.0, max(0.0, (target - h) / self.slope))

    def largest_h(self, rho: float, *, target: float) -> float:
        """Return the largest feasible h; 0 or less means that none is."""
        _check(rho, 1.0)
        return target - self.slope * rho

    def with_encoding(self, h: float, seconds: float) -> float:
        """Return the h of a scheme that also spends these seconds on encoding and decoding, on each worker."""
        return h + seconds / self.ideal_s

    def every_iterations(self, every: int) -> Bound:
        """Return the same training with another i."""
        return replace(self, every=every)


def _check(rho: float, h: float) -> None:
    for name, value in (("rho", rho), ("h", h)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be finite and at least 0, got {value!r}")
