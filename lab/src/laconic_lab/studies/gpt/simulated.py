"""Codecs computed on stacked slots, without frames: what the receiver decodes.

A frame per worker, slot and round would be slow with thousands of rounds. So values are computed here by a few batched
torch operations; ``frames.py`` makes real frames of sampled rounds, compares the values and measures the bytes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from laconic.codecs import parse
from laconic.codecs.bins import Bins
from laconic.codecs.cast import Raw
from laconic.codecs.sign import Sign
from laconic.codecs.topk import TopK, num_kept
from laconic.errors import ConfigError
from laconic.kernels.interface import BinCoding

__all__ = ["BESIDE", "Simulated", "simulated"]

BESIDE = " + "
"""Between two codecs of one message: the second one codes what the first one leaves."""

CODERS = ("huffman", "rans")
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Simulated:
    """The decoder's view of a codec: ``topk`` (also by chunks), ``sign``, ``bins``, a cast, or ``none``."""

    def __init__(self, spec: str) -> None:
        spec, _, rest = spec.partition(BESIDE)
        self.spec = spec
        self.rest = simulated(rest) if rest else None
        self.topk: TopK | None = None
        self.sign: Sign | None = None
        self.bins: Bins | None = None
        self.cast: torch.dtype | None = None
        for stage in parse(spec)[1].stages:
            if isinstance(stage, TopK) and not stage.approx:
                self.topk = stage
            elif isinstance(stage, Sign):
                self.sign = stage
            elif isinstance(stage, Bins):
                self.bins = stage
            elif stage.name in CASTS:
                self.cast = CASTS[stage.name]
            elif not isinstance(stage, Raw) and stage.name not in CODERS:
                raise ConfigError(f"the study does not compute the stage {stage.name!r} of {spec!r}")

    @property
    def exact(self) -> bool:
        return self.topk is None and self.sign is None and self.bins is None and self.cast is None

    def decode(self, x: Tensor) -> Tensor:
        """Return what a receiver decodes of x [..., n], one slot in each row."""
        rows = x.reshape(-1, x.shape[-1])
        if self.topk is None:
            decoded = self._values(rows)
        else:
            indices = _kept(rows, self.topk)
            values = self._values(rows.gather(1, indices))
            decoded = torch.zeros_like(rows).scatter_(1, indices, values)
        if self.rest is not None:
            decoded = decoded + self.rest.decode(rows - decoded)
        return decoded.view_as(x)

    def _values(self, rows: Tensor) -> Tensor:
        if self.sign is not None:
            return _signed(rows, self.sign.bucket)
        if self.bins is not None:
            return _binned(rows, self.bins.coding)
        return rows.clone() if self.cast is None else rows.to(self.cast).to(rows.dtype)


@lru_cache(64)
def simulated(spec: str) -> Simulated:
    return Simulated(spec)


def _kept(rows: Tensor, stage: TopK) -> Tensor:
    """Return the ascending positions of the largest magnitudes of each row, or of each chunk of a row."""
    n, chunk = rows.shape[1], stage.chunk
    if not chunk or n <= chunk:
        return _largest(rows, num_kept(stage.keep, n))
    whole = n // chunk * chunk
    parts = rows[:, :whole].reshape(-1, chunk)
    begins = torch.arange(0, whole, chunk, device=rows.device)
    within = _largest(parts, num_kept(stage.keep, chunk)).view(rows.shape[0], begins.numel(), -1)
    indices = (within + begins[:, None]).flatten(1)
    if whole == n:
        return indices
    return torch.cat((indices, _largest(rows[:, whole:], num_kept(stage.keep, n - whole)) + whole), 1)


def _largest(rows: Tensor, k: int) -> Tensor:
    """Return the ascending positions of the k largest magnitudes of each row; of equal ones the lowest positions."""
    magnitudes = rows.abs()
    least = magnitudes.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = magnitudes > least, magnitudes == least
    missing = k - above.sum(1, keepdim=True, dtype=torch.int32)
    kept = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= missing))
    return kept.nonzero()[:, 1].view(-1, k)


def _buckets(rows: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    """Return each row's values in buckets, zeros behind its end, and how many values each bucket has."""
    count, n = rows.shape
    padded = torch.nn.functional.pad(rows, (0, -n % bucket)).view(count, -1, bucket)
    sizes = torch.full((padded.shape[1], 1), float(bucket), device=rows.device)
    sizes[-1] = n - bucket * (padded.shape[1] - 1)
    return padded, sizes


def _signed(rows: Tensor, bucket: int) -> Tensor:
    """Return the sign of each value times the mean magnitude of its bucket."""
    padded, sizes = _buckets(rows, bucket)
    means = padded.abs().sum(2, keepdim=True) / sizes
    return torch.where(torch.signbit(padded), -means, means).view(rows.shape[0], -1)[:, : rows.shape[1]]


def _binned(rows: Tensor, coding: BinCoding) -> Tensor:
    """Return the mean of the values that fall into the same bin of a bucket."""
    values, sizes = _buckets(rows, coding.bucket)
    valid = torch.arange(coding.bucket, device=rows.device) < sizes
    centred = torch.where(valid, values - values.sum(2, keepdim=True) / sizes, 0.0)
    distance, half = centred.abs(), 1 << (coding.bits - 1)
    mean = distance.sum(2, keepdim=True) / sizes
    deviation = ((distance * distance).sum(2, keepdim=True) / sizes - mean * mean).clamp(min=0.0).sqrt()
    factor = torch.where(deviation > 0, coding.slope / deviation, 0.0)
    level = ((distance - mean) * factor + coding.offset).clamp(0.0, half - 1).to(torch.int64)
    symbols = torch.where(centred < 0, half - 1 - level, half + level)
    decoded = torch.zeros_like(values)
    for symbol in range(1 << coding.bits):
        inside = valid & (symbols == symbol)
        total = torch.where(inside, values, 0.0).sum(2, keepdim=True)
        decoded = torch.where(inside, total / inside.sum(2, keepdim=True).clamp(min=1), decoded)
    return decoded.view(rows.shape[0], -1)[:, : rows.shape[1]]
