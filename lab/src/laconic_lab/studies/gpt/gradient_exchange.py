"""Exchange of gradients in every step: by a codec with error feedback, PowerSGD, 1-bit Adam or DeMo."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from laconic.frames import encode
from laconic_lab.studies.gpt.frames import FrameLog
from laconic_lab.studies.gpt.inner import BETAS, InnerOptimizer
from laconic_lab.studies.gpt.model import Replicas, Slots
from laconic_lab.studies.gpt.settings import Setting
from laconic_lab.studies.gpt.simulated import simulated

__all__ = ["GradientExchange", "exchange_of_gradients"]

FREEZE = 0.15
"""Share of the steps after which 1-bit Adam freezes the second moment (15-25 % in Tang et al. 2021)."""
TILE = 64
DEMO_KEEP, DEMO_DECAY = 32, 0.999


class GradientExchange:
    """Replaces all workers' gradients by a mean; the base class computes it by a codec, both ways."""

    def __init__(self, replicas: Replicas, setting: Setting, frames: FrameLog, optimizer: InnerOptimizer) -> None:
        self.replicas, self.setting, self.frames, self.optimizer = replicas, setting, frames, optimizer
        self.residuals = torch.zeros_like(replicas.gradients)
        self.mean_residual = torch.zeros_like(replicas.rows[0])

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Make the gradients of all workers equal, before the optimizer's step number ``step``."""
        for slots in self.replicas.shape.slots:
            part = self.replicas.gradients[:, slots.begin : slots.end]
            if len(slots.shape) < 2:
                self._exact(slots, part)
            else:
                self.exchange_slots(slots, part, step)

    def _exact(self, slots: Slots, part: Tensor) -> None:
        part.copy_(part.mean(0).expand_as(part))
        for direction in ("up", "down"):
            self.frames.add_bytes(slots, direction, "float32", 4.0 * slots.numel, slots.count)

    def exchange_slots(self, slots: Slots, part: Tensor, step: int) -> None:
        self._coded(slots, part, self.setting.up, self.setting.down)

    def _coded(self, slots: Slots, part: Tensor, up: str, down: str) -> None:
        span = slice(slots.begin, slots.end)
        residual, mean_residual = self.residuals[:, span], self.mean_residual[span]
        shape = (slots.count, slots.numel)
        residual.mul_(self.setting.decay).add_(part)
        sent = simulated(up).decode(residual.view(-1, *shape)).view_as(residual)
        self.frames.add(slots, "up", up, residual[0].view(shape), sent[0].view(shape))
        residual.sub_(sent)
        mean_residual.mul_(self.setting.decay).add_(sent.mean(0))
        decoded = simulated(down).decode(mean_residual.view(shape)).view(-1)
        self.frames.add(slots, "down", down, mean_residual.view(shape), decoded.view(shape))
        mean_residual.sub_(decoded)
        part.copy_(decoded.expand_as(part))


class PowerSgd(GradientExchange):
    """Vogels et al. 2019 (arXiv:1905.13727): a power iteration a step, warm start, float32 factors."""

    def __init__(self, replicas: Replicas, setting: Setting, frames: FrameLog, optimizer: InnerOptimizer) -> None:
        super().__init__(replicas, setting, frames, optimizer)
        generator = torch.Generator().manual_seed(setting.rank)
        self.starts = {
            slots.name: torch.randn(slots.count, slots.shape[1], setting.rank, generator=generator).to(replicas.device)
            for slots in replicas.shape.slots
            if len(slots.shape) == 2
        }

    def exchange_slots(self, slots: Slots, part: Tensor, step: int) -> None:
        residual = self.residuals[:, slots.begin : slots.end]
        residual.add_(part)
        matrices = residual.view(-1, slots.count, *slots.shape)
        left = torch.linalg.qr((matrices @ self.starts[slots.name]).mean(0)).Q
        right = (matrices.mT @ left).mean(0)
        self.starts[slots.name] = right
        decoded = (left @ right.mT).reshape(-1)
        residual.sub_(decoded)
        part.copy_(decoded.expand_as(part))
        nbytes = 4.0 * self.setting.rank * sum(slots.shape)
        for direction in ("up", "down"):
            self.frames.add_bytes(slots, direction, f"rank {self.setting.rank}", nbytes, slots.count)


