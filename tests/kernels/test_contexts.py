"""Positions by the contexts of rows and columns: bytes, all backends, sizes, and sections that no encoder writes."""

from __future__ import annotations

import math

import pytest
import torch
from position_sections import BACKENDS, raises_frame_error, read, refused_of_damaged

import laconic
import laws
from laconic import FrameError, counters, wire
from laconic.codecs.topk import TopK
from laconic.kernels import cpu, reference, torch_fallback
from laconic.kernels.interface import ChunkCounts
from laconic.kernels.sections import CONTEXTS, CONTEXTS_HEADER, MAX_COLUMNS, MAX_SPACING, RICE, columns_of


def uneven(rows, columns, k, seed=0, spread=1.5):
    """Positions of which some rows and columns have many and others few."""
    log_rates = spread * (laws.normal(rows, 1, seed=seed) + laws.normal(1, columns, seed=seed + 1))
    chosen = torch.multinomial(log_rates.exp().view(-1), k, generator=torch.Generator().manual_seed(seed))
    return chosen.sort().values.to(torch.int32)


def ints(*positions):
    return torch.tensor(positions, dtype=torch.int32)


POSITIONS = {
    "one": (3000, 50, ints(2999)),
    "first": (2, 1, ints(0)),
    "all but one": (300, 20, torch.arange(1, 300, dtype=torch.int32)),
    "one column": (900, 30, torch.arange(7, 900, 30, dtype=torch.int32)),
    "one row": (900, 30, torch.arange(90, 120, dtype=torch.int32)),
    "weights that are halved": (1300, 2, torch.arange(0, 1300, 2, dtype=torch.int32)),
    "a short last row": (1000, 48, uneven(20, 50, 60)),
    "more columns than values": (100, 400, ints(3, 50, 51, 99)),
    "uneven": (64 * 80, 80, uneven(64, 80, 200)),
    "even": (64 * 80, 80, uneven(64, 80, 200, spread=0.0)),
    "dense": (32 * 40, 40, uneven(32, 40, 700)),
}


def written(backend, n, columns, positions, room=1 << 16, counts=None):
    section = torch.full((room,), 0xEE, dtype=torch.uint8)
    return section[: backend.contexts_encode(positions, n, columns, counts, section)]


def in_chunks(rows, columns, keep, chunk, spread=1.0, seed=0):
    """The number of values, columns, the positions that every chunk keeps, and their counts; some columns keep many."""
    x = laws.normal(rows, columns, seed=seed) * torch.exp(spread * laws.normal(1, columns, seed=seed + 1))
    selector = TopK(keep, chunk=chunk)
    positions, _, _ = selector.choose(x.view(-1), cpu, 0)
    return x.numel(), columns, positions, selector.counts(x.numel())


CHUNKED = {
    "one of 64": in_chunks(40, 64, 1 / 64, 64),
    "chunks of several rows": in_chunks(60, 48, 3 / 64, 64),
    "rows of several chunks": in_chunks(20, 200, 0.1, 64),
    "a short last chunk": in_chunks(7, 19, 0.05, 128),
    "all but one of a chunk": in_chunks(4, 64, 63 / 64, 64),
    "one chunk that is not full": in_chunks(5, 11, 0.2, 64),
    "weights that are halved": in_chunks(600, 64, 1 / 64, 64, spread=9.0),
    "no column differs": in_chunks(40, 64, 1 / 64, 64, spread=0.0),
}


@pytest.mark.parametrize("kind", CHUNKED)
def test_chunks_round_trip_with_the_same_bytes_on_every_backend(kind):
    n, columns, positions, counts = CHUNKED[kind]
    section = written(reference, n, columns, positions, counts=counts)
    for backend in (cpu, torch_fallback):
        assert torch.equal(written(backend, n, columns, positions, counts=counts), section)
        assert written(backend, n, columns, positions, section.numel() - 1, counts).numel() == 0
    for backend in (cpu, reference, torch_fallback):
        assert torch.equal(read(backend, section, n), positions)


def test_one_of_64_takes_6_bits_where_columns_are_alike_and_fewer_where_they_differ():
    for spread, least, most in ((0.0, 5.99, 6.05), (1.0, 2.0, 4.0)):
        n, columns, positions, counts = in_chunks(768, 384, 1 / 64, 64, spread)
        nbits = 8 * (written(cpu, n, columns, positions, counts=counts).numel() - CONTEXTS_HEADER)
        assert least < nbits / positions.numel() < most


def test_context_of_chunks_is_smaller_than_their_ranks_where_columns_differ():
    x = laws.normal(256, 320, seed=3) * torch.exp(laws.normal(1, 320, seed=2))
    frames = [laconic.encode(x, f"topk:0.015625,chunk=64,code={code}|sign") for code in ("rank", "context")]
    rank, context = (wire.unpack(frame).sections[0].numel() for frame in frames)
    assert context < 0.8 * rank
    assert laws.same_bits(*map(laconic.decode, frames))


