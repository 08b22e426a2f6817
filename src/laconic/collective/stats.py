"""ExchangeStats: what exchanges have done so far, in bytes and seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

__all__ = ["ExchangeStats"]

Part = Literal["encode_s", "wire_s", "decode_s"]


@dataclass
class ExchangeStats:
    """Counts of one rank. Seconds are those of the thread that exchanges, so they may overlap with computing."""

    rounds: int = 0
    values: int = 0
    skipped_nonfinite: int = 0
    bytes_reduced: int = 0
    """What this rank gave to all-reduces: a ring sends 2 (ranks - 1) / ranks times that."""
    bytes_sent: int = 0
    """What this rank sent to others by itself, frames and their sizes."""
    encode_s: float = 0.0
    wire_s: float = 0.0
    """Waiting for others: for bytes on their way, and for ranks that are late."""
    decode_s: float = 0.0

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - began)

    def wire_bytes(self, ranks: int) -> float:
        """Bytes that leave this rank, if all-reduces are rings."""
        return self.bytes_sent + self.bytes_reduced * 2 * (ranks - 1) / ranks
