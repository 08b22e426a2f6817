"""Division of symbols into chunks and of a chunk's symbols into streams, for host and device."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from laconic.kernels.sections import CHUNK, num_buckets

__all__ = ["CHUNK_SYMBOLS", "LANES", "STREAMS", "STREAM_LENGTH", "ChunkLayout", "chunk_shape", "symbols_in_chunk"]

STREAMS = tl.constexpr(30)
"""Streams of a full chunk."""
LANES = tl.constexpr(32)
STREAM_LENGTH = num_buckets(CHUNK, STREAMS.value)
"""Symbols of a stream of a full chunk."""

CHUNK_SYMBOLS = tl.constexpr(CHUNK)
"""Symbols of a full chunk, for kernels."""
_STREAM_LENGTH = tl.constexpr(STREAM_LENGTH)


def streams_for(n: int) -> int:
    return STREAMS.value if n >= 65536 else 6 if n >= 2048 else 1


class ChunkLayout(NamedTuple):
    n: int
    chunks: int
    last_streams: int
    last_stream_size: int
    bins: int

    @classmethod
    def of(cls, n: int, alphabet: int) -> ChunkLayout:
        chunks = num_buckets(n, CHUNK)
        last = n - (chunks - 1) * CHUNK
        streams = streams_for(last)
        return cls(n, chunks, streams, num_buckets(last, streams), max(32, 1 << (alphabet - 1).bit_length()))

    @property
    def warps(self) -> int:
        return min(8, max(1, self.bins // 128))

    @property
    def steps(self) -> int:
        """Steps of a binary search over ``bins`` items."""
        return self.bins.bit_length() + 1

    @property
    def streams(self) -> int:
        """Streams of the largest chunk."""
        return self.last_streams if self.chunks == 1 else STREAMS.value

    @property
    def longest(self) -> int:
        """Symbols of the longest stream."""
        return self.last_stream_size if self.chunks == 1 else STREAM_LENGTH


@triton.jit
def symbols_in_chunk(n, chunk64):
    return tl.minimum(n - chunk64 * CHUNK_SYMBOLS, CHUNK_SYMBOLS).to(tl.int32)


@triton.jit
def chunk_shape(chunk, n, last_streams, last_stream_size):
    """Return the streams of a chunk, the symbols of a stream and the symbols of the chunk."""
    last = chunk == tl.num_programs(0) - 1
    streams = tl.where(last, last_streams, STREAMS)
    stream_size = tl.where(last, last_stream_size, _STREAM_LENGTH)
    return streams, stream_size, symbols_in_chunk(n, chunk.to(tl.int64))
