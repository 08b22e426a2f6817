"""SideStream: a stream of a GPU on which exchanges run beside what trains.

It is called for every DDP bucket in every step, on the thread that launches backward. So it keeps the objects that
torch.cuda's context managers would make anew, and asks torch for the current stream's number alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["SideStream"]

T = TypeVar("T")


class SideStream:
    """A stream of its own on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._ready, self._done = _event(), _event()
        self._numbers: tuple[int, int, int] | None = None
        """The stream that was current last, as torch's numbers."""
        self._current = self.stream

    def launch(self, work: Callable[[], T]) -> T:
        """Call what launches work on the current stream, with this one current: after what the other does by now."""
        index = self.device.index
        if torch.cuda.current_device() != index:
            with torch.cuda.device(self.device):
                return self.launch(work)
        current, side = self._find_current(), self.stream
        self._ready.record(current)
        _set_stream(side)
        try:
            self._ready.wait(side)
            return work()
        finally:
            _set_stream(current)

    def join(self) -> None:
        """Let the current stream wait for all that was launched; the host does not wait."""
        self._done.record(self.stream)
        self._done.wait(self._find_current())

    def _find_current(self) -> Any:
        numbers = torch._C._cuda_getCurrentStream(self.device.index)
        if numbers != self._numbers:
            self._numbers, self._current = numbers, torch.cuda.current_stream(self.device)
        return self._current


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _set_stream(stream: Any) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
