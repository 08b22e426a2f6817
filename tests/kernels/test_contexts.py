"""Positions by the contexts of rows and columns: bytes, all backends, sizes, and sections that no encoder writes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from position_sections import BACKENDS, raises_frame_error, read

import laconic
import laws
from laconic import FrameError, counters, wire
from laconic.kernels import cpu, reference, torch_fallback
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


def written(backend, n, columns, positions, room=1 << 16):
    section = torch.full((room,), 0xEE, dtype=torch.uint8)
    return section[: backend.contexts_encode(positions, n, columns, section)]


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


def outcome(backend, section, n):
    """Positions as a list, or None if the section is refused."""
    try:
        return read(backend, section, n).tolist()
    except FrameError:
        return None


def test_damaged_sections_are_refused_or_read_alike_by_every_backend():
    n, columns, positions = POSITIONS["uneven"]
    good, rng, refused = written(cpu, n, columns, positions), random.Random(5), 0
    for _ in range(120):
        bad = bytearray(good.tolist())
        move = rng.randrange(4)
        if move == 0:
            del bad[rng.randrange(len(bad)) :]
        elif move == 1:
            bad += bytes(rng.choice((1, 2, 40)))
        else:
            at = rng.randrange(rng.choice((CONTEXTS_HEADER, 60, len(bad))))
            bad[at] ^= 1 << rng.randrange(8)
        section = torch.tensor(list(bad), dtype=torch.uint8)
        found = outcome(cpu, section, n)
        assert outcome(reference, section, n) == outcome(torch_fallback, section, n) == found
        refused += found is None
        if found is not None:
            assert found == sorted(set(found)) and found[0] >= 0 and found[-1] < n
    assert refused > 100  # a damaged section rarely ends where its decisions do


def section_of(k, columns, body=b"", *, parameter=0, priors=(9, 9), rest=0):
    header = CONTEXTS | parameter << 8 | k << 16 | columns << 64 | priors[0] << 96 | priors[1] << 104 | rest << 112
    return torch.tensor(list(header.to_bytes(CONTEXTS_HEADER, "little") + body), dtype=torch.uint8)


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
}


test_invalid_contexts_raise_frame_error = raises_frame_error(INVALID, 100)


@BACKENDS
def test_valid_contexts_of_the_same_kind_are_read(backend):
    # Zeros select every value; 5 of them at about 1/20 are 22 bits, of which two bytes are settled.
    assert read(backend, section_of(5, 10, bytes(2)), 100).tolist() == [0, 1, 2, 3, 4]
    for length in (0, 1, 3, 4):
        with pytest.raises(FrameError):
            read(backend, section_of(5, 10, bytes(length)), 100)


def test_positions_that_are_too_far_apart_are_refused():
    section = section_of(1, 10, bytes(1))
    assert read(cpu, section, MAX_SPACING).tolist() == [0]
    with pytest.raises(FrameError, match="cannot hold 1 of 4097 positions"):
        read(cpu, section, MAX_SPACING + 1)
