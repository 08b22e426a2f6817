"""Real frames of sampled messages: compared with the computed values, and measured for the bytes of a run."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

import torch
from torch import Tensor

from laconic.frames import decode, encode
from laconic_lab.studies.gpt.model import Slots
from laconic_lab.studies.gpt.simulated import BESIDE

__all__ = ["FrameLog"]

TOLERANCE = 1e-4
"""Relative: means of buckets are summed in another order than a frame's."""


class FrameLog:
    """Counts the messages of one worker by kind, and makes frames of some of them.

    Args:
        samples: Frames made of each kind of message: slots, direction and codec. The first ``samples`` powers of two of
            its occurrences are taken, so that early and late rounds are covered.
    """

    def __init__(self, samples: int = 8) -> None:
        self.samples = samples
        self.compared = self.differing = 0
        self._counts: dict[tuple[str, str, str], int] = defaultdict(int)
        self._sizes: dict[tuple[str, str, str], list[int]] = defaultdict(list)

    def add(
        self, slots: Slots, direction: str, spec: str, values: Tensor, decoded: Tensor, *, times: float = 1.0
    ) -> None:
        """Count one message a slot. ``values`` and ``decoded`` are [slots, numel]; the first slot may be sampled.

        Args:
            times: Messages like this one that the worker sends or receives, such as those of all others.
        """
        key = (slots.name, direction, f"{spec} x{times:g}")
        seen = self._counts[key]
        self._counts[key] += values.shape[0]
        if len(self._sizes[key]) < self.samples and seen & (seen - 1) == 0:
            row = values[0].contiguous()
            expected, nbytes = torch.zeros_like(row), 0
            for part in spec.split(BESIDE):
                rest = row - expected
                frame = encode(rest.view(slots.shape) if len(slots.shape) > 1 else rest, part)
                nbytes += len(frame)
                expected += decode(frame).view(-1).to(row.device)
            self._sizes[key].append(round(nbytes * times))
            self.compared += 1
            scale = float(row.abs().max()) or 1.0
            if not torch.allclose(decoded[0], expected, rtol=TOLERANCE, atol=TOLERANCE * scale):
                self.differing += 1

    def add_bytes(self, slots: Slots, direction: str, label: str, nbytes: float, count: int = 1) -> None:
        """Count messages whose size follows from a formula."""
        key = (slots.name, direction, label)
        self._counts[key] += count
        if not self._sizes[key]:
            self._sizes[key].append(round(nbytes))

    def nbytes(self, direction: str) -> int:
        """Return the bytes of all messages of a direction, each kind at the mean size of its frames."""
        return round(sum(count * fmean(self._sizes[key]) for key, count in self._counts.items() if key[1] == direction))

    def share(self) -> dict[str, int]:
        """Return the bytes by kind of message, for Records."""
        return {" ".join(key): round(count * fmean(self._sizes[key])) for key, count in self._counts.items()}
