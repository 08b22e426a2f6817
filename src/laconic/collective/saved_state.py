"""Checks of saved states: a state may come from a file that somebody else wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.aggregate.homomorphic.families import UNUSABLE
from laconic.errors import InputError
from laconic.residuals import saved_floats

__all__ = [
    "ROUND",
    "SCALES",
    "saved_count",
    "saved_counts",
    "saved_rounds",
    "saved_scale",
    "saved_scales",
    "saved_world",
]

ROUND, SCALES = "/round", "/scales"
"""Suffixes of the keys of a slot's round number and of its carried scales."""


def saved_count(key: str, value: object, *, at_least: int = 0) -> int:
    """Return a saved whole number of at most 63 bits."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point() and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 1 << 63:
        shown = f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:40]
        raise InputError(f"{key!r} in the saved state must be one whole number from {at_least} on, got {shown}")
    return value


def saved_counts(state: Mapping[str, Tensor]) -> list[float]:
    """Return the counts of an ``ExchangeStats``; none of a state that an earlier version saved."""
    counts = state.get("counts")
    if counts is None:
        return []
    if not isinstance(counts, Tensor) or counts.dim() != 1 or counts.dtype != torch.float64:
        raise InputError("'counts' in the saved state must be a vector of float64")
    if not bool(((counts >= 0) & (counts < 2.0**63)).all()):
        raise InputError("'counts' in the saved state must be finite and not negative")
    values: list[float] = counts.tolist()
    return values


def saved_rounds(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the round numbers of a state by slot."""
    return {key.removesuffix(ROUND): saved_count(key, x) for key, x in state.items() if key.endswith(ROUND)}


def saved_scales(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the carried scales of a state by slot."""
    found = {}
    for key, x in state.items():
        if key.endswith(SCALES):
            scales = saved_floats(key, x)
            if scales.dim() != 1 or not bool(((scales >= 0) & (scales < UNUSABLE)).all()):
                raise InputError(f"{key!r} in the saved state must be a vector of scales that are not negative")
            found[key.removesuffix(SCALES)] = scales
    return found


def saved_world(state: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the rank that saved a state and its number of ranks."""
    world = state["world"]
    if not isinstance(world, Tensor) or world.shape != (2,) or world.dtype != torch.int64:
        raise InputError("'world' in the saved state must be two whole numbers, the rank and the number of ranks")
    rank, size = world.tolist()
    return rank, size


def saved_scale(state: Mapping[str, Tensor]) -> float | None:
    """Return the scale of a gradient scaler; None if the state has none."""
    scale = state.get("scale")
    if scale is None:
        return None
    if not isinstance(scale, Tensor) or scale.numel() != 1 or not 0 < scale.item() < math.inf:
        raise InputError("'scale' in the saved state must be one finite number above 0")
    return float(scale)
