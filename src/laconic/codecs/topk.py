"""``topk:keep``: the entries of largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import Selected
from laconic.codecs.positional import CODES, PositionalSelector
from laconic.errors import ConfigError
from laconic.kernels.interface import ChunkCounts, Kernels
from laconic.kernels.sections import MAX_CHUNK, MIN_CHUNK, num_ranks, positions_max_nbytes, ranks_nbytes
from laconic.packet import Arena

__all__ = ["TopK", "num_kept"]


def num_kept(keep: float, n: int) -> int:
    """Return how many of n entries a fraction keeps: at least one, unless n is 0."""
    return min(n, max(1, int(keep * n + 0.5))) if n else 0


@dataclass(frozen=True)
class TopK(PositionalSelector):
    """Keep the entries of largest magnitude; send their positions and values.

    Biased: the other entries are lost. For training, put ``ef`` (Stich et al. 2018, arXiv:1809.07599) or ``momentum``
    before it. Of equal magnitudes the lowest index wins.

    Args:
        keep: Fraction of entries kept, in (0, 1]; at least one entry.
        approx: Estimate the threshold from 65,536 sampled magnitudes: keeps about ``keep``, at most twice as many
            entries, and takes half the time.
        chunk: 0: of the whole tensor. A power of two from 64 to 65536: of each chunk of this many consecutive values,
            the final one shorter; at least one entry of each (SparseLoCo, arXiv:2508.15706). Not with ``approx``.
        code: Code of the positions: ``rice``; or ``rans``, which costs time and saves bytes where some rows of a matrix
            keep more entries than others; or ``context``, which saves more there, and where columns differ, and costs
            more time (with ``chunk``, columns alone count). With ``chunk`` also ``rank``: a number per chunk, which
            always takes the same bytes; with chunk=64 few. See docs/codecs.md.

    Payload: positions (at most 1.06 times the entropy of k of n), then the values by the next stage.
    """

    keep: float = 0.01
    approx: bool = False
    chunk: int = 0
    code: str = "rice"

    keeps_largest = True
    name, example = "topk", "ef|topk:0.01|qsgd:4"
    summary = "entries of largest magnitude"
    biased = True

    def __post_init__(self) -> None:
        checks.fraction(self, "keep")
        chunk = self.chunk
        whole = isinstance(chunk, int) and not isinstance(chunk, bool)
        if not whole or (chunk and (not MIN_CHUNK <= chunk <= MAX_CHUNK or chunk & (chunk - 1))):
            raise ConfigError(
                f"stage 'topk': chunk must be 0 or a power of two from {MIN_CHUNK} to {MAX_CHUNK}, got {chunk}"
            )
        if chunk and self.approx:
            raise ConfigError(f"stage 'topk': chunk must be 0 with approx=true, which samples all values, got {chunk}")
        checks.one_of(self, "code", (*CODES, "rank"))
        each = num_kept(self.keep, chunk)
        if self.code == "rank" and not (chunk and num_ranks(chunk, each)):
            raise ConfigError(
                f"stage 'topk': code=rank needs a chunk with fewer than 2^31 ways to keep at most half of its entries, "
                f"got {each} of chunk={chunk}. Use chunk=64 with keep up to 0.11, or code=rans."
            )

    @property
    def randomized(self) -> bool:
        return self.approx

    def select(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        if self.approx or self.code != "rice":
            return super().select(x, kernels, arena, seed)
        n, k = x.numel(), self.max_kept(x.numel())
        section = arena.take(positions_max_nbytes(n, k))
        if self.chunk:
            nbytes, values, amax_bits = kernels.topk_chunks_encode(x, self.counts(n), section)
        else:
            nbytes, values, amax_bits = kernels.topk_encode(x, k, section)
        return Selected(arena.trim(section, nbytes), values, amax_bits)

    def choose(self, x: Tensor, kernels: Kernels, seed: int) -> tuple[Tensor, Tensor, int]:
        n = x.numel()
        if self.approx:
            return kernels.topk_sampled(x, num_kept(self.keep, n), seed)
        return kernels.topk_chunks(x, self.counts(n)) if self.chunk else kernels.topk(x, num_kept(self.keep, n))

    def encode(self, positions: Tensor, n: int, kernels: Kernels, arena: Arena) -> Tensor:
        if self.code != "rank":
            return super().encode(positions, n, kernels, arena)
        section = arena.take(self.max_section_nbytes(n))
        return arena.trim(section, kernels.ranks_encode(positions, n, self.counts(n), section))

    def max_section_nbytes(self, n: int) -> int:
        if self.code == "rank":
            return ranks_nbytes(n, self.chunk, num_kept(self.keep, self.chunk))
        return super().max_section_nbytes(n)

    def counts(self, n: int) -> ChunkCounts:
        """Return how many entries each chunk of n > 0 values keeps."""
        return ChunkCounts(self.chunk, num_kept(self.keep, self.chunk), num_kept(self.keep, (n - 1) % self.chunk + 1))

    def chunk_counts(self, n: int) -> ChunkCounts | None:
        return self.counts(n) if self.chunk else None

    def fixed_count(self, n: int) -> int | None:
        return None if self.approx else self.max_kept(n)

    def max_kept(self, n: int) -> int:
        if self.chunk and n:
            return self.counts(n).total(n)
        k = num_kept(self.keep, n)
        return min(n, 2 * k + 16) if self.approx else k
