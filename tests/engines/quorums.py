"""A stand-in for torchft where it is not installed: managers in threads, whose quorums a test decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(seconds=20)


class Gloo:
    """What ``torchft.ProcessGroupGloo`` does: a gloo group that can be configured again."""

    def __init__(self) -> None:
        self.group: Any = None

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *_: Any) -> None:
        port, _, prefix = store_addr.partition("/")
        client = dist.TCPStore("localhost", int(port), is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        self.group = dist.ProcessGroupGloo(dist.PrefixStore(prefix, client), rank, world_size, TIMEOUT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)  # allreduce, send, recv, size

    def errored(self) -> None:
        return None

    def getBackendName(self) -> str:  # noqa: N802
        return "torchft-gloo"


class Manager:
    """The part of ``torchft.Manager`` that laconic uses. ``healthy=False`` makes ``should_commit`` refuse."""

    def __init__(self) -> None:
        self._pg: Any = Gloo()
        self._quorum_id = -1
        self.step, self.participates, self.healthy = 0, True, True
        self.error: Exception | None = None
        self.state: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        self.state[key] = load, save

    def current_step(self) -> int:
        return self.step

    def is_participating(self) -> bool:
        return self.participates

    def report_error(self, error: Exception) -> None:
        self.error = error

    def allreduce(self, tensor: Tensor) -> Any:
        if not self.participates:
            tensor.zero_()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        return self._pg.allreduce([tensor], options)

    def should_commit(self) -> bool:
        committed = self.error is None and self.healthy
        self.step += committed
        self.error, self.healthy = None, True
        return committed

    def reduce(self, *tensors: Tensor) -> list[Tensor]:
        """Take one step: replace copies of the tensors by their sums, and decide on the step."""
        copies = [x.clone() for x in tensors]
        works = [self.allreduce(x) for x in copies]
        for work in works:
            try:
                work.wait()
            except Exception as error:
                self.report_error(error)
        self.should_commit()
        return copies


_store: list[Any] = []
_quorums = [0]


def form_quorum(managers: Sequence[Manager]) -> None:
    """Let managers continue with each other, as torchft does when replicas come and go."""
    if not _store:
        _store.append(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    _quorums[0] += 1
    address = f"{_store[0].port}/quorum{_quorums[0]}"
    in_threads([lambda m=m, i=i: m._pg.configure(address, "0", i, len(managers)) for i, m in enumerate(managers)])


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(60) for each in [pool.submit(call) for call in calls]]


def take_step(managers: Sequence[Manager], tensors: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return in_threads([lambda m=m, x=x: m.reduce(*x) for m, x in zip(managers, tensors, strict=True)])


def gradients(count: int, step: int, shapes: Sequence[tuple[int, ...]] = ((64, 96), (80, 64))) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(count)]
