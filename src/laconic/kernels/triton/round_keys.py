"""Rounding keys of many shards, drawn on the device: a CUDA graph that encodes them needs no argument from the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.sections import num_buckets

__all__ = ["next_round_keys"]

SPAN = 128


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    """Return x ^ (x >> BITS) of unsigned numbers."""
    return x ^ ((x >> BITS) & ((1 << (64 - BITS)) - 1))


@triton.jit
def _splitmix64(x):
    """``random.splitmix64``; its constants are written as signed numbers."""
    x = x + (-7046029254386353131)
    x = _shifted(x, 30) * (-4658895280553007687)
    x = _shifted(x, 27) * (-7723592293110705685)
    return _shifted(x, 31)


@triton.jit
def _next_round_keys(
    rounds, inner, names, keys, count, stream_word, NAMED: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    inside = at < count
    number = tl.load(rounds + at, mask=inside, other=0) + 1
    tl.store(rounds + at, number, mask=inside)
    seed = _splitmix64(number ^ tl.load(inner + at, mask=inside, other=0))
    if NAMED:
        seed = _splitmix64(seed ^ tl.load(names + at, mask=inside, other=0))
    tl.store(keys + at, _splitmix64(_splitmix64(seed) ^ stream_word), mask=inside)


def next_round_keys(rounds: Tensor, inner: Tensor, keys: Tensor, names: Tensor | None = None) -> None:
    """Count a round of each shard, and write the rounding key of the seed ``splitmix64(round ^ inner)``.

    Args:
        rounds, inner: A number for each shard, int64.
        keys: Pairs of int32, as ``random.keys`` returns them.
        names: The hash of each shard's name, int64: the key is then that of the residual which it keeps.
    """
    word = random.stream_word(random.ROUNDING if names is None else random.RESIDUALS)
    _next_round_keys[(num_buckets(rounds.numel(), SPAN),)](
        rounds, inner, inner if names is None else names, keys.view(rounds.dtype), rounds.numel(),
        word - (1 << 64) if word >> 63 else word, NAMED=names is not None, SPAN=SPAN, num_warps=4,
    )  # fmt: skip
