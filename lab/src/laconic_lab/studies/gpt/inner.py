"""Inner optimizers on stacked parameters: AdamW, and Muon with AdamW for vectors, embedding and head.

The arithmetic is that of ``torch.optim.AdamW`` and ``torch.optim.Muon``; a test compares them. Learning rate and step
number are tensors, so that a step can be a CUDA graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic_lab.studies.gpt.model import Replicas
from laconic_lab.studies.gpt.settings import Setting

__all__ = ["BETAS", "InnerOptimizer", "adamw_update", "orthogonalized"]

BETAS = (0.9, 0.95)
CLIP = 1.0
"""Norm of a worker's gradient above which it is scaled down."""
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)


class InnerOptimizer:
    """One optimizer state for each worker; ``demo`` steps by the signs of the gradients that it is given."""

    def __init__(self, replicas: Replicas, setting: Setting, *, compiled: bool = False) -> None:
        self.replicas, self.setting = replicas, setting
        device = replicas.device
        self._adamw = torch.compile(adamw_update, dynamic=False) if compiled else adamw_update
        self._blend = torch.compile(muon_momentum, dynamic=False) if compiled else muon_momentum
        self.lr = torch.zeros((), device=device)
        """AdamW's learning rate of the next step."""
        self.count = torch.zeros((), device=device)
        self.frozen = torch.zeros((), device=device)
        """Not 0 once 1-bit Adam has frozen the second moment and gives first moments instead of gradients."""
        self.num_muon = replicas.shape.num_hidden if setting.optimizer == "muon" else 0
        rows = replicas.rows
        self.first, self.second = (torch.zeros_like(rows[:, self.num_muon :]) for _ in range(2))
        self.velocity = torch.zeros_like(rows[:, : self.num_muon])

    @torch.no_grad()
    def step(self) -> None:
        """Clip all gradients and update all parameters."""
        gradients, rows = self.replicas.gradients, self.replicas.rows
        decay = self.setting.weight_decay
        if self.setting.exchange == "demo":
            rows.mul_(1 - self.lr * decay).sub_(gradients.sign() * self.lr)
            return
        norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        self.count += 1
        scale = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        scale = torch.where(self.frozen > 0, torch.ones_like(scale), scale)
        if self.num_muon:
            self._muon(scale)
        self._adamw(
            rows[:, self.num_muon :], gradients[:, self.num_muon :], scale, self.first, self.second, self.count,
            self.frozen, self.lr, decay,
        )  # fmt: skip

    def _muon(self, scale: Tensor) -> None:
        setting, n = self.setting, self.num_muon
        lr = self.lr * setting.muon_factor
        update = self._blend(self.replicas.gradients[:, :n], scale, self.velocity, setting.momentum)
        rows, decay = self.replicas.rows[:, :n], 1 - lr * setting.weight_decay
        for slots in self.replicas.shape.slots:
            if slots.hidden:
                matrices = slots.of(update).reshape(-1, *slots.shape)
                ratio = math.sqrt(max(1.0, slots.shape[0] / slots.shape[1]))
                step = orthogonalized(matrices).view(slots.of(rows).shape)
                slots.of(rows).mul_(decay).sub_(step.float() * (lr * ratio))

    def state(self) -> dict[str, Tensor]:
        return {"count": self.count, "first": self.first, "second": self.second, "velocity": self.velocity}


def adamw_update(
    p: Tensor, g: Tensor, scale: Tensor, first: Tensor, second: Tensor, count: Tensor, frozen: Tensor,
    lr: Tensor, weight_decay: float,
) -> None:  # fmt: skip
    """Apply one step of AdamW to clipped gradients, in place."""
    b1, b2 = BETAS
    g = g * scale
    first.copy_(torch.where(frozen > 0, g, first.lerp(g, 1 - b1)))
    second.copy_(torch.where(frozen > 0, second, second * b2 + g * g * (1 - b2)))
    denominator = second.sqrt() / (1 - b2**count).sqrt() + 1e-8
    p.mul_(1 - lr * weight_decay).sub_(first / denominator * (lr / (1 - b1**count)))


def muon_momentum(g: Tensor, scale: Tensor, velocity: Tensor, momentum: float) -> Tensor:
    """Update the velocity in place; return Nesterov's blend with the clipped gradient."""
    g = g * scale
    velocity.lerp_(g, 1 - momentum)
    return g.lerp(velocity, momentum)


def orthogonalized(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return nearly orthogonal matrices with the singular vectors of the input, by Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices.float()  # slow on a CPU
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a, alpha=1.0)
    return x.mT if tall else x
