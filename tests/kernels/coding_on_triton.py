"""Huffman's code by Triton against the core: sections byte for byte, symbols back, lies refused. As ``on_triton.py``.

A lane goes symbol after symbol, which the interpreter takes its time for: sizes are small, and most of them slow.
"""

from __future__ import annotations

import os
import random
import struct

import pytest
import torch

import laws
import symbols as kinds
from laconic import FrameError, counters
from laconic.kernels import cpu
from laconic.kernels.interface import CHUNK, CONSTANT, HUFFMAN, RANS, RAW, Coding, coded_max_nbytes
from laconic.kernels.reference import code_tables

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def whole_streams(monkeypatch):
    """The interpreter runs one program after another: parts would only cost, and have tests of their own."""
    from laconic.kernels.triton import huffman_decode

    if INTERPRETED:
        monkeypatch.setattr(huffman_decode, "PARTS", 1)


def ours():
    from laconic.kernels.triton import backend

    return backend


def hosted() -> int:
    return counters.counts().get("hosted_kernels", 0)


def written(symbols, alphabet, coding=Coding.HUFFMAN) -> bytes:
    """The section as Triton writes it, into room that it must leave alone around what it wrote."""
    limit = coded_max_nbytes(symbols.numel(), alphabet)
    room = torch.full((limit + 64,), 0xA5, dtype=torch.uint8, device=DEVICE)
    nbytes = ours().encode_symbols(symbols.to(DEVICE), alphabet, coding, room[32 : 32 + limit])
    room = room.cpu()
    assert bool((room[:32] == 0xA5).all()) and bool((room[32 + nbytes :] == 0xA5).all()), "wrote past its section"
    return bytes(room[32 : 32 + nbytes].tolist())


def truth(symbols, alphabet, coding=Coding.HUFFMAN) -> bytes:
    return bytes(kinds.code(cpu, symbols, alphabet, coding).tolist())


def placed(section: bytes, before: int = 64):
    """Bytes on the device, between others that must not matter."""
    room = torch.frombuffer(bytearray(b"\xff" * before + section + b"\xff" * 64), dtype=torch.uint8).to(DEVICE)
    return room[before : before + len(section)]


def agree(kind: str, n: int, alphabet: int) -> None:
    symbols = kinds.make(kind, n, alphabet)
    section, before = truth(symbols, alphabet), hosted()
    assert written(symbols, alphabet) == section, (kind, n, alphabet)
    assert torch.equal(ours().decode_symbols(placed(section), n, alphabet).cpu(), symbols), (kind, n, alphabet)
    assert hosted() == before, "the device alone"


QUICK = [("normal", 30, 8), ("one symbol", 50, 16), ("normal", 1, 9)]
FEW = [*QUICK, ("two symbols", 2048, 2), ("geometric", 20, 300)]
SIZES = (1, 2, 15, 16, 17, 300, 2047, 2048, 2053, 65_535, 65_536 + 7)


@pytest.mark.parametrize(
    "kind, n, alphabet", [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in FEW]
)
def test_sections_are_those_of_the_core(kind, n, alphabet):
    agree(kind, n, alphabet)


def read_back(kind: str, n: int, alphabet: int) -> None:
    symbols, before = kinds.make(kind, n, alphabet), hosted()
    found = ours().decode_symbols(placed(truth(symbols, alphabet)), n, alphabet)
    assert torch.equal(found.cpu(), symbols) and hosted() == before, (kind, n, alphabet)


def cut_into(parts: int, warm: int, monkeypatch) -> None:
    """Let a reader cut short streams, too, and begin its parts so many bits early."""
    from laconic.kernels.triton import huffman_decode

    for name, value in (("PARTS", parts), ("WARM", warm), ("SHORT", 1)):
        monkeypatch.setattr(huffman_decode, name, value)


@pytest.mark.parametrize("warm", [pytest.param(0, marks=pytest.mark.slow), 32])
def test_streams_are_read_in_parts(warm, monkeypatch):
    cut_into(4, warm, monkeypatch)
    read_back("normal", 90, 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["even", "normal", "geometric", "skewed"])
