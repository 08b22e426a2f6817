"""Exact: uncompressed means, as DistributedDataParallel computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective.buffers import BufferCache
from laconic.collective.process_groups import size_of
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce
from laconic.residuals import KeepsResiduals

__all__ = ["Exact", "begin_mean"]


def begin_mean(flat: Tensor, group: dist.ProcessGroup | None, stats: ExchangeStats) -> Any:
    """Start an all-reduce that replaces a tensor by its mean. As in DDP, it scales before it adds: the same bits."""
    flat.mul_(1.0 / size_of(group))
    return all_reduce(flat, group, stats)


class Exact:
    """Means without compression: one all-reduce for all tensors of a dtype."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, stats: ExchangeStats | None = None) -> None:
        self.group = group
        self.stats = ExchangeStats() if stats is None else stats
        self._buffers = BufferCache()

    def reduce_all(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.begin(tensors)()

    def begin(self, tensors: Sequence[tuple[str, Tensor]], turn: int = 0) -> Callable[[], None]:
        """Start the all-reduces; the returned function waits for them. One round at a time for each turn."""
        self.stats.rounds += 1
        pending = []
        for dtype in dict.fromkeys(x.dtype for _, x in tensors):
            same = [x for _, x in tensors if x.dtype == dtype]
            numel = sum(x.numel() for x in same)
            self.stats.values += numel
            flat = self._buffers.get(turn, numel, dtype, same[0].device)
            torch.cat([x.reshape(-1) for x in same], out=flat)
            pending.append((same, flat, begin_mean(flat, self.group, self.stats)))

        def finish() -> None:
            for same, flat, work in pending:
                with self.stats.during("wire_s"):
                    work.wait()
                parts = torch.split(flat, [x.numel() for x in same])
                # A few launches for any number of tensors: launches are what small tensors cost on a GPU.
                torch._foreach_copy_(same, [part.view(x.shape) for x, part in zip(same, parts, strict=True)])

        return finish

    residual_resets = 0

    @property
    def memories(self) -> dict[str, KeepsResiduals]:
        return {}

    def set_aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_rounds(self, number: int) -> None:
        pass

    def portable_state(self, slots: Mapping[str, int]) -> dict[str, Tensor]:
        return {}

    def load_portable_state(self, state: Mapping[str, Tensor]) -> None:
        pass

    def residual(self, slot: str, numel: int) -> Tensor | None:
        return None

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def checked_state(self, state: Mapping[str, Tensor]) -> Callable[[], None]:
        return lambda: None

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass
