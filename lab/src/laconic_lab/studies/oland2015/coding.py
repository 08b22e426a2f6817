"""What coding saves and costs: LZW on float32 weights, side information of frames, and the time of the codec.

The weights are those of the baseline after some epochs, a packet for each layer, as the paper sends them.
"""

from __future__ import annotations

import heapq
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.frames import decode, encode
from laconic.train.data import Images
from laconic_lab.studies.oland2015.exchange import exchange_packets
from laconic_lab.studies.oland2015.network import Batches, Networks
from laconic_lab.studies.oland2015.settings import BASELINE, LAYERS, CommonSettings
from laconic_lab.studies.trainer import single_thread

__all__ = ["CODEC", "KIND", "huffman_bits", "lzw_nbytes", "measure"]

KIND = "study.oland2015.coding"
CODEC = "adaptive:5|huffman"
TURNS = 5
WIDEST = 16
"""Bits of the longest code of LZW, as in the program compress; a full dictionary is kept."""


def lzw_nbytes(data: bytes) -> int:
    """Return the bytes of LZW codes that grow from 9 to 16 bits.

    >>> lzw_nbytes(b"a"), lzw_nbytes(b"a" * 1000) < 60
    (2, True)
    """
    codes: dict[tuple[int, int], int] = {}
    bits, width, prefix = 0, 9, -1
    for byte in data:
        if prefix < 0:
            prefix = byte
            continue
        code = codes.get((prefix, byte))
        if code is not None:
            prefix = code
            continue
        bits += width
        if len(codes) + 256 < 1 << WIDEST:
            codes[prefix, byte] = len(codes) + 256
            width = max(width, min(WIDEST, (len(codes) + 256).bit_length()))
        prefix = byte
    return -(-(bits + (width if prefix >= 0 else 0)) // 8)


def huffman_bits(counts: Sequence[int]) -> int:
    """Return the bits of all symbols in the best prefix code; a single symbol needs one bit each time.

    >>> huffman_bits([2, 1, 1]), huffman_bits([5])
    (6, 5)
    """
    heap = sorted(counts)
    if len(heap) == 1:
        return heap[0]
    total = 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        total += both
        heapq.heappush(heap, both)
    return total


def measure(common: CommonSettings, runs: int, images: Images) -> list[dict[str, Any]]:
    """Train the baseline, average and code the weights of the first worker, and return the values of each run."""
    settings, device = [common.default] * runs, torch.device("cpu")
    batches = Batches(
        images.train_images, images.train_labels, workers=common.workers, batch=common.default.batch,
        seed=common.seed, pixels=common.default.pixels, device=device,
    )  # fmt: skip
    with single_thread():
        networks = Networks(settings, range(runs), common.workers, common.seed, device)
        for epoch in range(common.epochs):
            networks.train_epoch(epoch, batches)
            last = [networks.layer(0, i).clone() for i in range(len(LAYERS))]
            exchange_packets(networks, [BASELINE] * runs, seed=common.seed + epoch)
        return [_coded([layer[run] for layer in last], common.seed) for run in range(runs)]


def _coded(layers: Sequence[Tensor], seed: int) -> dict[str, Any]:
    raw = b"".join(layer.numpy().tobytes() for layer in layers)
    began = time.thread_time()
    lzw = lzw_nbytes(raw)
    lzw_s = time.thread_time() - began
    frames = [encode(layer, CODEC, seed=seed) for layer in layers]
    symbols = sum(-(-huffman_bits(list(Counter(decode(frame).tolist()).values())) // 8) for frame in frames)
    encoding, decoding = [], []
    for _ in range(TURNS):
        began = time.thread_time()
        frames = [encode(layer, CODEC, seed=seed) for layer in layers]
        encoded = time.thread_time()
        for frame in frames:
            decode(frame)
        encoding.append(encoded - began)
        decoding.append(time.thread_time() - encoded)
    nbytes = sum(map(len, frames))
    return {
        "nbytes": len(raw), "lzw_nbytes": lzw, "lzw_s": lzw_s, "deflate_nbytes": len(zlib.compress(raw)),
        "codec": CODEC, "frame_nbytes": nbytes, "side_nbytes": nbytes - symbols, "encode_s": min(encoding),
        "decode_s": min(decoding),
    }  # fmt: skip
