"""attach for modules that torch's ``fully_shard`` (FSDP2) has sharded.

With replicas (HSDP) the codec does the slow dimension, between replicas: see ``HSDPAttachment``. Without replicas it
does the collectives inside the only one: see ``FSDPAttachment``.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import nn

from laconic.collective.attachment import Attachment, AttachOptions
from laconic.collective.fsdp.param_groups import ParamGroup, param_groups_of
from laconic.collective.fsdp.replicas import HSDPAttachment
from laconic.collective.fsdp.scatter import FSDPAttachment
from laconic.collective.groups import ranks_of
from laconic.errors import ConfigError

__all__ = ["FSDPAttachment", "HSDPAttachment", "attach_fsdp"]

log = logging.getLogger("laconic")

MESH = (
    'mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard")), '
    'fully_shard(model, mesh=mesh["shard"]) and attach(model, spec, replicate=mesh["replicate"])'
)
"""What errors advise."""


def attach_fsdp(
    module: nn.Module, spec: str, options: AttachOptions, *, replicate: Any | None, gather: str | None,
    delta: bool = False,
) -> Attachment:  # fmt: skip
    """Attach a module that is sharded by ``fully_shard``; ``attach`` describes the arguments."""
    groups = param_groups_of(module)
    if not any(group.parameters for group in groups):
        raise ConfigError("the FSDP module has no parameters: there is nothing to exchange")
    for group in groups:
        group.require_unattached()
        for each in group.parameters:
            if each.parameter.is_complex():
                raise ConfigError(f"parameter {each.name!r} is complex, which is not supported with FSDP")
    _warn_of_other_parameters(module, groups)
    between = _replicate_group(groups, replicate)
    if between is None:
        return FSDPAttachment(module, spec, options, groups, gather, delta=delta)
    if gather is not None or delta:
        raise ConfigError("gather compresses gathered parameters of models without replicas: leave it out here")
    return HSDPAttachment(module, spec, options, groups, between)


def _replicate_group(groups: list[ParamGroup], replicate: Any | None) -> dist.ProcessGroup | None:
    """Return the ranks with the same shards as this one; None if the model is not replicated."""
    native = {tuple(ranks_of(each)) for each in (group.replicate_group for group in groups) if each is not None}
    if len(native) > 1 or (native and any(group.replicate_group is None for group in groups)):
        raise ConfigError("parts of the model are sharded over different meshes: use the same mesh for all of them")
    if len({tuple(ranks_of(group.shard_group)) for group in groups}) > 1:
        raise ConfigError("parts of the model are sharded over different ranks: use the same mesh for all of them")
    given = _process_group(replicate)
    if native:
        group = groups[0].replicate_group
        if given is not None and ranks_of(given) != ranks_of(group):
            raise ConfigError(
                f"replicate has the ranks {ranks_of(given)}, but the model is replicated over {ranks_of(group)} by its "
                "mesh of two dimensions: leave replicate out"
            )
        return group
    if given is not None:
        common = sorted(set(ranks_of(given)) & set(ranks_of(groups[0].shard_group)))
        if common != [dist.get_rank()]:
            raise ConfigError(
                f"replicate must hold one rank of each replica, but ranks {common} are in it and in the mesh over "
                f"which the model is sharded: use {MESH}"
            )
    return given


def _process_group(replicate: Any | None) -> dist.ProcessGroup | None:
    if replicate is None or isinstance(replicate, dist.ProcessGroup):
        return replicate
    if not hasattr(replicate, "get_group") or replicate.ndim != 1:
        raise ConfigError(
            f"replicate must be a mesh of one dimension or a process group, got {replicate!r}: use {MESH}"
        )
    group: dist.ProcessGroup = replicate.get_group()
    return group


def _warn_of_other_parameters(module: nn.Module, groups: list[ParamGroup]) -> None:
    known = {each.name for group in groups for each in group.parameters}
    others = [name for name, p in module.named_parameters() if p.requires_grad and not hasattr(p, "device_mesh")]
    others = [name for name in others if name.replace("_orig_mod.", "") not in known]
    if others:
        log.warning(
            "%d trained parameters (%s, …) are not sharded by fully_shard: neither FSDP nor laconic exchanges their "
            "gradients", len(others), others[0],
        )  # fmt: skip
