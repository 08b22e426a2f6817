"""Exact: plain means, as DistributedDataParallel makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective.buffers import BufferCache
from laconic.collective.stats import ExchangeStats

__all__ = ["Exact", "begin_mean"]


def begin_mean(flat: Tensor, group: dist.ProcessGroup | None, ledger: ExchangeStats) -> Any:
    """Begin an all-reduce that replaces a tensor by its mean. Scaled first and then added, as DDP does: same bits."""
    ledger.bytes_reduced += flat.numel() * flat.element_size()
    flat.mul_(1.0 / dist.get_world_size(group))
    return dist.all_reduce(flat, group=group, async_op=True)


class Exact:
    """Means without compression: tensors of one dtype in one all-reduce."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, ledger: ExchangeStats | None = None) -> None:
        self.group = group
        self.stats = ExchangeStats() if ledger is None else ledger
        self._rooms = BufferCache()

    def reduce_all(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.begin(tensors)()

    def begin(self, tensors: Sequence[tuple[str, Tensor]]) -> Callable[[], None]:
        """Begin; what it returns waits for the end. One at a time."""
        self.stats.rounds += 1
        under_way = []
        for dtype in dict.fromkeys(x.dtype for _, x in tensors):
            same = [x for _, x in tensors if x.dtype == dtype]
            numel = sum(x.numel() for x in same)
            self.stats.values += numel
            flat = self._rooms.of("flat", numel, dtype, same[0].device)
            torch.cat([x.reshape(-1) for x in same], out=flat)
            under_way.append((same, flat, begin_mean(flat, self.group, self.stats)))

        def finish() -> None:
            for same, flat, work in under_way:
                with self.stats.during("wire_s"):
                    work.wait()
                parts = torch.split(flat, [x.numel() for x in same])
                # In few launches, however many there are: on a GPU they are what small tensors cost.
                torch._foreach_copy_(same, [part.view(x.shape) for x, part in zip(same, parts, strict=True)])

        return finish

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass
