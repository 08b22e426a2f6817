"""How inputs are bent: bytes, JSON, frames, bundles, and files behind a SHA-256; checksums fit again afterwards.

Each takes bytes, a random generator and ``scramble``, which bends plain bytes: libFuzzer's own mutations under atheris,
``blind`` without it. What cannot be read as what it should be is scrambled as it is.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import mutate

Scramble = Callable[[bytes, int], bytes]
"""Bytes and the most that may come out -> other bytes."""

NUMBERS = (0, 1, 2, 7, 8, 9, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 1.5, -0.0, 1e308, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, "", "F32",
    "F64", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F4", "C64", "U8", "U16", "U64", "I64", "BOOL",
    "\ud800", "\0", "x" * 300, [], {}, [[]], [0, 2**63], [0, 0], [2**32, 2**32], {"a": 1},
)  # fmt: skip


def blind(rng: random.Random) -> Scramble:
    """Mutations without guidance, in the manner of libFuzzer's."""

    def scramble(data: bytes, room: int) -> bytes:
        it = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            move, at = rng.randrange(7), rng.randrange(len(it) + 1)
            if move == 0 and at < len(it):
                it[at] ^= 1 << rng.randrange(8)
            elif move == 1 and at < len(it):
                it[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            elif move == 2:
                it[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16)))
            elif move == 3:
                del it[at : at + rng.choice((1, 2, 4, 16, 1000))]
            elif move == 4:
                end = rng.randint(at, min(len(it), at + 64))
                begin = rng.randrange(len(it) + 1)
                it[begin : begin + rng.choice((0, end - at))] = it[at:end]
            else:
                width = rng.choice((1, 2, 4, 8))
                it[at : at + width] = (rng.choice(NUMBERS) & (256**width - 1)).to_bytes(width, "little")
        return bytes(it[:room])

    return scramble


def frame(data: bytes, rng: random.Random, scramble: Scramble, room: int) -> bytes:
    """Sections by ``scramble``, fields and what codecs put into sections by the moves of the hostile-frame tests."""
    try:
        it = mutate.Frame.read(data)
    except struct.error:
        return scramble(data, room)
    moves, weights = zip(*mutate.MOVES, strict=True)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if it.sections and rng.random() < 0.5:
            at = rng.randrange(len(it.sections))
            section = it.sections[at]
            longer = rng.choice((0, 0, 16))  # a section of another length is seldom read any further
            it.sections[at] = scramble(section, max(1, len(section) + longer))
            if rng.random() < 0.6:
                it.sections[at] = (it.sections[at] + bytes(len(section)))[: len(section)]
        else:
            rng.choices(moves, weights)[0](it, rng)
    try:
        return it.write()
    except struct.error:  # more than 2^16 bytes of spec, say
        return scramble(data, room)


def bundle(data: bytes, rng: random.Random, scramble: Scramble, room: int, *, metadata: bytes | None = None) -> bytes:
    """A frame within, most of the time, or the directory. The frame under ``metadata`` is bent as the JSON it is."""
    try:
        it = mutate.Bundle.read(data)
    except struct.error:
        return scramble(data, room)
    try:
        if it.frames and rng.random() < 0.7:
            at = rng.randrange(len(it.frames))
            if metadata in it.names and rng.random() < 0.3:
                at = it.names.index(metadata)
            if it.names[at] == metadata and rng.random() < 0.8:
                it.frames[at] = _json_frame(it.frames[at], rng, scramble)
            else:
                it.frames[at] = frame(it.frames[at], rng, scramble, room)
        elif it.frames and rng.random() < 0.3:
            at = rng.randrange(len(it.names))
            it.names[at] = scramble(it.names[at] or b"x", 1024)
        else:
            mutate.mutate_bundle(it, it.frames or [mutate.Frame([2], [bytes(8)], b"none").write()], rng)
        return it.write()
    except (struct.error, ValueError):
        return scramble(data, room)


def _json_frame(blob: bytes, rng: random.Random, scramble: Scramble) -> bytes:
    it = mutate.Frame.read(blob)
    text = it.sections[0] if it.sections else b"{}"
    text = json_text(text, rng, scramble)
    it.shape, it.sections = [len(text)], [text]
    return it.write()


def json_text(text: bytes, rng: random.Random, scramble: Scramble) -> bytes:
    try:
        value = json.loads(text)
        if rng.random() < 0.8:
            return json.dumps(json_value(value, rng), ensure_ascii=rng.random() < 0.5).encode()
    except (ValueError, RecursionError):  # no longer JSON, or a lone surrogate that cannot be written as it is
        pass
    if rng.random() < 0.1:
        depth = rng.choice((100, 900, 990, 1000, 5000))
        return b'{"a":' * depth + b"1" + b"}" * depth
    return scramble(text, len(text) + 64)


