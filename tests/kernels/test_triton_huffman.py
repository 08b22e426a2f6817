"""Huffman coding by Triton against the C++ core: the same sections, the same symbols, the same rejections.

Each lane decodes symbol by symbol, which the interpreter takes long for: sizes are small, and most cases are slow.
"""

from __future__ import annotations

import random
import struct

import pytest
import torch
import triton_support as support
from triton_support import ALPHABETS, DEVICE, core_section, gpu_only, on_device, rejected, triton_kernels

import laws
import symbols as kinds
from laconic.kernels.reference import code_tables
from laconic.kernels.sections import CHUNK, CONSTANT, HUFFMAN, RAW, Coding, coded_max_nbytes

pytestmark = support.MARKS


@pytest.fixture(autouse=True)
def undivided_streams(monkeypatch):
    """The interpreter runs programs one after another: splitting streams only costs time, and has tests of its own."""
    from laconic.kernels.triton import huffman_decode

    if support.INTERPRETED:
        monkeypatch.setattr(huffman_decode, "MAX_PARTS", 1)


QUICK = [("normal", 30, 8), ("one symbol", 50, 16), ("normal", 1, 9)]
FEW = [*QUICK, ("two symbols", 2048, 2), ("geometric", 20, 300)]
SIZES = (1, 2, 15, 16, 17, 300, 2047, 2048, 2053, 65_535, 65_536 + 7)


@pytest.mark.parametrize(
    "kind, n, alphabet", [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in FEW]
)
def test_triton_writes_and_reads_the_sections_of_the_core(kind, n, alphabet):
    support.section_agrees(kind, n, alphabet)


def decoded_symbols_agree(kind: str, n: int, alphabet: int) -> None:
    symbols, before = kinds.make(kind, n, alphabet), support.fallbacks()
    decoded = triton_kernels().decode_symbols(on_device(core_section(symbols, alphabet)), n, alphabet)
    assert torch.equal(decoded.cpu(), symbols) and support.fallbacks() == before, (kind, n, alphabet)


def split_streams(parts: int, sync_bits: int, monkeypatch) -> None:
    """Make the decoder split short streams as well, each part starting this many bits early."""
    from laconic.kernels.triton import huffman_decode

    for name, value in (("MAX_PARTS", parts), ("SYNC_BITS", sync_bits), ("MIN_SPLIT_SYMBOLS", 1)):
        monkeypatch.setattr(huffman_decode, name, value)


@pytest.mark.parametrize("sync_bits", [pytest.param(0, marks=pytest.mark.slow), 32])
def test_streams_split_into_parts_decode(sync_bits, monkeypatch):
    split_streams(4, sync_bits, monkeypatch)
    decoded_symbols_agree("normal", 40, 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["even", "normal", "geometric", "skewed"])
@pytest.mark.parametrize("parts, sync_bits", [(1, 0), (8, 0), (16, 100), (8, 1536)])
@pytest.mark.parametrize("n, alphabet", [(2500, 90), (2500, 600)])
def test_streams_split_into_parts_decode_for_every_distribution(n, alphabet, parts, sync_bits, kind, monkeypatch):
    split_streams(parts, sync_bits, monkeypatch)
    decoded_symbols_agree(kind, n, alphabet)


@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_sections_agree_for_every_distribution(kind, alphabet):
    support.section_agrees(kind, 2500, alphabet)


@pytest.mark.slow
@pytest.mark.parametrize("n", SIZES)
def test_sections_agree_for_every_size(n):
    support.section_agrees("normal", n, 90)
    support.section_agrees("even", n, 300)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind, alphabet", [("normal", 92), ("skewed", 300)])
def test_sections_of_two_chunks_agree(kind, alphabet):
    support.section_agrees(kind, CHUNK + 300, alphabet)


@gpu_only
@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
@pytest.mark.parametrize("alphabet", [2, 92, 256, 4096])
def test_sections_of_many_chunks_agree(kind, alphabet):
    support.section_agrees(kind, 9 * CHUNK + 70_001, alphabet)


@pytest.mark.slow
def test_a_constant_chunk_before_another_chunk_agrees():
    symbols = torch.full((CHUNK + 40,), 3, dtype=torch.uint8)
    symbols[-2:] = 5
    section = core_section(symbols, 7)
    assert support.triton_section(symbols, 7) == section
    assert torch.equal(triton_kernels().decode_symbols(on_device(section), CHUNK + 40, 7).cpu(), symbols)


