"""Small models that fully_shard shards, and their training, for the tests of attach with FSDP2."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.train.models import GPT, GPTConfig, seeded

CONTEXT = 16


def sharded_gpt(mesh, *, width=32, **options):
    with seeded(0):
        model = GPT(GPTConfig(context=CONTEXT, width=width, layers=2, heads=2))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


class Branches(nn.Module):
    """Parameters that are tied, frozen, unused in some steps, and with fewer rows than there are shards."""

    def __init__(self):
        super().__init__()
        with seeded(0):
            self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
            self.optional, self.frozen, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.uses_optional = True

    def forward(self, x):
        x = self.second(self.first(x).relu())
        x = x + self.optional(x) if self.uses_optional else x
        return self.last(self.frozen(x))


def adamw(model):
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


def muon(model):
    return laconic.muon(model, lr=0.02, adamw_lr=1e-2)


def text(rank, count, batch=2, generator_seed=0):
    """Yield windows in which a byte follows from the one before it, but for some noise."""
    generator = torch.Generator().manual_seed(100 * generator_seed + rank)
    for _ in range(count):
        first = torch.randint(256, (batch, 1), generator=generator)
        noise = (torch.rand(batch, CONTEXT + 1, generator=generator) < 0.1).long()
        yield (first * 5 + 3 * torch.arange(CONTEXT + 1) + 7 * noise) % 256


def loss_of(model, windows):
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(model, steps, *, rank, optimizers=None, accumulate=1, all_reduce_last=False, seed=0, batch=2, decays=False):
    """Train a sharded GPT, with learning rates that fall to a twentieth or not; return the mean of the last losses."""
    optimizers = adamw(model) if optimizers is None else optimizers
    schedules = [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.05, steps) for each in optimizers] if decays else []
    losses = []
    for step, windows in enumerate(text(rank, steps * accumulate, batch, seed)):
        last = (step + 1) % accumulate == 0
        if all_reduce_last:
            model.set_requires_all_reduce(last)
        else:
            model.set_requires_gradient_sync(last)
        loss = loss_of(model, windows)
        loss.backward()
        losses.append(loss.detach())
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()
    return torch.stack(losses[-10:]).mean()


def whole(model):
    model.reshard()
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
