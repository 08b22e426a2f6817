"""Exchange of changes: every so many local steps the workers' changes are replaced by a coded mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from laconic_lab.studies.gpt.frames import FrameLog
from laconic_lab.studies.gpt.inner import orthogonalized
from laconic_lab.studies.gpt.model import Replicas, Slots
from laconic_lab.studies.gpt.settings import EVEN, LATE, PROGRESS, Setting
from laconic_lab.studies.gpt.simulated import simulated

__all__ = ["LocalExchange"]

Part = tuple[Slots, int, int]
"""Slots of one shape, and the first and last of them."""


@dataclass
class _Pending:
    """An exchange whose means are applied after step ``due``."""

    due: int
    means: list[tuple[slice, Slots, Tensor]] = field(default_factory=list)
    starts: list[Tensor] = field(default_factory=list)
    """The workers' parameters when it began, if it overlaps with training."""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """Residuals that the workers keep in their parameters, by the first parameter of the part."""


class LocalExchange:
    """What ``laconic.LocalSGD`` does over ranks, on stacked workers."""

    def __init__(self, replicas: Replicas, setting: Setting, frames: FrameLog) -> None:
        self.replicas, self.setting, self.frames = replicas, setting, frames
        self.anchor = replicas.rows[0].clone()
        """The last common model."""
        lossy = not simulated(setting.up).exact
        self.residuals = torch.zeros_like(replicas.rows) if lossy and setting.decay and not setting.carry else None
        self.mean_residual = torch.zeros_like(self.anchor) if setting.decay and not setting.gather else None
        self.velocity = torch.zeros_like(self.anchor) if setting.outer_momentum else None
        self.watch: Callable[[Slots, int, Tensor, Tensor], None] | None = None
        """Sees the slots of one shape, the first of them, what all workers have to send, and what they send."""
        self._pending: _Pending | None = None
        self.fragments = _fragments(replicas.shape.slots, setting.fragments)
        self._clock = _exchanges_by_step(setting)
        self._average = torch.zeros_like(self.anchor) if setting.averaged else None
        self._num_averaged = 0

    @property
    def model(self) -> Tensor:
        """The global model, or the average of its last versions."""
        return self.anchor if self._average is None or not self._num_averaged else self._average

    def after_step(self, step: int) -> None:
        """Apply and begin what is due after ``step`` local steps; after the last one, exchange everything."""
        setting = self.setting
        if self._pending is not None and step in (self._pending.due, setting.steps):
            self._apply(self._pending)
            self._pending = None
        if step == setting.steps:
            for _ in range(setting.settle):
                for fragment in self.fragments:
                    self._apply(self._begin(fragment, step))
            self._add_to_average(step)
            return
        before, now = (int(self._clock[s] * setting.fragments) for s in (step - 1, step))
        if now > before:
            pending = self._begin(self.fragments[now % setting.fragments], step + setting.overlap)
            if setting.overlap:
                self._pending = pending
            else:
                self._apply(pending)
            self._add_to_average(step)

    @torch.no_grad()
    def _add_to_average(self, step: int) -> None:
        """Take the global model into the average if it is one of the last versions."""
        if self._average is not None and self._clock[step] >= (1 - self.setting.averaged) * self._clock[-1]:
            self._num_averaged += 1
            self._average.lerp_(self.anchor, 1 / self._num_averaged)

    @torch.no_grad()
    def _begin(self, fragment: list[Part], due: int) -> _Pending:
        """Return the outer step for each part of a fragment, from the workers' changes until now."""
        setting, rows, others = self.setting, self.replicas.rows, self.replicas.workers - 1
        pending = _Pending(due)
        for slots, first, last in fragment:
            span = slice(slots.begin + first * slots.numel, slots.begin + last * slots.numel)
            shape = (last - first, slots.numel)
            exempt = len(slots.shape) < 2
            up, down = (setting.small, setting.small) if exempt else (setting.up, setting.down)
            change = self.anchor[span] - rows[:, span]
            if self.residuals is not None and not exempt:
                change.add_(self.residuals[:, span], alpha=setting.decay)
            sent = simulated(up).decode(change.view(-1, *shape)).view_as(change)
            if self.watch is not None:
                self.watch(slots, first, change, sent)
            self.frames.add(slots, "up", up, change[0].view(shape), sent[0].view(shape))
            if setting.gather:
                self.frames.add(slots, "down", up, change[0].view(shape), sent[0].view(shape), times=others)
            change -= sent
            if self.residuals is not None and not exempt:
                self.residuals[:, span] = change
            mean = self._mean(sent)
            if setting.outer_norm and not exempt:
                mean = _lengthened(mean.view(shape), sent.view(-1, *shape), setting.outer_norm).view(-1)
            if setting.outer_first:
                mean = self._outer(mean, span, slots)
            if not setting.gather:
                if self.mean_residual is not None and not exempt:
                    mean.add_(self.mean_residual[span], alpha=setting.decay)
                decoded = simulated(down).decode(mean.view(shape)).view(-1)
                self.frames.add(slots, "down", down, mean.view(shape), decoded.view(shape))
                if self.mean_residual is not None and not exempt:
                    torch.sub(mean, decoded, out=self.mean_residual[span])
                mean = decoded
            pending.means.append((span, slots, mean))
            if setting.overlap:
                pending.starts.append(rows[:, span].clone())
            if setting.carry and not exempt:
                pending.kept[span.start] = change
        return pending

    @torch.no_grad()
    def _apply(self, pending: _Pending) -> None:
        """Move the global model by the means, and the workers to it."""
        setting, rows = self.setting, self.replicas.rows
        for i, (span, slots, mean) in enumerate(pending.means):
            theta, part = self.anchor[span], rows[:, span]
            theta.sub_(mean if setting.outer_first else self._outer(mean, span, slots))
            if not pending.starts:
                part.copy_(theta.expand_as(part))
            elif setting.merge == PROGRESS:
                part.add_(theta - pending.starts[i])
            else:
                part.lerp_(theta.expand_as(part), 1 - float(setting.merge))
            if span.start in pending.kept:
                part.sub_(pending.kept[span.start], alpha=setting.carry)

    def _mean(self, sent: Tensor) -> Tensor:
        if not self.setting.senders:
            return sent.mean(0)
        return sent.sum(0) / (sent != 0).sum(0).clamp(min=1)

    def _outer(self, mean: Tensor, span: slice, slots: Slots) -> Tensor:
        """Return the outer optimizer's step for a mean change."""
        lr, momentum = self.setting.outer_lr, self.setting.outer_momentum
        if self.setting.outer_flat and slots.hidden:
            mean = torch.lerp(mean, _flattened(mean.view(-1, *slots.shape)).reshape(-1), self.setting.outer_flat)
        if self.velocity is None:
            return mean * lr
        velocity = self.velocity[span]
        velocity.mul_(momentum).add_(mean)
        return (velocity * momentum + mean) * lr


