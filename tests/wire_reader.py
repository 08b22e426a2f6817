"""A second implementation of the wire format: a decoder in plain Python and numpy.

It was written from docs/wire-format.md alone, so that the document can be tested: ``test_wire_reader.py`` compares it
with laconic. Nothing of laconic is imported here, and whoever changes it reads the document, not the codecs. Sections 5
and 8 of the document are in ``wire_symbols``, sections 6 and 9 in ``wire_values``, section 7 in ``wire_positions``.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

import wire_positions
import wire_values
from wire_symbols import InvalidFrameError, require

__all__ = ["Decoded", "InvalidFrameError", "decode", "decode_bundle"]

DTYPES = {1: "float32", 2: "float64", 3: "float16", 4: "bfloat16", 16: "uint8", 17: "int8", 18: "int16", 19: "int32",
          20: "int64", 21: "bool"}  # fmt: skip
FLOATS = ("float32", "float64", "float16", "bfloat16")
ITEMSIZE = {"bfloat16": 2, "bool": 1}


@dataclass(frozen=True)
class Decoded:
    """A decoded tensor; ``data`` is its values in row-major order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


# ---- checksums and alignment, section 1


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def align16(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def read_header(frame: bytes, nbytes: int) -> None:
    """Check the checksum and the padding of a header whose fields end at ``nbytes``."""
    end = align16(nbytes + 4)
    require(len(frame) >= end, "the frame ends within its header")
    require(not any(frame[nbytes : end - 4]), "the padding of the header is not zero")
    require(crc32c(frame[: end - 4]) == int.from_bytes(frame[end - 4 : end], "little"), "the header is damaged")


# ---- codec specs, section 4


def _power_of_two(low: int, high: int) -> Any:
    return lambda value: low <= value <= high and value & (value - 1) == 0


def _within(low: float, high: float) -> Any:
    return lambda value: low <= value <= high


def _one_of(*words: str) -> Any:
    return lambda value: value in words


BUCKET = _power_of_two(128, 65536)
KEEP = ("keep", 0.01, lambda value: 0 < value <= 1)
ROUNDS = _one_of("nearest", "stochastic")
ANY = _one_of(True, False)
STAGES: dict[str, tuple[str, list[tuple[str, Any, Any]]]] = {
    "none": ("cast", []),
    "fp16": ("cast", []),
    "bf16": ("cast", []),
    "uniform": ("quantizer", [("bits", 8, _within(1, 30))]),
    "adaptive": ("quantizer", [
        ("c", 5.0, _within(0, 12)), ("m", 4, _within(1, 12)), ("f", 0.03, lambda value: 0 < value <= 1),
        ("integer", False, ANY), ("by", "entropy", _one_of("entropy", "grad")), ("c0", 1.0, _within(0, 1e6)),
        ("zero", False, ANY), ("tail", 0.0, _within(0, 0.1)),
    ]),
    "qsgd": ("quantizer", [
        ("bits", 4, _within(2, 12)), ("bucket", 512, lambda value: value == 0 or BUCKET(value)),
        ("norm", "max", _one_of("max", "l2")),
        ("round", "stochastic", ROUNDS),
    ]),
    "terngrad": ("quantizer", [("bucket", 512, BUCKET)]),
    "sign": ("quantizer", [("bucket", 4096, BUCKET)]),
    "onebit": ("quantizer", [("bucket", 8192, BUCKET)]),
    "bins": ("quantizer", [("bits", 2, _within(1, 4)), ("bucket", 4096, BUCKET)]),
    "shared": ("sum", [("bits", 8, _within(1, 16)), ("round", "nearest", ROUNDS)]),
    "thc": ("sum", [("bits", 4, _within(1, 16)), ("round", "nearest", ROUNDS), ("rotation", 0, _within(0, 2**63 - 1))]),
    "powersgd": ("sum", [("rank", 4, _within(1, 256))]),
    "mean": ("sum", []),
    "union": ("selector", []),
    "topk": ("selector", [
        KEEP, ("approx", False, ANY), ("chunk", 0, lambda value: value == 0 or _power_of_two(64, 65536)(value)),
        ("code", "rice", _one_of("rice", "rans", "context", "rank")),
    ]),
    "randk": ("selector", [KEEP, ("scale", True, ANY)]),
    "threshold": ("selector", [
        ("t", 0.001, _within(1e-37, 1e37)), ("code", "rice", _one_of("rice", "rans", "context")),
    ]),
    "huffman": ("coder", [("mode", "pure", _one_of("pure", "auto"))]),
    "rans": ("coder", [("mode", "pure", _one_of("pure", "auto"))]),
    "deflate": ("coder", [("level", 6, _within(1, 9))]),
    "zstd": ("coder", [("level", 3, _within(1, 19))]),
}  # fmt: skip
"""Kind and arguments of each stage: field, default, validity."""


@dataclass(frozen=True)
class Stage:
    name: str
    kind: str
    options: dict[str, Any]


def read_argument(text: str, default: object) -> object:
    """Return an argument of the type of its default, in its one canonical spelling."""
    if isinstance(default, bool):
        require(text in ("true", "false"), "a boolean is neither true nor false")
        return text == "true"
    if isinstance(default, int):
        require(re.fullmatch("0|[1-9][0-9]{0,30}", text), "a whole number is not canonical")
        return int(text)
    if isinstance(default, float):
        require(re.fullmatch(r"[0-9]+(\.[0-9]+)?(e[+-][0-9]+)?", text) and repr(float(text)) == text,
                "a fraction is not canonical")  # fmt: skip
        return float(text)
    return text


def read_stage(text: str) -> Stage:
    name, colon, rest = text.partition(":")
    require(name in STAGES, "the spec names an unknown stage")
    kind, arguments = STAGES[name]
    options = {field: default for field, default, _ in arguments}
    require(bool(colon) == bool(arguments), "the first argument of a stage is missing, or one too many")
    fields = [field for field, _, _ in arguments]
    place = -1
    for number, part in enumerate(rest.split(",") if colon else []):
        field, equals, value = (fields[0], "=", part) if number == 0 else part.partition("=")
        require(equals and field in fields and fields.index(field) > place, "an argument is unknown or out of order")
        place = fields.index(field)
        _, default, valid = arguments[place]
        options[field] = read_argument(value, default)
        require(valid(options[field]), f"the argument {field} is not valid")
        require(number == 0 or options[field] != default, "an argument has its default value")
    return Stage(name, kind, options)


@lru_cache(maxsize=4096)
def read_spec(spec: bytes) -> tuple[Stage | None, Stage, Stage | None]:
    """Return selector, value stage and coder of a canonical spec."""
    require(spec.isascii(), "the spec is not ASCII")
    stages = [read_stage(text) for text in spec.decode("ascii").split("|")]
    selector = stages.pop(0) if stages[0].kind == "selector" else None
    if not stages:
        stages = [Stage("none", "cast", {})]
    value, *coders = stages
    require(value.kind in ("cast", "quantizer", "sum"), "the spec has no value stage where it needs one")
    coder = coders[0] if coders else None
    require(len(coders) <= 1 and (coder is None or coder.kind == "coder"), "the spec has too many stages")
    require(coder is None or value.kind == "quantizer", "a coder follows a stage that is no quantizer")
    require(coder is None or value.name != "uniform" or value.options["bits"] <= 12, "too many bits before a coder")
    require(selector is None or value.name != "powersgd", "powersgd follows a selector")
    if selector is not None and selector.name == "topk":
        chunk, keep = selector.options["chunk"], selector.options["keep"]
        require(not (chunk and selector.options["approx"]), "topk has both chunk and approx")
        if selector.options["code"] == "rank":
            m = wire_positions.kept(keep, chunk) if chunk else 0
            require(1 <= m <= chunk / 2 and math.comb(chunk, m) < 1 << 31, "code=rank is not valid for this chunk")
    return selector, value, coder


# ---- packets, sections 2 and 7


def read_fields(frame: bytes, max_numel: int) -> tuple[str, list[int], bytes, list[bytes]]:
    """Return dtype, shape, spec and sections of a packet."""
    require(len(frame) >= 24, "the frame has fewer than 24 bytes")
    magic, version, flags, code, d, spec_nbytes, s, reserved, payload, crc = struct.unpack_from("<4sBBBBHBBQI", frame)
    require(magic == b"LACO" and version == 1 and flags in (0, 2) and reserved == 0, "this is not a packet")
    require(code in DTYPES and d <= 16 and 1 <= spec_nbytes <= 256 and s <= 8, "a field of the header is out of range")
    width = 8 if flags & 2 else 4
    end = 24 + width * (d + s) + spec_nbytes
    read_header(frame, end)
    numbers = struct.unpack_from(f"<{d + s}{'Q' if width == 8 else 'I'}", frame, 24)
    shape, lengths = list(numbers[:d]), numbers[d:]
    require(all(size <= 1 << 48 for size in shape), "a dimension is above 2^48")
    require(math.prod(shape) <= min(1 << 34, max_numel), "the tensor has too many values")
    require(math.prod(size for size in shape if size) <= 1 << 62, "the dimensions other than 0 are too large")
    start, at = align16(end + 4), 0
    places = []
    for length in lengths:
        places.append((align16(at), align16(at) + length))
        at = align16(at) + length
    require(payload == at and len(frame) == start + at, "the lengths do not add up to the frame")
    body = frame[start:]
    require(crc == (crc32c(body) if s else 0), "the payload is damaged")
    sections, before = [], 0
    for begin, stop in places:
        require(not any(body[before:begin]), "the padding between sections is not zero")
        sections.append(body[begin:stop])
        before = stop
    return DTYPES[code], shape, frame[end - spec_nbytes : end], sections


def most_positions(selector: Stage, n: int) -> int:
    if selector.name != "topk":
        return n
    keep, chunk = selector.options["keep"], selector.options["chunk"]
    if chunk:
        whole, rest = divmod(n, chunk)
        return whole * wire_positions.kept(keep, chunk) + (wire_positions.kept(keep, rest) if rest else 0)
    k = wire_positions.kept(keep, n)
    return min(n, 2 * k + 16) if selector.options["approx"] else k


def selected(selector: Stage, section: bytes, n: int) -> np.ndarray:
    if selector.name != "randk":
        return wire_positions.read_positions(section, n, most_positions(selector, n))
    require(len(section) == 8, "the section of randk does not have 8 bytes")
    hashes = wire_values.hash32(np.arange(n), wire_values.hash_key(int.from_bytes(section, "little"), 1))
    return np.sort(np.argsort(hashes, kind="stable")[: wire_positions.kept(selector.options["keep"], n)])


def scaled(values: np.ndarray, dtype: str, gain: float) -> np.ndarray:
    """Return the values of ``randk`` times n / k, in their own dtype and clamped to it."""
    if dtype == "float64":
        largest = np.finfo(np.float64).max
        return np.clip(values * np.float64(gain), -largest, largest)
    wide = wire_values.widen_bf16(values) if dtype == "bfloat16" else values.astype(np.float32)
    product = np.clip(wide * np.float32(gain), -wire_values.FLT_MAX, wire_values.FLT_MAX)
    if dtype == "bfloat16":
        return wire_values.round_to_bf16(product)
    return wire_values.round_to_fp16(product) if dtype == "float16" else product


def converted(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values in the packet's dtype."""
    if dtype == "bfloat16":
        return wire_values.round_to_bf16(values)
    if dtype == "float16":
        return wire_values.round_to_fp16(values)
    return values.astype(dtype)


def decode(frame: bytes, max_numel: int = 1 << 34) -> Decoded:
    """Return the tensor of one packet; ``InvalidFrameError`` if the document tells a reader to reject it."""
    with np.errstate(all="ignore"):
        return _decode(bytes(frame), max_numel)


def _decode(frame: bytes, max_numel: int) -> Decoded:
    dtype, shape, spec, sections = read_fields(frame, max_numel)
    selector, value, coder = read_spec(spec)
    require(dtype in FLOATS or spec == b"none", "integers and booleans need the codec none")
    n = math.prod(shape)
    storage = np.dtype({"bfloat16": "<u2", "bool": "|u1"}.get(dtype, dtype))
    if not sections:
        return Decoded(dtype, tuple(shape), bytes(n * storage.itemsize))
    require(n > 0, "a tensor without values has sections")
    wanted = wire_values.num_sections(value.name, value.options) + (selector is not None)
    require(len(sections) == wanted, "the packet has another number of sections than its codec")
    positions = None if selector is None else selected(selector, sections.pop(0), n)
    m = n if positions is None else len(positions)
    if value.name == "none":
        values, own = wire_values.stored(sections[0], m, dtype), dtype
    else:
        coder_name = None if coder is None else coder.name
        values = wire_values.float32_values(value.name, value.options, coder_name, sections, m, shape)
        own = "float32"
    if selector is not None and selector.name == "randk" and selector.options["scale"] and n != m:
        values = scaled(values, own, n / m)
    if value.name != "none":
        values = converted(values, dtype)
    if positions is not None:
        dense = np.zeros(n, storage)
        dense[positions] = values
        values = dense
    return Decoded(dtype, tuple(shape), np.ascontiguousarray(values, storage).tobytes())


# ---- bundles, section 3


def decode_bundle(bundle: bytes, max_numel: int = 1 << 34) -> list[tuple[str, Decoded]]:
    """Return names and tensors of a bundle, in their order."""
    bundle = bytes(bundle)
    require(len(bundle) >= 24, "the bundle has fewer than 24 bytes")
    magic, version, flags, reserved, count, directory, body = struct.unpack_from("<4sBBHIIQ", bundle)
    require(magic == b"LACO" and version == 1 and flags == 1 and reserved == 0, "this is not a bundle")
    require(count <= 1 << 20 and directory <= count * 1034, "the directory of the bundle is too large")
    read_header(bundle, 24 + directory)
    at, end, entries = 24, 24 + directory, []
    for _ in range(count):
        require(at + 10 <= end, "the directory ends within an entry")
        nbytes, name_nbytes = struct.unpack_from("<QH", bundle, at)
        at += 10
        require(name_nbytes <= 1024 and at + name_nbytes <= end, "a name is too long")
        try:
            entries.append((nbytes, bundle[at : at + name_nbytes].decode("utf-8")))
        except UnicodeDecodeError:
            raise InvalidFrameError("a name is not UTF-8") from None
        at += name_nbytes
    require(at == end, "the directory has bytes after its last entry")
    require(len({name for _, name in entries}) == len(entries), "two packets have the same name")
    start, at, places = align16(24 + directory + 4), 0, []
    for nbytes, name in entries:
        begin, before = align16(at), at
        at = begin + nbytes
        places.append((name, before, begin, at))
    require(at == body and len(bundle) == start + body, "the frames do not add up to the bundle")
    tensors = []
    for name, before, begin, stop in places:
        require(not any(bundle[start + before : start + begin]), "the padding between frames is not zero")
        tensors.append((name, decode(bundle[start + begin : start + stop], max_numel)))
    return tensors
