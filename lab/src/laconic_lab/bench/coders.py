"""Entropy coders: the symbols they get, the entropy that bounds them, and stock coders on the same symbols.

Stock coders get symbols ready-made, where ours make them from floats in the same time; both build their own models and
send them. What a coder could at best do is the entropy of the symbols, each taken by itself.
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
"""Symbols for coders that take a second for what others do in a tenth."""


def entropy(symbols: Tensor) -> float:
    """Bits a symbol of a code that knows how often each occurs, and nothing else."""
    counts = torch.bincount(symbols)
    share = counts[counts > 0].double() / symbols.numel()
    return -float((share * share.log2()).sum())


def uncoded(chain: Chain) -> Chain:
    """The chain without its coder: the same symbols, each in as many bits as the largest needs."""
    return replace(chain, coder=None)


def symbols(chain: Chain, x: Tensor, seed: int) -> Tensor:
    """What the chain's coder gets for x, as uint8 or, with more than 256 levels, int16."""
    plain = uncoded(chain)
    assert isinstance(plain.values, Quantizer)
    sections, n = plain.encode(x, seed=seed).sections, x.numel()
    if plain.selector is not None:
        n, sections = plain.selector.count(sections[0], n), sections[1:]
    return plain.values.packed_symbols(sections[-1], sections[:-1], n, cpu)


@dataclass(frozen=True)
class Rate:
    """Symbols, and the bytes that a coder made of them, tables and all."""

    numel: int
    entropy: float
    nbytes: int

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.numel

    @property
    def overhead(self) -> float | None:
        """What was written over the entropy, in percent of it; None where there is nothing to say (one symbol)."""
        return 100 * (self.bits / self.entropy - 1) if self.entropy else None

    def values(self) -> dict[str, Any]:
        return {
            "symbols": self.numel,
            "entropy_bits_per_symbol": self.entropy,
            "coded_bits_per_symbol": self.bits,
            "over_entropy_percent": self.overhead,
        }


def measure(chain: Chain, x: Tensor, seed: int) -> Rate:
    """What the coder at the end of a chain makes of x: a packet's last section."""
    found = symbols(chain, x, seed)
    return Rate(found.numel(), entropy(found), chain.encode(x, seed=seed).sections[-1].numel())


# -------------------------------------------------------------------------------------------------------- stock coders


def coder_peers(dtype: torch.dtype, n: int) -> list[Peer]:
    """Stock coders for n symbols of this dtype (uint8 or int16), as far as they are installed."""
    return [*_zstd(dtype), _zlib_huffman(dtype, n), *_constriction(n)]


def missing() -> list[str]:
    """What to tell about stock coders that are left out."""
    return [
        f"{name} is not installed, so it does not stand beside the coders: pip install 'laconic[bench]'"
        for name in ("zstandard", "constriction")
        if importlib.util.find_spec(name) is None
    ]


def _view(symbols: Tensor) -> memoryview:
    return symbols.numpy().data.cast("B")


def _back(raw: bytes, dtype: torch.dtype) -> Tensor:
    """Not copied, which would be a good part of a fast coder's time: torch warns, and nobody writes into it."""
    with quiet():
        return torch.frombuffer(raw, dtype=dtype)


def _sliced(part: int, n: int) -> str:
    return f"on the first {part:,} symbols, scaled" if part < n else ""


def _zstd(dtype: torch.dtype) -> list[Peer]:
    if importlib.util.find_spec("zstandard") is None:
        return []
    import zstandard

    def peer(level: int) -> Peer:
        press, unpress = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        return Peer(
            ZSTD.format(level), lambda x: press.compress(_view(x)), lambda m: _back(unpress.decompress(m), dtype)
        )

    return [peer(1), peer(3)]


def _zlib_huffman(dtype: torch.dtype, n: int) -> Peer:
    def encode(symbols: Tensor) -> bytes:
        press = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
        return press.compress(_view(symbols)) + press.flush()

    def decode(message: bytes) -> Tensor:
        return _back(zlib.decompress(message, -zlib.MAX_WBITS), dtype)

    part = min(n, ZLIB_NUMEL)
    return Peer("zlib, Huffman only", encode, decode, note=_sliced(part, n), numel=part)


def _constriction(n: int) -> list[Peer]:
    """Its coders take int32 and a table of probabilities, for which the counts travel."""
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
