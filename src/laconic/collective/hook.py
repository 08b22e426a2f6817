"""The hook that DistributedDataParallel calls for each bucket of gradients, and what it is switched to.

DDP lets a hook be registered once and never be taken away, so what is registered is a switch: without an attachment it
does what DDP does by itself. And it is registered when something is to be compressed, not before: DDP's own way scales
gradients while it copies them into buckets, and a hook needs a pass of its own for that.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes, not with their names.
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from laconic.collective.reductions.exact import begin_mean
from laconic.collective.stats import ExchangeStats
from laconic.errors import ConfigError

__all__ = ["Reduces", "Switch", "plain_mean", "plug", "switch_of"]

Done = Callable[[], None]


class Reduces(Protocol):
    """Who takes a bucket and promises its mean."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]: ...


class Switch:
    """What a DDP module's hook leads to."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.to: Reduces | None = None
        self.plugged = False
        self.group: dist.ProcessGroup = module.process_group
        self.ledger = ExchangeStats()


_switches: "weakref.WeakKeyDictionary[DistributedDataParallel, Switch]" = weakref.WeakKeyDictionary()


def switch_of(module: DistributedDataParallel) -> Switch:
    """The switch of a module; ``ConfigError`` when the module has another's hook."""
    switch = _switches.get(module)
    if switch is None or not switch.plugged:
        _refuse_other_hooks(module)
    if switch is None:
        switch = _switches[module] = Switch(module)
    return switch


def plug(module: DistributedDataParallel) -> None:
    """Register the hook that leads to a module's switch, unless that was done before."""
    switch = switch_of(module)
    if switch.plugged:
        return
    try:
        module.register_comm_hook(switch, laconic_hook)
    except RuntimeError as error:  # a built-in hook leaves no trace in Python
        module._comm_hooks.clear()
        raise ConfigError(f"the DDP module takes no hook: {str(error).splitlines()[0]}") from error
    switch.plugged = True


def _refuse_other_hooks(module: DistributedDataParallel) -> None:
    if module._comm_hooks:
        name = module._comm_hooks[0][0].__qualname__
        raise ConfigError(f"the DDP module has a hook already ({name}), and DDP takes one: make a new DDP module")


def laconic_hook(switch: Switch, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if switch.to is None:
        return plain_mean(bucket.buffer(), switch.group, switch.ledger)
    return switch.to.reduce(bucket)


def plain_mean(
    flat: Tensor, group: dist.ProcessGroup, ledger: ExchangeStats, done: Done | None = None
) -> torch.futures.Future[Tensor]:
    """What DDP does without a hook."""

    def result(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        mean = future.value()[0]
        if done is not None:
            done()
        return mean

    found: torch.futures.Future[Tensor] = begin_mean(flat, group, ledger).get_future().then(result)
    return found
