"""DeviceEvents: counts of what happens on a GPU, which the host reads when it need not wait for them."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import counters
from laconic.errors import FrameError, InputError

__all__ = ["INVALID", "LOOK_EVERY", "MISMATCH", "NONFINITE", "RESETS", "SATURATED", "DeviceEvents"]

NONFINITE, INVALID, RESETS, MISMATCH, SATURATED = KINDS = range(5)
"""Slots or shards that were not finite, messages that no encoder writes, residuals that were reset, rounds in which
ranks did not reduce the same tensors, and values that saturated."""

LOOK_EVERY = 8
"""Rounds of prepared tensors after which the host looks at the counts: looking costs it a copy, and events are rare."""


class DeviceEvents:
    """Counts on each device, copied to the host without waiting."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._seen: dict[torch.device, list[int]] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the counts of a device, int32, to which kernels add."""
        if device not in self._counts:
            on_host = torch.zeros(len(KINDS), dtype=torch.int32, pin_memory=device.type == "cuda")
            self._counts[device] = torch.zeros(len(KINDS), dtype=torch.int32, device=device), on_host
        return self._counts[device][0]

    def copy_to_host(self) -> None:
        for counts, on_host in self._counts.values():
            on_host.copy_(counts, non_blocking=True)

    def new(self, *, wait: bool) -> tuple[int, int]:
        """Return how many slots or shards were not finite and how many residuals were reset since the last call.

        ``FrameError`` if a message held bytes that no encoder writes, ``InputError`` if ranks reduced other tensors.

        Args:
            wait: For all work so far; otherwise events of the last rounds may be missing.
        """
        total = [0] * len(KINDS)
        for device, (counts, on_host) in self._counts.items():
            now, seen = (counts if wait else on_host).tolist(), self._seen.get(device, [0] * len(KINDS))
            total = [so_far + new - old for so_far, new, old in zip(total, now, seen, strict=True)]
            self._seen[device] = now
        if total[MISMATCH]:
            raise InputError(
                "ranks do not reduce the same tensors: all must call with the same names, shapes and codec"
            )
        if total[INVALID]:
            raise FrameError("a message from another rank holds bytes that no encoder writes")
        if total[SATURATED]:
            counters.count("saturated", total[SATURATED], "values beyond the range of 16 bits saturate")
        return total[NONFINITE], total[RESETS]
