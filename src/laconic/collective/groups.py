"""Process groups: which ranks they hold, and new groups of the same ranks for laconic's own messages."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from laconic.collective.process_groups import backend_of
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce

__all__ = ["device_of", "group_of_same_ranks", "ranks_of"]


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, in its order; all ranks for None."""
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return where tensors must be that a group's backend moves."""
    nccl = backend_of(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def group_of_same_ranks(
    group: dist.ProcessGroup | None, timeout_s: float | None, stats: ExchangeStats
) -> dist.ProcessGroup:
    """Return a new group of the same ranks, so that messages do not mix with those of the training script.

    All ranks of the group call it; other ranks need not.

    Args:
        timeout_s: How long its operations wait for other ranks; None is torch's default.
        stats: Counts the few bytes that ranks exchange for it.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    _align_number_of_groups(group, timeout, stats)
    new = dist.new_group(
        ranks_of(group),
        timeout=timeout,
        backend="nccl" if "nccl" in str(dist.get_backend(group)) else "gloo",
        use_local_synchronization=True,
    )
    assert isinstance(new, dist.ProcessGroup)
    return new


def _align_number_of_groups(
    group: dist.ProcessGroup | None, timeout: timedelta | None, stats: ExchangeStats
) -> None:  # fmt: skip
    """Let all ranks of a group know equally many groups.

    torch derives the name under which ranks meet from that number, so ranks that differ in it would wait for ever.
    """
    known = len(distributed_c10d._world.pg_names)
    most = torch.tensor([known], device=device_of(group))
    work = all_reduce(most, group, stats, dist.ReduceOp.MAX)
    work.wait() if timeout is None else work.wait(timeout)
    for _ in range(int(most) - known):
        dist.new_group([dist.get_rank()], use_local_synchronization=True, backend="gloo")
