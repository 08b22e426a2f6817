"""Values and random numbers, read as sections 6 and 9 of docs/wire-format.md define them.

A part of ``wire_reader``: plain Python and numpy, written from the document, and nothing of laconic is imported.
"""

from __future__ import annotations

import math
import struct

import numpy as np

from wire_positions import read_positions
from wire_symbols import InvalidFrameError, bits_of, ceil_div, coded_symbols, require, unpack, unpack_trits

f32, f64, u64 = np.float32, np.float64, np.uint64
FLT_MAX = np.finfo(f32).max
MASK64 = (1 << 64) - 1
MAX_CLIP = (2 - 2.0**-20) * 2.0**127

# ---- randomness, section 9


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def hash_key(seed: int, stream: int) -> int:
    return splitmix64(splitmix64(seed) ^ stream * 0xD1B54A32D192ED03 & MASK64)


def hash32(counters: np.ndarray, key: int) -> np.ndarray:
    low, mask = counters.astype(u64) & u64(0xFFFFFFFF), u64(0xFFFFFFFF)
    h = low ^ u64(key & 0xFFFFFFFF) ^ ((counters.astype(u64) >> u64(32)) * u64(0x9E3779B9) & mask)
    h ^= h >> u64(16)
    h = h * u64(0x7FEB352D) & mask
    h ^= h >> u64(15) ^ u64(key >> 32)
    h = h * u64(0x846CA68B) & mask
    return h ^ h >> u64(16)


# ---- conversions


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(f32)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    largest = widen_bf16(np.array([0x7F7F], np.uint16))[0]
    bits = np.clip(values, -largest, largest).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def round_to_fp16(values: np.ndarray) -> np.ndarray:
    return np.clip(values, f32(-65504), f32(65504)).astype(np.float16)


# ---- value payloads, section 6


def floats(section: bytes, count: int, what: str, negative: bool = True) -> np.ndarray:
    require(len(section) == 4 * count, f"the section of {what} does not have {count} floats")
    values = np.frombuffer(section, "<f4")
    require(np.all(np.isfinite(values)), f"one of {what} is not finite")
    require(negative or np.all(values >= 0), f"one of {what} is negative")
    return values


class Quantizer:
    """The symbols of a value stage: packed, ternary or coded."""

    def __init__(self, coder: str | None) -> None:
        self.coder = coder

    def symbols(self, section: bytes, count: int, alphabet: int, largest: int = 0, trits: bool = False) -> np.ndarray:
        if self.coder is not None:
            return coded_symbols(section, count, alphabet, self.coder, largest or alphabet)
        return unpack_trits(section, count) if trits else unpack(section, count, bits_of(alphabet))


def uniform(sections: list[bytes], m: int, bits: int, quantizer: Quantizer) -> np.ndarray:
    low, high = floats(sections[0], 2, "low and high").astype(f64)
    require(low <= high, "low is above high")
    if low == high:
        require(not sections[1], "a constant has symbols")
        return np.full(m, f32(low) + f32(0), f32)
    symbols = quantizer.symbols(sections[1], m, 1 << bits)
    width = (high - low) / f64(1 << bits)
    return (low + (symbols + f64(0.5)) * width).astype(f32)


def max_tail(tail: float, m: int) -> int:
    return min(m, max(64, math.ceil(4 * tail * m)))


def adaptive(sections: list[bytes], m: int, options: dict, quantizer: Quantizer) -> np.ndarray:
    header = sections[0]
    require(len(header) == 16, "the header of adaptive does not have 16 bytes")
    low, high, levels, measure = struct.unpack("<ffIf", header)
    require(1 <= levels <= 4096 and math.isfinite(low) and math.isfinite(measure), "the header of adaptive is wrong")
    if options["zero"]:
        step, first = low, struct.unpack_from("<i", header, 4)[0]
        far = max(abs(first), abs(first + levels - 1))
        require(far <= 4096 and abs(step) * (far - 1) <= FLT_MAX, "the levels of adaptive go too far")
    else:
        require(math.isfinite(high) and low <= high, "low is above high")
        require((low == high) == (levels == 1), "levels = 1 and low = high do not agree")
    if levels == 1:
        require(not sections[-1], "one level has symbols")
        symbols = np.zeros(m, np.int64)
    else:
        symbols = np.minimum(quantizer.symbols(sections[-1], m, levels, 4096), levels - 1)
    if options["zero"]:
        values = (symbols + first).astype(f64) * f64(step)
    else:
        values = f64(low) + (symbols + f64(0.5)) * ((f64(high) - f64(low)) / f64(levels))
    values = np.clip(values, -f64(FLT_MAX), f64(FLT_MAX)).astype(f32)
    if options["tail"] > 0:
        positions = read_positions(sections[1], m, max_tail(options["tail"], m)) if sections[1] else np.arange(0)
        values[positions] = floats(sections[2], len(positions), "values of the tail")
    return values


