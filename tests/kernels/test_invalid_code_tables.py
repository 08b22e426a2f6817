"""Invalid code tables: both backends reject them, and agree on all others."""

from __future__ import annotations

import random

import pytest
from invalid_sections import (
    LOW,
    PARTS,
    STATES,
    THREE,
    TWO_HALVES,
    Parts,
    bits_to_bytes,
    decode,
    handmade,
    rejected,
    u16,
)

from laconic.kernels import cpu
from laconic.kernels.sections import HUFFMAN, RANS, Coding


def test_handmade_tables_decode():
    """Guards the invalid tables below, each of which differs from these in one respect."""
    section = handmade(HUFFMAN, THREE, bits_to_bytes("01011001110"))
    assert not rejected(section, 7, 16)
    assert decode(cpu, section, 7, 16).tolist() == [0, 1, 2, 0, 0, 2, 1]
    section = handmade(RANS, TWO_HALVES, STATES)
    assert not rejected(section, 4, 16)
    assert decode(cpu, section, 4, 16).tolist() == [3, 5, 3, 5]


@pytest.mark.parametrize(
    "table",
    [
        u16(0) + u16(2) + "110" + "0000" + "101" + "0",  # explicit class 0
        u16(0) + u16(2) + "110" + "1000" + "100" + "0",  # one less than 1
        u16(0) + u16(2) + "110" + "1111" + "101" + "0",  # one more than 15
        u16(14) + u16(2) + "110" + "1000" + "101" + "0",  # symbol 16 of 16
        u16(16) + u16(0) + "110" + "1000",
        u16(65535) + u16(65535) + "110" + "1000" + "101" + "0",
        u16(0) + u16(3) + "110" + "1000" + "101" + "0" + "1111",  # ends with a symbol that does not occur
        u16(0) + u16(2) + "110" + "1000" + "0" + "1111",
        u16(0) + u16(5) + "110" + "1000" + "111" + "0001" + "000" + "101" + "0",  # a run of 8 where 5 are left
        u16(0) + u16(15) + "110" + "1000" + "111" + "0" * 12 + "1" + "0" * 12,  # a run of 4,096
        u16(0) + u16(15) + "110" + "1000" + "111" + "0" * 60,
        THREE + "00001",  # nonzero padding
        THREE + "1",
        u16(3) + u16(0) + "110" + "1000",  # one symbol alone: half a code
        u16(0) + u16(1) + "110" + "0100" + "0",  # two quarters
        u16(0) + u16(2) + "110" + "1000" + "0" + "0",  # three halves
        u16(0) + u16(1) + "110" + "1000" + "101",  # a half and a quarter
        "1" * 400,
        "0" * 8,
        "",
    ],
)  # fmt: skip
def test_invalid_table_of_lengths_is_rejected(table):
    for rest in (b"", b"\x00", bits_to_bytes("01011001110"), bytes(40)):
        assert rejected(handmade(HUFFMAN, table, rest), 7, 16)


@pytest.mark.parametrize(
    "table",
    [
        u16(3) + u16(2) + "110" + "0000" + "0" * 11 + "111" + "1" + "0" + "0" * 11,  # explicit class 0
        u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "1" + "101" + "0" * 12,  # a half and the whole scale
        u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "1" + "100" + "0" * 10,  # a half and a quarter
        u16(3) + u16(2) + "110" + "0011" + "10" + "0" * 9 + "111" + "1" + "0" + "0" * 11,  # a sum that is one too large
        u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "0" + "0" * 11 + "0" + "0" * 11,  # three halves
        u16(3) + u16(0) + "110" + "1011" + "0" * 12,  # the whole scale: must be a constant chunk
        u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "010" + "0",  # a run of 2 where the last one occurs
        u16(14) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "1" + "0" + "0" * 11,  # symbol 16 of 16
        TWO_HALVES + "1",  # nonzero padding
        TWO_HALVES[:-12],
        "1" * 400,
        "",
    ],
)  # fmt: skip
def test_invalid_table_of_frequencies_is_rejected(table):
    for rest in (b"", STATES, STATES + bytes(2), bytes(40)):
        assert rejected(handmade(RANS, table, rest), 4, 16)


