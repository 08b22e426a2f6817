"""Layers whose weight is a product of thin factors. They compute with the factors, so smaller is also faster.

The factors are ordinary parameters and autograd's gradients are exact: any optimizer, DDP and the parameter server work
without changes.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.layers.functional import with_parameters

__all__ = ["LowRankConv2d", "LowRankLinear", "MonarchLinear", "truncated"]

FULL_SVD = 1024
"""Largest side for a full SVD; beyond it, if few directions are needed, subspace iteration is used."""

OVERSAMPLING, POWER_ITERATIONS = 16, 4


def truncated(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors ``left @ right`` of the best approximation of a rank, with the singular values split evenly.

    Args:
        matrices: [..., m, n].
        rank: Directions kept: left is [..., m, rank], right is [..., rank, n]. Those beyond min(m, n) are zero.
    """
    x = matrices.detach().to(torch.float32)
    full_rank = min(x.shape[-2:])
    if full_rank > FULL_SVD and 4 * rank <= full_rank:
        x_left, values, x_right = _leading(x, rank)
    else:
        x_left, values, x_right = torch.linalg.svd(x, full_matrices=False)
    kept = min(rank, full_rank)
    root = values[..., :kept].sqrt()
    left, right = x_left[..., :kept] * root[..., None, :], root[..., :, None] * x_right[..., :kept, :]
    if kept < rank:
        left, right = F.pad(left, (0, rank - kept)), F.pad(right, (0, 0, 0, rank - kept))
    return left.to(matrices.dtype), right.to(matrices.dtype)


def _leading(x: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest singular triples by iteration on a random subspace (Halko, Martinsson and Tropp 2011)."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(x.shape[-1], rank + OVERSAMPLING, generator=generator).to(x.device)
    for _ in range(POWER_ITERATIONS):
        basis = torch.linalg.qr(x.mT @ torch.linalg.qr(x @ basis).Q).Q
    columns = torch.linalg.qr(x @ basis).Q
    inner, values, right = torch.linalg.svd(columns.mT @ x, full_matrices=False)
    return columns @ inner, values, right


class LowRankLinear(nn.Module):
    """``y = left (right x) + bias``: rank (n + m) numbers instead of n m."""

    def __init__(self, left: Tensor, right: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.right = nn.Parameter(right.contiguous())
        self.left = nn.Parameter(left.contiguous())
        self.bias = _bias(bias)

    @classmethod
    def project(cls, weight: Tensor, bias: Tensor | None, rank: int) -> LowRankLinear:
        return cls(*truncated(weight, rank), bias)

    @classmethod
    def fresh(cls, weight: Tensor, bias: Tensor | None, rank: int) -> LowRankLinear:
        """Draw factors whose product has the variance of ``weight``."""
        outputs, inputs = weight.shape
        right = _normal(weight, (rank, inputs), 1 / inputs)
        return cls(_normal(weight, (outputs, rank), _variance(weight) * inputs / rank), right, bias)

    @property
    def rank(self) -> int:
        return self.right.shape[0]

    @property
    def weight(self) -> Tensor:
        return self.left @ self.right

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.right), self.left, self.bias)

    def dense(self) -> nn.Module:
        return _linear(self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.right.shape[1]}, {self.left.shape[0]}, rank={self.rank}, bias={self.bias is not None}"


