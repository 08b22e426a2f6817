"""Process groups: which ranks they hold, and new groups of the same ranks for laconic's own messages."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from laconic.collective.process_groups import backend_of, is_registered
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce

__all__ = ["device_of", "group_of_same_ranks", "ranks_of", "release_group", "timeout_of"]


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, in its order; all ranks for None."""
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return where tensors must be that a group's backend moves."""
    nccl = backend_of(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return how long a group's operations wait for other ranks; None if its backend does not say."""
    group = distributed_c10d._get_default_group() if group is None else group
    options = getattr(group._get_backend(device_of(group)), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def group_of_same_ranks(
    group: dist.ProcessGroup | None, timeout_s: float | None, stats: ExchangeStats
) -> dist.ProcessGroup:
    """Return a new group of the same ranks, so that messages do not mix with those of the training script.

    All ranks of the group call it; other ranks need not.

    Args:
        timeout_s: How long its operations wait for other ranks; None: as long as those of the given group.
        stats: Counts the few bytes that ranks exchange for it.
    """
    timeout = timeout_of(group) if timeout_s is None else timedelta(seconds=timeout_s)
    ranks, backend = ranks_of(group), "nccl" if "nccl" in str(dist.get_backend(group)) else "gloo"
    released = _released_group(tuple(ranks), timeout, backend)
    if _agree_on(released, group, timeout, stats):
        assert released is not None
        _released.remove(released)
        return released
    new = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    assert isinstance(new, dist.ProcessGroup)
    return new


_released: list[dist.ProcessGroup] = []
"""Groups that are not used any more. torch cannot make a group of the same name again, so they are not destroyed."""


def release_group(group: dist.ProcessGroup) -> None:
    """Let a group that ``group_of_same_ranks`` returned be used again: each group has threads and sockets."""
    if is_registered(group):
        _released.append(group)


def _released_group(ranks: tuple[int, ...], timeout: timedelta | None, backend: str) -> dist.ProcessGroup | None:
    _released[:] = [group for group in _released if is_registered(group)]  # not after destroy_process_group
    for group in reversed(_released):
        if (tuple(ranks_of(group)), timeout_of(group), backend_of(group)) == (ranks, timeout, backend):
            return group
    return None


def _agree_on(
    released: dist.ProcessGroup | None, group: dist.ProcessGroup | None, timeout: timedelta | None, stats: ExchangeStats
) -> bool:
    """Return whether all ranks of a group have the same released group; if not, let them know equally many groups.

    torch derives the name under which ranks meet from that number, so ranks that differ in it would wait for ever.
    """
    known = len(distributed_c10d._world.pg_names)
    name = "" if released is None else str(distributed_c10d._world.pg_names[released])
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little") if name else 0
    maxima = torch.tensor([known, digest, -digest], device=device_of(group))
    work = all_reduce(maxima, group, stats, dist.ReduceOp.MAX)
    work.wait() if timeout is None else work.wait(timeout)
    most, highest, negated_lowest = maxima.tolist()
    if highest == -negated_lowest != 0:
        return True
    for _ in range(most - known):
        dist.new_group([dist.get_rank()], use_local_synchronization=True, backend="gloo")
    return False
