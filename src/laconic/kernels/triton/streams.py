"""How symbols are dealt to chunks and a chunk's symbols to streams, on both sides of a launch."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from laconic.kernels.sections import CHUNK, num_buckets

__all__ = ["LANES", "STREAMS", "STREAM_LENGTH", "Cut", "share"]

STREAMS = tl.constexpr(30)
"""The most streams of a chunk."""
LANES = tl.constexpr(32)
STREAM_LENGTH = num_buckets(CHUNK, STREAMS.value)
"""The most symbols of a stream."""

_CHUNK = tl.constexpr(CHUNK)
_STREAM_LENGTH = tl.constexpr(STREAM_LENGTH)


def streams_for(n: int) -> int:
    return STREAMS.value if n >= 65536 else 6 if n >= 2048 else 1


class Cut(NamedTuple):
    n: int
    chunks: int
    last_streams: int
    last_each: int
    bins: int

    @classmethod
    def of(cls, n: int, alphabet: int) -> Cut:
        chunks = num_buckets(n, CHUNK)
        last = n - (chunks - 1) * CHUNK
        streams = streams_for(last)
        return cls(n, chunks, streams, num_buckets(last, streams), max(32, 1 << (alphabet - 1).bit_length()))

    @property
    def warps(self) -> int:
        return min(8, max(1, self.bins // 128))

    @property
    def steps(self) -> int:
        """Halvings until an interval of so many items is empty."""
        return self.bins.bit_length() + 1

    @property
    def streams(self) -> int:
        """The most of a chunk."""
        return self.last_streams if self.chunks == 1 else STREAMS.value

    @property
    def longest(self) -> int:
        """Symbols of the longest stream."""
        return self.last_each if self.chunks == 1 else STREAM_LENGTH


@triton.jit
def share(chunk, n, last_streams, last_each):
    """Streams of a chunk, symbols of a stream, symbols in all."""
    last = chunk == tl.num_programs(0) - 1
    streams = tl.where(last, last_streams, STREAMS)
    each = tl.where(last, last_each, _STREAM_LENGTH)
    return streams, each, tl.minimum(n - chunk.to(tl.int64) * _CHUNK, _CHUNK).to(tl.int32)
