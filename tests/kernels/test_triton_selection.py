"""Selectors on Triton's kernels: wrong samples, parts of several tiles, invalid sections."""

from __future__ import annotations

import pytest
import test_parity
import torch
from test_packing_and_positions import INVALID_POSITIONS
from triton_support import DEVICE, MARKS, agree, gpu_only, no_compile_fallback, triton_kernels  # noqa: F401

import laconic
import laws
from laconic import FrameError, kernels
from laconic.kernels import reference
from laconic.kernels.sections import ALL, BITMAP, RICE, gaps_max_nbytes, positions_max_nbytes, read_positions_header

pytestmark = [*MARKS, pytest.mark.usefixtures("no_compile_fallback")]

PHASED = ("grid_sync", "bitmap", "rice", "topk", "scatter", "randk", "selectors", "linear")
"""Modules of the kernels that run in phases."""


@pytest.fixture
def few_parts(monkeypatch):
    """Give each part several tiles, as in large tensors."""
    import importlib

    for module_name in PHASED:
        module = importlib.import_module(f"laconic.kernels.triton.{module_name}")
        monkeypatch.setattr(module, "PARTS", 4)
        if hasattr(module, "SINGLE_LAUNCH_NUMEL"):
            monkeypatch.setattr(module, "SINGLE_LAUNCH_NUMEL", 4096)
        if hasattr(module, "_layout"):
            module._layout.cache_clear()
    yield
    for module_name in ("topk", "scatter", "randk"):
        importlib.import_module(f"laconic.kernels.triton.{module_name}")._layout.cache_clear()


@pytest.fixture
def few_samples(monkeypatch):
    """Draw far fewer samples than there are values, and leave little capacity for candidates."""
    from laconic.kernels.triton import topk

    monkeypatch.setattr(topk, "SAMPLES", 1024)
    monkeypatch.setattr(topk, "MORE_SAMPLES", 1024)
    monkeypatch.setattr(topk, "FULL_CAPACITY_NUMEL", 0)
    topk._layout.cache_clear()
    yield
    topk._layout.cache_clear()


@pytest.fixture
def exact_passes(monkeypatch):
    """Sizes of the tensors for which the sampled selection failed and exact passes ran."""
    from laconic.kernels.triton import selectors

    lengths, real = [], selectors._selector
    monkeypatch.setattr(selectors, "_selector", lambda n, *rest: lengths.append(n) or real(n, *rest))
    return lengths


def selection_agrees(x, k):
    """Assert that positions, values, amax and the written section are those of the reference."""
    selected, expected, n = triton_kernels().topk(x.to(DEVICE), k), reference.topk(x, k), x.numel()
    assert torch.equal(selected[0].cpu(), expected[0]) and laws.same_bits(selected[1].cpu(), expected[1])
    assert selected[2] == expected[2] or min(selected[2], expected[2]) >= kernels.interface.NONFINITE
    section, reference_section = (
        torch.full((positions_max_nbytes(n, k),), fill, dtype=torch.uint8) for fill in (0xEE, 0xDD)
    )
    section = section.to(DEVICE)
    nbytes, values, amax_bits = triton_kernels().topk_encode(x.to(DEVICE), k, section)
    assert nbytes == reference.topk_encode(x, k, reference_section)[0] and amax_bits == selected[2]
    assert laws.same_bits(values.cpu(), expected[1])
    assert torch.equal(section[:nbytes].cpu(), reference_section[:nbytes])


