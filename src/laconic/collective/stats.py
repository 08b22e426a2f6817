"""ExchangeStats: counts of the exchanges of one rank, in bytes and seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["ExchangeStats"]

Phase = Literal["encode_s", "wire_s", "decode_s"]


@dataclass
class ExchangeStats:
    """Counts of one rank. Seconds are those of the exchange thread, so they may overlap with computing.

    Attachments, LocalSGD and torchft add counts of their own in subclasses.
    """

    rounds: int = 0
    values: int = 0
    skipped_nonfinite: int = 0
    bytes_reduced: int = 0
    """Counted: bytes of all tensors handed to ``torch.distributed.all_reduce``."""
    bytes_sent: int = 0
    """Counted: bytes of all messages handed to ``torch.distributed.isend``, with their length prefixes."""
    bytes_received: int = 0
    """Counted: bytes of all buffers handed to ``torch.distributed.irecv``, with their length prefixes."""
    bytes_scattered: int = 0
    """Counted: bytes of all inputs handed to torch's reduce-scatter."""
    bytes_gathered: int = 0
    """Counted: bytes of all inputs handed to torch's all-gather."""
    bytes_broadcast: int = 0
    """Counted: bytes of all tensors handed to ``torch.distributed.broadcast`` by the rank that sends them."""
    encode_s: float = 0.0
    wire_s: float = 0.0
    """Waiting for bytes on their way and for ranks that are late."""
    decode_s: float = 0.0

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Add the time of the block to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + time.perf_counter() - began)

    def by_name(self) -> dict[str, Any]:
        """Return all counts by name, those of a subclass included."""
        return asdict(self) | {"wire_bytes": self.wire_bytes}

    def saved(self) -> Tensor:
        """Return the counts of exchanges as one vector, for a saved state."""
        return torch.tensor([float(getattr(self, each.name)) for each in fields(ExchangeStats)], dtype=torch.float64)

    def load(self, saved: Sequence[float]) -> None:
        """Continue from saved counts: those of an attachment or LocalSGD that ended with its process."""
        for each, value in zip(fields(ExchangeStats), saved, strict=False):  # an earlier version may have had fewer
            setattr(self, each.name, value if each.type == "float" else int(value))

    @property
    def wire_bytes(self) -> int:
        """Counted: all bytes that this rank handed to ``torch.distributed``."""
        collectives = self.bytes_reduced + self.bytes_scattered + self.bytes_gathered + self.bytes_broadcast
        return self.bytes_sent + collectives

    def ring_bytes_estimate(self, ranks: int) -> float:
        """Modelled: bytes of rounds that leave this rank if collectives are rings.

        An all-reduce sends 2 (ranks - 1) / ranks of its bytes, a reduce-scatter half of that, and an all-gather sends
        its input ranks - 1 times.
        """
        twice = 2 * self.bytes_reduced + self.bytes_scattered + self.bytes_gathered * ranks
        return self.bytes_sent + twice * (ranks - 1) / ranks
