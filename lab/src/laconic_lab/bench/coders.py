"""Entropy coders: their symbols, the entropy bound, and stock coders on the same symbols.

Stock coders receive ready-made symbols while ours quantize floats in the same time; both build and send their own
models. The bound is the zero-order entropy of the symbols.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import Chain
from laconic.codecs.base import Quantizer
from laconic.kernels import cpu
from laconic_lab.bench.peers import ZLIB_NUMEL, Peer, quiet

__all__ = ["ANS", "ZSTD", "Rate", "coder_peers", "entropy", "measure", "missing", "symbols", "uncoded"]

ZSTD, ANS = "zstd level {} on symbols", "constriction ANS"

SLICE = 4_000_000
"""Number of symbols for slow coders."""


def entropy(symbols: Tensor) -> float:
    """Return the zero-order entropy in bits per symbol."""
    counts = torch.bincount(symbols)
    share = counts[counts > 0].double() / symbols.numel()
    return -float((share * share.log2()).sum())


def uncoded(chain: Chain) -> Chain:
    """Return the chain without its coder: the same symbols in fixed-width bits."""
    return replace(chain, coder=None)


def symbols(chain: Chain, x: Tensor, seed: int) -> Tensor:
    """Return the symbols that the chain's coder receives for x: uint8, or int16 with more than 256 levels."""
    plain = uncoded(chain)
    assert isinstance(plain.values, Quantizer)
    sections, n = plain.encode(x, seed=seed).sections, x.numel()
    if plain.selector is not None:
        n, sections = plain.selector.count(sections[0], n), sections[1:]
    return plain.values.packed_symbols(sections[-1], sections[:-1], n, cpu)


@dataclass(frozen=True)
class Rate:
    """A number of symbols and the bytes they were coded in, code tables included."""

    numel: int
    entropy: float
    nbytes: int

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.numel

    @property
    def overhead(self) -> float | None:
        """Excess over the entropy in percent; None if the entropy is zero."""
        return 100 * (self.bits / self.entropy - 1) if self.entropy else None

    def values(self) -> dict[str, Any]:
        return {
            "symbols": self.numel,
            "entropy_bits_per_symbol": self.entropy,
            "coded_bits_per_symbol": self.bits,
            "over_entropy_percent": self.overhead,
        }


def measure(chain: Chain, x: Tensor, seed: int) -> Rate:
    """Measure the coder of a chain on x: the size of the packet's last section."""
    coded = symbols(chain, x, seed)
    return Rate(coded.numel(), entropy(coded), chain.encode(x, seed=seed).sections[-1].numel())


def coder_peers(dtype: torch.dtype, n: int) -> list[Peer]:
    """Return the installed stock coders for n symbols of this dtype (uint8 or int16)."""
    return [*_zstd(dtype), _zlib_huffman(dtype, n), *_constriction(n)]


def missing() -> list[str]:
    """Return a note for each stock coder that is not installed."""
    return [
        f"{name} is not installed and is left out: pip install 'laconic-lab[coders]'"
        for name in ("zstandard", "constriction")
        if importlib.util.find_spec(name) is None
    ]


def _view(symbols: Tensor) -> memoryview:
    return symbols.numpy().data.cast("B")


def _back(raw: bytes, dtype: torch.dtype) -> Tensor:
    """Return the bytes as a tensor without a copy, which would be much of a fast coder's time; torch warns."""
    with quiet():
        return torch.frombuffer(raw, dtype=dtype)


def _sliced(part: int, n: int) -> str:
    return f"on the first {part:,} symbols, scaled" if part < n else ""


def _zstd(dtype: torch.dtype) -> list[Peer]:
    if importlib.util.find_spec("zstandard") is None:
        return []
    import zstandard

    def peer(level: int) -> Peer:
        compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        return Peer(
            ZSTD.format(level),
            lambda x: compressor.compress(_view(x)),
            lambda m: _back(decompressor.decompress(m), dtype),
        )

    return [peer(1), peer(3)]


def _zlib_huffman(dtype: torch.dtype, n: int) -> Peer:
    def encode(symbols: Tensor) -> bytes:
        compressor = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
        return compressor.compress(_view(symbols)) + compressor.flush()

    def decode(message: bytes) -> Tensor:
        return _back(zlib.decompress(message, -zlib.MAX_WBITS), dtype)

    part = min(n, ZLIB_NUMEL)
    return Peer("zlib, Huffman only", encode, decode, note=_sliced(part, n), numel=part)


def _constriction(n: int) -> list[Peer]:
    """constriction's coders take int32 and a probability table, so the symbol counts are sent."""
    if importlib.util.find_spec("constriction") is None:
        return []
    from constriction import stream

    part = min(n, SLICE)

    def peer(name: str, code: Callable[[Any, Any], Any], uncode: Callable[[Any, Any, int], Any]) -> Peer:
        def encode(symbols: Tensor) -> Any:
            counts = torch.bincount(symbols, minlength=2).numpy().astype(np.float32)
            model = stream.model.Categorical(counts, perfect=False)
            return code(symbols.numpy(), model), counts, np.array([symbols.numel()])

        def decode(message: Any) -> Tensor:
            words, counts, numel = message
            return torch.from_numpy(uncode(words, stream.model.Categorical(counts, perfect=False), int(numel[0])))

        return Peer(name, encode, decode, note=_sliced(part, n), numel=part, dtype=torch.int32)

    def ans(symbols: Any, model: Any) -> Any:
        coder = stream.stack.AnsCoder()
        coder.encode_reverse(symbols, model)
        return coder.get_compressed()

    def ranges(symbols: Any, model: Any) -> Any:
        coder = stream.queue.RangeEncoder()
        coder.encode(symbols, model)
        return coder.get_compressed()

    return [
        peer(ANS, ans, lambda words, model, n: stream.stack.AnsCoder(words).decode(model, n)),
        peer(
            "constriction range coder",
            ranges,
            lambda words, model, n: stream.queue.RangeDecoder(words).decode(model, n),
        ),
    ]
