"""BufferCache: memory that is reused in every round, because fresh pages cost more than what is written into them."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from laconic.packet import TensorSpec, allocate

__all__ = ["BufferCache"]


class BufferCache:
    """Flat tensors by key, each as large as the largest request so far."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Hashable, torch.dtype, torch.device], Tensor] = {}

    def get(
        self, key: Hashable, numel: int, dtype: torch.dtype = torch.uint8, device: torch.device | None = None, *,
        pinned: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return a buffer, which may hold old values. Pin host memory that a GPU writes or reads."""
        device = torch.device("cpu") if device is None else device
        pinned = pinned and device.type == "cpu"
        buffer = self._buffers.get((key, dtype, device))
        if buffer is None or buffer.numel() < numel or (pinned and not buffer.is_pinned()):
            if pinned:
                buffer = torch.empty(numel, dtype=dtype, pin_memory=True)
            else:
                buffer = allocate(TensorSpec((numel,), dtype), device)
            self._buffers[key, dtype, device] = buffer
        return buffer[:numel]
