"""Replay: work that is launched in every step, if wanted recorded as a CUDA graph after its first runs.

The exchange of a DDP bucket takes tens of launches, and most of its time is Python's. All of them have the same
arguments in every step, because gradients, residuals and messages stay where they are. Collectives are not recorded: a
stretch of work ends before each of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from laconic import counters

__all__ = ["Recent", "Replay"]

log = logging.getLogger("laconic")

EAGER_RUNS = 2
"""Runs that compile kernels and fill caches, before one is recorded."""

VARIANTS = 4
"""Places of the same slots that are remembered: more would keep memory of tensors that are elsewhere in every step."""

T = TypeVar("T")

_recording = False


def record_exchanges(enabled: bool = True) -> None:
    """Record the exchanges that begin from now on, or launch them in every step, which is the default.

    Recording has not been measured on a GPU yet.
    """
    global _recording
    _recording = enabled


_pools: dict[tuple[torch.device, int], Any] = {}
"""Memory of graphs by device and stream: those of one stream run one after the other, so they share it."""


class Replay:
    """A function that only launches work, always with the same tensors. What it leaves behind, its caller holds.

    Args:
        recorded: False if an argument differs from run to run.
    """

    def __init__(self, launch: Callable[[], None], device: torch.device, *, recorded: bool = True) -> None:
        self._launch, self._device = launch, device
        self._left = EAGER_RUNS if recorded and _recording and device.type == "cuda" else -1
        self._graph: Any = None
        self._stream = 0

    def __call__(self) -> None:
        graph = self._graph
        if graph is not None and torch.cuda.current_stream(self._device).cuda_stream == self._stream:
            graph.replay()
        elif graph is None and self._left == 0 and self._record():
            self._graph.replay()
        else:
            self._left = -1 if graph is not None else self._left - (self._left > 0)  # another stream: not again
            self._graph = None
            self._launch()

    def _record(self) -> bool:
        """Record the launches; False if that is not possible here."""
        stream = torch.cuda.current_stream(self._device)
        if stream == torch.cuda.default_stream(self._device) or torch.cuda.is_current_stream_capturing():
            return False
        key = (self._device, stream.cuda_stream)
        if key not in _pools:
            _pools[key] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Of this thread alone: NCCL's threads may use the device meanwhile.
            graph.capture_begin(pool=_pools[key], capture_error_mode="thread_local")
            try:
                self._launch()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            self._left = -1
            counters.count(
                "unrecorded_exchanges", 1, f"a CUDA graph cannot hold the exchange ({error}): it is launched"
            )
            return False
        self._graph, self._stream = graph, stream.cuda_stream
        return True


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
