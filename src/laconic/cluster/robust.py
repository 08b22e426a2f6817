"""Rounds in which one worker cannot move the weights far: ``after=clipped``, ``median`` or ``trimmed:K``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.aggregate.robust import clip_factors, squared_norm, trimmed_mean
from laconic.cluster.round import Push

__all__ = ["Robust"]


class Robust:
    """The pushes of a round, kept until all are there and then combined slot by slot.

    Args:
        trim: Number of values to drop at each end of a coordinate; 0 clips by the median norm.
    """

    in_order = True

    def __init__(self, like: Sequence[Tensor], trim: int) -> None:
        self._like, self._trim = like, trim
        self._pushes: list[Push] = []
        self._norms: list[float] = []

    def add(self, push: Push) -> None:
        # Decoded here for its norm, and so that the update cannot fail on it.
        self._norms.append(math.sqrt(sum(squared_norm(frame.decode(torch.device("cpu"))) for frame in push.frames)))
        self._pushes.append(push)

    def result(self) -> dict[str, Tensor]:
        by_slot = list(zip(*(push.frames for push in self._pushes), strict=True))
        sparse = any(frame.chain.selector is not None for frames in by_slot for frame in frames)
        # What a single worker sends of a sparse coordinate cannot be trimmed, so its length must be bounded.
        factors = clip_factors(self._norms) if sparse or not self._trim else None
        if self._trim:
            return {frames[0].slot: trimmed_mean(frames, self._trim, factors) for frames in by_slot}
        sums = {}
        for frames, x in zip(by_slot, self._like, strict=True):
            sums[frames[0].slot] = total = torch.zeros_like(x)
            for frame, factor in zip(frames, factors or (), strict=True):
                frame.add_to(total, factor / len(frames))
        return sums

    def frames(self) -> None:
        return None

    def clear(self) -> None:
        """Nothing is used again."""
