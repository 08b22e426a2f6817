"""ParamGroup: a parameter group of torch's ``fully_shard``, and what laconic reads and sets in it.

torch calls ``FSDPParamGroup.post_backward`` for each group during backward. It reduce-scatters the group's gradients,
calls the group's all-reduce hook with the reduced shards in one flat tensor, and hands out views of that tensor (or of
a copy in the parameters' dtype) as gradients. No other module of laconic knows these internals of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)

from laconic.errors import ConfigError, LaconicError
from laconic.packet import TensorSpec

__all__ = ["ParamGroup", "ShardedParameter", "param_groups_of", "write_back"]

Scatter = Callable[["ParamGroup", Tensor, Tensor, Any], bool]
"""Reduce-scatters gradients, with group, output, input and operation; False if torch must do it."""

Gather = Callable[["ParamGroup", Tensor, Tensor], bool]
"""Gathers parameters, with group, output and input; False if torch must do it."""

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names that torch.compile and activation checkpointing put into those of parameters."""


class ShardedParameter:
    """One parameter of which each rank of a mesh dimension holds a shard."""

    def __init__(self, name: str, inside: Any) -> None:
        self.name = name
        self.inside = inside
        """torch's FSDPParam."""

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the optimizer steps: a DTensor."""
        parameter: nn.Parameter = self.inside.sharded_param
        return parameter

    @property
    def whole(self) -> TensorSpec:
        """Shape and dtype of the whole parameter."""
        return TensorSpec(tuple(self.inside._orig_size), self.parameter.dtype)

    @property
    def shard_shape(self) -> torch.Size:
        """Shape of this rank's shard; it has no values if there are fewer rows than ranks."""
        shape: torch.Size = self.inside.sharded_size
        return shape

    @property
    def padded_numel(self) -> int:
        """Number of values of the largest shard: what each shard takes in flat tensors."""
        numel: int = self.inside.padded_sharded_param_size.numel()
        return numel

    @property
    def shard_dim(self) -> int:
        dim: int = self.inside.fsdp_placement.dim
        return dim

    def local_gradient(self) -> Tensor | None:
        gradient = self.parameter.grad
        if gradient is None:
            return None
        local: Tensor = gradient._local_tensor if hasattr(gradient, "_local_tensor") else gradient
        return local


