"""``huffman``, ``rans``, ``deflate``, ``zstd``: entropy coders of a quantizer's symbols."""

from __future__ import annotations

import importlib
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic import counters
from laconic.codecs import checks
from laconic.codecs.base import Coder, Symbols
from laconic.errors import ConfigError, FrameError
from laconic.kernels.interface import Kernels
from laconic.kernels.sections import (
    CONSTANT,
    HUFFMAN,
    RANS,
    RAW,
    Coding,
    coded_max_nbytes,
    read_bytes,
    symbol_dtype,
    write_bytes,
)
from laconic.packet import Arena

__all__ = ["ByteCoder", "ChunkCoder", "Deflate", "Huffman", "Rans", "Zstd"]

_MODES = {CONSTANT: "constant", RAW: "raw", HUFFMAN: "huffman", RANS: "rans"}


class ChunkCoder(Coder):
    """Codes chunks of 2^19 symbols, each with its own code table, so that threads work in parallel."""

    mode: str
    pure: ClassVar[Coding]
    auto: ClassVar[Coding]

    def __post_init__(self) -> None:
        checks.one_of(self, "mode", ("pure", "auto"))

    def max_nbytes(self, n: int, alphabet: int) -> int:
        return coded_max_nbytes(n, alphabet)

    def encode(self, symbols: Symbols, kernels: Kernels, arena: Arena) -> Tensor:
        coding = self.auto if self.mode == "auto" else self.pure
        section = arena.take(coded_max_nbytes(symbols.source.numel(), symbols.alphabet))
        if symbols.grid is None:
            nbytes = kernels.encode_symbols(symbols.source, symbols.alphabet, coding, section)
        else:
            nbytes = kernels.encode_values(symbols.source, symbols.grid, coding, section)
        return arena.trim(section, nbytes)

    def decode(self, section: Tensor, n: int, alphabet: int, kernels: Kernels) -> Tensor:
        return kernels.decode_symbols(section, n, alphabet)

    def decode_values(
        self, section: Tensor, table: Tensor, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        kernels.decode_values(section, table, out, weight)

    def chunk_modes(self, section: Tensor, n: int, kernels: Kernels) -> dict[str, int]:
        modes = kernels.chunk_modes(section, n).tolist()
        return {_MODES[mode]: modes.count(mode) for mode in sorted(set(modes))}


@dataclass(frozen=True)
class Huffman(ChunkCoder):
    """A canonical Huffman code of at most 15 bits a symbol, optimal under that limit; its lengths are sent along.

    Decodes faster than ``rans``, and comes within about 1 % of the entropy above 3 bits a symbol. It cannot use less
    than one bit a symbol: use ``rans`` for skewed symbols.

    Args:
        mode: ``pure``, or ``auto``: the smallest of Huffman, rANS and plain bits for each chunk.
    """

    mode: str = "pure"

    name, example = "huffman", "adaptive:5.0|huffman"
    summary = "canonical Huffman code of a quantizer's symbols"
    pure: ClassVar[Coding] = Coding.HUFFMAN
    auto: ClassVar[Coding] = Coding.HUFFMAN_AUTO


@dataclass(frozen=True)
class Rans(ChunkCoder):
    """Asymmetric numeral systems (Duda 2013, arXiv:1311.2540), 32 streams: within 1 % of the entropy at any skew.

    Args:
        mode: ``pure``, or ``auto``: the smallest of rANS, Huffman and plain bits for each chunk.
    """

    mode: str = "pure"

    name, example = "rans", "topk:0.01|qsgd:4|rans"
    summary = "rANS code of a quantizer's symbols"
    pure: ClassVar[Coding] = Coding.RANS
    auto: ClassVar[Coding] = Coding.RANS_AUTO


class ByteCoder(Coder):
    """Passes symbols as bytes (two each above 256 symbols) to a compression library.

    The bytes may differ between versions of that library; every version decodes them.
    """

    host_only: ClassVar[bool] = True
    max_level: ClassVar[int]

    def max_nbytes(self, n: int, alphabet: int) -> int:
        raw = n * symbol_dtype(alphabet).itemsize
        return raw + raw // 100 + 1024

    def encode(self, symbols: Symbols, kernels: Kernels, arena: Arena) -> Tensor:
        on_host = self._to_host(symbols.materialize(kernels)).contiguous()
        coded = self._compress(on_host.view(torch.uint8).numpy().tobytes())
        section = arena.take(len(coded))
        if section.is_cpu:
            write_bytes(section, coded)
        else:
            section.copy_(torch.frombuffer(bytearray(coded), dtype=torch.uint8))
        return section

    def decode(self, section: Tensor, n: int, alphabet: int, kernels: Kernels) -> Tensor:
        dtype = symbol_dtype(alphabet)
        on_host = self._to_host(section)
        raw = self._decompress(read_bytes(on_host, on_host.numel()), n * dtype.itemsize)
        if len(raw) != n * dtype.itemsize:
            raise FrameError(f"expected {n} symbols of {dtype.itemsize} bytes, {self.name} returns {len(raw)} bytes")
        symbols = torch.frombuffer(bytearray(raw), dtype=dtype)
        if int(symbols.max()) >= alphabet or int(symbols.min()) < 0:
            raise FrameError(f"the frame holds a symbol above {alphabet - 1}")
        return symbols.to(section.device)

    def __post_init__(self) -> None:
        checks.integer(self, "level", 1, self.max_level)

    def _to_host(self, x: Tensor) -> Tensor:
        if not x.is_cpu:
            counters.count("hosted_kernels", 1, f"{self.name} has no kernel for {x.device.type} and runs on the host")
        return x.cpu()

    def _compress(self, data: bytes) -> bytes:
        raise NotImplementedError

    def _decompress(self, data: bytes, expected: int) -> bytes:
        """Return at most ``expected + 1`` bytes, whatever size the data declares."""
        raise NotImplementedError


@dataclass(frozen=True)
class Deflate(ByteCoder):
    """zlib: part of Python, and slow. A baseline. Its level is 1 (fast) to 9 (small)."""

    level: int = 6

    max_level = 9
    name, example = "deflate", "uniform:8|deflate"
    summary = "zlib on a quantizer's symbols"

    def _compress(self, data: bytes) -> bytes:
        return zlib.compress(data, self.level)

    def _decompress(self, data: bytes, expected: int) -> bytes:
        inflater = zlib.decompressobj()
        try:
            raw = inflater.decompress(data, expected + 1)
        except zlib.error as error:
            raise FrameError(f"deflated symbols in the frame cannot be read: {error}") from None
        if not inflater.eof or inflater.unused_data:
            raise FrameError("deflated symbols in the frame do not end where they must")
        return raw


@dataclass(frozen=True)
class Zstd(ByteCoder):
    """Zstandard; needs the package ``zstandard``. A baseline. Its level is 1 (fast) to 19 (small)."""

    level: int = 3

    max_level = 19
    name, example = "zstd", "uniform:8|zstd"
    summary = "Zstandard on a quantizer's symbols"

    @staticmethod
    def _library() -> Any:
        try:
            return importlib.import_module("zstandard")
        except ImportError:
            raise ConfigError("the stage 'zstd' needs the package zstandard: pip install zstandard") from None

    def _compress(self, data: bytes) -> bytes:
        return bytes(self._library().ZstdCompressor(level=self.level).compress(data))

    def _decompress(self, data: bytes, expected: int) -> bytes:
        try:
            library = self._library()
        except ConfigError as error:
            raise FrameError(f"the frame cannot be read here: {error}") from None
        reader = library.ZstdDecompressor(max_window_size=1 << 27).decompressobj(write_size=1 << 16)
        raw = bytearray()
        try:  # in pieces, because a few bytes can expand to gigabytes
            for at in range(0, len(data), 64):
                raw += reader.decompress(data[at : at + 64])
                if len(raw) > expected:
                    break
        except library.ZstdError as error:
            raise FrameError(f"zstd symbols in the frame cannot be read: {error}") from None
        if not reader.eof or reader.unused_data:
            raise FrameError("zstd symbols in the frame do not end where they must")
        return bytes(raw)