@PARTS
def test_truncated_table_is_rejected(kind, n, alphabet, coding):
    parts = Parts(kind, n, alphabet, coding)
    whole = parts.table
    parts.numbers, parts.rest = [], b""
    for end in range(len(whole) + 1):
        parts.table = whole[:end]
        assert parts.rejected()


def with_one_changed(values, others):
    """Yield copies of the values of all symbols in which one symbol's, of about eight that occur, is another."""
    used = [symbol for symbol, value in enumerate(values) if value]
    for symbol in used[:: max(1, len(used) // 8)]:
        for other in others(values[symbol]) - {values[symbol]}:
            yield [*values[:symbol], other, *values[symbol + 1 :]]


@pytest.mark.parametrize("kind, n, alphabet", [("normal", 300, 16), ("normal", 3000, 256), ("geometric", 500, 1000)])
def test_incomplete_code_is_rejected(kind, n, alphabet):
    parts = Parts(kind, n, alphabet, Coding.HUFFMAN)
    lengths = list(parts.classes)
    for parts.classes in with_one_changed(lengths, lambda length: {length - 1, min(length + 1, 15), 15, 0}):
        parts.rewrite_table()
        assert parts.rejected()


@pytest.mark.parametrize("kind, n, alphabet", [("normal", 300, 16), ("normal", 3000, 256), ("geometric", 17_000, 30)])
def test_frequencies_with_a_wrong_sum_are_rejected(kind, n, alphabet):
    parts = Parts(kind, n, alphabet, Coding.RANS)
    frequencies = list(parts.frequencies)
    for parts.frequencies in with_one_changed(frequencies, lambda count: {count - 1, count + 1, 2 * count, 0}):
        parts.classes = [frequency.bit_length() for frequency in parts.frequencies]
        parts.rewrite_table()
        assert parts.rejected()


@pytest.mark.parametrize("scale", [12, 15])
def test_frequency_of_the_whole_scale_is_rejected(scale):
    # A constant must use its own mode; here it would make every word and state valid.
    parts = Parts("normal", 300, 16, Coding.RANS)
    parts.scale = bytes([scale])
    parts.frequencies = [0, 1 << scale, *[0] * 14]
    parts.classes = [frequency.bit_length() if frequency < 1 << 15 else 15 for frequency in parts.frequencies]
    parts.numbers, parts.rest = [LOW] * 4, b""
    if scale == 12:
        parts.rewrite_table()
        assert parts.rejected()
    parts.frequencies[1] = (1 << scale) - 1
    parts.classes = [frequency.bit_length() for frequency in parts.frequencies]
    parts.rewrite_table()
    assert parts.rejected()


@PARTS
def test_nonzero_table_padding_is_rejected(kind, n, alphabet, coding):
    parts = Parts(kind, n, alphabet, coding)
    table = parts.table
    parts.table = table[:-1] + bytes([table[-1] | 0x80])
    # If the table fills its last byte, this is another table.
    assert table[-1] & 0x80 or parts.rejected()


@pytest.mark.parametrize("coding", [Coding.HUFFMAN, Coding.RANS], ids=lambda coding: coding.name)
def test_backends_agree_on_permuted_tables(coding):
    """The table stays readable: two symbols exchange their lengths or frequencies."""
    rng = random.Random(coding)
    taken = 0
    for _ in range(150):
        n, alphabet = rng.choice((20, 300, 2100)), rng.choice((4, 30, 300))
        parts = Parts(rng.choice(("normal", "geometric", "even")), n, alphabet, coding)
        given = parts.classes if coding == Coding.HUFFMAN else parts.frequencies
        a, b = rng.sample(range(alphabet), 2)
        given[a], given[b] = given[b], given[a]
        if coding == Coding.RANS:
            parts.classes = [frequency.bit_length() for frequency in parts.frequencies]
        parts.rewrite_table()
        taken += not parts.rejected()
    assert taken > 0
