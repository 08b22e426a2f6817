"""CompressedGroup: the process group that torchft's manager uses, with sums by codecs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective.executor import ExchangeThread
from laconic.collective.work import CodecWork
from laconic.counters import LogOnce
from laconic.errors import LaconicError
from laconic.torchft.memory import ReplicaMemory
from laconic.torchft.naming import SlotNames

__all__ = ["CompressedGroup"]


class QuorumGroup:
    """The replicas of one quorum as a process group that ``torch.distributed`` has no record of."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        self._inner, self._rank, self._size = inner, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "gloo"

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        return self._inner.allreduce(tensors, options)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        return self._inner.send(tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        return self._inner.recv(tensors, rank, tag)


class SumWork(dist.Work):
    """A sum that begins with the first ``wait``; sums requested before that share its messages.

    Its error is in its future and not raised by ``wait``: torchft reports errors of futures to the manager, but an
    error that ``wait`` raises ends the backward pass of torchft's DDP, and with it the replica.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__()
        self._begin = begin
        self.started: CodecWork | None = None

    def _started(self) -> CodecWork:
        if self.started is None:
            self._begin()
        assert self.started is not None
        return self.started

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with suppress(Exception):
            self._started().wait()
        return True

    def is_completed(self) -> bool:
        return self.started is not None and self.started.is_completed()

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        self.wait()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._started().get_future()


class PlainWork(dist.Work):
    """A sum of the wrapped group, whose error is in its future only, as that of ``SumWork``."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with suppress(Exception):
            self._work.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        self.wait()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = self._work.get_future()
        return future


@dataclass
class _Sum:
    """One all-reduce that waits for others to travel with it."""

    slots: list[tuple[str, Tensor]]
    tensors: list[Tensor]
    work: SumWork


class CompressedGroup:
    """A torchft process group whose float sums travel by a codec. Everything else goes to the group it wraps.

    Args:
        inner: torchft's own process group, with the gloo backend.
        manager: Tells the step, and whether this replica takes part in it.
    """

    def __init__(self, inner: Any, manager: Any, memory: ReplicaMemory, names: SlotNames) -> None:
        self._inner, self._manager, self._memory, self._names = inner, manager, memory, names
        self._group: QuorumGroup | None = None
        self._thread = ExchangeThread("laconic-torchft")
        self._batch: list[_Sum] = []
        self._last: CodecWork | None = None
        self.uncompressed: Counter[str] = Counter()
        """All-reduces that did not use the codec, by reason."""
        self._warn_once = LogOnce("stats")

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if callable(attribute) and not name.startswith("_"):
            self.drain()  # another operation of the group must not overtake a sum on some replicas only
        return attribute

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, *more: Any, **options: Any
    ) -> None:  # fmt: skip
        """Continue with the replicas of another quorum. torchft calls it."""
        self._batch.clear()
        self.drain()
        self._thread.close()
        self._thread, self._last = ExchangeThread("laconic-torchft"), None
        self._inner.configure(store_addr, replica_id, rank, world_size, *more, **options)
        self._group = QuorumGroup(self._inner, rank, world_size)
        self._memory.join(cast(dist.ProcessGroup, self._group))

    # ---------------------------------------------------------------------------------------------------------- sums

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Replace tensors by their sums over the quorum; ``Manager.allreduce`` divides them by the participants."""
        assert self._group is not None, "torchft reduces before it has configured a quorum"
        why = self._why_uncompressed(tensors, getattr(opts, "reduceOp", opts))
        if why:
            self.drain()
            self.uncompressed[why] += 1
            self._memory.stats.bytes_reduced += sum(x.numel() * x.element_size() for x in tensors)
            return PlainWork(self._inner.allreduce(tensors, opts))
        slots = [slot for x in tensors for slot in self._names.slots(x)]
        waiting = {name for each in self._batch for name, _ in each.slots}
        if any(name in waiting for name, _ in slots):  # a second sum of the same slot needs the residual of the first
            self.begin()
        self._memory.begin_attempt(
            self._manager.current_step(), slots, participates=bool(self._manager.is_participating())
        )
        work = SumWork(self.begin)
        self._batch.append(_Sum(slots, tensors, work))
        return work

    def _why_uncompressed(self, tensors: list[Tensor], op: Any) -> str:
        if self._memory.spec == "none" and not self._memory.policy.rules and self._memory.policy.small == "none":
            return "the codec is none"
        if self._group is not None and self._group.size() == 1:
            return "the quorum has one replica"
        if op != dist.ReduceOp.SUM or not all(x.is_floating_point() and not x.is_sparse for x in tensors):
            return "not a sum of float tensors"
        if any(x.requires_grad for x in tensors):  # torchft's LocalSGD clones parameters with their history
            message = "parameters are averaged, which a lossy codec would damage: use DiLoCo, which averages changes"
            self._warn_once("parameters", message)
            return "parameters, not gradients or changes"
        return ""

    def begin(self) -> None:
        """Start the sums that wait, in one exchange."""
        batch, self._batch = self._batch, []
        if not batch:
            return
        exchange, group = self._memory.exchange, self._group
        assert exchange is not None and group is not None
        participates, size = bool(self._manager.is_participating()), group.size()
        tensors = [x for each in batch for x in each.tensors]
        slots = [slot for each in batch for slot in each.slots]

        def sums() -> None:
            try:
                self._memory.check_settings()
                with nullcontext() if participates else exchange.set_aside_residuals():
                    exchange.mean(slots)
            except LaconicError as error:
                if isinstance(error.__cause__, RuntimeError):
                    raise LaconicError(
                        "a replica was lost during an exchange: torchft discards the step and forms another quorum "
                        f"({str(error.__cause__).strip()[:200]})"
                    ) from error.__cause__
                raise
            torch._foreach_mul_(tensors, float(size))

        self._last = CodecWork.start(self._thread, sums, tensors)
        for each in batch:
            each.work.started = self._last

    def drain(self) -> Exception | None:
        """Start what waits and wait for it; return the error of the last exchange, if it failed."""
        self.begin()
        last, self._last = self._last, None
        if last is None:
            return None
        try:
            last.wait()
        except Exception as error:  # of any kind: the waiting step got it, too
            return error
        return None
