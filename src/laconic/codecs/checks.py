"""Checks of stage arguments that several stages share; each message names the stage, the value and the valid set."""

from __future__ import annotations

import math

from laconic.errors import ConfigError

__all__ = ["bucket", "fraction", "one_of", "whole"]

BUCKETS = (128, 65536)


def fraction(stage: str, field: str, value: float) -> None:
    if not 0.0 < value <= 1.0 or math.isnan(value):
        raise ConfigError(f"stage {stage!r}: {field} must be in (0, 1], got {value}")


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
