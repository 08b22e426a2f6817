"""Table 1: gzip on a model's weights and on training data, beside zstd and laconic's codecs."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.frames import decode, encode, max_nbytes
from laconic.frames import encode_into as into
from laconic.train.data import load
from laconic.train.models import build_model

__all__ = ["CODECS", "MODEL", "measure"]

MODEL = "alexnet"
CODECS = ("bf16", "qsgd:4", "topk:0.01|qsgd:4", "adaptive:5.0|huffman", "thc:4")
"""Beside gzip, on weights. All but gzip and zstd lose something."""


def measure(data: str, data_dir: Path | None, model: str = MODEL) -> Iterator[dict[str, Any]]:
    """Rows: what, by what, bytes, compressed bytes, seconds of the processor there and back; with one thread."""
    pixels = load(data, data_dir).train_images.numpy().tobytes()
    weights = torch.cat([p.detach().reshape(-1) for p in build_model(model, seed=0).parameters()])
    raw = weights.numpy().tobytes()
    for way, (there, back) in _lossless().items():
        yield _row(model, way, len(raw), raw, there, back)
    for spec in CODECS:
        yield _coded(model, spec, weights)
    for way, (there, back) in _lossless().items():
        yield _row(data, way, len(pixels), pixels, there, back)


def _lossless() -> dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]]:
    found: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        "gzip": (lambda raw: zlib.compress(raw, 6), zlib.decompress)
    }
    try:
        import zstandard
    except ImportError:
        return found
    found["zstd:3"] = (zstandard.ZstdCompressor(level=3).compress, zstandard.ZstdDecompressor().decompress)
    return found


def _row(
    what: str, way: str, nbytes: int, raw: bytes, there: Callable[[bytes], bytes], back: Callable[[bytes], bytes]
) -> dict[str, Any]:
    begin = time.process_time()
    small = there(raw)
    middle = time.process_time()
    if back(small) != raw:
        raise ConfigError(f"{way} did not give back what it was given")
    end = time.process_time()
    return {
        "what": what, "way": way, "lossless": True, "nbytes": nbytes, "compressed_nbytes": len(small),
        "compress_s": middle - begin, "decompress_s": end - middle,
    }  # fmt: skip


def _coded(what: str, spec: str, x: Tensor) -> dict[str, Any]:
    """The second of two, into memory that is there: as it is when it is done at every update."""
    room, out = torch.empty(max_nbytes(spec, x), dtype=torch.uint8), torch.empty_like(x)
    into(x, spec, room)
    begin = time.process_time()
    nbytes = into(x, spec, room)
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
