"""Schemes of compressed layers, in the grammar of codecs: ``monarch:0.1``, ``subspace:0.1,T=50``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from laconic.codecs.spec import format_named, parse_named
from laconic.errors import ConfigError

__all__ = ["DENSE", "SCHEMES", "Hashed", "LowRank", "Monarch", "Scheme", "Subspace", "parse_scheme"]

DENSE = "dense"
"""The rule of a policy for weights that stay dense."""


@dataclass(frozen=True)
class Scheme:
    """Base of all schemes: ``rho`` is the fraction of a weight's entries that is kept, in (0, 1)."""

    name: ClassVar[str]
    rho: float

    def __post_init__(self) -> None:
        _check_fraction(self.name, "rho", self.rho)

    def __str__(self) -> str:
        return format_named(self)


@dataclass(frozen=True)
class LowRank(Scheme):
    """A product of two thin matrices; a convolution into few channels and a 1 x 1 convolution out of them.

    Args:
        rho: Fraction of each weight.
        conv: Fraction for convolutions, if different.
    """

    name: ClassVar[str] = "lowrank"
    conv: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv is not None:
            _check_fraction(self.name, "conv", self.conv)


@dataclass(frozen=True)
class Monarch(Scheme):
    """Blocks of low rank (Dao et al. 2022): as fast as ``lowrank``, of a higher rank. Convolutions as ``lowrank``.

    Args:
        rho: Fraction of each weight.
        conv: Fraction for convolutions, if different.
        blocks: Blocks along each side; 0 chooses by size and rho.
    """

    name: ClassVar[str] = "monarch"
    conv: float | None = None
    blocks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv is not None:
            _check_fraction(self.name, "conv", self.conv)
        if self.blocks < 0:
            raise ConfigError(f"scheme 'monarch': blocks must not be negative, got {self.blocks}")


@dataclass(frozen=True)
class Subspace(Scheme):
    """A dense weight that moves in few directions: the optimizer sees their coordinates, redrawn every T steps.

    Args:
        rho: Fraction of each weight.
        T: Steps between renewals; 0 never renews.
    """

    name: ClassVar[str] = "subspace"
    T: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.T < 0:
            raise ConfigError(f"scheme 'subspace': T must not be negative, got {self.T}")


@dataclass(frozen=True)
class Hashed(Scheme):
    """Entries share values, equally many each (Chen et al. 2015, balanced)."""

    name: ClassVar[str] = "hashed"


SCHEMES: dict[str, type[Scheme]] = {scheme.name: scheme for scheme in (Hashed, LowRank, Monarch, Subspace)}


def parse_scheme(spec: str | Scheme, *, rho: float | None = None) -> Scheme:
    """Return a scheme from its text, or from its name and ``rho``.

    >>> str(parse_scheme("subspace:0.1,T=50")), parse_scheme("monarch", rho=0.1)
    ('subspace:0.1,T=50', Monarch(rho=0.1, conv=None, blocks=0))
    """
    if isinstance(spec, Scheme):
        return spec if rho is None else replace(spec, rho=rho)
    name = spec.strip()
    if name in SCHEMES:
        if rho is None:
            raise ConfigError(f"scheme {name!r} needs rho, the fraction of entries that is kept, such as {name}:0.1")
        return SCHEMES[name](rho=rho)
    scheme = parse_named(spec, SCHEMES, noun="scheme")
    if rho is not None and scheme.rho != rho:
        raise ConfigError(f"{spec!r} contains rho {scheme.rho}, but rho={rho} was given as well: give one of them")
    return scheme


def _check_fraction(scheme: str, name: str, value: float) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 < value < 1:
        raise ConfigError(f"scheme {scheme!r}: {name} must be in (0, 1), got {value}")