class ParamGroup:
    """The parameters of one call of ``fully_shard``, whose gradients are reduced together.

    Args:
        inside: torch's FSDPParamGroup.
        name_of: Returns the name that the user gave a parameter.
    """

    def __init__(self, inside: Any, name_of: Callable[[Any], str]) -> None:
        self._inside = inside
        self.parameters = [ShardedParameter(name_of(each), each) for each in inside.fsdp_params]
        self._by_id = {id(each.inside): each for each in self.parameters}
        self._with_gradient: list[ShardedParameter] = []
        self._meshes: tuple[Any, Any] | None = None
        """The mesh information before the replicas were taken over."""

    # -------------------------------------------------------------------------------------------------------- meshes

    @property
    def shard_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._inside.mesh_info.shard_process_group
        return group

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks with the same shards, over which torch itself averages gradients; None without replicas."""
        info = self._inside.mesh_info
        return info.replicate_process_group if isinstance(info, DDPMeshInfo) else None

    def take_over_replicas(self) -> None:
        """Let torch reduce gradients inside a replica only, as for a mesh of one dimension.

        The parameters keep their mesh of two dimensions. torch then divides by the ranks of a replica, and the
        all-reduce hook has the replicas to itself.
        """
        inside = self._inside
        info, after_forward = inside.mesh_info, inside.post_forward_mesh_info
        if not isinstance(info, HSDPMeshInfo):
            return
        settings = {each.name: getattr(info, each.name) for each in fields(info) if each.init}
        alone = FSDPMeshInfo(**(settings | {"replicate_mesh_dim": None}))
        alone.reduce_scatter_process_group = getattr(info, "reduce_scatter_process_group", None)
        self._meshes = (info, after_forward)
        inside.mesh_info = alone
        if after_forward == info:  # torch compares the two to see whether parameters are sharded anew after forward
            inside.post_forward_mesh_info = alone

    # --------------------------------------------------------------------------------------------------------- hooks

    def install(self, hook: Callable[[ParamGroup, Tensor], None]) -> None:
        """Call a hook with the reduced shards of each backward."""
        self._record_gradients()
        self._inside._all_reduce_hook = _Hook(self, hook)

    def install_collectives(self, scatter: Scatter, gather: Gather | None) -> None:
        """Call functions instead of torch's reduce-scatter of gradients and, if given, its all-gather of parameters."""
        self._record_gradients()
        self._inside._reduce_scatter_comm = _CodecReduceScatter(self, scatter)
        if gather is not None:
            self._inside._all_gather_comm = _CodecAllGather(self, gather)

    def require_unattached(self) -> None:
        """Raise ``ConfigError`` if the group has a hook or collectives of its own."""
        hook, scatter, gather = (
            getattr(self._inside, name) for name in ("_all_reduce_hook", "_reduce_scatter_comm", "_all_gather_comm")
        )
        if isinstance(hook, _Hook) or isinstance(scatter, _CodecReduceScatter):
            raise ConfigError("the FSDP module is attached already: use set() of its Attachment to change the codec")
        if hook is not None:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise ConfigError(f"the FSDP module already has an all-reduce hook ({name}), and takes one only")
        if not isinstance(scatter, DefaultReduceScatter) or not isinstance(gather, DefaultAllGather):
            kinds = f"{type(scatter).__name__} and {type(gather).__name__}"
            raise ConfigError(f"the FSDP module already has collectives of its own ({kinds}): use torch's default ones")

    def _record_gradients(self) -> None:
        """Remember which parameters have gradients when torch reduces them: its hook does not receive this."""
        inside, post_backward = self._inside, self._inside.post_backward

        def recorded(*unused: Any) -> None:
            self._with_gradient = [self._by_id[id(each)] for each in inside.fsdp_params if self._has_gradient(each)]
            post_backward(*unused)

        inside.post_backward = recorded

    def _has_gradient(self, parameter: Any) -> bool:
        if not hasattr(parameter, "_unsharded_param"):
            return False
        unsharded = parameter.unsharded_param
        return (
            parameter.unsharded_accumulated_grad is not None
            or unsharded.grad is not None
            or (getattr(self._inside, "reduce_scatter_unused_params", False) and unsharded.requires_grad)
        )

    def remove(self) -> None:
        """Undo what ``install``, ``install_collectives`` and ``take_over_replicas`` did."""
        inside = self._inside
        inside._all_reduce_hook = None
        inside._reduce_scatter_comm, inside._all_gather_comm = DefaultReduceScatter(), DefaultAllGather()
        inside.__dict__.pop("post_backward", None)
        if self._meshes is not None:
            if inside.post_forward_mesh_info == inside.mesh_info:
                inside.post_forward_mesh_info = self._meshes[0]
            inside.mesh_info, self._meshes = self._meshes[0], None

    # ----------------------------------------------------------------------------------------------------- gradients

    def slots(self, flat: Tensor) -> list[tuple[ShardedParameter, Tensor]]:
        """Return the parameters whose gradients are in a flat tensor of shards, with views of it, without padding."""
        parts = _parts(self._with_gradient, flat)
        return [(each, part[: each.shard_shape.numel()].view(each.shard_shape)) for each, part in parts]

    def scattered(self, shards: Tensor, whole: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """Return names, padded shards and padded shards of all ranks of the gradients that torch reduces."""
        rows = _parts(self._with_gradient, whole.view(-1, shards.numel()))
        return [
            (each.name, x, row) for (each, x), (_, row) in zip(_parts(self._with_gradient, shards), rows, strict=True)
        ]

    def gathered(self, shards: Tensor, whole: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """Return names, padded shards of all ranks and padded shards of all parameters that torch gathers."""
        rows = _parts(self.parameters, whole.view(-1, shards.numel()))
        return [(each.name, row, x) for (each, x), (_, row) in zip(_parts(self.parameters, shards), rows, strict=True)]

    @property
    def divisor(self) -> float | None:
        """What the user divides gradients by, instead of the number of ranks."""
        divisor: float | None = self._inside.gradient_divide_factor
        return divisor

    @property
    def gathers_plainly(self) -> bool:
        """Whether torch gathers shards as they are, over the same ranks after forward as before it."""
        inside = self._inside
        after = inside.post_forward_mesh_info
        return (after is None or after == inside.mesh_info) and not any(
            hasattr(each.inside._sharded_local_tensor, "fsdp_pre_all_gather") for each in self.parameters
        )

    @property
    def gathers_for_backward(self) -> bool:
        """Whether torch gathers the parameters that forward had before."""
        for_backward: bool = self._inside._training_state == TrainingState.PRE_BACKWARD
        return for_backward

    @property
    def requires_all_reduce(self) -> bool:
        """False between ``set_requires_all_reduce(False)`` and ``(True)``: shards accumulate, replicas do not talk."""
        required: bool = self._inside.all_reduce_grads
        return required

    @property
    def adds(self) -> bool:
        """Whether replicas are added instead of averaged: the user has set the divisor of all gradients."""
        return self._inside.gradient_divide_factor is not None

    def can_wait(self, flat: Tensor) -> bool:
        """Whether the values of a flat tensor may arrive after its hook has returned, until the end of backward.

        torch must neither compute with them in the meantime (divide them, add them to gradients, copy them to a host)
        nor let the user do so.
        """
        inside = self._inside
        divides = flat.dtype not in (torch.float32, torch.bfloat16) or getattr(
            inside, "force_sum_reduction_for_comms", False
        )
        return not divides and all(
            each.parameter.grad is None
            and not each.inside.offload_to_cpu
            and not getattr(each.parameter, "_post_accumulate_grad_hooks", None)
            for each in self._with_gradient
        )


def _parts(parameters: Sequence[ShardedParameter], x: Tensor) -> list[tuple[ShardedParameter, Tensor]]:
    """Return parameters with their parts of the last dimension of a tensor, padded."""
    sizes = [each.padded_numel for each in parameters]
    if sum(sizes) != x.shape[-1]:
        raise LaconicError(
            f"torch's FSDP hands over {x.shape[-1]} values where {len(sizes)} parameters have {sum(sizes)}: this "
            f"version of torch ({torch.__version__}) is not supported; detach, and report it"
        )
    return list(zip(parameters, torch.split(x, sizes, dim=-1), strict=True))


class _CodecReduceScatter(DefaultReduceScatter):
    """What torch calls instead of its own reduce-scatter."""

    def __init__(self, group: ParamGroup, call: Scatter) -> None:
        self._group, self._call = group, call

    def __call__(  # type: ignore[override]  # torch ignores what it returns
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if not self._call(self._group, output_tensor, input_tensor, op):
            super().__call__(output_tensor, input_tensor, group, op, async_op)


class _CodecAllGather(DefaultAllGather):
    """What torch calls instead of its own all-gather."""

    def __init__(self, group: ParamGroup, call: Gather) -> None:
        self._group, self._call = group, call

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._call(self._group, output_tensor, input_tensor):
            return None
        return super().__call__(output_tensor, input_tensor, group, async_op)


@dataclass(frozen=True)
class _Hook:
    """What torch calls with the reduced shards of a group."""

    group: ParamGroup
    call: Callable[[ParamGroup, Tensor], None]

    def __call__(self, flat: Tensor) -> None:
        self.call(self.group, flat)


def write_back(slots: Sequence[tuple[ShardedParameter, Tensor]]) -> None:
    """Copy values that arrived after the hook had returned into gradients that are not views of the same memory."""
    for each, values in slots:
        gradient = each.local_gradient()
        if gradient is not None and values.numel() and gradient.data_ptr() != values.data_ptr():
            gradient.copy_(values)


def param_groups_of(module: nn.Module) -> list[ParamGroup]:
    """Return the parameter groups of all parts of a module; ``ConfigError`` if one cannot be served."""
    prefixes = {id(part): name for name, part in module.named_modules()}

    def name_of(parameter: Any) -> str:
        info = parameter._module_info
        path = [*prefixes[id(info.module)].split("."), info.param_name]
        return ".".join(word for word in path if word and word not in _WRAPPERS)

    groups = []
    for name, state in _states(module):
        inside = getattr(state, "_fsdp_param_groups", None)
        if inside is None:  # older versions of torch have at most one
            inside = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        if len(inside) > 1:
            raise ConfigError(
                f"module {name!r} has {len(inside)} FSDP parameter groups (its shard_placement_fn names several "
                "meshes), and torch allows no hooks there: use one mesh for each module"
            )
        for each in inside:
            if not isinstance(each.mesh_info, FSDPMeshInfo):
                raise ConfigError(f"module {name!r} is replicated, not sharded: use DistributedDataParallel")
            groups.append(ParamGroup(each, name_of))
    return groups


def _states(module: nn.Module) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            if id(state) not in seen:
                seen.add(id(state))
                yield name, state
