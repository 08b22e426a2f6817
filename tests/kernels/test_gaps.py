"""Positions as entropy-coded gaps: classes, bytes, all backends, and sections that no encoder writes."""

from __future__ import annotations

import pytest
import torch
from position_sections import BACKENDS, raises_frame_error, read, refused_of_damaged

import laconic
import laws
from laconic import wire
from laconic.kernels import cpu, reference, torch_fallback
from laconic.kernels.sections import (
    CHUNK,
    GAPS,
    GAPS_HEADER,
    gap_alphabet,
    gap_class_start,
    gap_class_width,
    gaps_max_nbytes,
)


def test_classes_cover_every_gap_once():
    following = 0
    for gap_class in range(gap_alphabet(1 << 34)):
        assert gap_class_start(gap_class) == following
        following += 1 << gap_class_width(gap_class)
    assert following == 1 << 34 and gap_alphabet(1 << 34) == 132


@pytest.mark.parametrize("n", [*range(2, 70), 1000, 1 << 20, (1 << 20) + 1, (1 << 34) - 1, 1 << 34])
def test_alphabet_ends_with_the_class_of_the_largest_gap(n):
    last = gap_alphabet(n) - 1
    assert gap_class_start(last) <= n - 1 < gap_class_start(last + 1)


def clustered(n, k, seed=0):
    """Positions with short gaps in some parts and long ones in others."""
    weight = torch.where(laws.normal(n // 64 + 1, seed=seed) > 1, 8.0, 1.0).repeat_interleave(64)[:n]
    return torch.multinomial(weight, k, generator=torch.Generator().manual_seed(seed)).sort().values.to(torch.int32)


POSITIONS = {
    "one": (5000, torch.tensor([4999], dtype=torch.int32)),
    "first": (2, torch.tensor([0], dtype=torch.int32)),
    "all but one": (300, torch.arange(1, 300, dtype=torch.int32)),
    "every other": (600, torch.arange(0, 600, 2, dtype=torch.int32)),
    "clustered": (6000, clustered(6000, 500)),
    "far apart": (1 << 34, torch.arange(1, 20, dtype=torch.int64) ** 8 + 1),
    "beyond 32 bits": (1 << 34, torch.tensor([0, 1, (1 << 33) + 12345, (1 << 34) - 1])),
}


def written(backend, positions, n):
    section = torch.full((gaps_max_nbytes(n, positions.numel()),), 0xEE, dtype=torch.uint8)
    return section[: backend.gaps_encode(positions, n, section)]


@pytest.mark.parametrize("kind", POSITIONS)
def test_gaps_round_trip_with_the_same_bytes_on_every_backend(kind):
    n, positions = POSITIONS[kind]
    section = written(reference, positions, n)
    for backend in (cpu, torch_fallback):
        assert torch.equal(written(backend, positions, n), section)
    for backend in (cpu, reference, torch_fallback):
        assert torch.equal(read(backend, section, n), positions)


@pytest.mark.slow
def test_gaps_of_several_chunks_agree():
    n, k = 1 << 21, CHUNK + 1000
    positions = clustered(n, k, seed=3)
    section = written(cpu, positions, n)
    assert torch.equal(section, written(reference, positions, n))
    assert torch.equal(read(cpu, section, n), positions) and torch.equal(read(reference, section, n), positions)


def test_damaged_sections_are_refused_or_read_alike_by_every_backend():
    n, positions = POSITIONS["clustered"]
    assert refused_of_damaged(written(cpu, positions, n), n, header=GAPS_HEADER, times=150) > 75


def section_of(k, coded, low, *, parameter=0, declared=None):
    size = len(coded) if declared is None else declared
    header = (GAPS | parameter << 8 | k << 16 | size << 64).to_bytes(GAPS_HEADER, "little")
    return torch.tensor(list(header + bytes(coded) + bytes(low)), dtype=torch.uint8)


def constant(gap_class):
    return [3, 0, 0, 0, 0, gap_class, 0]


INVALID = {
    "no room for a chunk": section_of(1, [], []),
    "a parameter": section_of(2, constant(3), [], parameter=1),
    "no position": section_of(0, constant(3), []),
    "as many positions as values": section_of(100, constant(0), []),
    "classes that end after the section": section_of(2, constant(3), [], declared=8),
    "classes of 2^63 bytes": section_of(2, constant(3), [], declared=1 << 63),
    "classes that end too early": section_of(2, constant(3), [], declared=6),
    "a class beyond the alphabet": section_of(1, constant(gap_alphabet(100)), []),
    "a position at n": section_of(25, constant(3), [0]),
    "positions beyond n": section_of(26, constant(3), []),
    "a gap beyond n": section_of(1, constant(gap_alphabet(100) - 1), [15]),
    "low bits that are missing": section_of(3, constant(9), []),
    "a byte after the low bits": section_of(3, constant(9), [0, 0]),
    "low bits where there are none": section_of(3, constant(7), [0]),
    "padding that is not zero": section_of(3, constant(9), [8]),
    "chunks of 2^47 positions": section_of(1 << 47, constant(0), []),
}


test_invalid_gaps_raise_frame_error = raises_frame_error(INVALID, 100)


@BACKENDS
def test_valid_gaps_of_the_same_kind_are_read(backend):
    assert read(backend, section_of(24, constant(3), []), 100).tolist() == list(range(3, 99, 4))
    assert read(backend, section_of(3, constant(9), [5]), 100).tolist() == [11, 22, 34]  # gaps 10 + 1, 10, 10 + 1


@pytest.mark.parametrize("spec", ["topk:0.05{}|sign", "threshold:6.0{}|sign"])
def test_rans_is_smaller_where_rows_differ_and_never_larger(spec):
    rows = torch.exp(1.5 * laws.normal(256, seed=1))[:, None]
    for x, at_most in ((laws.normal(256, 192) * rows, 0.85), (laws.normal(30, 20) * 7, 1.0)):
        plain, coded = (laconic.encode(x, spec.format(code)) for code in ("", ",code=rans"))
        sizes = [wire.unpack(frame).sections[0].numel() for frame in (plain, coded)]
        assert sizes[1] <= at_most * sizes[0]
        assert laws.same_bits(laconic.decode(plain), laconic.decode(coded))


def test_few_positions_fall_back_to_the_smaller_code():
    frame = laconic.encode(laws.normal(1000), "topk:0.01,code=rans")
    assert int(wire.unpack(frame).sections[0][0]) != GAPS


def test_unknown_code_is_named_with_the_valid_ones():
    with pytest.raises(laconic.ConfigError, match="code must be one of rice, rans, context, rank, got 'huffman'"):
        laconic.codec("topk:0.1,code=huffman")