ORDERS = {
    "ascending": lambda n: torch.arange(n).float(),
    "descending": lambda n: torch.arange(n).flip(0).float(),
    "largest last": lambda n: torch.cat([laws.normal(n - n // 50), 9 + laws.normal(n // 50)]),
}


def test_topk_of_few_values_agrees_without_the_exact_fallback(exact_passes):
    for n, k in ((2, 1), (2348, 23)):
        selection_agrees(laws.normal(n, seed=n), k)
    selection_agrees(torch.full((700,), -0.5), 40)
    assert not exact_passes


def test_of_equal_magnitudes_the_lowest_index_is_kept():
    x = torch.randint(-2, 3, (2500,), generator=torch.Generator().manual_seed(1)).float()
    for k in (400, 2500):
        selection_agrees(x, k)


def chunks_agree(x, keep, chunk):
    counts = laconic.codec(f"topk:{keep!r},chunk={chunk}").selector.counts(x.numel())
    expected, n = reference.topk_chunks(x, counts), x.numel()
    selected = triton_kernels().topk_chunks(x.to(DEVICE), counts)
    assert torch.equal(selected[0].cpu(), expected[0]) and laws.same_bits(selected[1].cpu(), expected[1])
    assert selected[2] == expected[2] or min(selected[2], expected[2]) >= kernels.interface.NONFINITE
    section, reference_section = (
        torch.full((positions_max_nbytes(n, counts.total(n)),), fill, dtype=torch.uint8) for fill in (0xEE, 0xDD)
    )
    section = section.to(DEVICE)
    nbytes, values, amax_bits = triton_kernels().topk_chunks_encode(x.to(DEVICE), counts, section)
    assert nbytes == reference.topk_chunks_encode(x, counts, reference_section)[0] and amax_bits == selected[2]
    assert laws.same_bits(values.cpu(), expected[1]) and torch.equal(section[:nbytes].cpu(), reference_section[:nbytes])


def test_topk_of_chunks_is_exact():
    """Two programs of several chunks each, the last one shorter; then a chunk longer than the tensor."""
    chunks_agree(test_parity.KINDS["two values"](3000), 0.1, 64)
    chunks_agree(laws.normal(70), 0.3, 128)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "two values", "zeros and a one", "constant", "outliers"])
def test_topk_of_chunks_of_every_size_is_exact(kind):
    for n, chunk, keep in (
        (5000, 64, 0.1), (5000, 1024, 0.01), (4096, 2048, 0.5), (65, 64, 1e-6), (140_000, 65536, 0.01),
        (20_000, 4096, 0.015625), (20_001, 256, 1.0),
    ):  # fmt: skip
        chunks_agree(test_parity.KINDS[kind](n), keep, chunk)


def test_of_chunks_non_finite_values_are_among_the_largest():
    x = laws.normal(3001)
    x[700], x[3000] = float("nan"), -float("inf")
    chunks_agree(x, 0.01, 512)


def test_chunks_of_16_bit_and_64_bit_floats_agree():
    for dtype in (torch.float16, torch.float64):
        agree(laws.normal(700, dtype=dtype), "topk:0.1,chunk=128")


SOON = ("normal", "two values")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in SOON else pytest.mark.slow)
     for kind in (*SOON, "outliers", "zeros and a one", "constant", *ORDERS)],
)  # fmt: skip
def test_topk_of_many_values_is_exact(kind, few_samples, exact_passes):
    """The sample admits a few more than k values, too many (ties, zeros), or values far above its threshold."""
    n = 6001
    x = {**test_parity.KINDS, **ORDERS}[kind](n)
    for k in (1, 23):
        selection_agrees(x, k)
    failures = {"two values": 4, "zeros and a one": 4, "constant": 4, "outliers": 2}.get(kind, 0)
    assert exact_passes == [n] * failures, "took the other path"


def test_non_finite_values_are_among_the_largest(few_samples):
    x = laws.normal(3001)
    x[7], x[3000] = float("nan"), -float("inf")
    selection_agrees(x, 23)


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, marks=() if spec == "topk:0.01" else pytest.mark.slow)
     for spec in ("topk:0.01", "topk:0.3", "topk:0.9", "threshold:2.0", "randk:0.01", "uniform:5")],
)  # fmt: skip
def test_parts_of_several_tiles_agree(spec, few_parts, few_samples):
    agree(laws.normal(20_001, seed=5), spec, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.001, 0.02, 0.4, 0.99, 1.0])
def test_values_are_scattered_to_their_positions(keep):
    for n in (1, 8191, 8193, 20_000):
        agree(laws.normal(n, seed=n), f"topk:{keep}")


@pytest.mark.slow
def test_values_of_every_dtype_are_scattered_to_their_positions():
    for dtype in laws.DTYPES:
        agree(laws.normal(700, dtype=dtype), "topk:0.1")


def scatter(section, values, out, weight):
    kept = read_positions_header(section, out.numel()).kept
    assert triton_kernels().sparse_decode(section.to(DEVICE), values[:kept], out, weight)