@pytest.mark.parametrize(
    "before", [pytest.param(60, marks=pytest.mark.slow), pytest.param(56, marks=pytest.mark.slow), 61]
)
def test_sections_at_any_alignment_are_read_and_written(before):
    n = 20
    symbols = kinds.make("normal", n, 30)
    section = core_section(symbols, 30)
    assert torch.equal(triton_kernels().decode_symbols(on_device(section, before), n, 30).cpu(), symbols)
    buffer = torch.full((coded_max_nbytes(n, 30) + before,), 0xA5, dtype=torch.uint8, device=DEVICE)
    nbytes = triton_kernels().encode_symbols(symbols.to(DEVICE), 30, Coding.HUFFMAN, buffer[before:])
    assert bytes(buffer[before : before + nbytes].tolist()) == section
    assert bool((buffer[:before] == 0xA5).all())


@pytest.mark.parametrize("weight", [None, -0.3])
def test_decoded_values_agree(weight):
    before = support.fallbacks()
    support.values_agree(on_device(core_section(kinds.make("normal", 24, 11), 11)), 24, laws.normal(11), weight)
    assert support.fallbacks() == before


THREE = support.u16(0) + support.u16(2) + "110" + "1000" + "101" + "0"
STREAM = support.bits_to_bytes("01011001110")
INVALID_TABLES = {
    "class 0": support.u16(0) + support.u16(2) + "110" + "0000" + "101" + "0",
    "length below 1": support.u16(0) + support.u16(2) + "110" + "1000" + "100" + "0",
    "length above 15": support.u16(0) + support.u16(2) + "110" + "1111" + "101" + "0",
    "symbol outside the alphabet": support.u16(14) + support.u16(2) + "110" + "1000" + "101" + "0",
    "symbol 65,535": support.u16(65535) + support.u16(65535) + "110" + "1000" + "101" + "0",
    "ends with a run": support.u16(0) + support.u16(3) + "110" + "1000" + "101" + "0" + "1111",
    "run past the last symbol": support.u16(0) + support.u16(5) + "110" + "1000" + "111" + "0001" + "000" + "101" + "0",
    "run of 4,096": support.u16(0) + support.u16(15) + "110" + "1000" + "111" + "0" * 12 + "1" + "0" * 12,
    "run length without end": support.u16(0) + support.u16(15) + "110" + "1000" + "111" + "0" * 60,
    "nonzero padding": THREE + "00001", "one symbol": support.u16(3) + support.u16(0) + "110" + "1000",
    "incomplete code": support.u16(0) + support.u16(1) + "110" + "0100" + "0",
    "oversubscribed code": support.u16(0) + support.u16(2) + "110" + "1000" + "0" + "0", "ones": "1" * 400, "empty": "",
}  # fmt: skip


def test_a_handmade_code_table_is_read():
    section = support.with_size(bytes([HUFFMAN]) + support.bits_to_bytes(THREE) + STREAM)
    assert not rejected(section, 7, 16)
    assert support.decode_or_none(triton_kernels(), section, 7, 16).tolist() == [0, 1, 2, 0, 0, 2, 1]


def unary_code(symbols) -> str:
    """Encode symbols by code lengths 1, 2, …, 15, 15, which no encoder would choose."""
    return "".join("1" * symbol + "0" * (symbol < 15) for symbol in symbols)


LONG = support.u16(0) + support.u16(15) + "110" + "1000" + 14 * "101" + "0"


def test_codes_longer_than_the_lookup_prefix_are_read():
    symbols = [15, 14, 0, 13, 15, 1, 12, 11, 2, 15, 15, 14, 0, 0, 13, 3, 12, 15]
    section = support.with_size(
        bytes([HUFFMAN]) + support.bits_to_bytes(LONG) + support.bits_to_bytes(unary_code(symbols))
    )
    assert not rejected(section, len(symbols), 16), "read as the core reads it"
    assert rejected(section[:-1], len(symbols), 16)


@gpu_only
@pytest.mark.parametrize("sync_bits", [0, 1536])
@pytest.mark.parametrize("parts", [1, 4, 32])
@pytest.mark.parametrize("alphabet", [90, 256, 4096])
def test_large_streams_split_into_parts_decode(alphabet, parts, sync_bits, monkeypatch):
    split_streams(parts, sync_bits, monkeypatch)
    for kind in ("even", "normal", "geometric", "skewed"):
        decoded_symbols_agree(kind, 2 * CHUNK + 70_000, alphabet)


