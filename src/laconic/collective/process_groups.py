"""Rank, size and backend of process groups, also of those that torch.distributed has no record of.

An engine such as torchft makes and replaces process groups of its own. The functions of ``torch.distributed`` refuse
them, so such a group is asked directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

__all__ = ["backend_of", "is_registered", "rank_in", "size_of", "start_all_reduce", "start_messages"]


def is_registered(group: dist.ProcessGroup | None) -> bool:
    """Whether ``torch.distributed`` knows a group; None is the group of all ranks."""
    return group is None or group in distributed_c10d._world.pg_map


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Return the rank of this process in a group."""
    return dist.get_rank(group) if group is None or is_registered(group) else group.rank()


def size_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group."""
    return dist.get_world_size(group) if group is None or is_registered(group) else group.size()


def backend_of(group: dist.ProcessGroup | None) -> str:
    """Return the name of a group's backend, such as ``gloo``."""
    if group is None or is_registered(group):
        return str(dist.get_backend(group))
    name = group.name().lower()
    return "nccl" if "nccl" in name else name


def start_all_reduce(x: Tensor, group: dist.ProcessGroup | None, op: Any) -> Any:
    """Start an all-reduce in place; return the work to wait for."""
    if group is None or is_registered(group):
        return dist.all_reduce(x, op=op, group=group, async_op=True)
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([x], options)


def start_messages(
    group: dist.ProcessGroup, sending: Mapping[int, Tensor], receiving: Mapping[int, Tensor], tag: int
) -> list[Any]:
    """Start sends and receives, by rank of the group, in a group that torch.distributed has no record of."""
    works = [group.recv([buffer], rank, tag) for rank, buffer in receiving.items()]
    return works + [group.send([message], rank, tag) for rank, message in sending.items()]
