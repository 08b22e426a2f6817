"""Replica: this rank's part of a model that is trained between exchanges, alone or by a group of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.collective.groups import ranks_of
from laconic.errors import ConfigError, InputError

__all__ = ["Replica", "values_of"]

MESH = (
    'mesh = init_device_mesh(device, (replicas, inner), mesh_dim_names=("replica", "inner")), the model over '
    'mesh["inner"], and group=mesh["replica"].get_group()'
)
"""What an error advises to those whose replicas have several ranks."""


def values_of(x: Tensor) -> Tensor:
    """Return the memory that this rank holds of a tensor: the shard of a DTensor, a complex tensor as pairs."""
    x = x.detach()
    if hasattr(x, "to_local"):
        x = x.to_local()
    return torch.view_as_real(x) if x.is_complex() else x


class Replica:
    """Parameters and buffers of a model, with the names that the user gave them.

    Args:
        model: A bare module, a DDP module, or a module with FSDP2's sharded parameters; also inside ``torch.compile``.
        group: The ranks that exchange, one of each replica.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.model = getattr(model, "_orig_mod", model)  # the module that torch.compile wraps
        self.sharded = False
        self.inner_group: dist.ProcessGroup | None = None
        """The ranks that hold the same parameters and exchange gradients in every step: those of DDP."""
        if isinstance(self.model, DistributedDataParallel):
            self.inner_group = self.model.process_group
            _require_other_ranks("the DDP module's process group", ranks_of(self.inner_group), group)
            self.model = self.model.module
        if not isinstance(self.model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        kinds = {kind.__name__ for part in self.model.modules() for kind in type(part).__mro__}
        if "FullyShardedDataParallel" in kinds:
            raise ConfigError("LocalSGD cannot exchange FSDP1 modules: shard with FSDP2, torch's fully_shard")
        self._fsdp: list[Any] = [
            part for part in self.model.modules() if "FSDPModule" in {kind.__name__ for kind in type(part).__mro__}
        ]
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self._others: list[tuple[str, nn.Parameter]] = []
        """Parameters that are not trained."""
        for name, parameter in self._named_parameters():
            mesh: Any = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                self.sharded = True
                ranks = mesh.mesh.flatten().tolist()
                _require_other_ranks(f"the mesh over which parameter {name!r} is sharded", ranks, group)
            if parameter.requires_grad:
                self.names.append(name)
                self.parameters.append(parameter)
            else:
                self._others.append((name, parameter))
        if not self.parameters:
            raise ConfigError("the model has no parameter with requires_grad: there is nothing to exchange")

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            yield name.replace("_orig_mod.", ""), parameter

    def all_values(self) -> list[tuple[str, Tensor]]:
        """Return the values of all parameters and buffers, trained or not."""
        self.reshard()
        tensors = (*self._named_parameters(), *self.model.named_buffers())
        return [(name, values_of(x)) for name, x in tensors]

    def float_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that are averaged, such as those of batch norm."""
        named = ((name.replace("_orig_mod.", ""), x) for name, x in self.model.named_buffers())
        return [(name, values_of(x)) for name, x in named if x.is_floating_point() or x.is_complex()]

    def reshard(self) -> None:
        """Free the gathered parameters of FSDP2, which would hide what is written into the shards."""
        for part in self._fsdp:
            part.reshard()

    def new_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that are trained now and were not before."""
        self.reshard()
        known = {id(parameter) for parameter in self.parameters}
        named = self._named_parameters()
        return [
            (name, parameter) for name, parameter in named if parameter.requires_grad and id(parameter) not in known
        ]

    def include(self, name: str, parameter: nn.Parameter) -> None:
        self.names.append(name)
        self.parameters.append(parameter)
        self._others = [(other, x) for other, x in self._others if x is not parameter]

    def require_no_new_parameters(self, *, look_for_added: bool) -> None:
        """Raise if a parameter is trained that is not exchanged: it would differ between ranks without notice.

        Args:
            look_for_added: Look for parameters that were added to the module, too, which takes longer.
        """
        new = [name for name, parameter in self._others if parameter.requires_grad]
        if look_for_added and not new:
            new = [name for name, _ in self.new_parameters()]
        if new:
            raise InputError(
                f"parameter {new[0]!r} is trained, but was frozen or missing when LocalSGD was made, so each rank "
                "would train it alone: call local.include_new_parameters() on all ranks before the step"
            )

    def foreign_parameters(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> int:
        """Return how many tensors the optimizers train that are not parameters of the model."""
        known = {id(parameter) for _, parameter in self._named_parameters()}
        held = {id(x) for optimizer in optimizers for group in optimizer.param_groups for x in group["params"]}
        return len(held - known)


def _require_other_ranks(what: str, ranks: list[int], group: dist.ProcessGroup | None) -> None:
    common = sorted(set(ranks) & set(ranks_of(group)))
    if common != [dist.get_rank()]:
        raise ConfigError(
            f"LocalSGD takes the bare module, or a replica of other ranks than group: ranks {common} are in group and "
            f"in {what}. For replicas of several ranks use {MESH}"
        )