@gpu_only
def test_long_codes_in_many_streams_agree():
    n, generator = 70_000, random.Random(3)
    symbols = [generator.choice((0, 1, 13, 14, 15)) for _ in range(n)]
    each = -(-n // 30)
    bits = [unary_code(symbols[j * each : (j + 1) * each]) for j in range(30)]
    starts = [sum(map(len, bits[:j])) for j in range(1, 30)]
    head = bytes([HUFFMAN]) + support.bits_to_bytes(LONG)
    for error in (0, 1):
        packed_starts = struct.pack("<29I", starts[0] + error, *starts[1:])
        assert rejected(support.with_size(head + packed_starts + support.bits_to_bytes("".join(bits))), n, 16) == bool(
            error
        )


QUICK_INVALID = ("length above 15", "symbol 65,535", "run length without end", "incomplete code", "ones", "empty")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK_INVALID else pytest.mark.slow) for case in INVALID_TABLES]
)
def test_an_invalid_code_table_is_rejected(case):
    assert rejected(support.with_size(bytes([HUFFMAN]) + support.bits_to_bytes(INVALID_TABLES[case]) + STREAM), 7, 16)


@pytest.mark.slow
def test_a_chunk_directory_that_does_not_fit_is_rejected():
    n, constant = CHUNK + 1, struct.pack("<BH", CONSTANT, 1)
    assert not rejected(struct.pack("<II", 3, 3) + constant * 2, n, 4)
    most = 2**32 - 1
    for sizes in ((2, 4), (0, 6), (6, 0), (3, 2), (most, 7), (7, most)):
        assert rejected(struct.pack("<II", *sizes) + constant * 2, n, 4), sizes


@pytest.mark.slow
def test_chunks_of_a_wrong_size_are_rejected():
    for data in (b"", b"\0" * 9, b"\1\0\0\0\2"):
        assert rejected(data, 10, 16)
    for body in (b"\0", b"\0\0", b"\0\4\0", b"\0\1\0\0", b"\4\0\0", b"\xff"):
        assert rejected(support.with_size(body), 7, 4)


def split_section(section: bytes, n: int, alphabet: int):
    """Return what precedes the stream starts, the starts, and the bits."""
    _, _, nbytes = code_tables.read_code_table(section[5:], alphabet, with_frequencies=False)
    streams = 30 if n >= 65536 else 6 if n >= 2048 else 1
    starts_begin = 5 + nbytes
    return (
        section[4:starts_begin],
        list(struct.unpack_from(f"<{streams - 1}I", section, starts_begin)),
        section[starts_begin + 4 * (streams - 1) :],
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_streams_with_wrong_starts_are_rejected():
    n, alphabet = 2048, 2
    head, starts, bits = split_section(core_section(kinds.make("normal", n, alphabet), alphabet), n, alphabet)

    def with_starts(others, rest=bits):
        return support.with_size(head + struct.pack(f"<{len(others)}I", *others) + rest)

    assert not rejected(with_starts(starts), n, alphabet)
    cases = [[starts[0] + 1, *starts[1:]], [*starts[:-1], 2**32 - 1], [starts[1], starts[0], *starts[2:]], starts[:-1]]
    for case in cases:
        assert rejected(with_starts(case), n, alphabet), case
    for rest in (bits[:-1], bits + b"\0", bits[:-1] + bytes([bits[-1] ^ 0x80])):
        assert rejected(with_starts(starts, rest), n, alphabet) or rest[-1] != bits[-1]


@pytest.mark.slow
def test_missing_or_extra_bytes_are_rejected():
    n, alphabet = 24, 7
    section = core_section(kinds.make("normal", n, alphabet), alphabet)
    for rest in (section[:-1], section + b"\0", section[: len(section) // 2]):
        assert rejected(support.with_size(rest[4:]), n, alphabet)
    assert rejected(section, n // 2, alphabet)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind, n, alphabet", [("normal", 40, 8), ("geometric", 60, 4096), ("one symbol", 50, 16)])
def test_every_flipped_bit_is_rejected_or_decoded_as_by_the_core(kind, n, alphabet):
    support.flips_are_rejected_or_agree(core_section(kinds.make(kind, n, alphabet), alphabet), n, alphabet)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_random_bytes_are_rejected_or_decoded_as_by_the_core():
    modes = (HUFFMAN, HUFFMAN, CONSTANT, RAW)
    for section, n, alphabet in support.random_sections(2, 150, lambda generator: bytes([generator.choice(modes)])):
        rejected(section, n, alphabet)


@gpu_only
def test_flipped_bits_in_many_streams_are_rejected_or_decoded_as_by_the_core():
    n, alphabet, generator = 70_000, 100, random.Random(1)
    section = core_section(kinds.make("normal", n, alphabet), alphabet)
    bits = [*range(64), *(generator.randrange(8 * len(section)) for _ in range(300))]
    support.flips_are_rejected_or_agree(section, n, alphabet, bits)
