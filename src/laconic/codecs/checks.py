"""Checks of stage arguments that several stages share; each message names the stage, the value and the valid set."""

from __future__ import annotations

import math

from laconic.codecs.base import Stage
from laconic.errors import ConfigError

__all__ = ["bucket", "fraction", "number", "one_of", "whole"]

BUCKETS = (128, 65536)


def fraction(stage: Stage, field: str) -> None:
    value = number(stage, field)
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"stage {stage.name!r}: {field} must be in (0, 1], got {value}")


def number(stage: Stage, field: str) -> float:
    """A field that holds a number, as a float from now on: 1 and 1.0 must be written alike, and so must 0 and -0."""
    value = getattr(stage, field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"stage {stage.name!r}: {field} must be a finite number, got {value}")
    object.__setattr__(stage, field, float(value) + 0.0)
    return float(value) + 0.0


def whole(stage: str, field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"stage {stage!r}: {field} must be a whole number from {low} to {high}, got {value}")


def bucket(stage: str, value: int) -> None:
    low, high = BUCKETS
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high or value & (value - 1):
        raise ConfigError(f"stage {stage!r}: bucket must be a power of two from {low} to {high}, got {value}")


def one_of(stage: str, field: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"stage {stage!r}: {field} must be one of {', '.join(valid)}, got {value!r}")


def between(stage: Stage, field: str, low: float, high: float) -> None:
    value = number(stage, field)
    if not low <= value <= high:
        raise ConfigError(f"stage {stage.name!r}: {field} must be from {low:g} to {high:g}, got {value}")
