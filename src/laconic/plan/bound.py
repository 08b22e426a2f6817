"""When a compressed training pays: the model of Jang, Na and Yoon 2017, to the letter.

M workers share one link to a server. A dense model of W bytes takes C seconds for one minibatch on one node; workers
exchange every ``i`` iterations. Compressed to ``rho`` of its bytes it computes in ``h`` times the time::

    T(rho, h) = h i C / M + rho M W / BW        seconds between two exchanges, M nodes sharing the work of one
    k         = M² W / (i C BW)                 what the link costs a dense model, in units of the ideal i C / M
    r_min     = h + k rho                       T in these units: 1 is as fast as M nodes without a network

A target of r times the ideal time is feasible when r_min <= r. Only one direction of the exchange is counted, as there.
What it takes to encode and decode belongs to h: ``with_encoding``. Rho is compressed over original throughout (the
paper uses the letter for both).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from laconic.errors import ConfigError

__all__ = ["Bound"]


@dataclass(frozen=True)
class Bound:
    """A training whose exchange is to be judged.

    Args:
        workers: M.
        nbytes: W, of the dense parameters.
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
                raise ConfigError(f"{name} must be a whole number, at least 1, got {value!r}")
        for name in ("nbytes", "step_s", "bandwidth"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a finite number above 0, got {value!r}")

    @property
    def ideal_s(self) -> float:
        """i C / M: seconds between exchanges if the network took no time."""
        return self.every * self.step_s / self.workers

    @property
    def slope(self) -> float:
        """K: what the exchange of the dense model takes, over the ideal time."""
        return self.workers**2 * self.nbytes / (self.every * self.step_s * self.bandwidth)

    def seconds(self, rho: float = 1.0, h: float = 1.0) -> float:
        """T(rho, h): seconds between two exchanges."""
        _check(rho, h)
        return h * self.ideal_s + rho * self.workers * self.nbytes / self.bandwidth

    def r_min(self, rho: float = 1.0, h: float = 1.0) -> float:
        """T(rho, h) over the ideal time: the least target that is feasible."""
        _check(rho, h)
        return h + self.slope * rho

    def feasible(self, rho: float, h: float, *, target: float) -> bool:
        """Whether h <= r - k rho."""
        return self.r_min(rho, h) <= target

    def over_one_node(self, rho: float = 1.0, h: float = 1.0) -> float:
        """Times as fast as one node with the dense model."""
        return self.workers / self.r_min(rho, h)

    def over_vanilla(self, rho: float, h: float) -> float:
        """Times as fast as the same workers with the dense model."""
        return (1 + self.slope) / self.r_min(rho, h)

    def beats_one_node(self, rho: float, h: float) -> bool:
        return self.r_min(rho, h) < self.workers

    def beats_vanilla(self, rho: float, h: float) -> bool:
        """Whether h < 1 + k (1 - rho)."""
        _check(rho, h)
        return h < 1 + self.slope * (1 - rho)

    def largest_rho(self, h: float, *, target: float) -> float:
        """The largest rho that is feasible, not above 1; 0 when none is, since h alone takes too long."""
        _check(1.0, h)
        return min(1.0, max(0.0, (target - h) / self.slope))

    def largest_h(self, rho: float, *, target: float) -> float:
        """The largest h that is feasible; not above 0 when none is."""
        _check(rho, 1.0)
        return target - self.slope * rho

    def with_encoding(self, h: float, seconds: float) -> float:
        """H of a scheme whose exchange also takes these seconds for encoding and decoding, on each worker."""
        return h + seconds / self.ideal_s

    def every_iterations(self, every: int) -> Bound:
        """The same with another i."""
        return replace(self, every=every)


def _check(rho: float, h: float) -> None:
    for name, value in (("rho", rho), ("h", h)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be a finite number, not below 0, got {value!r}")
