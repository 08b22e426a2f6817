"""Loops that take a shorter way than their definition give the same bytes where the two ways meet."""

from __future__ import annotations

import math

import pytest
import torch

import laconic
import laws
import mutate
from laconic import _core, kernels, wire
from laconic.codecs import codec
from laconic.errors import FrameError


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def edges(low: float, high: float, levels: int) -> torch.Tensor:
    """Return the float32 at, just below and just above each edge between two bins, and both ends."""
    exact = low + torch.arange(levels + 1, dtype=torch.float64) * ((high - low) / levels)
    at = exact.to(torch.float32)
    below, above = torch.nextafter(at, torch.tensor(-math.inf)), torch.nextafter(at, torch.tensor(math.inf))
    return torch.cat([at, below, above]).clamp(low, high)


@pytest.mark.parametrize("bits", [1, 4, 8, 12])
@pytest.mark.parametrize(
    "low, high",
    [(0.0, 1.0), (-1.0, 1.0), (-0.3, 0.7), (1.0, 1.0 + 2.0**-20), (-3e38, 3e38), (0.0, 1e-38), (-1e-44, 1e-40)],
)
def test_values_at_the_edges_of_bins_get_the_bins_of_the_reference(low, high, bits):
    low, high = (float(torch.tensor(bound, dtype=torch.float32)) for bound in (low, high))
    x = edges(low, high, 1 << bits)
    for spec in (f"uniform:{bits}", f"uniform:{bits}|huffman"):
        with kernels.use_backend("reference"):
            expected = laconic.encode(x, spec)
        assert laconic.encode(x, spec) == expected


def test_uniform_of_random_ranges_agrees():
    for seed in range(40):
        x = laws.normal(3001, seed=seed) * 2.0 ** (seed - 20) + (seed % 3 - 1) * 5.0
        laws.agree(x, f"uniform:{1 + seed % 12}", seed=seed)


@pytest.mark.parametrize("keep", [0.04, 0.3, 0.9])
@pytest.mark.parametrize("n", [(1 << 21) + 2048, (1 << 21) + 2049, (1 << 21) + 4095])
def test_dense_entries_are_scattered_to_a_large_tensor(n, keep):
    """Large outputs are filled by way of a window of 2,048 values."""
    x = laws.normal(n, seed=n)
    x[-1] = 9.0
    frame = laconic.encode(x, f"topk:{keep}")
    packet, chain = wire.unpack(frame), codec(f"topk:{keep}")
    positions = chain.positions(packet)
    expected = torch.zeros(n)
    expected[positions.long()] = x[positions.long()]
    out = torch.full((n,), 7.0)
    assert laws.same_bits(laconic.decode(frame, out=out), expected)
    shifted = torch.full((n + 1,), 7.0)[1:]  # not aligned for streaming stores
    assert laws.same_bits(laconic.decode(frame, out=shifted), expected)


def test_empty_windows_between_entries_are_zero():
    n = 1 << 21
    x = torch.zeros(n)
    x[: n // 8] = 1.0
    x[n // 2 + 5] = -2.0
    x[-3] = 3.0
    assert laws.same_bits(laconic.decode(laconic.encode(x, "threshold:0.5"), out=torch.ones(n)), x)


def test_invalid_positions_of_a_large_tensor_raise_frame_error():
    frame = mutate.Frame.read(laconic.encode(laws.normal(1 << 21), "topk:0.3"))
    positions = frame.sections[0]
    for at in (8, 1000, len(positions) // 2, len(positions) - 1):
        frame.sections[0] = positions[:at] + bytes([positions[at] ^ 0xFF]) + positions[at + 1 :]
        try:
            laconic.decode(frame.write())  # other low bits can be valid positions, too
        except FrameError as error:
            assert "positions that are not" in str(error)  # noqa: PT017
    frame.sections[0] = positions[:-1] + b"\xff"
    with pytest.raises(FrameError, match="positions that are not"):
        laconic.decode(frame.write())


@pytest.mark.parametrize("n", [1, 7, 255, 256, 257, 5000, 70_001])
@pytest.mark.parametrize("keep", [0.001, 0.2, 1.0])
def test_random_entries_are_those_of_the_reference(n, keep):
    for threads in (1, 3):
        torch.set_num_threads(threads)
        laws.agree(laws.normal(n, seed=n), f"randk:{keep}", seed=n)


def test_random_entries_report_a_value_that_is_not_finite_and_not_kept():
    x = laws.normal(1000)
    for at in (0, 255, 256, 990, 999):
        y = x.clone()
        y[at] = math.nan
        with pytest.raises(laconic.NonFiniteError):
            laconic.encode(y, "randk:0.01")


@pytest.mark.parametrize(
    "origin, shift, step", [(-1.5, 0.5, 3 / 256), (None, -3, 0.1), (None, -2, -0.25), (0.0, 0.5, 1e38)]
)
def test_level_table_is_computed_in_double_precision(origin, shift, step):
    table = torch.empty(256)
    _core.level_table(256, origin, shift, step, table.data_ptr())
    level = (torch.arange(256, dtype=torch.float64) + shift) * step
    expected = level if origin is None else origin + level
    assert laws.same_bits(table, expected.clamp(-laws.FLOAT32_MAX, laws.FLOAT32_MAX).to(torch.float32))


FRAMES = [
    laconic.encode(x, spec)
    for spec in ("none", "qsgd:4", "topk:0.1|qsgd:4", "uniform:4|huffman")
    for x in (laws.normal(300), torch.zeros(2, 3), torch.empty(0), laws.normal(12).view(2, 3, 2))
]


def accepted(blob: bytes) -> bool:
    try:
        wire.frame._unpack_stepwise(wire.as_bytes(blob), wire.MAX_NUMEL)
    except FrameError:
        return False
    return True


def test_frames_are_read_at_once_exactly_if_they_are_accepted_step_by_step():
    whole = list(FRAMES)
    blobs = whole + [frame[:-1] for frame in whole] + [frame + b"\0" for frame in whole]
    blobs += [blob for blob, is_bundle in mutate.cases(whole, 3000) if not is_bundle]
    read = 0
    for blob in blobs:
        view = wire.as_bytes(blob)
        fields = _core.read_frame(view.data_ptr(), view.numel())
        if fields is None:
            assert not accepted(blob), blob[:64]
        elif fields[2] in wire.DTYPES and 0 < math.prod(fields[1]) <= wire.MAX_NUMEL:
            assert accepted(blob), blob[:64]
            read += 1
    assert 100 < read < len(blobs) - 100


@pytest.mark.parametrize("number", [2**64 - 16, 2**63, 2**64 - 1])
def test_section_lengths_that_overflow_are_refused(number):
    frame = mutate.Frame.read(laconic.encode(laws.normal(300), "qsgd:4"))
    for lengths in ([number, 16], [8, number], [number, 2**64 - number]):
        frame.lengths, frame.wide = lengths, True
        view = wire.as_bytes(frame.write())
        assert _core.read_frame(view.data_ptr(), view.numel()) is None