def _lengthened(mean: Tensor, sent: Tensor, exponent: float) -> Tensor:
    """Return the mean of each slot times a power of the messages' mean norm over its own norm.

    Args:
        mean: [slots, values].
        sent: [workers, slots, values].
    """
    norm = torch.linalg.vector_norm(mean, dim=1).clamp(min=torch.finfo(mean.dtype).tiny)
    return mean * (torch.linalg.vector_norm(sent, dim=2).mean(0) / norm).pow(exponent)[:, None]


def _flattened(matrices: Tensor) -> Tensor:
    """Return matrices with the singular vectors and the norm of the given ones, and nearly equal singular values."""
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    flat = orthogonalized(matrices).float()
    return flat * (norm / torch.linalg.vector_norm(flat, dim=(1, 2), keepdim=True).clamp(min=1e-7))


def _exchanges_by_step(setting: Setting) -> list[float]:
    """Return how many times everything was exchanged after each number of steps; between whole numbers, fragments."""
    if setting.pace == EVEN:
        return [step / setting.every for step in range(setting.steps + 1)]
    weights = [
        1 + 2 * step / setting.steps if setting.pace == LATE else setting.learning_rate(step)
        for step in range(setting.steps)
    ]
    sums = [0.0, *accumulate(weights)]
    return [setting.steps / setting.every * each / sums[-1] for each in sums]


def _fragments(all_slots: tuple[Slots, ...], count: int) -> list[list[Part]]:
    """Deal matrices to fragments in turns; vectors, embedding and head belong to the first one."""
    if count == 1:
        return [[(slots, 0, slots.count) for slots in all_slots]]
    fragments: list[list[Part]] = [[] for _ in range(count)]
    place = 0
    for slots in all_slots:
        if not slots.hidden:
            fragments[0].append((slots, 0, slots.count))
            continue
        for i in range(slots.count):
            fragments[place % count].append((slots, i, i + 1))
            place += 1
    return fragments
