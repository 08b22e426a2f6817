"""rANS, raw chunks and the choice of modes by Triton against the C++ core: sections, symbols and rejections."""

from __future__ import annotations

import random
import struct

import pytest
import torch
import triton_support as support
from triton_support import ALPHABETS, DEVICE, core_section, gpu_only, on_device, rejected, triton_kernels

import laws
import symbols as kinds
from laconic.kernels import cpu
from laconic.kernels.reference import code_tables
from laconic.kernels.sections import CHUNK, CONSTANT, HUFFMAN, RANS, RAW, Coding, packed_nbytes, symbol_bits

pytestmark = support.MARKS

CODINGS = [coding for coding in Coding if coding != Coding.HUFFMAN]
LOW = 1 << 15


def chunk_modes(section: bytes, n: int) -> list[int]:
    return cpu.chunk_modes(torch.frombuffer(bytearray(section), dtype=torch.uint8), n).tolist()


@pytest.mark.parametrize("kind, n, alphabet, coding, mode", [
    ("normal", 30, 8, Coding.RANS, RANS), ("even", 300, 16, Coding.RANS_AUTO, RAW),
    pytest.param("normal", 30, 8, Coding.HUFFMAN_AUTO, RAW, marks=pytest.mark.slow),
    pytest.param("even", 300, 13, Coding.RANS_AUTO, HUFFMAN, marks=pytest.mark.slow),
    pytest.param("two symbols", 3000, 100, Coding.HUFFMAN_AUTO, RANS, marks=pytest.mark.slow),
    pytest.param("one symbol", 50, 16, Coding.RANS, CONSTANT, marks=pytest.mark.slow),
    pytest.param("one symbol", 50, 1, Coding.RANS_AUTO, CONSTANT, marks=pytest.mark.slow),
    pytest.param("normal", 16_384 + 5, 92, Coding.RANS, RANS, marks=pytest.mark.slow),
])  # fmt: skip
def test_triton_writes_and_reads_the_sections_of_the_core(kind, n, alphabet, coding, mode):
    assert chunk_modes(support.section_agrees(kind, n, alphabet, coding), n) == [mode]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.name)
@pytest.mark.parametrize("alphabet", ALPHABETS)
@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
def test_sections_agree_for_every_distribution(kind, alphabet, coding):
    support.section_agrees(kind, 777, alphabet, coding)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 31, 32, 33, 255, 256, 257, 16_383, 16_384, 16_384 + 257])
def test_sections_agree_for_every_size(n):
    support.section_agrees("normal", n, 90, Coding.RANS)
    support.section_agrees("even", n, 300, Coding.HUFFMAN_AUTO)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_frequencies_of_the_finer_scale_agree():
    """Cases where frequencies of 2^12 are too coarse or too few; some frequencies must shrink here."""
    section = support.section_agrees("all but equal", 2000, 1500, Coding.RANS)
    assert section[4:6] == bytes([RANS, 15])
    section = support.section_agrees("one in the middle", 100_000, 4, Coding.RANS)
    assert section[4:6] == bytes([RANS, 15])
    assert support.section_agrees("heavy tail", 2500, 2000, Coding.RANS)[4:6] == bytes([RANS, 12])


