"""Kernels called directly, with inputs that codecs do not produce: all widths, 64-bit positions, the hash."""

from __future__ import annotations

import pytest
import torch

import laws
from laconic import FrameError
from laconic._core import byte_view, crc32c
from laconic.kernels import cpu, random, reference
from laconic.kernels.sections import ALL, BITMAP, RICE, PositionPlan, packed_nbytes, read_positions_header

BACKENDS = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
LENGTHS = (0, 1, 7, 8, 31, 255, 256, 257, 511, 512, 700)


@pytest.mark.parametrize("bits", range(32))
def test_symbols_of_every_width_round_trip(bits):
    for n in LENGTHS:
        symbols = random.hash32(torch.arange(n), bits) & ((1 << bits) - 1)
        written, expected = (torch.full((packed_nbytes(n, bits),), 0xEE, dtype=torch.uint8) for _ in range(2))
        cpu.pack(symbols, bits, written)
        reference.pack(symbols, bits, expected)
        assert torch.equal(written, expected)
        assert torch.equal(cpu.unpack(expected, n, bits).long(), symbols)
        assert torch.equal(reference.unpack(expected, n, bits).long(), symbols)


@pytest.mark.parametrize("bits", [1, 3, 4, 11])
def test_packed_tail_is_padded_to_a_byte_only(bits):
    for n in LENGTHS:
        assert packed_nbytes(n, bits) == -(-n * bits // 8)


def test_packed_bytes_match_the_format():
    """Value 8 r + i of a group starts at bit r·b of lane i."""
    bits, n = 4, 256
    symbols = torch.arange(n) % 16
    packed = torch.empty(packed_nbytes(n, bits), dtype=torch.uint8)
    reference.pack(symbols, bits, packed)
    for lane in range(8):
        stream = sum(int(symbols[8 * row + lane]) << (row * bits) for row in range(32))
        words = [int(w) & 0xFFFFFFFF for w in packed.view(torch.int32)[lane::8]]
        assert words == [stream >> (32 * m) & 0xFFFFFFFF for m in range(bits)]


@pytest.mark.parametrize("n", [1, 2, 9, 64, 257, 1000, 70_001])
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.2, 0.9, 1.0])
def test_positions_round_trip_in_every_mode(n, share):
    k = max(1, round(share * n))
    chosen = {
        "random": torch.randperm(n, generator=torch.Generator().manual_seed(n))[:k].sort().values,
        "first": torch.arange(k),
        "last": torch.arange(n - k, n),
    }
    for positions in chosen.values():
        positions = positions.to(torch.int32)
        best = cpu.positions_plan(positions, n)
        assert best == reference.positions_plan(positions, n)
        tried = [best] if k == n else [best, PositionPlan(BITMAP, 0, 8 + -(-n // 8))]
        assert best.nbytes <= min(plan.nbytes for plan in tried)
        for plan in tried:
            written, expected = (torch.full((plan.nbytes,), 0xEE, dtype=torch.uint8) for _ in range(2))
            cpu.positions_write(positions, n, plan, written)
            reference.positions_write(positions, n, plan, expected)
            assert torch.equal(written, expected)
            assert torch.equal(read(cpu, expected, n), positions)
            assert torch.equal(read(reference, expected, n), positions)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("low_bits", [0, 1, 5])
def test_groups_of_small_and_large_gaps_are_written_alike(low_bits, dtype):
    """Groups of 256 take one of two ways: by their largest gap, and by the room that is left."""
    generator = torch.Generator().manual_seed(low_bits)
    largest = torch.tensor([1, 12, 13, 14, 15, 62, 63, 64, 500, 13, 13, 13, 13, 2, 13])
    for rest in (0, 1, 255):
        high = torch.cat([torch.randint(0, int(most), (256,), generator=generator) for most in largest])
        high = torch.cat([high, torch.randint(0, 13, (rest,), generator=generator)])
        high[: 256 * len(largest) : 256] = largest - 1
        gaps = (high << low_bits) + torch.randint(0, 1 << low_bits, high.shape, generator=generator)
        positions = (gaps + 1).cumsum(0).sub(1).to(dtype)
        n, k = int(positions[-1]) + 1, positions.numel()
        plan = PositionPlan(RICE, low_bits, 8 + packed_nbytes(k, low_bits) + (int((high + 1).sum()) + 7) // 8)
        written, expected = (torch.empty(plan.nbytes, dtype=torch.uint8) for _ in range(2))
        cpu.positions_write(positions, n, plan, written)
        reference.positions_write(positions, n, plan, expected)
        assert torch.equal(written, expected)
        assert cpu.positions_plan(positions, n) == reference.positions_plan(positions, n)


@pytest.mark.parametrize("n", [2**31 + 5, 2**33, 2**34])
@pytest.mark.parametrize("k", [1, 2, 40])
def test_positions_beyond_32_bits_round_trip(n, k):
    positions = torch.linspace(0, 1, k, dtype=torch.float64).mul(n - 1).long()
    positions[-1] = n - 1
    plan = cpu.positions_plan(positions, n)
    assert plan.mode == RICE and plan.nbytes < 8 + 10 * k, "few positions must not take a bitmap"
    assert plan == reference.positions_plan(positions, n)
    written, expected = (torch.empty(plan.nbytes, dtype=torch.uint8) for _ in range(2))
    cpu.positions_write(positions, n, plan, written)
    reference.positions_write(positions, n, plan, expected)
    assert torch.equal(written, expected)
    assert torch.equal(read(cpu, written, n), positions)
    assert torch.equal(read(reference, written, n), positions)


def read(backend, section, n):
    return backend.positions_decode(section, n, read_positions_header(section, n))


def section(mode, low_bits, k, body):
    return torch.tensor(list((mode | low_bits << 8 | k << 16).to_bytes(8, "little") + bytes(body)), dtype=torch.uint8)


INVALID_POSITIONS = [
    section(ALL, 0, 9, []),
    section(ALL, 0, 10, [0]),
    section(ALL, 1, 10, []),
    section(3, 0, 1, [1]),
    section(BITMAP, 0, 2, [1, 0]),
    section(BITMAP, 0, 1, [3, 0]),
    section(BITMAP, 0, 1, [0, 4]),  # position 10, the maximum is 9
    section(BITMAP, 0, 0, [0, 0]),
    section(BITMAP, 0, 1, [1]),
    section(RICE, 0, 0, []),
    section(RICE, 0, 1, [0]),
    section(RICE, 0, 2, [1]),
    section(RICE, 0, 1, [3]),
    section(RICE, 0, 1, [0, 4]),  # position 10, the maximum is 9
    section(RICE, 0, 1, [1, 0]),  # a byte after the last position
    section(RICE, 40, 1, [1] * 8),
    section(RICE, 31, 1, [255, 255, 255, 127, 1]),
    section(RICE, 31, 1, [0, 0, 0, 0, 128]),
    section(RICE, 0, 11, [255, 7]),
    section(RICE, 0, 1 << 47, [255] * 8),
    torch.zeros(3, dtype=torch.uint8),
]
"""Position sections of 10 values that no encoder writes."""


@BACKENDS
@pytest.mark.parametrize("invalid", INVALID_POSITIONS, ids=lambda invalid: invalid.tolist().__repr__()[:60])
def test_invalid_positions_raise_frame_error(backend, invalid):
    with pytest.raises(FrameError):
        read(backend, invalid, 10)


def test_random_positions_agree_and_are_distinct(threads):
    like = torch.empty(0)
    small = (1, 1), (10, 3), (10, 10), (1000, 1), (65_537, 700), (200_000, 199_999)
    on_threads = (600_007, 60), (600_007, 6_000), (600_007, 299_999), (600_007, 580_000), (600_007, 600_007)
    for n, k in small + on_threads:
        written = cpu.random_positions(n, k, 5, like)
        assert torch.equal(written, reference.random_positions(n, k, 5, like))
        assert written.unique().numel() == k and int(written[-1]) < n and int(written[0]) >= 0


def test_hash_matches_the_formula():
    def times(a, b):
        return a * b & 0xFFFFFFFF

    def hash32(counter, key):
        h = (counter & 0xFFFFFFFF) ^ (key & 0xFFFFFFFF) ^ times(counter >> 32, 0x9E3779B9)
        h = times(h ^ h >> 16, 0x7FEB352D)
        h = times(h ^ h >> 15 ^ key >> 32, 0x846CA68B)
        return h ^ h >> 16

    counters = [0, 1, 2, 255, 2**31, 2**32 - 1, 2**32, 2**34 + 7]
    for seed in (0, 1, 2**64 - 1):
        key = random.key(seed, random.ROUNDING)
        assert random.hash32(torch.tensor(counters), key).tolist() == [hash32(c, key) for c in counters]
    assert random.key(-1, 0) == random.key(2**64 - 1, 0)
    assert len({random.key(3, stream) for stream in range(3)}) == 3


def test_checksum_matches_crc32c():
    def checksum(data):
        view = byte_view(data)
        return crc32c(view.data_ptr(), len(data))

    def bitwise(data):
        crc = 0xFFFFFFFF
        for byte in data:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        return crc ^ 0xFFFFFFFF

    assert checksum(b"123456789") == 0xE3069283
    noise = bytes(random.hash32(torch.arange(20_000), 1).to(torch.uint8).tolist())
    for n in (1, 7, 8, 9, 63, 64, 255, 256, 257, 512, 1000, 4099, 20_000):
        assert checksum(noise[:n]) == bitwise(noise[:n])
    for shift in range(16):  # any alignment
        view = byte_view(noise)
        assert crc32c(view.data_ptr() + shift, 3000) == bitwise(noise[shift : shift + 3000])


def test_pairwise_sum_matches_a_sum():
    rows = laws.normal(3, 4096)
    torch.testing.assert_close(reference.pairwise_sum(rows), rows.sum(1), rtol=1e-4, atol=1e-4)