def test_weights_of_a_column_that_sends_whole_chunks_round_trip():
    each, chunk = 65_000, 1 << 16  # the weight of the column nears 2^24
    generator = torch.Generator().manual_seed(0)
    chunks = [at * chunk + torch.randperm(chunk, generator=generator)[:each].sort().values for at in range(3)]
    positions, counts = torch.cat(chunks).to(torch.int32), ChunkCounts(chunk, each, each)
    section = written(reference, 3 * chunk, 1, positions, counts=counts)
    assert torch.equal(written(cpu, 3 * chunk, 1, positions, counts=counts), section)
    assert torch.equal(read(cpu, section, 3 * chunk), positions)


@BACKENDS
def test_positions_of_other_counts_than_those_of_chunks_are_refused(backend):
    short = ints(115, 120, 166)  # none in the first chunk, two in the second
    with pytest.raises(ValueError, match="not those of the chunks' counts"):
        written(backend, 192, 8, short, counts=ChunkCounts(64, 1, 1))
    with pytest.raises(AssertionError):
        written(backend, 192, 8, short, counts=ChunkCounts(64, 2, 1))


@pytest.mark.parametrize("positions", [(5, 3), (5, 5), (5, 64)], ids=str)
def test_positions_that_do_not_ascend_below_n_are_refused_by_the_core(positions):
    for counts in (None, ChunkCounts(64, 2, 2)):
        with pytest.raises(ValueError, match="not ascending"):
            written(cpu, 64, 8, ints(*positions), counts=counts)


@pytest.mark.parametrize("kind", POSITIONS)
def test_contexts_round_trip_with_the_same_bytes_on_every_backend(kind):
    n, columns, positions = POSITIONS[kind]
    section = written(reference, n, columns, positions)
    for backend in (cpu, torch_fallback):
        assert torch.equal(written(backend, n, columns, positions), section)
    for backend in (cpu, reference, torch_fallback):
        assert torch.equal(read(backend, section, n), positions)


@BACKENDS
@pytest.mark.parametrize("kind", ["one", "uneven", "even"])
def test_section_without_room_for_it_is_not_written(backend, kind):
    n, columns, positions = POSITIONS[kind]
    nbytes = written(cpu, n, columns, positions).numel()
    assert written(backend, n, columns, positions, room=nbytes).numel() == nbytes
    for room in (nbytes - 1, CONTEXTS_HEADER, CONTEXTS_HEADER - 1, 0):
        assert room == nbytes or written(backend, n, columns, positions, room).numel() == 0


def test_wide_positions_are_those_of_narrow_ones():
    n, columns, positions = POSITIONS["uneven"]
    assert torch.equal(written(cpu, n, columns, positions.long()), written(cpu, n, columns, positions))


def test_even_positions_take_little_more_than_their_entropy():
    rows, columns, k = 512, 512, 4096
    positions = uneven(rows, columns, k, spread=0.0)
    entropy = (math.lgamma(rows * columns + 1) - math.lgamma(k + 1) - math.lgamma(rows * columns - k + 1)) / math.log(2)
    nbits = 8 * (written(cpu, rows * columns, columns, positions).numel() - CONTEXTS_HEADER)
    assert entropy <= nbits + 64 and nbits < 1.01 * entropy


@pytest.mark.parametrize("by", ["rows", "columns", "both"])
def test_uneven_rows_and_columns_are_smaller_than_by_gaps(by):
    x = laws.normal(256, 320, seed=3)
    if by != "columns":
        x = x * torch.exp(laws.normal(256, 1, seed=1))
    if by != "rows":
        x = x * torch.exp(laws.normal(1, 320, seed=2))
    frames = [laconic.encode(x, f"topk:0.015625{code}|sign") for code in ("", ",code=rans", ",code=context")]
    rice, rans, context = (wire.unpack(frame).sections[0].numel() for frame in frames)
    assert context < 0.9 * min(rice, rans)
    assert laws.same_bits(laconic.decode(frames[0]), laconic.decode(frames[2]))


@pytest.mark.parametrize(
    "spec", ["topk:0.05{}|sign", "threshold:1.5{}", "topk:0.05,approx=true{}", "topk:0.1,chunk=64{}"]
)
def test_context_decodes_to_the_same_values_and_is_never_larger(spec):
    for x in (
        laws.normal(30, 41),
        laws.normal(1000),
        laws.normal(4, 5, 6, 7),
        laws.normal(3, 1),
        laws.normal(20_000, 1),
    ):
        *others, coded = (laconic.encode(x, spec.format(code), seed=5) for code in ("", ",code=rans", ",code=context"))
        for other in others:
            assert laws.same_bits(laconic.decode(other), laconic.decode(coded))
            assert wire.unpack(coded).sections[0].numel() <= wire.unpack(other).sections[0].numel()


def test_sparser_positions_fall_back_to_a_rice_code():
    x = torch.zeros(64, MAX_SPACING)
    x[7, torch.randperm(MAX_SPACING, generator=torch.Generator().manual_seed(0))[:64]] = 1.0
    for keep, mode in ((64, CONTEXTS), (63, RICE)):
        frame = laconic.encode(x, f"topk:{keep / x.numel()!r},code=context")
        assert int(wire.unpack(frame).sections[0][0]) == mode