@pytest.mark.parametrize("parts, warm", [(1, 0), (8, 0), (16, 100), (8, 1536)])
@pytest.mark.parametrize("n, alphabet", [(2500, 90), (2500, 600)])
def test_streams_in_parts_are_those_of_the_core(n, alphabet, parts, warm, kind, monkeypatch):
    cut_into(parts, warm, monkeypatch)
    read_back(kind, n, alphabet)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
@pytest.mark.parametrize("alphabet", [2, 3, 100, 256, 257, 4096])
def test_sections_of_every_kind_are_those_of_the_core(kind, alphabet):
    agree(kind, 2500, alphabet)


@pytest.mark.slow
@pytest.mark.parametrize("n", SIZES)
def test_sections_of_every_size_are_those_of_the_core(n):
    agree("normal", n, 90)
    agree("even", n, 300)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind, alphabet", [("normal", 92), ("skewed", 300)])
def test_chunks_follow_one_another(kind, alphabet):
    agree(kind, CHUNK + 300, alphabet)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
@pytest.mark.parametrize("alphabet", [2, 92, 256, 4096])
def test_many_chunks_are_those_of_the_core(kind, alphabet):
    agree(kind, 9 * CHUNK + 70_001, alphabet)


@pytest.mark.slow
def test_constant_chunks_stand_among_others():
    symbols = torch.full((CHUNK + 40,), 3, dtype=torch.uint8)
    symbols[-2:] = 5
    section = truth(symbols, 7)
    assert written(symbols, 7) == section
    assert torch.equal(ours().decode_symbols(placed(section), CHUNK + 40, 7).cpu(), symbols)


@pytest.mark.parametrize("before", [60, pytest.param(56, marks=pytest.mark.slow), 61])
def test_sections_that_begin_anywhere_are_read_and_written(before):
    n = 20
    symbols = kinds.make("normal", n, 30)
    section = truth(symbols, 30)
    assert torch.equal(ours().decode_symbols(placed(section, before), n, 30).cpu(), symbols)
    room = torch.full((coded_max_nbytes(n, 30) + before,), 0xA5, dtype=torch.uint8, device=DEVICE)
    nbytes = ours().encode_symbols(symbols.to(DEVICE), 30, Coding.HUFFMAN, room[before:])
    assert bytes(room[before : before + nbytes].tolist()) == section
    assert bool((room[:before] == 0xA5).all())


@pytest.mark.parametrize("weight", [None, -0.3])
def test_values_are_looked_up(weight):
    symbols, table = kinds.make("normal", 24, 11), laws.normal(11)
    section = placed(truth(symbols, 11))
    expected, found = torch.ones(24), torch.ones(24, device=DEVICE)
    cpu.decode_values(section.cpu(), table, expected, weight)
    before = hosted()
    ours().decode_values(section, table, found, weight)
    assert hosted() == before
    assert laws.same_bits(found.cpu(), expected)


# ------------------------------------------------------------------------------------------------------------- lies


def answer(backend, section):
    data, n, alphabet = section
    try:
        return backend.decode_symbols(placed(data) if backend is not cpu else placed(data).cpu(), n, alphabet).cpu()
    except FrameError:
        return None


def refused(data: bytes, n: int, alphabet: int) -> bool:
    """Whether it is; the core must say the same, and read the same."""
    before = hosted()
    found, expected = (answer(backend, (data, n, alphabet)) for backend in (ours(), cpu))
    assert hosted() == before or (found is not None and data[4] in (RAW, RANS)), "the device alone"
    assert (found is None) == (expected is None), "the core says otherwise"
    assert found is None or torch.equal(found, expected)
    if found is None:
        out = torch.ones(n, device=DEVICE)
        with pytest.raises(FrameError, match=f"{n} symbols of {alphabet} that no coder wrote"):
            ours().decode_values(placed(data), torch.zeros(alphabet, device=DEVICE), out, 0.5)
        assert bool((out == 1).all()), "a refused section must not be added"
    return found is None