def qsgd(sections: list[bytes], m: int, options: dict, quantizer: Quantizer) -> np.ndarray:
    bucket, s = options["bucket"] or m, f32((1 << options["bits"] - 1) - 1)
    norms = floats(sections[0], ceil_div(m, bucket), "norms", negative=False)
    symbols = quantizer.symbols(sections[1], m, 1 << options["bits"])
    step = norms / s
    step = np.where(np.isinf(step * s), step * f32(1 - 2.0**-22), step)
    return np.minimum(symbols - int(s), int(s)).astype(f32) * np.repeat(step, bucket)[:m]


def bucketed(name: str, sections: list[bytes], m: int, options: dict, quantizer: Quantizer) -> np.ndarray:
    bucket, buckets = options["bucket"], ceil_div(m, options["bucket"])
    if name == "bins":
        levels = 1 << options["bits"]
        means = floats(sections[0], buckets * levels, "means")
        symbols = quantizer.symbols(sections[1], m, levels)
        return means[np.arange(m) // bucket * levels + symbols]
    scales = floats(sections[0], (2 if name == "onebit" else 1) * buckets, "scales", negative=False)
    if name == "terngrad":
        symbols = quantizer.symbols(sections[1], m, 3, trits=True)
        return (symbols - 1).astype(f32) * np.repeat(scales, bucket)[:m]
    symbols = quantizer.symbols(sections[1], m, 2)
    pairs = scales.reshape(-1, 2) if name == "onebit" else np.stack([scales, scales], axis=1)
    plus, minus = np.repeat(pairs, bucket, axis=0)[:m].T
    return np.where(symbols == 0, plus, -minus)


# ---- sums, section 6


def summed_integers(header: bytes, section: bytes, v: int, bits: int) -> tuple[np.ndarray, int, int]:
    """Return the integers, T and c."""
    require(len(header) == 16, "the header of a sum does not have 16 bytes")
    layout, w, reserved, levels, most, c = struct.unpack("<BBHIII", header)
    require(layout <= 1 and reserved == 0, "the header of a sum has an unknown layout")
    require(1 <= levels <= (1 << bits) - 1 and most >= 1 and most * levels < 1 << 30, "levels or workers are not valid")
    require(c <= most, "more workers were added than may be")
    if layout == 0:
        require(w == (max(1, c) * levels).bit_length(), "the integers of a sum have another number of bits")
        return unpack(section, v, w), c * levels, c
    require(1 <= w <= 16 and most * levels <= (1 << w) - 1, "words are too narrow for their sum")
    per_word = 32 // w
    parts, at = [], 0
    for start in range(0, v, 1024):
        count = min(1024, v - start)
        words = ceil_div(ceil_div(count, 8), per_word)
        require(at + 32 * words <= len(section), "words are missing")
        block = np.frombuffer(section, "<u4", 8 * words, at).reshape(words, 1, 8).astype(np.int64)
        at += 32 * words
        rows = block >> (w * np.arange(per_word))[None, :, None] & (1 << w) - 1
        parts.append(rows.reshape(-1)[:count])
    require(at == len(section), "the words do not fill their section")
    return np.concatenate(parts), c * levels, c


def shared_or_thc(name: str, sections: list[bytes], m: int, options: dict) -> np.ndarray:
    blocks = ceil_div(m, 1024)
    v = m if name == "shared" else 1024 * blocks
    clips = floats(sections[1], blocks, "clips", negative=False)
    require(np.all(clips <= MAX_CLIP), "a clip is too large")
    integers, total, c = summed_integers(sections[0], sections[2], v, options["bits"])
    require(np.all(integers <= total), "an integer of a sum is above T")
    if c == 0:
        return np.zeros(m, f32)
    signed = (2 * integers - total).astype(f32)
    if name == "shared":
        return signed * np.repeat(clips / f32(total), 1024)[:m]
    large = clips > f32(2.0**90)
    step = (np.where(large, clips * f32(2.0**-64), clips) / f32(total)) * f32(2.0**-5)
    u = signed.reshape(blocks, 1024) * step[:, None]
    for stage in range(10):
        pairs = u.reshape(blocks, -1, 2, 1 << stage)
        u = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(blocks, 1024)
    i = np.arange(v)
    hashes = hash32(((i >> 8) << 3) + (i & 7), hash_key(options["rotation"], 3))
    negated = (hashes >> ((i >> 3) & 31).astype(u64) & u64(1)).astype(bool).reshape(blocks, 1024)
    u = np.where(negated, -u, u)
    u = np.where(large[:, None], np.clip(u * f32(2.0**64), -FLT_MAX, FLT_MAX), u)
    return u.reshape(-1)[:m]


def counts(section: bytes) -> int:
    require(len(section) == 8, "the counts of a sum do not have 8 bytes")
    most, c = struct.unpack("<II", section)
    require(most >= 1 and c <= most, "the counts of a sum are not valid")
    return c


def mean(sections: list[bytes], m: int) -> np.ndarray:
    c, sums = counts(sections[0]), floats(sections[1], m, "sums")
    if c == 0:
        require(not sums.any(), "a sum of no workers is not zero")
        return np.zeros(m, f32)
    return sums / f32(c)


def powersgd(sections: list[bytes], shape: list[int], rank: int) -> np.ndarray:
    rows = shape[0] if len(shape) >= 2 else 1
    columns = math.prod(shape) // rows
    r = min(rank, rows, columns)
    p = floats(sections[0], rows * r, "P").reshape(rows, r)
    c = counts(sections[1])
    q = floats(sections[2], r * columns, "Q").reshape(r, columns)
    if c == 0:
        return np.zeros(rows * columns, f32)
    q = q / f32(c) if c > 1 else q
    values = p[:, :1] * q[:1]
    for k in range(1, r):
        values = values + p[:, k : k + 1] * q[k : k + 1]
    require(np.all(np.isfinite(values)), "a value of powersgd is not finite")
    return values.reshape(-1)


def stored(section: bytes, m: int, dtype: str) -> np.ndarray:
    """Return the values of ``none``, ``fp16`` and ``bf16``; bfloat16 as the upper halves of binary32."""
    kind = {"bfloat16": "<u2", "bool": "|u1"}.get(dtype, dtype)
    values = np.frombuffer(section, kind) if len(section) == m * np.dtype(kind).itemsize else None
    if values is None:
        raise InvalidFrameError("the values do not fill their section")
    if dtype == "bool":
        require(np.all(values <= 1), "a bool is neither 0 nor 1")
    elif dtype == "bfloat16":
        require(np.all(np.isfinite(widen_bf16(values))), "a value is not finite")
    elif values.dtype.kind == "f":
        require(np.all(np.isfinite(values)), "a value is not finite")
    return values


SECTIONS = {"none": 1, "fp16": 1, "bf16": 1, "shared": 3, "thc": 3, "powersgd": 3}
"""How many sections a value stage has, where it is not 2; ``adaptive`` with a tail has 4."""


def num_sections(name: str, options: dict) -> int:
    return 4 if name == "adaptive" and options["tail"] > 0 else SECTIONS.get(name, 2)


def float32_values(
    name: str, options: dict, coder: str | None, sections: list[bytes], m: int, shape: list[int]
) -> np.ndarray:
    """Return the ``m`` values of every stage but ``none``, in float32."""
    quantizer = Quantizer(coder)
    if name == "fp16":
        return stored(sections[0], m, "float16").astype(f32)
    if name == "bf16":
        return widen_bf16(stored(sections[0], m, "bfloat16"))
    if name == "uniform":
        return uniform(sections, m, options["bits"], quantizer)
    if name == "adaptive":
        return adaptive(sections, m, options, quantizer)
    if name == "qsgd":
        return qsgd(sections, m, options, quantizer)
    if name in ("shared", "thc"):
        return shared_or_thc(name, sections, m, options)
    if name == "mean":
        return mean(sections, m)
    if name == "powersgd":
        return powersgd(sections, shape, options["rank"])
    return bucketed(name, sections, m, options, quantizer)
