"""The quantizers of the codecs for layers of many runs at once, with the same symbols and decoded values.

A layer is [runs, values]; parameters of a run are elements of a vector. Operations have the precision and order of the
codecs. Divisors are tensors, because CUDA multiplies by the reciprocal of a plain number, which rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from laconic.kernels import random
from laconic_lab.studies.oland2015.settings import Quantizer

__all__ = ["Exact", "Fitted", "Fixed", "Linear", "entropy", "fit", "sample", "sample_positions"]

MIN_SAMPLE = 1024
MIN_LEVELS, MAX_LEVELS = 2, 4096


class Fitted(Protocol):
    """A quantizer fitted to one layer of some runs."""

    @property
    def levels(self) -> Tensor | None:
        """Number of bins of each run, 1 where all weights are equal; None where values are not quantized."""

    @property
    def low(self) -> Tensor | None:
        """Lower end of each run's range."""

    def decode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the decoded values of these columns of the layer and, if a coder follows, symbol + bins * run."""


def fit(quantizers: Sequence[Quantizer], x: Tensor, seed: int, gradient: Tensor | None = None) -> Fitted:
    """Fit the quantizers of one family to a layer.

    Args:
        seed: The seed of ``laconic.encode``.
        gradient: [runs], the RMS of the layer's derivative, for ``by=grad``.
    """
    first = quantizers[0]
    if first.kind == "none":
        return Exact()
    low, high = x.amin(1) + 0.0, x.amax(1) + 0.0  # + 0.0 turns -0 into +0
    if first.kind == "uniform":
        return Fixed(low, high, _vector([q.bits for q in quantizers], x).exp2())
    c = _vector([q.c for q in quantizers], x)
    sampled = sample(x, first.f, seed)
    limit = None
    if first.tail > 0:
        limit = _limit(first.tail, x, sampled, torch.maximum(-low, high))
        low, high = torch.maximum(low, -limit) + 0.0, torch.minimum(high, limit) + 0.0
    if first.zero:
        low, high = low.clamp(max=0), high.clamp(min=0)
    if first.by == "grad":
        assert gradient is not None
        levels = (gradient.to(torch.float64) + 1.0) * c.exp2()
    else:
        bits = entropy(sampled, low, high, _vector([q.m for q in quantizers], x)) + c
        integer = torch.tensor([q.integer for q in quantizers], device=x.device)
        levels = torch.where(integer, bits.ceil(), bits).exp2()
    # A grid around zero may need two levels more than it was given.
    levels = (levels + 0.5).floor().clamp(MIN_LEVELS, MAX_LEVELS - 2 if first.zero else MAX_LEVELS)
    return Linear(low, high, levels, zero=first.zero, limit=limit)


def _limit(tail: float, x: Tensor, sampled: Tensor, largest: Tensor) -> Tensor:
    """Return [runs], the magnitude above which values are sent apart; the largest one where too many would be."""
    n, count = x.shape[1], sampled.shape[1]
    rank = min(count, max(1, math.floor(tail * count + 0.5)))
    limit = sampled.abs().topk(rank, 1).values[:, -1]
    most = min(n, max(64, math.ceil(4 * tail * n)))
    return torch.where((x.abs() > limit.unsqueeze(1)).sum(1) > most, largest, limit)


def _vector(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)


def sample_positions(n: int, f: float, seed: int) -> Tensor | None:
    """Return the positions of a layer that the codec samples, one in each interval of equal size; None for all."""
    count = min(n, max(MIN_SAMPLE, math.ceil(f * n)))
    if count == n:
        return None
    begins = torch.arange(count + 1, dtype=torch.int64) * n // count
    width = begins[1:] - begins[:-1]
    drawn = random.hash32(torch.arange(count, dtype=torch.int64), random.key(seed, random.SAMPLING))
    return begins[:-1] + (drawn * width >> 32)


def sample(x: Tensor, f: float, seed: int) -> Tensor:
    """Return the sampled values as [runs, sampled]."""
    positions = sample_positions(x.shape[1], f, seed)
    return x if positions is None else x.index_select(1, positions.to(x.device))


def entropy(sampled: Tensor, low: Tensor, high: Tensor, m: Tensor) -> Tensor:
    """Return [runs], the entropy in bits of [runs, sampled] values over 2^m bins of [low, high], in float64."""
    runs, count = sampled.shape
    symbols, _ = Linear(low, high, m.exp2(), zero=False).symbols(sampled)
    counts = torch.zeros(runs, int(m.max().exp2()), dtype=torch.int64, device=sampled.device)
    counts.scatter_add_(1, symbols, torch.ones((), dtype=torch.int64, device=sampled.device).expand(symbols.shape))
    c = counts.to(torch.float64)
    total = torch.full((), count, dtype=torch.float64, device=sampled.device)
    return (math.log2(count) - torch.where(counts > 0, c * c.log2(), 0.0).sum(1) / total).clamp(min=0)


class Exact:
    """``none``."""

    levels = low = None

    def decode(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


class Fixed:
    """``uniform:bits``, in float64."""

    def __init__(self, low: Tensor, high: Tensor, levels: Tensor) -> None:
        self.low, self.high, self.levels = low, high, torch.where(low == high, 1.0, levels)

    def decode(self, x: Tensor) -> tuple[Tensor, None]:
        low, high = self.low.to(torch.float64), self.high.to(torch.float64)
        inverse = torch.where(low == high, 0.0, self.levels / (high - low))
        index = x.to(torch.float64).sub_(low.unsqueeze(1)).mul_(inverse.unsqueeze(1)).trunc_()
        index = torch.minimum(index, (self.levels - 1).unsqueeze(1), out=index)
        width = (high - low) / self.levels
        # The width of a constant is zero, so it decodes to itself whatever its index.
        return index.add_(0.5).mul_(width.unsqueeze(1)).add_(low.unsqueeze(1)).to(torch.float32), None


class Linear:
    """The quantizer of ``adaptive``: bins of equal width over [low, high], in float32, decoded to their centres.

    Args:
        low: [runs], the lower end.
        high: [runs], the upper end.
        levels: [runs], how many bins.
        zero: Whether the grid is moved so that zero is a centre.
        limit: [runs]; larger magnitudes are sent apart in float32.
    """

    def __init__(self, low: Tensor, high: Tensor, levels: Tensor, *, zero: bool, limit: Tensor | None = None) -> None:
        least, most = low.to(torch.float64), high.to(torch.float64)
        span = most - least
        constant = span == 0
        levels = torch.where(constant, 1.0, levels.to(torch.float64))
        if zero:
            rounded = torch.where(constant, 1.0, span / levels).to(torch.float32)
            step = torch.where(rounded.to(torch.float64) * levels < span, _next_up(rounded), rounded).to(torch.float64)
            first = torch.where(constant, 0.0, (least / step + 0.5).floor())
            last = torch.where(constant, 0.0, (most / step + 0.5).floor())
            levels = last - first + 1
            pre = _power(step * levels)
            base, inverse = (first - 0.5) * step * pre, torch.ones_like(step) / (step * pre)
        else:
            pre = _power(span)
            base, inverse = least * pre, levels / (span * pre)
        self.low, self.levels, self.limit = low, levels, limit
        self.pre, self.base = pre.to(torch.float32), base.to(torch.float32)
        self.inverse = torch.where(constant, 0.0, inverse).to(torch.float32)
        bins = torch.arange(int(levels.max()), dtype=torch.float64, device=low.device)
        if zero:
            table = (first.unsqueeze(1) + bins) * step.unsqueeze(1)
        else:
            table = least.unsqueeze(1) + (bins + 0.5) * (span / levels).unsqueeze(1)
        self.table = torch.where(constant.unsqueeze(1), least.unsqueeze(1), table).to(torch.float32)

    def symbols(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return [runs, columns] symbols in int64, and a scratch tensor of x's size."""
        scratch = x * self.pre.unsqueeze(1)
        scratch.sub_(self.base.unsqueeze(1)).mul_(self.inverse.unsqueeze(1))
        # Clamped before the conversion, so that no float outside the range of integers is converted.
        scratch.clamp_(min=0)
        torch.minimum(scratch, (self.levels - 1).to(torch.float32).unsqueeze(1), out=scratch)
        return scratch.to(torch.int64), scratch

    def decode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        symbols, values = self.symbols(x)
        runs, bins = self.table.shape
        symbols += torch.arange(0, runs * bins, bins, device=x.device).unsqueeze(1)
        torch.index_select(self.table.view(-1), 0, symbols.view(-1), out=values.view(-1))
        if self.limit is not None:
            values = torch.where(x.abs() > self.limit.unsqueeze(1), x, values)
        return values, symbols


def _power(spread: Tensor) -> Tensor:
    """Return the factor of values that keeps differences and quotients from overflowing."""
    return torch.where(spread < 2.0**-64, 2.0**64, torch.where(spread > 2.0**64, 2.0**-64, 1.0)).to(torch.float64)


def _next_up(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, torch.inf))
