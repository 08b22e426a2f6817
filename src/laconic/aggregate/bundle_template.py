"""BundleTemplate: a fast validity check for bundles of a known layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from laconic import wire
from laconic._core import bytes_at

__all__ = ["BundleTemplate"]


class BundleTemplate:
    """Names, sizes and headers of the frames in a bundle that is expected many times.

    A bundle that does not match may still be valid: ``wire.unpack_bundle`` reads it, or names its fault.

    Args:
        frames: Templates of the frames, in the same order.
    """

    def __init__(self, names: Sequence[str], frames: Sequence[wire.FrameTemplate]) -> None:
        sizes = [frame.nbytes for frame in frames]
        self._header, self._frames = wire.bundle_header(names, sizes), frames
        self.offsets: list[int] = []
        """Where each frame begins."""
        self._gaps: list[tuple[int, bytes]] = []
        end = len(self._header)
        for size in sizes:
            if begin_gap := -end & (wire.ALIGN - 1):
                self._gaps.append((end, bytes(begin_gap)))
            self.offsets.append(wire.align(end))
            end = wire.align(end) + size
        self.nbytes = end

    def matches(self, data: Tensor, *, trusted: bool = False) -> bool:
        """Whether these bytes are such a bundle, undamaged; of trusted bytes only the header is compared."""
        address = data.data_ptr()
        if data.numel() != self.nbytes or bytes_at(address, len(self._header)) != self._header:
            return False
        if trusted:
            return True
        if any(bytes_at(address + begin, len(zeros)) != zeros for begin, zeros in self._gaps):
            return False
        return all(frame.matches(address + begin) for frame, begin in zip(self._frames, self.offsets, strict=True))
