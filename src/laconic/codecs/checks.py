"""Checks of stage arguments; each message names the stage, the field, the valid values and the value."""

from __future__ import annotations

import math

from laconic.codecs.base import Stage
from laconic.errors import ConfigError

__all__ = ["between", "bucket", "fraction", "integer", "number", "one_of"]

BUCKETS = (128, 65536)


def fraction(stage: Stage, field: str) -> None:
    value = number(stage, field)
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"stage {stage.name!r}: {field} must be in (0, 1], got {value}")


def number(stage: Stage, field: str) -> float:
    """Convert a field to a float, so that 1 and 1.0, or 0 and -0, give the same canonical spec."""
    value = getattr(stage, field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"stage {stage.name!r}: {field} must be a finite number, got {value}")
    object.__setattr__(stage, field, float(value) + 0.0)
    return float(value) + 0.0


def between(stage: Stage, field: str, low: float, high: float) -> None:
    value = number(stage, field)
    if not low <= value <= high:
        raise ConfigError(f"stage {stage.name!r}: {field} must be from {low:g} to {high:g}, got {value}")


def integer(stage: Stage, field: str, low: int, high: int) -> None:
    value = getattr(stage, field)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"stage {stage.name!r}: {field} must be a whole number from {low} to {high}, got {value}")


def bucket(stage: Stage, field: str = "bucket", *, whole: bool = False) -> None:
    """Check the size of a bucket; with ``whole`` it may be 0, the whole tensor."""
    value, (low, high) = getattr(stage, field), BUCKETS
    if whole and value == 0 and type(value) is int:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high or value & (value - 1):
        valid = f"{'0 (one norm for the whole tensor) or ' if whole else ''}a power of two from {low} to {high}"
        raise ConfigError(f"stage {stage.name!r}: {field} must be {valid}, got {value}")


def one_of(stage: Stage, field: str, valid: tuple[str, ...]) -> None:
    value = getattr(stage, field)
    if value not in valid:
        raise ConfigError(f"stage {stage.name!r}: {field} must be one of {', '.join(valid)}, got {value!r}")
