"""When a server updates its weights: in rounds, at each push, or at each push within a staleness bound."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.errors import ConfigError

__all__ = ["Mode"]


@dataclass(frozen=True)
class Mode:
    """A job's mode, parsed from ``sync``, ``async`` or ``bounded:S``.

    Args:
        in_rounds: Whether all workers push for the same update. Otherwise each push is an update.
        staleness_bound: Updates that a gradient may be stale: 0 in rounds, None without a bound.

    >>> Mode.parse("bounded:4")
    Mode(in_rounds=False, staleness_bound=4)
    """

    in_rounds: bool
    staleness_bound: int | None

    @classmethod
    def parse(cls, text: str) -> Mode:
        name, _, bound = text.partition(":")
        if text == "sync":
            return cls(in_rounds=True, staleness_bound=0)
        if text == "async":
            return cls(in_rounds=False, staleness_bound=None)
        if name == "bounded" and bound.isdecimal() and int(bound) >= 1:
            return cls(in_rounds=False, staleness_bound=int(bound))
        raise ConfigError(f"mode must be sync, async or bounded:S with S of at least 1, got {text!r}")
