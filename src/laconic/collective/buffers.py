"""Memory that outlives a round: fresh pages cost more than what is written into them."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from laconic.packet import TensorSpec, allocate

__all__ = ["BufferCache"]


class BufferCache:
    """Flat tensors by key, each as large as it ever had to be."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, torch.dtype, torch.device], Tensor] = {}

    def of(
        self,
        key: Hashable,
        numel: int,
        dtype: torch.dtype = torch.uint8,
        device: torch.device | None = None,
        *,
        pinned: bool = False,
    ) -> Tensor:
        """Room for so many values; what it held before may be in it. Pinned on the host if a GPU writes or reads it."""
        where = torch.device("cpu") if device is None else device
        kept = self._kept.get((key, dtype, where))
        if kept is None or kept.numel() < numel or (pinned and where.type == "cpu" and not kept.is_pinned()):
            if pinned and where.type == "cpu":
                kept = torch.empty(numel, dtype=dtype, pin_memory=True)
            else:
                kept = allocate(TensorSpec((numel,), dtype), where)
            self._kept[key, dtype, where] = kept
        return kept[:numel]
