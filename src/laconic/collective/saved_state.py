"""Checks of saved states: a state may come from a file that somebody else wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import Tensor

from laconic.aggregate.homomorphic.families import UNUSABLE
from laconic.errors import InputError, NonFiniteError
from laconic.residuals import saved_by_name, saved_floats

__all__ = [
    "ROUND",
    "SCALES",
    "saved_by_name",
    "saved_count",
    "saved_counts",
    "saved_floats",
    "saved_like",
    "saved_rounds",
    "saved_scale",
    "saved_scales",
    "saved_world",
]

ROUND, SCALES = "/round", "/scales"
"""Suffixes of the keys of a slot's round number and of its carried scales."""


def _has_values(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def saved_count(key: str, value: object, *, at_least: int = 0) -> int:
    """Return a saved whole number of at most 63 bits."""
    if _has_values(value) and value.numel() == 1 and not value.is_floating_point() and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 1 << 63:
        shown = f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:40]
        raise InputError(f"{key!r} in the saved state must be one whole number from {at_least} on, got {shown}")
    return value


def saved_like(key: str, value: object, like: Tensor, *, finite: bool = True) -> Tensor:
    """Return a copy of a saved float tensor with the dtype and on the device of another, which has its shape."""
    if not _has_values(value) or not (value.is_floating_point() or (value.is_complex() and like.is_complex())):
        raise InputError(f"{key!r} in the saved state must be a dense float tensor, got {repr(value)[:40]}")
    if value.shape != like.shape:
        raise InputError(f"{key!r} in the saved state must have the shape {list(like.shape)}")
    copy = value.detach().to(like.device, like.dtype, copy=True)
    if finite and not bool(copy.isfinite().all()):
        raise NonFiniteError(f"{key!r} in the saved state is not finite: load an earlier state")
    return copy


def saved_counts(state: Mapping[str, Tensor]) -> list[float]:
    """Return the counts of an ``ExchangeStats``; none of a state that an earlier version saved."""
    counts = state.get("counts")
    if counts is None:
        return []
    if not _has_values(counts) or counts.dim() != 1 or counts.dtype != torch.float64:
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
    by_name = {}
    for key, x in state.items():
        if key.endswith(SCALES):
            scales = saved_floats(key, x)
            if scales.dim() != 1 or not bool(((scales >= 0) & (scales < UNUSABLE)).all()):
                raise InputError(f"{key!r} in the saved state must be a vector of scales that are not negative")
            by_name[key.removesuffix(SCALES)] = scales
    return by_name


def saved_world(state: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the rank that saved a state and its number of ranks."""
    world = state["world"]
    if not _has_values(world) or world.shape != (2,) or world.dtype != torch.int64:
        raise InputError("'world' in the saved state must be two whole numbers, the rank and the number of ranks")
    rank, size = world.tolist()
    return rank, size


def saved_scale(state: Mapping[str, Tensor]) -> float | None:
    """Return the scale of a gradient scaler; None if the state has none."""
    scale = state.get("scale")
    if scale is None:
        return None
    if not _has_values(scale) or not scale.is_floating_point() or scale.numel() != 1 or not 0 < scale.item() < math.inf:
        raise InputError("'scale' in the saved state must be one finite number above 0")
    return float(scale)
