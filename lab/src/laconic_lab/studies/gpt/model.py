"""A byte-level GPT whose parameters are stacked over workers: one batched pass trains all of them.

Worker k's parameters are row k of one flat float32 tensor; gradients likewise. Products of all workers are one batched
matrix product, so that many small replicas use a GPU as well as one large model does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["SIZES", "Replicas", "Shape", "Slots"]

VOCABULARY = 256


@dataclass(frozen=True)
class Slots:
    """Matrices (or vectors) of one shape that lie one behind the other in a row of parameters."""

    name: str
    count: int
    shape: tuple[int, ...]
    begin: int
    hidden: bool
    """Whether Muon may train them: matrices between embedding and head."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.begin + self.count * self.numel

    def of(self, rows: Tensor) -> Tensor:
        """Return a view [..., count, *shape] of the last dimension of ``rows``."""
        part = rows[..., self.begin : self.end]
        return part.view(*part.shape[:-1], self.count, *self.shape)


@dataclass(frozen=True)
class Shape:
    """Size of a decoder."""

    layers: int
    width: int
    heads: int
    context: int = 256

    @cached_property
    def slots(self) -> tuple[Slots, ...]:
        """Hidden matrices first, so that Muon's parameters are a prefix of a row."""
        c, n = self.width, self.layers
        listed = (
            ("attention.qkv", 3 * n, (c, c), True),
            ("attention.out", n, (c, c), True),
            ("mlp.up", n, (4 * c, c), True),
            ("mlp.down", n, (c, 4 * c), True),
            ("embedding", 1, (VOCABULARY, c), False),
            ("head", 1, (VOCABULARY, c), False),
            ("norms", 2 * n + 1, (c,), False),
        )
        slots, begin = [], 0
        for name, count, shape, hidden in listed:
            slots.append(Slots(name, count, shape, begin, hidden))
            begin = slots[-1].end
        return tuple(slots)

    @property
    def numel(self) -> int:
        return self.slots[-1].end

    @property
    def num_hidden(self) -> int:
        """Number of parameters that Muon trains."""
        return max(slots.end for slots in self.slots if slots.hidden)

    def initial(self, seed: int, device: torch.device) -> Tensor:
        """Return one row of initial parameters."""
        generator = torch.Generator().manual_seed(seed)
        row = torch.empty(self.numel)
        for slots in self.slots:
            view = slots.of(row)
            if slots.name == "norms":
                view.fill_(1.0)
                continue
            deviation = 0.02 if slots.name == "embedding" else self.width**-0.5
            if slots.name in ("attention.out", "mlp.down"):
                deviation *= (slots.shape[1] / self.width) ** -0.5 / math.sqrt(2 * self.layers)
            view.normal_(0.0, 0.0 if slots.name == "head" else deviation, generator=generator)
        return row.to(device)


SIZES = {
    "1m": Shape(2, 192, 3, 128),
    "7m": Shape(4, 384, 6),
    "30m": Shape(6, 640, 10),
    "126m": Shape(10, 1024, 16),
}


class Replicas:
    """Parameters and gradients of ``workers`` copies of a model.

    ``loss`` is the sum over workers of each one's mean loss, so that ``gradients[k]`` is the gradient of worker k.
    """

    def __init__(self, shape: Shape, workers: int, seed: int, device: torch.device, *, compiled: bool = False) -> None:
        self.shape, self.workers, self.device = shape, workers, device
        self.rows = shape.initial(seed, device).repeat(workers, 1)
        self.gradients = torch.zeros_like(self.rows)
        self._leaves = [leaf.requires_grad_(True) for leaf in self._views(self.rows)]
        self._rotary = _rotary(shape, device)
        self.forward = torch.compile(forward, dynamic=False) if compiled else forward

    def _autocast(self) -> torch.autocast:
        # On a CPU bfloat16 products are slower than float32 ones.
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def _views(self, rows: Tensor) -> list[Tensor]:
        return [slots.of(rows) for slots in self.shape.slots]

    def backward(self, tokens: Tensor) -> Tensor:
        """Compute all gradients for tokens [workers, batch, context + 1]; return each worker's loss."""
        with self._autocast():
            losses = self.forward(self._leaves, tokens, self.shape, *self._rotary)
        computed = torch.autograd.grad(losses.sum(), self._leaves)
        for gradient, values in zip(self._views(self.gradients), computed, strict=True):
            gradient.copy_(values)
        return losses.detach()

    @torch.no_grad()
    def validation_loss(self, row: Tensor, tokens: Tensor, batch: int = 64) -> float:
        """Return the mean loss of one row of parameters over windows [count, context + 1]."""
        views = [slots.of(row[None]) for slots in self.shape.slots]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in torch.split(tokens, batch):
            with self._autocast():
                total += forward(views, part[None], self.shape, *self._rotary).sum().double() * part.shape[0]
        return float(total) / tokens.shape[0]


def forward(views: list[Tensor], tokens: Tensor, shape: Shape, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return the mean loss of each worker: pre-norm blocks, rotary positions, squared-ReLU MLP."""
    # unbind, because the gradient of an indexed slice is as large as the whole tensor
    qkv, out, up, down, (embedding,), (head,), norms = (view.unbind(1) for view in views)
    workers, batch, length = tokens.shape[0], tokens.shape[1], tokens.shape[2] - 1
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    which = torch.arange(workers, device=tokens.device)[:, None]
    x = embedding[which, inputs.reshape(workers, -1)]
    heads, n = shape.heads, shape.layers

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x, weight.transpose(1, 2))

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],)) * gain[:, None, :].to(x.dtype)

    def split(x: Tensor) -> Tensor:
        return x.view(workers * batch, length, heads, -1).transpose(1, 2)

    def rotate(x: Tensor) -> Tensor:
        x = F.rms_norm(x, (x.shape[-1],))
        first, second = x.chunk(2, -1)
        c, s = cosine[:length].to(x.dtype), sine[:length].to(x.dtype)
        return torch.cat((first * c - second * s, first * s + second * c), -1)

    for layer in range(n):
        h = norm(x, norms[2 * layer])
        q, k, v = (split(product(h, qkv[3 * layer + i])) for i in range(3))
        q, k = rotate(q).to(v.dtype), rotate(k).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + product(mixed.transpose(1, 2).reshape(workers, batch * length, -1), out[layer])
        h = norm(x, norms[2 * layer + 1])
        x = x + product(F.relu(product(h, up[layer])).square(), down[layer])
    logits = product(norm(x, norms[2 * n]), head)
    losses = F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1).long(), reduction="none")
    return losses.view(workers, -1).mean(1)


def _rotary(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    half = shape.width // shape.heads // 2
    frequencies = 10_000.0 ** -(torch.arange(half, device=device) / half)
    angles = torch.arange(shape.context, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()
