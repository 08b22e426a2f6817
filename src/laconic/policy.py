"""Policy: which codec each slot gets.

One-dimensional and small tensors (biases, norms) are under 1 % of the bytes and most of the damage, so by default they
travel uncompressed. A pattern can say otherwise, slot by slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from laconic.codecs import parse
from laconic.errors import ConfigError
from laconic.packet import TensorSpec

__all__ = ["Choice", "Policy"]


@dataclass(frozen=True)
class Choice:
    """The spec for one slot, and why it is not the default one (empty when it is)."""

    spec: str
    reason: str = ""


@dataclass(frozen=True)
class Policy:
    """Patterns first, then the exemption of small tensors, then the channel's own spec.

    Args:
        rules: Slot-name pattern (``*.bias``, ``head.*``) to codec spec; the first that matches wins.
        min_numel: Tensors with fewer values are exempt.
        exempt_1d: Tensors with one dimension or none are exempt.
        small: The codec of exempt tensors.
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    min_numel: int = 4096
    exempt_1d: bool = True
    small: str = "none"

    def __post_init__(self) -> None:
        if self.min_numel < 0:
            raise ConfigError(f"policy: min_numel must not be negative, got {self.min_numel}")
        for spec in (*self.rules.values(), *([self.small] if self.small != "none" else [])):
            parse(spec)  # not "none", so that the default policy can be made without looking for stages

    @classmethod
    def of(cls, policy: Policy | Mapping[str, str] | None) -> Policy:
        """A policy from itself, from rules alone, or the default one."""
        if isinstance(policy, Policy):
            return policy
        return cls(rules=dict(policy)) if policy else cls()

    def choose(self, slot: str, tensor: TensorSpec, default: str) -> Choice:
        for pattern, spec in self.rules.items():
            if fnmatchcase(slot, pattern):
                return Choice(spec, f"matches {pattern!r}")
        if self.exempt_1d and len(tensor.shape) <= 1:
            return Choice(self.small, "is one-dimensional" if tensor.shape else "is a single number")
        if tensor.numel < self.min_numel:
            return Choice(self.small, f"has fewer than {self.min_numel} values")
        return Choice(default)
