"""Positions as ranks of the sets that chunks keep: numbering, bytes, all backends, and sections no encoder writes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from position_sections import BACKENDS, raises_frame_error, read

import laconic
import laws
from laconic import wire
from laconic.kernels import cpu, reference, torch_fallback
from laconic.kernels.interface import ChunkCounts
from laconic.kernels.sections import RANKS, RANKS_HEADER, num_ranks, ranks_nbytes


def written(backend, positions, n, counts):
    section = torch.full((ranks_nbytes(n, counts.chunk, counts.each),), 0xEE, dtype=torch.uint8)
    assert backend.ranks_encode(positions, n, counts, section) == section.numel()
    return section


def test_every_set_has_its_own_rank_in_order():
    chunk, each = 64, 2
    sets = sorted(itertools.combinations(range(chunk), each), key=lambda offsets: offsets[::-1])
    n, counts = chunk * len(sets), ChunkCounts(chunk, each, each)
    positions = torch.tensor(sets) + torch.arange(len(sets))[:, None] * chunk
    section = written(reference, positions.view(-1).to(torch.int32), n, counts)
    ranks = reference.unpack(section[RANKS_HEADER:], len(sets), 11)
    assert ranks.tolist() == list(range(math.comb(chunk, each)))
    assert torch.equal(read(reference, section, n), positions.view(-1).to(torch.int32))


@pytest.mark.parametrize("n", [1, 5, 63, 64, 65, 128, 1000, 20_011])
@pytest.mark.parametrize("counts", [(64, 1), (64, 2), (64, 7), (128, 3), (4096, 2)], ids=str)
def test_ranks_round_trip_with_the_same_bytes_on_every_backend(n, counts):
    chunk, each = counts
    counts = ChunkCounts(chunk, each, min(each, (n - 1) % chunk + 1))
    positions = reference.topk_chunks(laws.normal(n, seed=n), counts)[0]
    section = written(reference, positions, n, counts)
    for backend in (cpu, torch_fallback):
        assert torch.equal(written(backend, positions, n, counts), section)
    for backend in (cpu, reference, torch_fallback):
        assert torch.equal(read(backend, section, n), positions)


def section_of(k, chunk, each, last, body, *, parameter=0):
    header = RANKS | parameter << 8 | k << 16 | chunk << 64 | each << 96 | last << 112
    return torch.tensor(list(header.to_bytes(RANKS_HEADER, "little") + bytes(body)), dtype=torch.uint8)


INVALID = {  # of 100 values: a chunk of 64 and one of 36
    "no rank": section_of(2, 64, 1, 1, []),
    "a parameter": section_of(2, 64, 1, 1, [0, 0], parameter=6),
    "a byte too few": section_of(2, 64, 1, 1, [0]),
    "a byte too many": section_of(2, 64, 1, 1, [0, 0, 0]),
    "another count": section_of(3, 64, 1, 1, [0, 0]),
    "no chunk": section_of(2, 0, 1, 1, [0, 0]),
    "a chunk of 2^32 - 1": section_of(1, 2**32 - 1, 1, 1, [0]),
    "chunks that keep nothing": section_of(1, 64, 0, 1, [0, 0]),
    "chunks that keep more than half": section_of(66, 64, 33, 33, [0] * 16),
    "too many ways": section_of(16, 64, 8, 8, [0] * 9),
    "a last chunk that keeps nothing": section_of(1, 64, 1, 0, [0, 0]),
    "a last chunk that keeps more": section_of(3, 64, 1, 2, [0, 0]),
    "a last chunk that keeps more than it has": section_of(30, 16, 5, 5, [0] * 12),
    "a rank beyond the last chunk": section_of(2, 64, 1, 1, [0, 36 >> 2]),
    "a rank beyond the ways": section_of(4, 64, 2, 2, [0xFF, 0x07, 0]),
    "a header that is cut": section_of(2, 64, 1, 1, [])[:12],
}


test_invalid_ranks_raise_frame_error = raises_frame_error(INVALID, 100)


@BACKENDS
def test_valid_ranks_of_the_same_kind_are_read(backend):
    assert read(backend, section_of(2, 64, 1, 1, [63 | (35 & 3) << 6, 35 >> 2]), 100).tolist() == [63, 99]
    assert read(backend, section_of(3, 64, 2, 1, [0, 0, 0]), 100).tolist() == [0, 1, 64]


@pytest.mark.parametrize("keep, bits", [(1 / 64, 6.0), (1 / 32, 5.5), (1 / 16, 5.0), (6 / 64, 4.5)])
def test_frames_have_a_fixed_size_and_hold_the_values_of_a_rice_code(keep, bits):
    spec = f"topk:{keep!r},chunk=64"
    for x in (laws.normal(200, 96), laws.normal(200, 96) * torch.exp(laws.normal(200, 1, seed=5)), torch.ones(19_200)):
        frame = laconic.encode(x, spec + ",code=rank")
        section = wire.unpack(frame).sections[0]
        assert len(frame) == laconic.max_nbytes(spec + ",code=rank", x)
        assert section.numel() - RANKS_HEADER == math.ceil(bits * int(64 * keep) * 300 / 8)
        assert laws.same_bits(laconic.decode(frame), laconic.decode(laconic.encode(x, spec)))


@pytest.mark.parametrize("spec, got", [("topk:0.1", "0 of chunk=0"), ("topk:0.2,chunk=64", "13 of chunk=64")])
def test_chunks_with_too_many_sets_are_refused(spec, got):
    assert num_ranks(64, 7) and not num_ranks(64, 8)
    with pytest.raises(laconic.ConfigError, match=f"code=rank needs a chunk.*got {got}. Use chunk=64"):
        laconic.codec(spec + ",code=rank")
