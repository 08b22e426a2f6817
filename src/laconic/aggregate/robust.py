"""Means that one sender cannot move far: clipped by the median norm, and trimmed coordinate by coordinate.

Clipping bounds the length of each sender's contribution (Karimireddy et al. 2021, arXiv:2012.10333, clip to a radius;
here the radius is the median of the senders' norms). The trimmed mean and, as its extreme, the median are those of Yin
et al. 2018, arXiv:1803.01498.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from laconic.aggregate.decode_sum import OpenedFrame
from laconic.errors import ConfigError

__all__ = ["ROBUST", "clip_factors", "parse_robust", "squared_norm", "trimmed_mean"]

ROBUST = ("clipped", "median", "trimmed:K")
"""The values of a job's ``after`` that bound a worker's influence."""


def parse_robust(after: str, workers: int) -> int | None:
    """Return how many values are trimmed at each end of a coordinate: none with ``clipped``; None for other values.

    >>> [parse_robust(after, 5) for after in ("clipped", "median", "trimmed:1", "mean")]
    [0, 2, 1, None]
    """
    name, _, number = after.partition(":")
    trim = {"clipped": 0, "median": _median_trim(workers)}.get(after)
    if name == "trimmed":
        trim = int(number) if number.isdecimal() else 0
        if not 1 <= trim <= _median_trim(workers):
            raise ConfigError(
                f"after=trimmed:K needs K from 1 to {_median_trim(workers)}, fewer than half of {workers} workers, got "
                f"{after!r}"
            )
    if trim is not None and workers < 3:
        raise ConfigError(f"after={after} compares workers and needs at least 3 of them, got {workers}")
    return trim


def _median_trim(senders: int) -> int:
    """Return the number of values to trim at each end so that the median remains (of an even number, the middle two).

    It is 0, 0, 1, 1, 2 for 1 to 5 senders.
    """
    return (senders - 1) // 2


def squared_norm(x: Tensor) -> float:
    """Return the sum of squares, in float64: squares of finite float32 values cannot overflow there."""
    flat = x.reshape(-1).double()
    return float(flat.dot(flat))


def clip_factors(norms: Sequence[float]) -> list[float]:
    """Return the factor of each sender that shortens contributions to the median norm; none is lengthened.

    >>> clip_factors([1.0, 2.0, 1000.0])
    [1.0, 1.0, 0.002]
    """
    limit = median(norms)
    return [limit / norm if norm > limit else 1.0 for norm in norms]


def trimmed_mean(frames: Sequence[OpenedFrame], trim: int, factors: Sequence[float] | None = None) -> Tensor:
    """Return the mean of one slot without the smallest and the largest values of each coordinate.

    Where frames are sparse, only values that were sent count. Of the c values of a coordinate, at most ``trim`` are
    dropped at each end, and never all; the mean of the rest is multiplied by c / senders, as in the plain mean. A value
    that one sender alone sent is not trimmed: sparse frames need ``factors``, too.

    Args:
        frames: One frame per sender.
        trim: Number of values to drop at each end.
        factors: Multiplies each sender's values; see ``clip_factors``.
    """
    shape = frames[0].packet.spec.shape
    values = torch.stack([frame.decode(torch.device("cpu")).reshape(-1).float() for frame in frames])
    if factors is not None:
        values *= torch.tensor(factors, dtype=torch.float64).to(torch.float32)[:, None]
    sent = _sent(frames, values)
    if sent is None:
        kept = values.sort(dim=0).values[trim : len(frames) - trim]
        return kept.mean(dim=0).reshape(shape)
    ordered = values.masked_fill(~sent, math.inf).sort(dim=0).values
    count = sent.sum(dim=0)
    cut = torch.minimum(torch.tensor(trim), (count - 1).clamp(min=0) // 2)
    rank = torch.arange(len(frames))[:, None]
    inside = (rank >= cut) & (rank < count - cut)
    total = ordered.masked_fill(~inside, 0.0).sum(dim=0)
    share = count / (len(frames) * (count - 2 * cut).clamp(min=1))
    return (total * share).reshape(shape)


def _sent(frames: Sequence[OpenedFrame], values: Tensor) -> Tensor | None:
    """Return which values were sent, as booleans; None if all were."""
    if all(frame.chain.selector is None for frame in frames):
        return None
    sent = torch.ones_like(values, dtype=torch.bool)
    for row, frame in zip(sent, frames, strict=True):
        if frame.chain.selector is not None:
            positions = frame.chain.positions(frame.packet)
            row.zero_()
            if positions is not None:
                row[positions.to(torch.int64)] = True
    return sent
