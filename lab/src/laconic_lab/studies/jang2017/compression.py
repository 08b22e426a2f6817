"""Table 1: gzip on a model's weights and on training data, beside zstd and laconic's codecs."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.errors import WrongResultError
from laconic.frames import decode, encode, encode_into, max_nbytes
from laconic.train.data import load
from laconic.train.models import build_model

__all__ = ["CODECS", "MODEL", "measure"]

MODEL = "alexnet"
CODECS = ("bf16", "qsgd:4", "topk:0.01|qsgd:4", "adaptive:5.0|huffman", "thc:4")
"""Codecs that are compared with gzip on weights; all of them are lossy."""


def measure(data: str, data_dir: Path | None, model: str = MODEL) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table: method, bytes, compressed bytes, CPU seconds of compression and decompression."""
    pixels = load(data, data_dir).train_images.numpy().tobytes()
    weights = torch.cat([p.detach().reshape(-1) for p in build_model(model, seed=0).parameters()])
    raw = weights.numpy().tobytes()
    for method in _lossless_methods():
        yield _lossless_row(model, method, raw)
    for spec in CODECS:
        yield _codec_row(model, spec, weights)
    for method in _lossless_methods():
        yield _lossless_row(data, method, pixels)


class _Method(NamedTuple):
    name: str
    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes], bytes]


def _lossless_methods() -> list[_Method]:
    methods = [_Method("gzip", lambda raw: zlib.compress(raw, 6), zlib.decompress)]
    try:
        import zstandard
    except ImportError:
        return methods
    compress, decompress = zstandard.ZstdCompressor(level=3).compress, zstandard.ZstdDecompressor().decompress
    return [*methods, _Method("zstd:3", compress, decompress)]


def _lossless_row(what: str, method: _Method, raw: bytes) -> dict[str, Any]:
    begin = time.process_time()
    compressed = method.compress(raw)
    middle = time.process_time()
    if method.decompress(compressed) != raw:
        raise WrongResultError(f"{method.name} did not restore its input")
    end = time.process_time()
    return {
        "what": what, "way": method.name, "lossless": True, "nbytes": len(raw), "compressed_nbytes": len(compressed),
        "compress_s": middle - begin, "decompress_s": end - middle,
    }  # fmt: skip


def _codec_row(what: str, spec: str, x: Tensor) -> dict[str, Any]:
    """Time the second of two calls with allocated buffers, as at every update of a training."""
    buffer, out = torch.empty(max_nbytes(spec, x), dtype=torch.uint8), torch.empty_like(x)
    encode_into(x, spec, buffer)
    begin = time.process_time()
    nbytes = encode_into(x, spec, buffer)
    middle = time.process_time()
    frame = encode(x, spec)
    decode(frame, out=out)
    again = time.process_time()
    decode(frame, out=out)
    end = time.process_time()
    error = float((out - x).square().sum() / x.square().sum())
    return {
        "what": what, "way": spec, "lossless": False, "nbytes": 4 * x.numel(), "compressed_nbytes": nbytes,
        "compress_s": middle - begin, "decompress_s": end - again, "relative_squared_error": error,
    }  # fmt: skip