def json_value(value: Any, rng: random.Random) -> Any:
    """The value with one place in it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        copy, key = dict(value), rng.choice(list(value))
        move = rng.randrange(8)
        if move == 0:
            del copy[key]
        elif move == 1:
            copy[rng.choice(("", "a", "\ud800", "__metadata__", "shape", key + "x"))] = copy[key]
        else:
            copy[key] = json_value(copy[key], rng)
        return copy
    if isinstance(value, list) and value and rng.random() < 0.7:
        copy = list(value)
        at = rng.randrange(len(copy))
        copy[at] = json_value(copy[at], rng)
        return copy
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, -8, 8, 2**32))
    return rng.choice(ODD_VALUES)


def join_checkpoint(manifest: bytes, tensors: bytes) -> bytes:
    """A checkpoint's two files as one input."""
    return len(manifest).to_bytes(4, "little") + manifest + tensors


def split_checkpoint(data: bytes) -> tuple[bytes, bytes]:
    nbytes = int.from_bytes(data[:4], "little")
    return data[4 : 4 + nbytes], data[4 + nbytes :]


def checkpoint(data: bytes, rng: random.Random, scramble: Scramble, room: int) -> bytes:
    manifest, tensors = split_checkpoint(data)
    move = rng.randrange(10)
    if move < 6:
        tensors = safetensors(tensors, rng, scramble)
    try:
        body = json.loads(manifest)
        body.pop("sha256", None)
        if rng.random() < 0.9:
            body["files"]["tensors.safetensors"] = {
                "nbytes": len(tensors),
                "sha256": hashlib.sha256(tensors).hexdigest(),
            }
        if 6 <= move < 9:
            body = json_value(body, rng)
        seal = hashlib.sha256(_spelled(body)).hexdigest()
        manifest = _spelled(body | {"sha256": seal}) if isinstance(body, dict) else _spelled(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    if move == 9:
        manifest = scramble(manifest, len(manifest) + 64)
    return join_checkpoint(manifest, tensors)


def _spelled(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def safetensors(data: bytes, rng: random.Random, scramble: Scramble) -> bytes:
    nbytes = int.from_bytes(data[:8], "little")
    text, body = data[8 : 8 + nbytes], data[8 + nbytes :]
    move = rng.randrange(6)
    if move == 0:
        return scramble(data, len(data) + 64)
    if move == 1:
        body = scramble(body or b"x", len(body) + 64)
    elif move == 2:  # the same bytes under another type, in the shape that goes with it
        text = _retyped(text, rng)
    else:
        text = json_text(text, rng, scramble)
    return len(text).to_bytes(8, "little") + text + body


def _retyped(text: bytes, rng: random.Random) -> bytes:
    bits = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "U8": 8, "BOOL": 8, "I8": 8,
            "F16": 16, "BF16": 16, "U16": 16, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "U64": 64}  # fmt: skip
    try:
        header = json.loads(text)
        entry = header[rng.choice([name for name in header if name != "__metadata__"])]
        begin, end = entry["data_offsets"]
        entry["dtype"] = rng.choice(list(bits))
        entry["shape"] = [8 * (end - begin) // bits[entry["dtype"]]]
        if begin == end:
            entry["shape"] += rng.choice(([], [1], [2**62], [2**63]))
        return json.dumps(header, separators=(",", ":")).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return text


def join_messages(messages: list[bytes]) -> bytes:
    """A stream's messages as one input."""
    return b"".join(len(message).to_bytes(4, "little") + message for message in messages)


def split_messages(data: bytes) -> list[bytes]:
    messages, at = [], 0
    while at + 4 <= len(data) and len(messages) < 256:
        nbytes = int.from_bytes(data[at : at + 4], "little")
        messages.append(data[at + 4 : at + 4 + nbytes])
        at += 4 + nbytes
    return messages


def messages(data: bytes, rng: random.Random, scramble: Scramble, room: int) -> bytes:
    stream = split_messages(data) or [b"N{}"]
    at, move = rng.randrange(len(stream)), rng.randrange(8)
    if move == 0:
        stream.insert(at, rng.choice(stream))
    elif move == 1:
        stream.pop(at)
    elif move == 2:
        rng.shuffle(stream)
    elif move == 3 and stream[at][:1] in (b"F", b"M") and len(stream[at]) > 14:  # one piece in two
        cut = rng.randrange(14, len(stream[at]))
        stream[at : at + 1] = [stream[at][:cut], b"M" + stream[at][cut:]]
    elif move == 4 and stream[at][:1] == b"F" and len(stream[at]) >= 13:
        number = rng.choice((*NUMBERS, len(stream[at]) - 13, len(stream[at]) - 12))
        slot = rng.choice((0, 1, 2, 3, 2**32 - 1))
        stream[at] = b"F" + struct.pack("<IQ", slot, number) + stream[at][13:]
    elif stream[at][:1] == b"N":
        stream[at] = b"N" + json_text(stream[at][1:], rng, scramble)
    else:
        stream[at] = scramble(stream[at] or b"N", len(stream[at]) + 64)
    return join_messages(stream)
