"""The hook that DistributedDataParallel calls for each DDP bucket.

DDP lets a hook be registered once and never be removed, so the registered hook asks a switch: without an attachment it
does what DDP does itself. It is registered when something is to be compressed and not before: DDP alone scales
gradients while it copies them into buckets, and a hook needs an extra pass for that.
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

__all__ = ["BucketReducer", "Switch", "exact_mean", "register_hook", "switch_of"]


class BucketReducer(Protocol):
    """Returns a future of a DDP bucket's mean."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]: ...


class Switch:
    """The target of a DDP module's hook."""

    def __init__(self, module: DistributedDataParallel | None) -> None:
        self.target: BucketReducer | None = None
        self.registered = False
        self.group: dist.ProcessGroup | None = None if module is None else module.process_group
        self.stats = ExchangeStats()

    def __reduce__(self) -> tuple[type["Switch"], tuple[None]]:
        """Let a DDP module be copied and pickled: the copy is not attached. torch makes it a reducer without hooks."""
        return Switch, (None,)


_switches: "weakref.WeakKeyDictionary[DistributedDataParallel, Switch]" = weakref.WeakKeyDictionary()


def switch_of(module: DistributedDataParallel) -> Switch:
    """Return the switch of a module; ``ConfigError`` if the module has a foreign hook."""
    switch = _switches.get(module)
    if switch is None and module._comm_hooks and isinstance(module._comm_hooks[0][1], Switch):
        module._comm_hooks.clear()  # the module is a copy: its reducer has no hook
    if (switch is None or not switch.registered) and module._comm_hooks:
        name = module._comm_hooks[0][0].__qualname__
        raise ConfigError(f"the DDP module already has a hook ({name}), and DDP takes one only: make a new DDP module")
    if switch is None:
        switch = _switches[module] = Switch(module)
    return switch


def register_hook(module: DistributedDataParallel) -> None:
    """Register the hook of a module's switch, unless it is registered."""
    switch = switch_of(module)
    if switch.registered:
        return
    if module._use_python_reducer:
        raise ConfigError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer', which exchanges gradients one by one and without "
            "DDP buckets: set it to True before the DDP module is made"
        )
    try:
        module.register_comm_hook(switch, laconic_hook)
    except RuntimeError as error:  # a built-in hook is not visible in Python
        module._comm_hooks.clear()
        raise ConfigError(f"the DDP module takes no hook: {str(error).splitlines()[0]}") from error
    switch.registered = True


def laconic_hook(switch: Switch, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if switch.target is None:
        return exact_mean(bucket.buffer(), switch.group, switch.stats)
    return switch.target.reduce(bucket)


def exact_mean(
    flat: Tensor, group: dist.ProcessGroup | None, stats: ExchangeStats, on_done: Callable[[], None] | None = None
) -> torch.futures.Future[Tensor]:
    """Do what DDP does without a hook."""

    def result(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        mean = future.value()[0]
        if on_done is not None:
            on_done()
        return mean

    mean: torch.futures.Future[Tensor] = begin_mean(flat, group, stats).get_future().then(result)
    return mean
