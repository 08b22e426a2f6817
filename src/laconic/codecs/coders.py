"""``huffman``, ``rans``, ``deflate``, ``zstd``: a quantizer's symbols in as few bits as their frequencies allow."""

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
from laconic.kernels.sections import Coding, coded_max_nbytes, read_bytes, symbol_dtype, write_bytes
from laconic.packet import Arena

__all__ = ["ByteCoder", "Deflate", "Huffman", "Rans", "Zstd"]


class ChunkCoder(Coder):
    """Chunks of 2^19 symbols, each with a codebook of its own, so that threads share them."""

    mode: str
    pure: ClassVar[Coding]
    auto: ClassVar[Coding]

    def __post_init__(self) -> None:
        checks.one_of(self.name, "mode", self.mode, ("pure", "auto"))

    def limit(self, n: int, alphabet: int) -> int:
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


@dataclass(frozen=True)
class Huffman(ChunkCoder):
    """A prefix code of at most 15 bits, optimal under that limit, whose lengths travel with it.

    The faster one to decode, and within about 1 % of the entropy above 3 bits a symbol. It cannot go below one bit: for
    skewed symbols take ``rans``.

    Args:
        mode: ``pure``, or ``auto``: each chunk by the smallest of Huffman, rANS and plain bits.
    """

    mode: str = "pure"

    name: ClassVar[str] = "huffman"
    summary: ClassVar[str] = "canonical Huffman code of a quantizer's symbols"
    example: ClassVar[str] = "adaptive:5.0|huffman"
    pure: ClassVar[Coding] = Coding.HUFFMAN
    auto: ClassVar[Coding] = Coding.HUFFMAN_AUTO


@dataclass(frozen=True)
class Rans(ChunkCoder):
    """Asymmetric numeral systems (Duda 2013, arXiv:1311.2540), 32 lanes: within 1 % of the entropy at any skew.

    Args:
        mode: ``pure``, or ``auto``: each chunk by the smallest of rANS, Huffman and plain bits.
    """

    mode: str = "pure"

    name: ClassVar[str] = "rans"
    summary: ClassVar[str] = "rANS code of a quantizer's symbols"
    example: ClassVar[str] = "topk:0.01|qsgd:4|rans"
    pure: ClassVar[Coding] = Coding.RANS
    auto: ClassVar[Coding] = Coding.RANS_AUTO


class ByteCoder(Coder):
    """Symbols as bytes (two each above 256), through a compressor that the machine has.

    Its bytes are its own affair: they may differ between versions of that library, and any of them decodes.
    """

    def limit(self, n: int, alphabet: int) -> int:
        raw = n * symbol_dtype(alphabet).itemsize
        return raw + raw // 100 + 1024

    def encode(self, symbols: Symbols, kernels: Kernels, arena: Arena) -> Tensor:
        made = self._hosted(symbols.made(kernels)).contiguous()
        coded = self._compress(made.view(torch.uint8).numpy().tobytes())
        section = arena.take(len(coded))
        if section.is_cpu:
            write_bytes(section, coded)
        else:
            section.copy_(torch.frombuffer(bytearray(coded), dtype=torch.uint8))
        return section

    def decode(self, section: Tensor, n: int, alphabet: int, kernels: Kernels) -> Tensor:
        dtype = symbol_dtype(alphabet)
        on_host = self._hosted(section)
        raw = self._decompress(read_bytes(on_host, on_host.numel()), n * dtype.itemsize)
        if len(raw) != n * dtype.itemsize:
            raise FrameError(f"expected {n} symbols of {dtype.itemsize} bytes, {self.name} gives {len(raw)} bytes")
        symbols = torch.frombuffer(bytearray(raw), dtype=dtype)
        if int(symbols.max()) >= alphabet or int(symbols.min()) < 0:
            raise FrameError(f"the frame holds a symbol beyond {alphabet - 1}")
        return symbols.to(section.device)

    def _hosted(self, x: Tensor) -> Tensor:
        if not x.is_cpu:
            counters.count("hosted_kernels", 1, f"{self.name} has no kernel for {x.device.type}: the host serves")
        return x.cpu()

    def _compress(self, data: bytes) -> bytes:
        raise NotImplementedError

    def _decompress(self, data: bytes, expected: int) -> bytes:
        """At most one byte more than expected, whatever the data claims."""
        raise NotImplementedError


@dataclass(frozen=True)
class Deflate(ByteCoder):
    """zlib: everywhere at hand, and slow. A baseline.

    Args:
        level: 1 (fast) to 9 (small).
    """

    level: int = 6

    name: ClassVar[str] = "deflate"
    summary: ClassVar[str] = "zlib on a quantizer's symbols"
    example: ClassVar[str] = "uniform:8|deflate"

    def __post_init__(self) -> None:
        checks.whole(self.name, "level", self.level, 1, 9)

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
    """Zstandard, where the package ``zstandard`` is installed. A baseline.

    Args:
        level: 1 (fast) to 19 (small).
    """

    level: int = 3

    name: ClassVar[str] = "zstd"
    summary: ClassVar[str] = "Zstandard on a quantizer's symbols"
    example: ClassVar[str] = "uniform:8|zstd"

    def __post_init__(self) -> None:
        checks.whole(self.name, "level", self.level, 1, 19)

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
        try:  # piece by piece, since a few bytes can claim to be gigabytes
            for at in range(0, len(data), 64):
                raw += reader.decompress(data[at : at + 64])
                if len(raw) > expected:
                    break
        except library.ZstdError as error:
            raise FrameError(f"zstd symbols in the frame cannot be read: {error}") from None
        if not reader.eof or reader.unused_data:
            raise FrameError("zstd symbols in the frame do not end where they must")
        return bytes(raw)
