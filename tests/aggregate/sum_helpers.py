"""Frames of several workers for a sum."""

from __future__ import annotations

import torch

import laconic
import laws


def encode_all(spec, xs, *, workers=None, ring=False, seed=3):
    """Return the codec and the frames of all workers, encoded on their agreed value."""
    summing = laconic.summing(spec, workers=workers or len(xs), ring=ring)
    agreed = summing.agree([summing.probe(x, seed=seed) for x in xs])
    assert summing.usable(agreed)
    return summing, [summing.encode(x, agreed, seed=seed, worker=i) for i, x in enumerate(xs)]


def inputs(workers, *shape, dtype=torch.float32):
    return [laws.normal(*shape, seed=100 + i, dtype=dtype) for i in range(workers)]