class OneBitAdam(GradientExchange):
    """Tang et al. 2021 (arXiv:2102.02888): Adam, then momentum by ``ef|sign`` over a frozen second moment.

    Vectors, embedding and head stay exact: rows of rare bytes have small second moments, and dividing the common
    magnitude of a bucket of signs by them makes large steps.
    """

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        frozen = step > FREEZE * self.setting.steps
        self.optimizer.frozen.fill_(float(frozen))
        b1 = BETAS[0]
        for slots in self.replicas.shape.slots:
            span = slice(slots.begin, slots.end)
            part = self.replicas.gradients[:, span]
            if frozen:  # the optimizer replaces its first moment by this: each worker's momentum, averaged
                part.mul_(1 - b1).add_(self.optimizer.first[:, span], alpha=b1)
            if frozen and slots.hidden:
                self._coded(slots, part, "sign", "sign")
            else:
                self._exact(slots, part)


class DeMo(GradientExchange):
    """Peng et al. 2024 (arXiv:2411.19870): large DCT coefficients of the momentum, gathered by all; steps are signs."""

    def __init__(self, replicas: Replicas, setting: Setting, frames: FrameLog, optimizer: InnerOptimizer) -> None:
        super().__init__(replicas, setting, frames, optimizer)
        self.basis = _dct(TILE).to(replicas.device)
        self._sizes: dict[str, int] = {}

    def exchange_slots(self, slots: Slots, part: Tensor, step: int) -> None:
        rows, columns = slots.shape
        residual = self.residuals[:, slots.begin : slots.end]
        residual.mul_(DEMO_DECAY).add_(part)
        tiles = residual.view(-1, slots.count, rows // TILE, TILE, columns // TILE, TILE).transpose(3, 4)
        coefficients = (self.basis @ tiles @ self.basis.T).flatten(-2)
        indices = coefficients.abs().topk(DEMO_KEEP, dim=-1, sorted=False).indices
        sent = torch.zeros_like(coefficients).scatter_(-1, indices, coefficients.gather(-1, indices))

        def inverse(x: Tensor) -> Tensor:
            spatial: Tensor = self.basis.T @ x.view(*x.shape[:-1], TILE, TILE) @ self.basis
            return spatial.transpose(-3, -2).flatten(-5)

        residual.sub_(inverse(sent).flatten(1))
        part.copy_(inverse(sent.mean(0)).flatten().sign().expand_as(part))
        if slots.name not in self._sizes:
            # Every tile keeps as many values, so sizes hardly change. The first gradients are zero behind a head of
            # zeros, so random coefficients are measured.
            values = torch.randn_like(coefficients[0, 0]).flatten()
            self._sizes[slots.name] = len(encode(values, f"topk:{DEMO_KEEP / TILE**2},chunk={TILE**2}|bf16"))
        for direction, times in (("up", 1), ("down", self.replicas.workers - 1)):
            self.frames.add_bytes(slots, direction, "demo", self._sizes[slots.name] * times, slots.count)


def exchange_of_gradients(name: str) -> Callable[[Replicas, Setting, FrameLog, InnerOptimizer], GradientExchange]:
    return {"codec": GradientExchange, "powersgd": PowerSgd, "onebit-adam": OneBitAdam, "demo": DeMo}[name]


def _dct(n: int) -> Tensor:
    """Return the orthonormal DCT-II as a matrix."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    basis = torch.cos(math.pi * (i + 0.5) * k / n) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis.float()
