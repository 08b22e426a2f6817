"""rANS, raw chunks and the choice between modes by Triton against the core. As ``coding_on_triton.py``, and as slow."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from coding_on_triton import (
    DEVICE,
    INTERPRETED,
    answer,
    bits_to_bytes,
    hosted,
    ours,
    placed,
    refused,
    sized,
    truth,
    u16,
    written,
)

import laws
import symbols as kinds
from laconic.kernels import cpu
from laconic.kernels.interface import CHUNK, CONSTANT, HUFFMAN, RANS, RAW, Coding, packed_nbytes, symbol_bits
from laconic.kernels.reference import code_tables

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CODINGS = [coding for coding in Coding if coding != Coding.HUFFMAN]
LOW = 1 << 15


def agree(kind: str, n: int, alphabet: int, coding: Coding) -> bytes:
    symbols = kinds.make(kind, n, alphabet)
    section, before = truth(symbols, alphabet, coding), hosted()
    assert written(symbols, alphabet, coding) == section, (kind, n, alphabet, coding.name)
    assert torch.equal(ours().decode_symbols(placed(section), n, alphabet).cpu(), symbols), (kind, n, alphabet)
    assert hosted() == before, "the device alone"
    return section


def modes(section: bytes, n: int) -> list[int]:
    return cpu.chunk_modes(torch.frombuffer(bytearray(section), dtype=torch.uint8), n).tolist()


@pytest.mark.parametrize(
    "kind, n, alphabet, coding, mode",
    [
        ("normal", 30, 8, Coding.RANS, RANS),
        ("even", 300, 16, Coding.RANS_AUTO, RAW),
        pytest.param("normal", 30, 8, Coding.HUFFMAN_AUTO, RAW, marks=pytest.mark.slow),
        pytest.param("even", 300, 13, Coding.RANS_AUTO, HUFFMAN, marks=pytest.mark.slow),
        pytest.param("two symbols", 3000, 100, Coding.HUFFMAN_AUTO, RANS, marks=pytest.mark.slow),
        pytest.param("one symbol", 50, 16, Coding.RANS, CONSTANT, marks=pytest.mark.slow),
        pytest.param("one symbol", 50, 1, Coding.RANS_AUTO, CONSTANT, marks=pytest.mark.slow),
        pytest.param("normal", 16_384 + 5, 92, Coding.RANS, RANS, marks=pytest.mark.slow),
    ],
)
def test_sections_are_those_of_the_core(kind, n, alphabet, coding, mode):
    assert modes(agree(kind, n, alphabet, coding), n) == [mode]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.name)
@pytest.mark.parametrize("alphabet", [2, 3, 100, 256, 257, 4096])
@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
def test_sections_of_every_kind_are_those_of_the_core(kind, alphabet, coding):
    agree(kind, 777, alphabet, coding)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 31, 32, 33, 255, 256, 257, 16_383, 16_384, 16_384 + 257])
def test_sections_of_every_size_are_those_of_the_core(n):
    agree("normal", n, 90, Coding.RANS)
    agree("even", n, 300, Coding.HUFFMAN_AUTO)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_shares_of_the_finer_scale_are_those_of_the_core():
    """Where shares of 2^12 would be too coarse, or too few; these are also the shares that have to give."""
    section = agree("all but equal", 2000, 1500, Coding.RANS)
    assert section[4:6] == bytes([RANS, 15])
    section = agree("one in the middle", 100_000, 4, Coding.RANS)
    assert section[4:6] == bytes([RANS, 15])
    assert agree("heavy tail", 2500, 2000, Coding.RANS)[4:6] == bytes([RANS, 12])


def mixture(n: int, alphabet: int) -> torch.Tensor:
    """Chunks of several modes, one after the other."""
    four = ("normal", "even", "one symbol", "skewed")
    parts = [kinds.make(four[i % 4], min(CHUNK, n - i * CHUNK), alphabet) for i in range(-(-n // CHUNK))]
    return torch.cat(parts)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.name)
@pytest.mark.parametrize("alphabet", [16, 60, 256, 1000])
def test_chunks_of_several_modes_stand_side_by_side(alphabet, coding):
    n = 8 * CHUNK + 70_001
    symbols, table = mixture(n, alphabet), laws.normal(alphabet)
    section = truth(symbols, alphabet, coding)
    assert len(set(modes(section, n))) >= 2
    assert written(symbols, alphabet, coding) == section
    assert torch.equal(ours().decode_symbols(placed(section), n, alphabet).cpu(), symbols)
    for weight in (None, -0.3):
        expected, found = torch.ones(n), torch.ones(n, device=DEVICE)
        cpu.decode_values(placed(section).cpu(), table, expected, weight)
        ours().decode_values(placed(section), table, found, weight)
        assert laws.same_bits(found.cpu(), expected)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.name)
@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
@pytest.mark.parametrize("alphabet", [2, 92, 256, 4096])
def test_many_chunks_are_those_of_the_core(kind, alphabet, coding):
    agree(kind, 3 * CHUNK + 16_384 + 7, alphabet, coding)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sections_that_begin_between_words_are_read_and_written():
    before, n, alphabet = 61, 600, 30
    symbols = kinds.make("normal", n, alphabet)
    for coding in (Coding.RANS, Coding.RANS_AUTO):
        section = truth(symbols, alphabet, coding)
        assert torch.equal(ours().decode_symbols(placed(section, before), n, alphabet).cpu(), symbols)
        room = torch.full((2000 + before,), 0xA5, dtype=torch.uint8, device=DEVICE)
        nbytes = ours().encode_symbols(symbols.to(DEVICE), alphabet, coding, room[before:])
        assert bytes(room[before : before + nbytes].tolist()) == section
        assert bool((room[:before] == 0xA5).all())


@pytest.mark.parametrize("coding, weight", [(Coding.RANS, -0.3), (Coding.RANS, None), (Coding.RANS_AUTO, -0.3)])
def test_values_are_looked_up(coding, weight):
    symbols, table = kinds.make("even", 24, 11), laws.normal(11)
    section = placed(truth(symbols, 11, coding))
    expected, found = torch.ones(24), torch.ones(24, device=DEVICE)
    cpu.decode_values(section.cpu(), table, expected, weight)
    ours().decode_values(section, table, found, weight)
    assert laws.same_bits(found.cpu(), expected)


def test_sections_of_other_modes_than_the_one_before_are_added_once():
    symbols, total = kinds.make("even", 24, 11), torch.zeros(24, device=DEVICE)
    codings = (Coding.HUFFMAN, Coding.RANS, Coding.RANS_AUTO, Coding.HUFFMAN)
    for coding in codings:
        ours().decode_values(placed(truth(symbols, 11, coding)), torch.arange(11.0), total, 0.5)
    assert torch.equal(total.cpu(), len(codings) * 0.5 * symbols)


# ------------------------------------------------------------------------------------------------------------- lies

# Two shares of a half, symbols 3 and 5: class 12 by name, then the same, with eleven bits of mantissa each, and a run
# of one between.
HALVES = u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "1" + "0" + "0" * 11
STATES = struct.pack("<4I", 1 << 16, (1 << 16) + 2048, 1 << 16, (1 << 16) + 2048)
LIES = {
    "class 0 by name": u16(3) + u16(2) + "110" + "0000" + "111" + "1" + "0",
    "one more than 15": u16(3) + u16(1) + "110" + "1111" + "0" * 14 + "101" + "0" * 15,
    "symbol 16 of 16": u16(14) + u16(2) + HALVES[32:],
    "symbols far beyond": u16(65535) + u16(65535) + HALVES[32:],
    "ends with a run": u16(3) + u16(3) + HALVES[32:] + "1111",
    "a run past the last": u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "01" + "1",
    "a run of 4,096": u16(0) + u16(15) + "110" + "0011" + "0" * 11 + "111" + "0" * 12 + "1" + "0" * 12,
    "something in the padding": HALVES + "1",
    "shares cut short": HALVES[:-12],
    "a half and nothing": u16(3) + u16(0) + "110" + "0011" + "0" * 11,
    "three halves": u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "0" + "0" * 11 + "0" + "0" * 11,
    "one has all": u16(3) + u16(0) + "110" + "1011" + "0" * 12,
    "ones": "1" * 400,
    "nothing": "",
}


def handmade(book: str, rest: bytes, scale: int = 12) -> bytes:
    return sized(bytes([RANS, scale]) + bits_to_bytes(book) + rest)


def test_a_handmade_book_is_read():
    section = handmade(HALVES, STATES)
    assert not refused(section, 4, 16)
    assert answer(ours(), (section, 4, 16)).tolist() == [3, 5, 3, 5]


@pytest.mark.parametrize(
    "lie", [pytest.param(lie, marks=() if lie in ("three halves", "ones") else pytest.mark.slow) for lie in LIES]
)
def test_a_book_that_lies_is_refused(lie):
    for rest in (b"", STATES, STATES + bytes(2), bytes(40)):
        assert refused(handmade(LIES[lie], rest), 4, 16)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scales_states_and_words_that_lie_are_refused():
    for scale in (0, 11, 13, 15, 16, 31, 32, 255):
        assert refused(handmade(HALVES, STATES, scale), 4, 16), scale
    # A half of state 0 leaves 0, which a word of 2^15 lifts to where every lane must end.
    words = struct.pack("<4H", *[LOW] * 4)
    for state in (0, 2048, LOW - 1, 1 << 31, 2**32 - 1):
        for rest in (b"", words):
            assert refused(handmade(HALVES, struct.pack("<4I", state, *[1 << 16] * 3) + rest), 4, 16), state
    assert not refused(handmade(HALVES, struct.pack("<4I", *[1 << 16] * 4)), 4, 16)
    for rest in (STATES[:-1], STATES + b"\0", STATES + b"\0\0", STATES[:-4], STATES + bytes(64)):
        assert refused(handmade(HALVES, rest), 4, 16)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("n, alphabet", [(300, 16), (16_390, 2)])
def test_words_that_are_missing_or_left_over_are_refused(n, alphabet):
    section = truth(kinds.make("normal", n, alphabet), alphabet, Coding.RANS)[4:]
    assert not refused(sized(section), n, alphabet)
    for lie in (section[:-1], section[:-2], section + b"\0", section + b"\0\0", section + b"\xff" * 64, section[:-40]):
        assert refused(sized(lie), n, alphabet)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("n, alphabet", [(1, 3), (300, 16), (300, 13), (257, 4095), (256, 300)])
def test_raw_chunks_of_another_size_or_with_other_symbols_are_refused(n, alphabet):
    bits = symbol_bits(alphabet)
    for place in {0, n - 1}:
        symbols = torch.zeros(n, dtype=torch.int32)
        for symbol in (alphabet - 1, alphabet, (1 << bits) - 1):
            if symbol >> bits:
                continue
            symbols[place] = symbol
            packed = torch.empty(packed_nbytes(n, bits), dtype=torch.uint8)
            cpu.pack(symbols, bits, packed)
            body = bytes([RAW, *packed.tolist()])
            assert refused(sized(body), n, alphabet) is (symbol >= alphabet)
            assert refused(sized(body + b"\0"), n, alphabet) and refused(sized(body[:-1]), n, alphabet)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind, n, alphabet, coding",
    [("normal", 40, 8, Coding.RANS), ("even", 30, 3, Coding.RANS_AUTO), ("geometric", 60, 300, Coding.RANS)],
)
def test_every_flipped_bit_is_refused_or_read_as_the_core_reads_it(kind, n, alphabet, coding):
    section = bytearray(truth(kinds.make(kind, n, alphabet), alphabet, coding))
    taken = 0
    for bit in range(8 * len(section)):
        section[bit // 8] ^= 1 << bit % 8
        taken += not refused(bytes(section), n, alphabet)
        section[bit // 8] ^= 1 << bit % 8
    assert taken < 4 * len(section)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_noise_is_refused_or_read_as_the_core_reads_it():
    dice = random.Random(3)
    for _ in range(120):
        n, alphabet = dice.choice((1, 5, 60)), dice.choice((2, 5, 256, 4096))
        body = bytes([dice.choice((RANS, RANS, RAW))]) + dice.choice((b"", b"\x0c", b"\x0f"))
        refused(sized(body + dice.randbytes(dice.choice((0, 2, 9, 60, 300)))), n, alphabet)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("alphabet, coding", [(100, Coding.RANS), (1500, Coding.RANS), (64, Coding.RANS_AUTO)])
def test_flipped_bits_of_many_rows_are_refused_or_read_as_the_core_reads_them(alphabet, coding):
    n, dice = 70_000, random.Random(1)
    kind = "normal" if coding == Coding.RANS else "even"
    section = bytearray(truth(kinds.make(kind, n, alphabet), alphabet, coding))
    for bit in [*range(64), *(dice.randrange(8 * len(section)) for _ in range(200))]:
        section[bit // 8] ^= 1 << bit % 8
        refused(bytes(section), n, alphabet)
        section[bit // 8] ^= 1 << bit % 8


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_bent_books_are_refused_or_read_as_the_core_reads_them():
    dice = random.Random(2)
    for _ in range(60):
        n, alphabet = dice.choice((20, 3000, 20_000)), dice.choice((4, 30, 300))
        section = truth(kinds.make(dice.choice(("normal", "geometric", "even")), n, alphabet), alphabet, Coding.RANS)
        if section[4] != RANS:
            continue
        _, shares, taken = code_tables.read_book(section[6:], alphabet, with_shares=True)
        a, b = dice.sample(range(alphabet), 2)
        shares[a], shares[b] = shares[b], shares[a]
        book = code_tables.write_book([share.bit_length() for share in shares], shares)
        refused(sized(section[4:6] + book + section[6 + taken :]), n, alphabet)