def test_columns_follow_from_the_shape():
    assert columns_of((40, 50)) == 50 and columns_of((8, 3, 5, 5)) == 75
    assert columns_of((2, 100, 1 << 13)) == 1 << 13  # the rows are too long, the last dimension is not
    assert columns_of((2, MAX_COLUMNS + 1)) == 256 == columns_of((5000,)) == columns_of((5000, 1))
    assert columns_of(()) == 1 and columns_of((7,)) == 7


def test_other_devices_use_the_host_and_count_it():
    class Elsewhere(torch.Tensor):
        is_cpu = False

    n, columns, positions = POSITIONS["uneven"]
    section = written(cpu, n, columns, positions)
    before = counters.counts().get("hosted_kernels", 0)
    found = read(torch_fallback, section.clone().as_subclass(Elsewhere), n)
    assert torch.equal(torch.as_tensor(found).as_subclass(torch.Tensor), positions)
    assert counters.counts()["hosted_kernels"] == before + 1


@pytest.mark.parametrize("n, columns, positions, counts", [(*POSITIONS["uneven"], None), CHUNKED["a short last chunk"]])
def test_damaged_sections_are_refused_or_read_alike_by_every_backend(n, columns, positions, counts):
    section = written(cpu, n, columns, positions, counts=counts)
    header = CONTEXTS_HEADER + 4 * (counts is not None)
    refused = refused_of_damaged(section, n, header=header, times=120)
    assert refused > 90  # a damaged section rarely ends where its decisions do


def section_of(k, columns, body=b"", *, parameter=0, priors=(9, 9), rest=0, chunk_bits=0, each=None):
    header = CONTEXTS | parameter << 8 | k << 16 | columns << 64 | priors[0] << 96 | priors[1] << 104
    header |= chunk_bits << 112 | rest << 120
    chunked = b"" if each is None else each.to_bytes(4, "little")
    return torch.tensor(list(header.to_bytes(CONTEXTS_HEADER, "little") + chunked + body), dtype=torch.uint8)


def chunked_section_of(k, each, body=b"", *, chunk_bits=6, row_prior=0):
    return section_of(k, 10, body, priors=(row_prior, 9), chunk_bits=chunk_bits, each=each)


INVALID = {
    "no columns": section_of(5, 0),
    "too many columns": section_of(5, MAX_COLUMNS + 1),
    "a parameter": section_of(5, 10, parameter=1),
    "a row prior beyond the last": section_of(5, 10, priors=(10, 0)),
    "a column prior beyond the last": section_of(5, 10, priors=(0, 255)),
    "fields that are not zero": section_of(5, 10, rest=1),
    "no position": section_of(0, 10),
    "as many positions as values": section_of(100, 10),
    "more positions than values": section_of(1 << 47, 10),
    "half a header": section_of(5, 10)[:12],
    "nothing is sent": section_of(5, 10, b"\xff" * 8),
    "bytes after the decisions": section_of(5, 10, bytes(8)),
    "a last row that is too short": section_of(99, 99, b"\xff" * 60),
    "chunks that are too small": chunked_section_of(13, 4, bytes(4), chunk_bits=5),
    "chunks that are too large": chunked_section_of(5, 5, bytes(4), chunk_bits=17),
    "chunks with a prior of rows": chunked_section_of(5, 3, bytes(4), row_prior=1),
    "chunks that keep nothing": chunked_section_of(5, 0, bytes(4)),
    "chunks that keep more than they have": chunked_section_of(70, 65, bytes(4)),
    "chunks of which the last has nothing left": chunked_section_of(5, 5, bytes(4)),
    "chunks of which the last keeps more than others": chunked_section_of(5, 2, bytes(4)),
    "chunks of which the last is too short": chunked_section_of(97, 60, bytes(4)),
    "chunks without the rest of their header": chunked_section_of(5, 3)[:18],
    "chunks with bytes after the decisions": chunked_section_of(5, 3, bytes(8)),
}


test_invalid_contexts_raise_frame_error = raises_frame_error(INVALID, 100)


@BACKENDS
def test_valid_contexts_of_the_same_kind_are_read(backend):
    # Zeros select every value; 5 of them at about 1/20 are 22 bits, of which two bytes are settled.
    assert read(backend, section_of(5, 10, bytes(2)), 100).tolist() == [0, 1, 2, 3, 4]
    for length in (0, 1, 3, 4):
        with pytest.raises(FrameError):
            read(backend, section_of(5, 10, bytes(length)), 100)
    assert read(backend, chunked_section_of(5, 3, bytes(3)), 100).tolist() == [0, 1, 2, 64, 65]


def test_positions_that_are_too_far_apart_are_refused():
    section = section_of(1, 10, bytes(1))
    assert read(cpu, section, MAX_SPACING).tolist() == [0]
    with pytest.raises(FrameError, match="cannot hold 1 of 4097 positions"):
        read(cpu, section, MAX_SPACING + 1)
