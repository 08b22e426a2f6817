"""Exchange of changes: every so many local steps the workers' changes are replaced by a coded mean."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic_lab.studies.gpt.frames import FrameLog
from laconic_lab.studies.gpt.model import Replicas, Slots
from laconic_lab.studies.gpt.settings import Setting
from laconic_lab.studies.gpt.simulated import simulated

__all__ = ["LocalExchange"]

Part = tuple[Slots, int, int]
"""Slots of one shape, and the first and last of them."""


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
        self.fragments = _fragments(replicas.shape.slots, setting.fragments)

    def after_step(self, step: int) -> None:
        """Exchange what is due after ``step`` local steps; after the last one, everything."""
        count, every = self.setting.fragments, self.setting.every
        if step == self.setting.steps:
            for fragment in self.fragments:
                self._exchange(fragment)
            return
        before, now = ((s * count) // every for s in (step - 1, step))
        if now > before:
            self._exchange(self.fragments[now % count])

    @torch.no_grad()
    def _exchange(self, fragment: list[Part]) -> None:
        setting, rows, others = self.setting, self.replicas.rows, self.replicas.workers - 1
        for slots, first, last in fragment:
            begin, end = slots.begin + first * slots.numel, slots.begin + last * slots.numel
            shape = (last - first, slots.numel)
            exempt = len(slots.shape) < 2
            up, down = (setting.small, setting.small) if exempt else (setting.up, setting.down)
            part, theta = rows[:, begin:end], self.anchor[begin:end]
            change = theta - part
            if self.residuals is not None and not exempt:
                change.add_(self.residuals[:, begin:end], alpha=setting.decay)
            sent = simulated(up).decode(change.view(-1, *shape)).view_as(change)
            self.frames.add(slots, "up", up, change[0].view(shape), sent[0].view(shape))
            change -= sent
            if self.residuals is not None and not exempt:
                self.residuals[:, begin:end] = change
            mean = self._mean(sent)
            if setting.outer_first:
                mean = self._outer(mean, begin, end)
            if setting.gather:
                self.frames.add(slots, "down", up, (change + sent)[0].view(shape), sent[0].view(shape), times=others)
            else:
                if self.mean_residual is not None and not exempt:
                    mean.add_(self.mean_residual[begin:end], alpha=setting.decay)
                decoded = simulated(down).decode(mean.view(shape)).view(-1)
                self.frames.add(slots, "down", down, mean.view(shape), decoded.view(shape))
                if self.mean_residual is not None and not exempt:
                    torch.sub(mean, decoded, out=self.mean_residual[begin:end])
                mean = decoded
            theta.sub_(mean if setting.outer_first else self._outer(mean, begin, end))
            part.copy_(theta.expand_as(part))
            if setting.carry and not exempt:
                part.sub_(change, alpha=setting.carry)

    def _mean(self, sent: Tensor) -> Tensor:
        if not self.setting.senders:
            return sent.mean(0)
        return sent.sum(0) / (sent != 0).sum(0).clamp(min=1)

    def _outer(self, mean: Tensor, begin: int, end: int) -> Tensor:
        """Return the outer optimizer's step for a mean change."""
        lr, momentum = self.setting.outer_lr, self.setting.outer_momentum
        if self.velocity is None:
            return mean * lr
        velocity = self.velocity[begin:end]
        velocity.mul_(momentum).add_(mean)
        return (velocity * momentum + mean) * lr


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