def mixture(n: int, alphabet: int) -> torch.Tensor:
    """Return symbols whose chunks have different distributions, hence different modes."""
    four = ("normal", "even", "one symbol", "skewed")
    parts = [kinds.make(four[i % 4], min(CHUNK, n - i * CHUNK), alphabet) for i in range(-(-n // CHUNK))]
    return torch.cat(parts)


@gpu_only
@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.name)
@pytest.mark.parametrize("alphabet", [16, 60, 256, 1000])
def test_chunks_of_several_modes_in_one_section_agree(alphabet, coding):
    n = 8 * CHUNK + 70_001
    symbols, table = mixture(n, alphabet), laws.normal(alphabet)
    section = core_section(symbols, alphabet, coding)
    assert len(set(chunk_modes(section, n))) >= 2
    assert support.triton_section(symbols, alphabet, coding) == section
    assert torch.equal(triton_kernels().decode_symbols(on_device(section), n, alphabet).cpu(), symbols)
    for weight in (None, -0.3):
        support.values_agree(on_device(section), n, table, weight)


@gpu_only
@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.name)
@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
@pytest.mark.parametrize("alphabet", [2, 92, 256, 4096])
def test_sections_of_many_chunks_agree(kind, alphabet, coding):
    support.section_agrees(kind, 3 * CHUNK + 16_384 + 7, alphabet, coding)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_unaligned_sections_are_read_and_written():
    before, n, alphabet = 61, 600, 30
    symbols = kinds.make("normal", n, alphabet)
    for coding in (Coding.RANS, Coding.RANS_AUTO):
        section = core_section(symbols, alphabet, coding)
        assert torch.equal(triton_kernels().decode_symbols(on_device(section, before), n, alphabet).cpu(), symbols)
        buffer = torch.full((2000 + before,), 0xA5, dtype=torch.uint8, device=DEVICE)
        nbytes = triton_kernels().encode_symbols(symbols.to(DEVICE), alphabet, coding, buffer[before:])
        assert bytes(buffer[before : before + nbytes].tolist()) == section
        assert bool((buffer[:before] == 0xA5).all())


@pytest.mark.parametrize("coding, weight", [(Coding.RANS, None), (Coding.RANS_AUTO, -0.3)])
def test_decoded_values_agree(coding, weight):
    section = on_device(core_section(kinds.make("even", 24, 11), 11, coding))
    support.values_agree(section, 24, laws.normal(11), weight)


def test_a_section_with_other_modes_than_the_previous_one_is_added_once():
    symbols, total = kinds.make("even", 24, 11), torch.zeros(24, device=DEVICE)
    codings = (Coding.HUFFMAN, Coding.RANS, Coding.HUFFMAN)
    for coding in codings:
        triton_kernels().decode_values(on_device(core_section(symbols, 11, coding)), torch.arange(11.0), total, 0.5)
    assert torch.equal(total.cpu(), len(codings) * 0.5 * symbols)


# Two frequencies of one half, symbols 3 and 5: class 12 given explicitly, then the same class, each with eleven bits of
# mantissa, and a run of one between them.
HALVES = support.u16(3) + support.u16(2) + "110" + "0011" + "0" * 11 + "111" + "1" + "0" + "0" * 11
STATES = struct.pack("<4I", 1 << 16, (1 << 16) + 2048, 1 << 16, (1 << 16) + 2048)
INVALID_TABLES = {
    "class 0": support.u16(3) + support.u16(2) + "110" + "0000" + "111" + "1" + "0",
    "class above 15": support.u16(3) + support.u16(1) + "110" + "1111" + "0" * 14 + "101" + "0" * 15,
    "symbol outside the alphabet": support.u16(14) + support.u16(2) + HALVES[32:],
    "symbol 65,535": support.u16(65535) + support.u16(65535) + HALVES[32:],
    "ends with a run": support.u16(3) + support.u16(3) + HALVES[32:] + "1111",
    "run past the last symbol": support.u16(3) + support.u16(2) + "110" + "0011" + "0" * 11 + "111" + "01" + "1",
    "run of 4,096": support.u16(0) + support.u16(15) + "110" + "0011" + "0" * 11 + "111" + "0" * 12 + "1" + "0" * 12,
    "nonzero padding": HALVES + "1",
    "truncated": HALVES[:-12],
    "frequencies below the scale": support.u16(3) + support.u16(0) + "110" + "0011" + "0" * 11,
    "frequencies above the scale": support.u16(3)
    + support.u16(2)
    + "110"
    + "0011"
    + "0" * 11
    + "0"
    + "0" * 11
    + "0"
    + "0" * 11,
    "one symbol": support.u16(3) + support.u16(0) + "110" + "1011" + "0" * 12,
    "ones": "1" * 400,
    "empty": "",
}


def with_table(table: str, rest: bytes, scale: int = 12) -> bytes:
    return support.with_size(bytes([RANS, scale]) + support.bits_to_bytes(table) + rest)


def test_a_handmade_frequency_table_is_read():
    section = with_table(HALVES, STATES)
    assert not rejected(section, 4, 16)
    assert support.decode_or_none(triton_kernels(), section, 4, 16).tolist() == [3, 5, 3, 5]


QUICK_INVALID = ("frequencies above the scale", "ones")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK_INVALID else pytest.mark.slow) for case in INVALID_TABLES]
)
def test_an_invalid_frequency_table_is_rejected(case):
    for rest in (b"", STATES, STATES + bytes(2), bytes(40)):
        assert rejected(with_table(INVALID_TABLES[case], rest), 4, 16)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_invalid_scales_states_and_words_are_rejected():
    for scale in (0, 11, 13, 15, 16, 31, 32, 255):
        assert rejected(with_table(HALVES, STATES, scale), 4, 16), scale
    # One half of state 0 leaves 0, which a word of 2^15 raises to the final state.
    words = struct.pack("<4H", *[LOW] * 4)
    for state in (0, 2048, LOW - 1, 1 << 31, 2**32 - 1):
        for rest in (b"", words):
            assert rejected(with_table(HALVES, struct.pack("<4I", state, *[1 << 16] * 3) + rest), 4, 16), state
    assert not rejected(with_table(HALVES, struct.pack("<4I", *[1 << 16] * 4)), 4, 16)
    for rest in (STATES[:-1], STATES + b"\0", STATES + b"\0\0", STATES[:-4], STATES + bytes(64)):
        assert rejected(with_table(HALVES, rest), 4, 16)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("n, alphabet", [(300, 16), (16_390, 2)])
