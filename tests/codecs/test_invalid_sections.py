"""Invalid sections of coded chains and of ``adaptive`` raise FrameError although their checksums are valid."""

from __future__ import annotations

import math
import struct

import pytest
import torch

import laconic
import laws
import mutate
from laconic import FrameError, wire

SMALL = (
    "adaptive:5.0|huffman:pure", "adaptive:5.0|rans:pure", "adaptive:3.0,zero=true|rans:auto",
    "adaptive:3.0,tail=0.02|huffman:pure", "adaptive:4.0", "uniform:3|huffman:auto", "qsgd:4|rans:pure",
    "terngrad:128|rans:pure", "sign:128|huffman:pure", "onebit:128|rans:pure", "bins:3,bucket=128|rans:pure",
    "topk:0.3|qsgd:4|rans:pure", "uniform:5|deflate:6", "uniform:5|zstd:3",
)  # fmt: skip


@pytest.mark.parametrize("spec", SMALL)
def test_flipped_bit_raises_frame_error_or_decodes_to_the_declared_shape(spec):
    it = mutate.Frame.read(laconic.encode(laws.weights(90), spec))
    good, taken, tried = list(it.sections), 0, 0
    for at, section in enumerate(good):
        for bit in range(8 * len(section)):
            bent = bytearray(section)
            bent[bit // 8] ^= 1 << bit % 8
            it.sections = [*good[:at], bytes(bent), *good[at + 1 :]]
            taken += mutate.survives(it.write(), False)
            tried += 1
    assert tried > 150 and taken < tried


@pytest.mark.parametrize("spec", SMALL)
def test_truncated_section_raises_frame_error(spec):
    frame = mutate.Frame.read(laconic.encode(laws.weights(90), spec))
    for damaged in mutate.with_resized_sections(frame, b"\0", b"\0" * 16, b"\xff" * 100):
        with pytest.raises(FrameError):
            laconic.decode(damaged)


def with_header(header: bytes, zero: bool) -> bytes:
    """Forty times the first symbol: whatever the alphabet, that is good, so the header alone decides."""
    spec = b"adaptive:5.0,zero=true|huffman:pure" if zero else b"adaptive:5.0|huffman:pure"
    return mutate.Frame([40], [header, struct.pack("<IBH", 3, 0, 0)], spec).write()


@pytest.mark.parametrize("values", [(0.0, 1.0, 8, 2.0), (-1e38, 3e38, 4096, 0.0), (-3.4e38, 3.4e38, 2, 12.0)])
def test_valid_header_decodes(values):
    low, high, levels, _ = values
    y = laconic.decode(with_header(struct.pack("<ffIf", *values), False))
    assert y.tolist() == pytest.approx([low + 0.5 * (high - low) / levels] * 40)


@pytest.mark.parametrize(
    "values", [(0.5, -4, 8, 2.0), (1e35, -2047, 4095, 0.0), (0.25, -4096, 8, 1.0), (3.0, 4089, 8, 1.0)]
)
def test_valid_header_with_zero_option_decodes(values):
    step, first, _, _ = values
    y = laconic.decode(with_header(struct.pack("<fiIf", *values), True))
    assert y.tolist() == pytest.approx([step * first] * 40)


@pytest.mark.parametrize("values", [
    (math.nan, 1.0, 8, 2.0), (0.0, math.nan, 8, 2.0), (0.0, math.inf, 8, 2.0), (-math.inf, 1.0, 8, 2.0),
    (0.0, 1.0, 8, math.nan), (0.0, 1.0, 8, math.inf), (1.0, 0.0, 8, 2.0), (1.0, 1.0, 8, 2.0), (0.0, 1.0, 0, 2.0),
    (0.0, 1.0, 1, 2.0), (0.0, 1.0, 4097, 2.0), (0.0, 1.0, 2**32 - 1, 2.0),
])  # fmt: skip
def test_invalid_header_raises_frame_error(values):
    for read in (laconic.decode, laconic.explain):
        with pytest.raises(FrameError):
            read(with_header(struct.pack("<ffIf", *values), False))


@pytest.mark.parametrize("values", [
    (math.nan, -4, 8, 2.0), (math.inf, -4, 8, 2.0), (0.5, -4, 0, 2.0), (0.5, -4, 4097, 2.0), (0.5, 2**31 - 1, 8, 2.0),
    (0.5, -(2**31), 8, 2.0), (0.5, -4097, 8, 2.0), (0.5, 4090, 8, 2.0), (3e38, -4, 8, 2.0), (3e38, 1, 3, 2.0),
    (0.5, -4, 8, math.nan), (0.5, -4, 8, math.inf),
])  # fmt: skip
def test_invalid_header_with_zero_option_raises_frame_error(values):
    for read in (laconic.decode, laconic.explain):
        with pytest.raises(FrameError):
            read(with_header(struct.pack("<fiIf", *values), True))


def test_symbols_that_contradict_the_header_raise_frame_error():
    for coder in ("", "|huffman:pure", "|rans:pure"):
        it = mutate.Frame.read(laconic.encode(torch.full((40,), 0.5), "adaptive:5.0" + coder))
        assert it.sections[1] == b""
        for section in (b"\0", bytes(5), struct.pack("<IBH", 3, 0, 0)):
            it.sections[1] = section
            with pytest.raises(FrameError):
                laconic.decode(it.write())
        other = mutate.Frame.read(laconic.encode(laws.weights(40), "adaptive:5.0" + coder))
        other.sections[1] = b""
        with pytest.raises(FrameError):
            laconic.decode(other.write())
    for quantizer in ("qsgd:4", "terngrad:512", "sign:4096", "onebit:8192", "bins:2", "uniform:8"):
        it = mutate.Frame.read(laconic.encode(laws.weights(40), quantizer + "|rans:pure"))
        it.sections[-1] = b""
        with pytest.raises(FrameError):
            laconic.decode(it.write())


def test_symbol_above_the_levels_raises_frame_error():
    for coder in ("|huffman:pure", "|rans:pure", "|deflate:6"):
        it = mutate.Frame.read(laconic.encode(laws.weights(400), "adaptive:5.0" + coder))
        low, high, levels, measure = struct.unpack("<ffIf", it.sections[0])
        it.sections[0] = struct.pack("<ffIf", low, high, levels - 1, measure)  # the last one occurs: it is the maximum
        with pytest.raises(FrameError):
            laconic.decode(it.write())
        with pytest.raises(FrameError):
            laconic.explain(it.write())


def frame_with_tail():
    return mutate.Frame.read(laconic.encode(laws.gradients(3000), "adaptive:3.0,tail=0.01|rans:pure"))


def test_invalid_tail_raises_frame_error():
    it = frame_with_tail()
    place, exact = it.sections[1], it.sections[2]
    count = int.from_bytes(place[2:8], "little")
    assert len(exact) == 4 * count > 0
    for sections in (
        (b"", exact),
        (place, b""),
        (place, exact[:-4]),
        (place, exact + bytes(4)),
        (place, exact[:-1]),
        (place[:-1], exact),
        (place[:4], exact),
        (place, exact[:-4] + struct.pack("<f", math.nan)),
        (place, struct.pack("<f", math.inf) + exact[4:]),
        (place[:2] + (count - 1).to_bytes(6, "little") + place[8:], exact[:-4]),
        (place[:2] + (3000).to_bytes(6, "little") + place[8:], bytes(12_000)),  # more than any sender sets apart
        (bytes([0, 0]) + (3000).to_bytes(6, "little"), bytes(12_000)),
        (b"\2\0" + place[2:8] + b"\xff" * 375, exact),
    ):
        it.sections[1:3] = sections
        with pytest.raises(FrameError):
            laconic.decode(it.write())
    it.sections[1:3] = [place, exact]
    assert laconic.decode(it.write()).shape == (3000,)


def test_empty_tail_is_two_empty_sections():
    it = frame_with_tail()
    it.sections[1:3] = [b"", b""]
    assert bool(torch.isfinite(laconic.decode(it.write())).all())


def test_unpacked_packet_equals_the_encoded_packet():
    for spec in SMALL:
        frame = laconic.encode(laws.weights(90), spec)
        assert wire.unpack(frame).codec == spec
