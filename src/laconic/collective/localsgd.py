"""LocalSGD: ranks train alone for some steps, then agree on a common model by a compressed exchange."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.collective.consistency import describe, require_same_on_all_ranks
from laconic.collective.exchange import Exchange, rank_independent
from laconic.collective.transport import broadcast
from laconic.errors import ConfigError, InputError
from laconic.policy import Policy

__all__ = ["OUTER", "LocalSGD"]

log = logging.getLogger("laconic")

Outer = Callable[[list[Tensor]], torch.optim.Optimizer]

OUTER: Mapping[str, Outer] = {
    "mean": lambda anchors: torch.optim.SGD(anchors, lr=1.0),
    "nesterov": lambda anchors: torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True),
}
"""Outer optimizers, applied to the mean of the ranks' changes: plain averaging, or DiLoCo's Nesterov momentum."""


class LocalSGD:
    """Wraps a module and its optimizer: exchanges once in ``every`` steps, compressed.

    After ``every`` local steps each rank's change since the last exchange (a pseudo-gradient) is replaced by the mean
    over all ranks, which an outer optimizer applies to the last common model (Douillard et al. 2023, arXiv:2311.08105).
    All ranks continue with the same bits. Float buffers, such as those of batch norm, are averaged uncompressed.

    Args:
        model: The bare module: DDP would exchange in every step. Rank 0's parameters are sent to all.
        optimizer: Optimizer of the local steps. Its state stays local.
        every: Local steps between exchanges.
        codec: As in ``attach``: ``ef|topk:0.01|qsgd:4``, ``ef|thc:4``, ``none``, …
        outer: ``nesterov`` (learning rate 0.7, momentum 0.9), ``mean`` (plain averaging), or a function that returns an
            optimizer for a list of tensors.
        policy: Codecs by parameter-name pattern.
        group: The ranks; all of them by default.
        nonfinite: As in ``attach``.

    >>> local = LocalSGD(model, optimizer, every=20, codec="ef|topk:0.01|qsgd:4")  # doctest: +SKIP
    >>> for batch in batches:                                                     # doctest: +SKIP
    ...     loss(model, batch).backward()
    ...     local.step()
    ...     local.zero_grad()
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int = 20, codec: str = "none",
        outer: str | Outer = "nesterov", policy: Policy | Mapping[str, str] | None = None,
        group: dist.ProcessGroup | None = None, nonfinite: str = "raise",
    ) -> None:  # fmt: skip
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("torch.distributed has no process group yet: call init_process_group first")
        if isinstance(model, DistributedDataParallel):
            raise ConfigError("LocalSGD takes the bare module: DistributedDataParallel exchanges in every step")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every must be a whole number from 1 on, got {every!r}")
        if isinstance(outer, str) and outer not in OUTER:
            raise ConfigError(f"outer must be one of {', '.join(OUTER)} or a function, got {outer!r}")
        self.model, self.optimizer, self.every, self.group = model, optimizer, every, group
        self.exchange = Exchange(codec, group, policy=policy, nonfinite=nonfinite)
        self.steps = self.residual_resets = 0
        options = repr((every, outer if isinstance(outer, str) else "a function", nonfinite))
        settings = {"codec": codec, "policy": repr(self.exchange.policy), "options": options}
        settings |= describe((*model.named_parameters(), *model.named_buffers()))
        require_same_on_all_ranks("LocalSGD", settings, group, self.exchange.stats)
        source = dist.get_global_rank(group, 0) if group is not None else 0
        with torch.no_grad():
            for x in (*model.parameters(), *model.buffers()):
                broadcast(x, source, group, self.exchange.stats)
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._anchors = [p.detach().clone() for p in self._parameters]
        self._outer = (OUTER[outer] if isinstance(outer, str) else outer)(self._anchors)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a local step, and exchange if it is due; return the result of the optimizer's step."""
        result = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        self.steps += 1
        if self.steps % self.every == 0:
            self.synchronize()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange now, so that all ranks hold the same parameters. Call it before evaluating or saving the model."""
        changes = []
        for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
            if anchor.grad is None:
                anchor.grad = torch.empty_like(anchor)
            torch.sub(anchor, parameter, out=anchor.grad)
            changes.append(anchor.grad)
        self.exchange.mean(list(zip(self._names, changes, strict=True)))
        self._outer.step()
        for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
            parameter.copy_(anchor)
        floats = [(name, x) for name, x in self.model.named_buffers() if x.is_floating_point()]
        if floats:
            self.exchange.mean_exactly(floats)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory besides model and optimizer: residuals, outer optimizer, last common model."""
        world = torch.tensor([dist.get_rank(self.group), dist.get_world_size(self.group)])
        return {
            "steps": self.steps,
            "world": world,
            "exchange": self.exchange.state_dict(),
            "anchors": {name: x.clone() for name, x in zip(self._names, self._anchors, strict=True)},
            "outer": copy.deepcopy(self._outer.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Residuals of another rank or number of ranks are dropped and logged."""
        for name, anchor in zip(self._names, self._anchors, strict=True):
            if name not in state["anchors"] or state["anchors"][name].shape != anchor.shape:
                raise InputError(f"the saved state has no parameter {name!r} of shape {list(anchor.shape)}")
        with torch.no_grad():
            for name, anchor in zip(self._names, self._anchors, strict=True):
                anchor.copy_(state["anchors"][name])
        self._outer.load_state_dict(state["outer"])
        self.steps = int(state["steps"])
        ours, saved = [dist.get_rank(self.group), dist.get_world_size(self.group)], state["world"].tolist()
        if saved != ours:
            self.residual_resets += 1
            log.warning("residuals were saved by rank %d of %d, this is rank %d of %d: they are reset", *saved, *ours)
            self.exchange.load_state_dict(rank_independent(state["exchange"]))
        elif not self.exchange.load_state_dict(state["exchange"]):
            self.residual_resets += 1