def test_missing_or_extra_words_are_rejected(n, alphabet):
    section = core_section(kinds.make("normal", n, alphabet), alphabet, Coding.RANS)[4:]
    assert not rejected(support.with_size(section), n, alphabet)
    for case in (section[:-1], section[:-2], section + b"\0", section + b"\0\0", section + b"\xff" * 64, section[:-40]):
        assert rejected(support.with_size(case), n, alphabet)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("n, alphabet", [(1, 3), (300, 16), (300, 13), (257, 4095), (256, 300)])
def test_raw_chunks_of_a_wrong_size_or_with_unknown_symbols_are_rejected(n, alphabet):
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
            assert rejected(support.with_size(body), n, alphabet) is (symbol >= alphabet)
            assert rejected(support.with_size(body + b"\0"), n, alphabet) and rejected(
                support.with_size(body[:-1]), n, alphabet
            )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind, n, alphabet, coding",
    [("normal", 40, 8, Coding.RANS), ("even", 30, 3, Coding.RANS_AUTO), ("geometric", 60, 300, Coding.RANS)],
)
def test_every_flipped_bit_is_rejected_or_decoded_as_by_the_core(kind, n, alphabet, coding):
    support.flips_are_rejected_or_agree(core_section(kinds.make(kind, n, alphabet), alphabet, coding), n, alphabet)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_bytes_are_rejected_or_decoded_as_by_the_core():
    def head(generator: random.Random) -> bytes:
        return bytes([generator.choice((RANS, RANS, RAW))]) + generator.choice((b"", b"\x0c", b"\x0f"))

    for section, n, alphabet in support.random_sections(3, 120, head):
        rejected(section, n, alphabet)


@gpu_only
@pytest.mark.parametrize("alphabet, coding", [(100, Coding.RANS), (1500, Coding.RANS), (64, Coding.RANS_AUTO)])
def test_flipped_bits_in_many_rows_are_rejected_or_decoded_as_by_the_core(alphabet, coding):
    n, generator = 70_000, random.Random(1)
    kind = "normal" if coding == Coding.RANS else "even"
    section = core_section(kinds.make(kind, n, alphabet), alphabet, coding)
    bits = [*range(64), *(generator.randrange(8 * len(section)) for _ in range(200))]
    support.flips_are_rejected_or_agree(section, n, alphabet, bits)


@gpu_only
def test_swapped_frequencies_are_rejected_or_decoded_as_by_the_core():
    generator = random.Random(2)
    for _ in range(60):
        n, alphabet = generator.choice((20, 3000, 20_000)), generator.choice((4, 30, 300))
        symbols = kinds.make(generator.choice(("normal", "geometric", "even")), n, alphabet)
        section = core_section(symbols, alphabet, Coding.RANS)
        if section[4] != RANS:
            continue
        _, frequencies, nbytes = code_tables.read_code_table(section[6:], alphabet, with_frequencies=True)
        a, b = generator.sample(range(alphabet), 2)
        frequencies[a], frequencies[b] = frequencies[b], frequencies[a]
        table = code_tables.write_code_table([frequency.bit_length() for frequency in frequencies], frequencies)
        rejected(support.with_size(section[4:6] + table + section[6 + nbytes :]), n, alphabet)