@pytest.mark.parametrize("weight", [None, 0.5])
def test_invalid_position_sections_are_rejected_before_anything_is_added(weight):
    for section in INVALID_POSITIONS:
        out = torch.ones(10, device=DEVICE)
        with pytest.raises(FrameError):
            scatter(section, torch.ones(2, device=DEVICE), out, weight)
        assert weight is None or bool((out == 1).all())


@pytest.mark.parametrize("weight", [None, 0.5])
@pytest.mark.parametrize("spec", ["topk:0.1", pytest.param("topk:0.9", marks=pytest.mark.slow), "randk:0.1"])
def test_non_finite_values_are_rejected_before_anything_is_added(spec, weight):
    codec = laconic.codec(spec)
    with kernels.use_backend("triton"):
        packet = codec.encode(laws.normal(300).to(DEVICE))
        packet.sections[1].view(torch.float32)[-1] = float("nan") if weight is None else -float("inf")
        out = torch.ones(300, device=DEVICE)
        with pytest.raises(FrameError, match="finite"):
            codec.decode(packet, out=out) if weight is None else codec.accumulate(packet, out, weight)
    assert weight is None or bool((out == 1).all())


@pytest.mark.parametrize(
    "begin, end, copied", [(0, 9, False), (0, 12, False), (1, 9, True), (8, 12, False), (8, 14, True), (0, 15, True)]
)
def test_sections_read_as_words_end_inside_their_storage(begin, end, copied):
    from laconic.kernels.triton.launch_args import whole_words

    section = torch.arange(15, dtype=torch.uint8, device=DEVICE)[begin:end]
    words = whole_words(section)
    assert torch.equal(words, section) and (words.data_ptr() != section.data_ptr()) == copied
    assert words.data_ptr() % 4 == 0
    assert words.untyped_storage().nbytes() - words.storage_offset() >= -(-section.numel() // 4) * 4


@pytest.mark.parametrize(
    "begin, end, copied", [(0, 16, False), (4, 20, False), (4, 33, True), (2, 16, True), (0, 39, True)]
)
def test_sections_read_as_blocks_of_16_bytes_end_inside_their_storage(begin, end, copied):
    from laconic.kernels.triton.launch_args import whole_words

    memory = torch.arange(64, dtype=torch.uint8, device=DEVICE)
    start = -memory.data_ptr() % 16
    storage = memory[start : start + 40].clone()  # two blocks and a half
    section = storage[begin:end]
    blocks = whole_words(section, 16)
    assert torch.equal(blocks, section) and (blocks.data_ptr() != section.data_ptr()) == copied
    after = blocks.untyped_storage().nbytes() - blocks.storage_offset() - blocks.numel()
    assert after >= -(blocks.data_ptr() + blocks.numel()) % 16


def test_unaligned_position_sections_are_written_and_read():
    n, k = 700, 40
    x = laws.normal(n).to(DEVICE)
    unaligned = torch.zeros(positions_max_nbytes(n, k) + 1, dtype=torch.uint8, device=DEVICE)
    aligned = torch.zeros_like(unaligned)
    nbytes, values, _ = triton_kernels().topk_encode(x, k, unaligned[1:])
    assert triton_kernels().topk_encode(x, k, aligned[:-1])[0] == nbytes
    assert torch.equal(unaligned[1 : 1 + nbytes], aligned[:nbytes])
    out = torch.full((n,), 7.0, device=DEVICE)
    scatter(unaligned[1 : 1 + nbytes], values, out, None)
    assert torch.equal(out.nonzero(), torch.where(out != 0, x, 0.0).nonzero()) and int((out != 0).sum()) == k


@pytest.mark.parametrize("n, k", [(10, 10), (10, 9), (300, 3), (9000, 700), (9000, 4400), (1 << 31, 5)])
def test_positions_limit_bounds_the_longest_section(n, k):
    """Positions as far apart as possible, and as close."""
    for positions in (torch.arange(k), torch.arange(n - k, n), (torch.arange(k, dtype=torch.float64) * (n / k)).long()):
        plan = reference.positions_plan(positions, n)
        assert plan.mode in (ALL, RICE, BITMAP) and plan.nbytes <= positions_max_nbytes(n, k)


@gpu_only
@pytest.mark.parametrize(
    "spec",
    ["topk:0.01", "topk:0.001", "topk:0.3", "topk:0.01|qsgd:4", "threshold:2.5", "randk:0.01", "uniform:8", "fp16"],
)
def test_separate_launches_agree_with_one_cooperative_launch(spec):
    """Sizes on both sides of the switch from one cooperative launch to a launch per phase, against the C++ core."""
    for n in ((1 << 22) - 77, (1 << 22) + 1077, 1 << 24):
        x = laws.normal(n, seed=n)
        frame = laconic.encode(x, spec, seed=n)
        assert laconic.encode(x.cuda(), spec, seed=n) == frame
        assert laws.same_bits(laconic.decode(frame, device="cuda").cpu(), laconic.decode(frame))


def test_a_section_with_another_number_of_positions_is_decoded():
    """One value fewer than the codec keeps takes as many bytes; only the section's header says so."""
    ours, other = laconic.codec("topk:0.3|qsgd:2"), laconic.codec("topk:0.299|qsgd:2")
    packet = other.encode(laws.normal(1000))
    packet = laconic.packet.Packet(str(ours), packet.spec, packet.sections)
    assert read_positions_header(packet.sections[0], 1000).kept == 299 != ours.selector.fixed_count(1000)
    with kernels.use_backend("triton"):
        decoded = ours.decode(packet.to(torch.device(DEVICE)), out=torch.empty(1000, device=DEVICE))
    assert laws.same_bits(decoded.cpu(), other.decode(other.encode(laws.normal(1000))))


def positions_are_decoded(section, n, positions, *, damaged):
    """Positions, and values added at them, are those of the reference; a section of other length is refused."""
    header, values, out = read_positions_header(section, n), laws.normal(positions.numel()), laws.normal(n, seed=1)
    assert torch.equal(triton_kernels().positions_decode(section.to(DEVICE), n, header).cpu(), positions)
    expected, out = out.clone(), out.to(DEVICE)
    assert reference.sparse_decode(section, values, expected, -0.3)
    assert triton_kernels().sparse_decode(section.to(DEVICE), values.to(DEVICE), out, -0.3)
    assert laws.same_bits(out.cpu(), expected)
    assert not triton_kernels().sparse_decode(section.to(DEVICE), values[1:].to(DEVICE), out, None)
    with pytest.raises(FrameError):
        triton_kernels().positions_decode(damaged.to(DEVICE), n, header)


@pytest.mark.parametrize("kind", ["few", pytest.param("every other", marks=pytest.mark.slow)])
def test_entropy_coded_gaps_agree(kind):
    n, positions = {
        "every other": (600, torch.arange(0, 600, 2, dtype=torch.int32)),
        "few": (400, torch.tensor([*range(0, 100, 5), 130, 131, 139, 220, 390], dtype=torch.int32)),
    }[kind]
    sections = [torch.full((gaps_max_nbytes(n, positions.numel()),), fill, dtype=torch.uint8) for fill in (0xEE, 0xDD)]
    nbytes = reference.gaps_encode(positions, n, sections[0])
    section, on_device = sections[0][:nbytes], sections[1].to(DEVICE)
    assert triton_kernels().gaps_encode(positions.to(DEVICE), n, on_device) == nbytes
    assert torch.equal(on_device[:nbytes].cpu(), section)
    positions_are_decoded(section, n, positions, damaged=section[:-1])


def test_contexts_are_coded_by_the_host_with_the_same_bytes():
    n, columns = 600, 30
    positions = torch.tensor([*range(3, 600, 30), *range(90, 120, 4)], dtype=torch.int32).unique()
    section = torch.empty(200, dtype=torch.uint8)
    section = section[: reference.contexts_encode(positions, n, columns, None, section)]
    on_device = torch.empty(200, dtype=torch.uint8, device=DEVICE)
    assert triton_kernels().contexts_encode(positions.to(DEVICE), n, columns, None, on_device) == section.numel() > 0
    assert torch.equal(on_device[: section.numel()].cpu(), section)
    positions_are_decoded(section, n, positions, damaged=torch.cat([section, section.new_zeros(1)]))