class MonarchLinear(nn.Module):
    """A weight of b x b blocks, each of rank t: b t (n + m) numbers, and an overall rank of up to b² t.

    Block (l, j) is ``left[l, j-th t rows]ᵀ right[j, :, l-th t columns]ᵀ``. Sides that b does not divide are padded with
    zeros. Both products are batched over blocks, so no tensor of the weight's size is allocated.

    Args:
        left: [b, b t, m / b].
        right: [b, n / b, b t].
        bias: Of the outputs; there may be fewer than left has rows.
        inputs: n.
        outputs: m.
    """

    def __init__(self, left: Tensor, right: Tensor, bias: Tensor | None, inputs: int, outputs: int) -> None:
        super().__init__()
        self.right = nn.Parameter(right.contiguous())
        self.left = nn.Parameter(left.contiguous())
        self.bias = _bias(bias)
        self.inputs, self.outputs = inputs, outputs
        self.blocks, self.rank = right.shape[0], right.shape[2] // right.shape[0]

    @classmethod
    def project(cls, weight: Tensor, bias: Tensor | None, blocks: int, rank: int) -> MonarchLinear:
        """Return the best approximation of a dense weight: each block's leading singular directions."""
        outputs, inputs = weight.shape
        rows, columns = _block_side(outputs, blocks), _block_side(inputs, blocks)
        padded = F.pad(weight.detach(), (0, blocks * columns - inputs, 0, blocks * rows - outputs))
        split = padded.view(blocks, rows, blocks, columns).transpose(1, 2)  # [l, j, m / b, n / b]
        left, right = truncated(split, rank)  # [l, j, m / b, t], [l, j, t, n / b]
        left = left.permute(0, 1, 3, 2).reshape(blocks, blocks * rank, rows)
        right = right.permute(1, 3, 0, 2).reshape(blocks, columns, blocks * rank)
        return cls(left, right, bias, inputs, outputs)

    @classmethod
    def fresh(cls, weight: Tensor, bias: Tensor | None, blocks: int, rank: int) -> MonarchLinear:
        """Draw factors whose product has the variance of ``weight``."""
        outputs, inputs = weight.shape
        rows, columns = _block_side(outputs, blocks), _block_side(inputs, blocks)
        right = _normal(weight, (blocks, columns, blocks * rank), 1 / columns)
        left = _normal(weight, (blocks, blocks * rank, rows), _variance(weight) * columns / rank)
        return cls(left, right, bias, inputs, outputs)

    @property
    def weight(self) -> Tensor:
        b, t = self.blocks, self.rank
        left = self.left.view(b, b, t, -1)  # [l, j, t, m / b]
        right = self.right.view(b, -1, b, t)  # [j, n / b, l, t]
        split = torch.einsum("ljtr,jclt->lrjc", left, right)
        return split.reshape(b * left.shape[-1], b * right.shape[1])[: self.outputs, : self.inputs]

    def forward(self, x: Tensor) -> Tensor:
        b, t = self.blocks, self.rank
        flat = x.reshape(-1, self.inputs)
        columns, rows = self.right.shape[1], self.left.shape[2]
        if b * columns != self.inputs:
            flat = F.pad(flat, (0, b * columns - self.inputs))
        inner = torch.bmm(flat.view(-1, b, columns).transpose(0, 1), self.right)  # [j, B, l t]
        inner = inner.view(b, -1, b, t).permute(2, 1, 0, 3).reshape(b, -1, b * t)  # [l, B, j t]
        y = torch.bmm(inner, self.left).transpose(0, 1).reshape(-1, b * rows)
        if b * rows != self.outputs:
            y = y[:, : self.outputs]
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.outputs)

    def dense(self) -> nn.Module:
        return _linear(self.weight, self.bias)

    def extra_repr(self) -> str:
        return (
            f"{self.inputs}, {self.outputs}, blocks={self.blocks}, rank={self.rank} each, bias={self.bias is not None}"
        )


class LowRankConv2d(nn.Module):
    """A convolution into ``rank`` channels (of each group), and a 1 x 1 convolution out of them.

    Stride, padding and dilation are the first one's.
    """

    def __init__(self, narrow: nn.Module, widen: nn.Module) -> None:
        super().__init__()
        assert isinstance(narrow, nn.Conv2d) and isinstance(widen, nn.Conv2d)
        self.narrow, self.widen = narrow, widen

    @classmethod
    def project(cls, layer: nn.Conv2d, rank: int) -> LowRankConv2d:
        return cls._of_factors(layer, *truncated(_by_group(layer), rank))

    @classmethod
    def fresh(cls, layer: nn.Conv2d, rank: int) -> LowRankConv2d:
        """Draw factors whose product has the variance of the layer's weight."""
        groups, outputs, inputs = _by_group(layer).shape
        right = _normal(layer.weight, (groups, rank, inputs), 1 / inputs)
        left = _normal(layer.weight, (groups, outputs, rank), _variance(layer.weight) * inputs / rank)
        return cls._of_factors(layer, left, right)

    @classmethod
    def _of_factors(cls, layer: nn.Conv2d, left: Tensor, right: Tensor) -> LowRankConv2d:
        inner = right.shape[1] * layer.groups
        narrow = copy.copy(layer)
        narrow.out_channels = inner
        widen = nn.Conv2d(inner, layer.out_channels, 1, groups=layer.groups, bias=False, device="meta")
        result = cls(
            with_parameters(narrow, right.reshape(inner, *layer.weight.shape[1:]), None),
            with_parameters(widen, left.reshape(layer.out_channels, -1, 1, 1), None),
        )
        result.widen.bias = _bias(layer.bias)
        return result

    @property
    def rank(self) -> int:
        return self.narrow.out_channels // self.narrow.groups

    @property
    def bias(self) -> Tensor | None:
        return self.widen.bias

    @property
    def weight(self) -> Tensor:
        right, groups = self.narrow.weight, self.narrow.groups
        product = self.widen.weight.view(groups, -1, self.rank) @ right.reshape(groups, self.rank, -1)
        return product.reshape(self.widen.out_channels, *right.shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.widen(self.narrow(x))
        return y

    def dense(self) -> nn.Module:
        layer = copy.copy(self.narrow)
        layer.out_channels = self.widen.out_channels
        return with_parameters(layer, self.weight, self.bias)


def _by_group(layer: nn.Conv2d) -> Tensor:
    return layer.weight.detach().reshape(layer.groups, layer.out_channels // layer.groups, -1)


def _block_side(side: int, blocks: int) -> int:
    return -(-side // blocks)


def _bias(bias: Tensor | None) -> nn.Parameter | None:
    return None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)


def _variance(weight: Tensor) -> float:
    return float(weight.detach().float().var())


def _normal(like: Tensor, shape: tuple[int, ...], variance: float) -> Tensor:
    """Draw on the CPU, so that every device starts with the same values."""
    return (torch.randn(shape) * math.sqrt(variance)).to(like)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    outputs, inputs = weight.shape
    return with_parameters(nn.Linear(inputs, outputs, device="meta"), weight, bias)
