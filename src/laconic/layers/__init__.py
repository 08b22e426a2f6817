"""Layers that are trained in a compressed space: fewer numbers to compute with, update, send and store."""

from __future__ import annotations

from laconic.layers.convert import INITS, Layout, Slot, compress, dense_numel, expand, layout
from laconic.layers.factored import LowRankConv2d, LowRankLinear, MonarchLinear
from laconic.layers.hashed import HashedLayer
from laconic.layers.policy import LayerPolicy
from laconic.layers.recurrent import CompressedRecurrent
from laconic.layers.schemes import SCHEMES, Hashed, LowRank, Monarch, Scheme, Subspace, parse_scheme
from laconic.layers.step_time import Timings, measure, timings
from laconic.layers.subspace import SubspaceLayer, advance, subspaces

__all__ = [
    "INITS", "SCHEMES", "CompressedRecurrent", "Hashed", "HashedLayer", "LayerPolicy", "Layout", "LowRank",
    "LowRankConv2d", "LowRankLinear", "Monarch", "MonarchLinear", "Scheme", "Slot", "Subspace", "SubspaceLayer",
    "Timings", "advance", "compress", "dense_numel", "expand", "layout", "measure", "parse_scheme", "subspaces",
    "timings",
]  # fmt: skip
