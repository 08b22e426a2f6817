"""Policy: decides which codec each slot gets.

One-dimensional and small tensors (biases, norms) are less than 1 % of the bytes and most of the loss of accuracy, so by
default they are sent uncompressed. Patterns of slot names override that.
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
    """The spec of one slot, and the reason why it is not the default (empty if it is)."""

    spec: str
    reason: str = ""


@dataclass(frozen=True)
class Policy:
    """Patterns first, then the exemption of small tensors, then the channel's spec.

    Args:
        rules: Patterns of slot names (``*.bias``, ``head.*``) and their codec specs; the first match wins.
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
            parse(spec)  # not "none", so that the default policy is created without loading stages

    @classmethod
    def of(cls, policy: Policy | Mapping[str, str] | None) -> Policy:
        """Return a policy unchanged, a policy of these rules, or the default policy."""
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
