"""Weights whose entries share values: ``w_i = s_i z[b_i]`` (HashedNets, Chen et al. 2015), balanced.

A random permutation assigns entries to values, so that all values have equally many. Forward and backward are gathers,
forward by bucket and backward by member, so that sums have one order on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from laconic.kernels import random
from laconic.layers.functional import call_with_weight, with_parameters, without_parameters

__all__ = ["HashedLayer"]

POSITIONS, SIGNS = 511, 512
"""Streams of the seed that positions and signs come from."""


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, bucket: Tensor, sign: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(sign, order)
        ctx.buckets = z.numel()
        return z.view(-1).index_select(0, bucket) * sign

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sign, order = ctx.saved_tensors
        return _bucket_sums(gradient * sign, order, ctx.buckets).view(1, -1), None, None, None


def _bucket_sums(values: Tensor, order: Tensor, buckets: int) -> Tensor:
    """Return the sum over the members of each bucket."""
    ordered = values.index_select(0, order)
    rows = -(-ordered.numel() // buckets)
    return nn.functional.pad(ordered, (0, rows * buckets - ordered.numel())).view(rows, buckets).sum(0)


class HashedLayer(nn.Module):
    """A Linear, convolution or embedding whose entries share K values.

    Args:
        buckets: K.
        seed: Decides which entries share a value; the same on all workers, different for each layer.
        fresh: Draw values of the weight's variance instead of fitting them to the weight.
    """

    z: nn.Parameter
    state: Tensor

    def __init__(self, layer: nn.Module, buckets: int, seed: int, *, fresh: bool = False) -> None:
        super().__init__()
        weight, bias = layer.weight, getattr(layer, "bias", None)
        assert isinstance(weight, Tensor)
        self.settings, self.shape, self.buckets = without_parameters(layer), weight.shape, buckets
        self.register_buffer("state", torch.tensor([seed & (2**62 - 1)], dtype=torch.int64, device=weight.device))
        # Two dimensions, because a policy takes vectors for biases and does not compress them.
        self.z = nn.Parameter(weight.new_zeros(1, buckets))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        self._derive_positions()
        self._fit(weight.detach().reshape(-1), fresh=fresh)

    @torch.no_grad()
    def _fit(self, weight: Tensor, *, fresh: bool) -> None:
        """Set each value to the mean of its members, which is the least-squares fit."""
        if fresh:
            self.z.copy_(torch.randn(self.buckets) * float(weight.float().std()))
            return
        members = _bucket_sums(torch.ones_like(weight), self._order, self.buckets)
        self.z.copy_(_bucket_sums(weight * self._sign, self._order, self.buckets) / members)

    @property
    def weight(self) -> Tensor:
        shared: Tensor = _Shared.apply(self.z, self._bucket, self._sign, self._order)  # type: ignore[no-untyped-call]
        return shared.view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        return call_with_weight(self.settings, x, self.weight, self.bias)

    def dense(self) -> nn.Module:
        return with_parameters(self.settings, self.weight, self.bias)

    @torch.no_grad()
    def _derive_positions(self) -> None:
        """Compute positions and signs from the seed; they are neither saved nor sent."""
        if self.state.device.type == "meta":
            return
        seed, entry = int(self.state), torch.arange(self.shape.numel(), dtype=torch.int64, device=self.state.device)
        self._order = random.hash32(entry, random.key(seed, POSITIONS)).argsort(stable=True)
        self._bucket = torch.empty_like(self._order)
        self._bucket[self._order] = entry % self.buckets
        self._sign = (1 - 2 * (random.hash32(entry, random.key(seed, SIGNS)) >> 16 & 1)).to(self.z.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> HashedLayer:
        before = self.z.device, self.z.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before != (self.z.device, self.z.dtype):
            self._derive_positions()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        before = self.state.clone()
        super()._load_from_state_dict(*args, **kwargs)
        if not torch.equal(before, self.state):
            self._derive_positions()

    def extra_repr(self) -> str:
        return f"values={self.buckets} for {self.shape.numel()}"