def sized(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def bits_to_bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def u16(value: int) -> str:
    return f"{value:016b}"[::-1]


THREE = u16(0) + u16(2) + "110" + "1000" + "101" + "0"
STREAM = bits_to_bytes("01011001110")
LIES = {
    "class 0 by name": u16(0) + u16(2) + "110" + "0000" + "101" + "0",
    "one less than 1": u16(0) + u16(2) + "110" + "1000" + "100" + "0",
    "one more than 15": u16(0) + u16(2) + "110" + "1111" + "101" + "0",
    "symbol 16 of 16": u16(14) + u16(2) + "110" + "1000" + "101" + "0",
    "symbols far beyond": u16(65535) + u16(65535) + "110" + "1000" + "101" + "0",
    "ends with a run": u16(0) + u16(3) + "110" + "1000" + "101" + "0" + "1111",
    "a run past the last": u16(0) + u16(5) + "110" + "1000" + "111" + "0001" + "000" + "101" + "0",
    "a run of 4,096": u16(0) + u16(15) + "110" + "1000" + "111" + "0" * 12 + "1" + "0" * 12,
    "zeros without end": u16(0) + u16(15) + "110" + "1000" + "111" + "0" * 60,
    "something in the padding": THREE + "00001",
    "one symbol alone": u16(3) + u16(0) + "110" + "1000",
    "two quarters": u16(0) + u16(1) + "110" + "0100" + "0",
    "three halves": u16(0) + u16(2) + "110" + "1000" + "0" + "0",
    "ones": "1" * 400,
    "nothing": "",
}


def test_a_handmade_book_is_read():
    section = sized(bytes([HUFFMAN]) + bits_to_bytes(THREE) + STREAM)
    assert not refused(section, 7, 16)
    assert answer(ours(), (section, 7, 16)).tolist() == [0, 1, 2, 0, 0, 2, 1]


def unary(symbols) -> str:
    """In a code of lengths 1, 2 to 15 and 15, as nobody would make it from counts."""
    return "".join("1" * symbol + "0" * (symbol < 15) for symbol in symbols)


LONG = u16(0) + u16(15) + "110" + "1000" + 14 * "101" + "0"


def test_codes_that_are_longer_than_a_table_knows_are_read():
    symbols = [15, 14, 0, 13, 15, 1, 12, 11, 2, 15, 15, 14, 0, 0, 13, 3, 12, 15]
    section = sized(bytes([HUFFMAN]) + bits_to_bytes(LONG) + bits_to_bytes(unary(symbols)))
    assert not refused(section, len(symbols), 16), "read as the core reads it"
    assert refused(section[:-1], len(symbols), 16)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("warm", [0, 1536])
@pytest.mark.parametrize("parts", [1, 4, 32])
@pytest.mark.parametrize("alphabet", [90, 256, 4096])
def test_large_streams_in_parts_are_those_of_the_core(alphabet, parts, warm, monkeypatch):
    cut_into(parts, warm, monkeypatch)
    for kind in ("even", "normal", "geometric", "skewed"):
        read_back(kind, 2 * CHUNK + 70_000, alphabet)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_long_codes_of_many_streams_are_read_as_the_core_reads_them():
    n, dice = 70_000, random.Random(3)
    symbols = [dice.choice((0, 1, 13, 14, 15)) for _ in range(n)]
    each = -(-n // 30)
    bits = [unary(symbols[j * each : (j + 1) * each]) for j in range(30)]
    starts = [sum(map(len, bits[:j])) for j in range(1, 30)]
    head = bytes([HUFFMAN]) + bits_to_bytes(LONG)
    for lie in (0, 1):
        others = struct.pack("<29I", starts[0] + lie, *starts[1:])
        assert refused(sized(head + others + bits_to_bytes("".join(bits))), n, 16) == bool(lie)


@pytest.mark.parametrize("lie", LIES)
def test_a_book_that_lies_is_refused(lie):
    assert refused(sized(bytes([HUFFMAN]) + bits_to_bytes(LIES[lie]) + STREAM), 7, 16)


@pytest.mark.slow
def test_directories_that_do_not_fit_are_refused():
    n, constant = CHUNK + 1, struct.pack("<BH", CONSTANT, 1)
    assert not refused(struct.pack("<II", 3, 3) + constant * 2, n, 4)
    most = 2**32 - 1
    for sizes in ((2, 4), (0, 6), (6, 0), (3, 2), (most, 7), (7, most)):
        assert refused(struct.pack("<II", *sizes) + constant * 2, n, 4), sizes


@pytest.mark.slow
def test_chunks_that_are_too_short_or_too_long_are_refused():
    for data in (b"", b"\0" * 9, b"\1\0\0\0\2"):
        assert refused(data, 10, 16)
    for body in (b"\0", b"\0\0", b"\0\4\0", b"\0\1\0\0", b"\4\0\0", b"\xff"):
        assert refused(sized(body), 7, 4)


def parts(section: bytes, n: int, alphabet: int):
    """What stands before the starts, the starts, the bits."""
    _, _, taken = code_tables.read_book(section[5:], alphabet, with_shares=False)
    streams = 30 if n >= 65536 else 6 if n >= 2048 else 1
    at = 5 + taken
    return section[4:at], list(struct.unpack_from(f"<{streams - 1}I", section, at)), section[at + 4 * (streams - 1) :]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_streams_that_do_not_meet_are_refused():
    n, alphabet = 2048, 2
    head, starts, bits = parts(truth(kinds.make("normal", n, alphabet), alphabet), n, alphabet)

    def with_starts(others, rest=bits):
        return sized(head + struct.pack(f"<{len(others)}I", *others) + rest)

    assert not refused(with_starts(starts), n, alphabet)
    lies = [[starts[0] + 1, *starts[1:]], [*starts[:-1], 2**32 - 1], [starts[1], starts[0], *starts[2:]], starts[:-1]]
    for lie in lies:
        assert refused(with_starts(lie), n, alphabet), lie
    for rest in (bits[:-1], bits + b"\0", bits[:-1] + bytes([bits[-1] ^ 0x80])):
        assert refused(with_starts(starts, rest), n, alphabet) or rest[-1] != bits[-1]


@pytest.mark.slow
def test_bits_that_are_missing_or_left_over_are_refused():
    n, alphabet = 24, 7
    section = truth(kinds.make("normal", n, alphabet), alphabet)
    for rest in (section[:-1], section + b"\0", section[: len(section) // 2]):
        assert refused(sized(rest[4:]), n, alphabet)
    assert refused(section, n // 2, alphabet)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind, n, alphabet", [("normal", 40, 8), ("geometric", 60, 4096), ("one symbol", 50, 16)])
def test_every_flipped_bit_is_refused_or_read_as_the_core_reads_it(kind, n, alphabet):
    section = bytearray(truth(kinds.make(kind, n, alphabet), alphabet))
    taken = 0
    for bit in range(8 * len(section)):
        section[bit // 8] ^= 1 << bit % 8
        taken += not refused(bytes(section), n, alphabet)
        section[bit // 8] ^= 1 << bit % 8
    assert taken < 4 * len(section)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_noise_is_refused_or_read_as_the_core_reads_it():
    dice = random.Random(2)
    for _ in range(150):
        n, alphabet = dice.choice((1, 5, 60)), dice.choice((2, 5, 256, 4096))
        body = bytes([dice.choice((HUFFMAN, HUFFMAN, CONSTANT, RAW))]) + dice.randbytes(dice.choice((0, 2, 9, 60, 300)))
        refused(sized(body), n, alphabet)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_flipped_bits_of_many_streams_are_refused_or_read_as_the_core_reads_them():
    n, alphabet, dice = 70_000, 100, random.Random(1)
    section = bytearray(truth(kinds.make("normal", n, alphabet), alphabet))
    for bit in [*range(64), *(dice.randrange(8 * len(section)) for _ in range(300))]:
        section[bit // 8] ^= 1 << bit % 8
        refused(bytes(section), n, alphabet)
        section[bit // 8] ^= 1 << bit % 8
