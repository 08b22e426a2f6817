"""Replay: work that is launched in every step, recorded as a CUDA graph after its first runs.

The exchange of a DDP bucket takes tens of launches, and most of its time is Python's. All of them have the same
arguments in every step, because gradients, residuals and messages stay where they are. Collectives are not recorded: a
stretch of work ends before each of them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from laconic import counters
from laconic.kernels.graph_tables import hold_tables

__all__ = ["Recent", "Replay", "record_exchanges"]

log = logging.getLogger("laconic")

EAGER_RUNS = 2
"""Runs that compile kernels and fill caches, before one is recorded."""

VARIANTS = 4
"""Places of the same slots that are remembered: more would keep memory of tensors that are elsewhere in every step."""

T = TypeVar("T")

_recording = True


def record_exchanges(enabled: bool = True) -> None:
    """Record the exchanges on a GPU whose tensors are new from now on, which is the default, or launch them every time.

    Work that is recorded takes one call of the host in every step, and the memory of its temporary tensors stays
    reserved. Means and residuals have the same bits in both cases.
    """
    global _recording
    _recording = enabled


class _Pool:
    """Memory of the graphs of one stream: they run one after the other, so they share it.

    torch frees a pool with its last graph and then refuses to record into it, so one graph stays.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        flag = torch.zeros(1, device=device)
        self._first = _captured(lambda: flag.zero_(), device, self.handle), flag


_pools: dict[tuple[torch.device, int], _Pool] = {}
"""By device and stream."""


def _captured(launch: Callable[[], object], device: torch.device, pool: Any) -> Any:
    """Return a graph of what is launched on the current stream; an error leaves torch as it was before."""
    graph = torch.cuda.CUDAGraph()
    with _without_garbage_collection():
        try:
            with _scratch_generator(device):
                # Of this thread alone: NCCL's threads may use the device meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            with suppress(RuntimeError):  # not recording into the pool any more
                torch._C._cuda_endAllocateToPool(device.index, pool)
            raise
    return graph


@contextmanager
def _scratch_generator(device: torch.device) -> Iterator[None]:
    """Let a graph that begins in the block take another generator for the default one of its device.

    torch marks the generator until the recording succeeds. If it does not, every later dropout would raise, and while
    it lasts, those of other threads would. Nothing that is recorded here draws random numbers.
    """
    generator = torch.cuda.default_generators[device.index]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(torch.Generator(device))
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep the collector from destroying another graph, or an event, while one is recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Replay:
    """A function that only launches work, always with the same tensors. What it leaves behind, its caller holds.

    Args:
        recorded: False if an argument differs from run to run.
    """

    def __init__(self, launch: Callable[[], None], device: torch.device, *, recorded: bool = True) -> None:
        self._launch = launch
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._left = EAGER_RUNS if recorded and _recording and device.type == "cuda" else -1
        self._replay: Callable[[], None] | None = None
        self._tables: list[object] = []
        self._stream = 0

    def __call__(self) -> None:
        replay = self._replay
        if replay is not None and _raw_stream(self._device) == self._stream:
            replay()
        elif replay is None and self._left == 0 and self._record():
            assert self._replay is not None
            self._replay()
        else:
            self._left = -1 if replay is not None else self._left - (self._left > 0)  # another stream: not again
            self._replay = None
            self._launch()

    def _record(self) -> bool:
        """Record the launches; False if that is not possible here."""
        stream = torch.cuda.current_stream(self._device)
        if stream == torch.cuda.default_stream(self._device) or torch.cuda.is_current_stream_capturing():
            return False
        key = (self._device, stream.cuda_stream)
        try:
            if key not in _pools:
                _pools[key] = _Pool(self._device)
            with hold_tables() as self._tables:
                graph = _captured(self._launch, self._device, _pools[key].handle)
        except Exception as error:  # of any kind: what is wrong with the work itself is raised when it is launched
            self._left, self._tables = -1, []
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            counters.count(
                "unrecorded_exchanges", 1, f"a CUDA graph cannot hold the exchange ({reason}): it is launched"
            )
            return False
        self._replay, self._stream = graph.replay, stream.cuda_stream
        return True


def _raw_stream(device: torch.device) -> int:
    """Return the address of the current stream."""
    raw: int = torch._C._cuda_getCurrentRawStream(device.index)
    return raw


class Recent(Generic[T]):
    """What was prepared for named tensors where they are, the latest few places of each set of slots."""

    def __init__(self) -> None:
        self._by_slots: dict[tuple[str, ...], dict[tuple[int, ...], T]] = {}

    def get(self, named: Sequence[tuple[str, Tensor]]) -> T | None:
        places = self._by_slots.get(tuple(slot for slot, _ in named), {})
        return places.get(tuple(x.data_ptr() for _, x in named))

    def put(self, named: Sequence[tuple[str, Tensor]], prepared: T) -> None:
        places = self._by_slots.setdefault(tuple(slot for slot, _ in named), {})
        here = tuple(x.data_ptr() for _, x in named)
        while len(places) >= VARIANTS and here not in places:
            del places[next(iter(places))]
        places[here] = prepared

    def clear(self) -> None:
        self._by_slots.clear()
