"""Chooses the compressed layer that replaces a dense one, and its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor, nn

from laconic.layers.factored import LowRankConv2d, LowRankLinear, MonarchLinear
from laconic.layers.hashed import HashedLayer
from laconic.layers.policy import LayerPolicy
from laconic.layers.schemes import Hashed, LowRank, Monarch, Scheme, Subspace
from laconic.layers.subspace import SubspaceLayer, Tiles

__all__ = ["Replacement", "replacement_for"]

MAX_BLOCKS = 16
FAST_BLOCKS, FAST_RHO = 4, 0.15
"""Monarch: from this rho on few blocks are faster; below it many blocks lose less."""

Build = Callable[[str, int], nn.Module]
"""Builds a layer from init (``project`` or ``fresh``) and seed."""


@dataclass(frozen=True)
class Replacement:
    """A compressed layer to be built, and the entries that it keeps of the weight."""

    kept: int
    build: Build


def replacement_for(module: nn.Module, weight: Tensor, scheme: Scheme, policy: LayerPolicy) -> Replacement | str:
    """Return the replacement of a layer, or the reason why it stays dense."""
    if isinstance(scheme, Subspace):
        return _subspace(module, weight, scheme, policy)
    if isinstance(scheme, Hashed):
        buckets = max(policy.min_coordinates, int(scheme.rho * weight.numel()))
        return _if_smaller(
            weight, buckets, lambda init, seed: HashedLayer(module, buckets, seed, fresh=init == "fresh")
        )
    assert isinstance(scheme, (LowRank, Monarch))
    if isinstance(module, nn.Linear):
        rank = _rank(module.out_features, module.in_features, scheme.rho, policy)
        return _low_rank(module, rank) if isinstance(scheme, LowRank) else _monarch(module, rank, scheme)
    if type(module) is nn.Conv2d:
        return _low_rank_conv(module, scheme.rho if scheme.conv is None else scheme.conv, policy)
    return f"belongs to a {type(module).__name__}, which {scheme.name} has no form for"


def _if_smaller(weight: Tensor, kept: int, build: Build) -> Replacement | str:
    if kept >= weight.numel():
        return f"would not be smaller: {kept} numbers for {weight.numel()}"
    return Replacement(kept, build)


def _rank(outputs: int, inputs: int, rho: float, policy: LayerPolicy) -> int:
    return max(policy.min_rank, int(rho * outputs * inputs / (outputs + inputs)))


def _subspace(module: nn.Module, weight: Tensor, scheme: Subspace, policy: LayerPolicy) -> Replacement | str:
    kept = Tiles(weight.numel(), scheme.rho).coordinates
    if kept < policy.min_coordinates:
        return f"would have fewer than {policy.min_coordinates} coordinates"
    return _if_smaller(weight, kept, lambda _, seed: SubspaceLayer(module, scheme.rho, scheme.T, seed))


def _low_rank(layer: nn.Linear, rank: int) -> Replacement | str:
    make = {"project": LowRankLinear.project, "fresh": LowRankLinear.fresh}
    kept = rank * sum(layer.weight.shape)
    return _if_smaller(layer.weight, kept, lambda init, _: make[init](layer.weight.detach(), layer.bias, rank))


def _monarch(layer: nn.Linear, rank: int, scheme: Monarch) -> Replacement | str:
    outputs, inputs = layer.weight.shape
    blocks = scheme.blocks or _num_blocks(inputs, outputs, rank, scheme.rho)
    block_rank = max(1, rank // blocks)
    make = {"project": MonarchLinear.project, "fresh": MonarchLinear.fresh}
    kept = blocks * block_rank * blocks * (-(-inputs // blocks) + -(-outputs // blocks))
    return _if_smaller(
        layer.weight, kept, lambda init, _: make[init](layer.weight.detach(), layer.bias, blocks, block_rank)
    )


def _num_blocks(inputs: int, outputs: int, rank: int, rho: float) -> int:
    """Return the number of blocks along a side: a divisor of both sides if there is one."""
    common = gcd(inputs, outputs)
    candidates = [b for b in range(2, MAX_BLOCKS + 1) if common % b == 0 and b <= rank]
    candidates = candidates or [b for b in (2, 4, 8, 16) if b <= rank]
    wanted = FAST_BLOCKS if rho >= FAST_RHO else rank**0.5
    return min(candidates, key=lambda b: max(b / wanted, wanted / b), default=1)


def _low_rank_conv(layer: nn.Conv2d, rho: float, policy: LayerPolicy) -> Replacement | str:
    groups, (outputs, inputs) = layer.groups, (layer.out_channels // layer.groups, layer.in_channels // layer.groups)
    entries = inputs * torch.Size(layer.weight.shape[2:]).numel()
    rank = _rank(outputs, entries, rho, policy)
    if rank >= min(inputs, outputs):
        return f"has too few channels for a rank of {rank}"
    make = {"project": LowRankConv2d.project, "fresh": LowRankConv2d.fresh}
    return _if_smaller(layer.weight, groups * rank * (outputs + entries), lambda init, _: make[init](layer, rank))
