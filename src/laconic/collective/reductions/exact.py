"""Exact: uncompressed means, as DistributedDataParallel computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.collective.buffers import BufferCache
from laconic.collective.process_groups import is_registered, size_of
from laconic.collective.reductions.device_replay import Replay
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce
from laconic.residuals import KeepsResiduals

__all__ = ["Exact", "begin_mean"]


def _nothing() -> None:
    pass


MAX_JOINED = 256
"""Sets of tensors on a GPU whose CUDA graphs are kept."""


def begin_mean(flat: Tensor, group: dist.ProcessGroup | None, stats: ExchangeStats) -> Any:
    """Start an all-reduce that replaces a tensor by its mean. As in DDP, it scales before it adds: the same bits."""
    flat.mul_(1.0 / size_of(group))
    return all_reduce(flat, group, stats, as_torch=True)


class _Joined:
    """Tensors of one dtype, which are averaged as one: gathered into a flat tensor, and copied back."""

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, size: int) -> None:
        self.flat, self.numel = flat, flat.numel()
        parts = torch.split(flat, [x.numel() for x in tensors])
        contiguous = all(x.is_contiguous() for x in tensors)
        flattened = [x.view(-1) for x in tensors] if contiguous else None
        shaped = [part.view(x.shape) for x, part in zip(tensors, parts, strict=True)]
        backend = kernels.multi_tensor_backend_for(flat)
        if backend is None or flattened is None or flat.dtype != torch.float32:
            gather: Callable[[], object] = lambda: torch.cat(flattened or [x.reshape(-1) for x in tensors], out=flat)  # noqa: E731
            scatter: Callable[[], object] = lambda: torch._foreach_copy_(list(tensors), shaped)  # noqa: E731
        else:  # one launch for any number of tensors: launches are what small tensors cost on a GPU
            copy_all, never = backend.copy_all, torch.zeros(len(tensors), dtype=torch.int32, device=flat.device)
            gather = lambda: copy_all(flattened, parts, never)  # noqa: E731
            scatter = lambda: copy_all(parts, flattened, never)  # noqa: E731

        def begin() -> None:
            gather()
            flat.mul_(1.0 / size)  # before it is added, as in DDP: the same bits

        def finish() -> None:
            scatter()

        self.gather, self.scatter = Replay(begin, flat.device), Replay(finish, flat.device)


class Exact:
    """Means without compression: one all-reduce for all tensors of a dtype.

    Args:
        as_torch: Whether all means must have the bits of torch's all-reduce, not those of ``reduce_all`` alone.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, stats: ExchangeStats | None = None, as_torch: bool = True
    ) -> None:
        self.group, self._as_torch = group, as_torch
        self.stats = ExchangeStats() if stats is None else stats
        self._buffers = BufferCache()
        self._joined: dict[tuple[Any, ...], _Joined] = {}

    def reduce_all(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Replace tensors by their means, with the bits of torch's all-reduce."""
        self._begin(sum(x.numel() for _, x in tensors), [] if self._alone else self._join_all(tensors, 0), True)()

    @property
    def _alone(self) -> bool:
        """Whether there is no other rank: means are then what this rank has."""
        return is_registered(self.group) and size_of(self.group) == 1

    def begin(self, tensors: Sequence[tuple[str, Tensor]], turn: int = 0) -> Callable[[], None]:
        """Start the all-reduces; the returned function waits for them. One round at a time for each turn."""
        joined = [] if self._alone else self._join_all(tensors, turn)
        return self._begin(sum(x.numel() for _, x in tensors), joined, self._as_torch)

    def prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Callable[[], Callable[[], None]]:
        """Return a function that does what ``begin`` does with tensors on a GPU that stay where they are."""
        numel, joined = sum(x.numel() for _, x in tensors), [] if self._alone else self._join_all(tensors, 0)
        return lambda: self._begin(numel, joined, self._as_torch)

    def _begin(self, numel: int, joined: Sequence[_Joined], as_torch: bool) -> Callable[[], None]:
        self.stats.rounds += 1
        self.stats.values += numel
        if not joined:
            return _nothing
        pending = []
        for each in joined:
            each.gather()
            pending.append((each, all_reduce(each.flat, self.group, self.stats, as_torch=as_torch)))

        def finish() -> None:
            for each, work in pending:
                with self.stats.during("wire_s"):
                    work.wait()
                each.scatter()

        return finish

    def _join_all(self, tensors: Sequence[tuple[str, Tensor]], turn: int) -> list[_Joined]:
        dtypes = dict.fromkeys(x.dtype for _, x in tensors)
        return [self._join([x for _, x in tensors if x.dtype == dtype], turn) for dtype in dtypes]

    def forget_places(self) -> None:
        """Drop what was prepared for tensors where they were."""
        self._joined.clear()

    def _join(self, tensors: Sequence[Tensor], turn: int) -> _Joined:
        first, numel = tensors[0], sum(x.numel() for x in tensors)
        flat = self._buffers.get(turn, numel, first.dtype, first.device)
        if not first.is_cuda:
            return _Joined(tensors, flat, size_of(self.group))
        key = (flat.data_ptr(), first.dtype, *((x.data_ptr(), x.shape, x.stride()) for x in tensors))
        joined = self._joined.get(key)
        if joined is None:
            while len(self._joined) >= MAX_JOINED:  # the tensors are elsewhere in every round
                del self._joined[next(iter(self._joined))]
            joined = self._joined[key] = _Joined(tensors, flat, size_of(self.group))
        return joined

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
