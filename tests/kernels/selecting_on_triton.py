"""Selectors on Triton's kernels, by themselves: what a sample gets wrong, parts of many tiles, sections that lie.

``test_triton.py`` runs this file, as it does ``on_triton.py``.
"""

from __future__ import annotations

import pytest
import test_packing
import test_parity
import torch
from on_triton import DEVICE, INTERPRETED, _nothing_gives_way, agree, triton_kernels  # noqa: F401

import laconic
import laws
from laconic import FrameError, kernels
from laconic.kernels import reference
from laconic.kernels.interface import ALL, BITMAP, RICE, positions_max_nbytes, read_positions_header

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PHASED = ("phases", "marks", "gaps", "largest", "placing", "drawing", "selection", "grids")


@pytest.fixture
def few_parts(monkeypatch):
    """Parts of several tiles each, as large tensors have them."""
    import importlib

    for name in PHASED:
        module = importlib.import_module(f"laconic.kernels.triton.{name}")
        monkeypatch.setattr(module, "PARTS", 4)
        if hasattr(module, "SMALL"):
            monkeypatch.setattr(module, "SMALL", 4096)
        if hasattr(module, "_layout"):
            module._layout.cache_clear()
    yield
    for name in ("largest", "placing", "drawing"):
        importlib.import_module(f"laconic.kernels.triton.{name}")._layout.cache_clear()


@pytest.fixture
def few_samples(monkeypatch):
    """Samples that are much fewer than the values, and as little room as they leave to many."""
    from laconic.kernels.triton import topk

    monkeypatch.setattr(topk, "SAMPLES", 1024)
    monkeypatch.setattr(topk, "MORE_SAMPLES", 1024)
    monkeypatch.setattr(topk, "ROOMY", 0)
    topk._layout.cache_clear()
    yield
    topk._layout.cache_clear()


@pytest.fixture
def misses(monkeypatch):
    """Lengths of the tensors that exact passes had to take over."""
    from laconic.kernels.triton import selectors

    lengths, real = [], selectors._selector
    monkeypatch.setattr(selectors, "_selector", lambda n, *rest: lengths.append(n) or real(n, *rest))
    return lengths


def same_selection(x, k):
    """Positions, values and key, and the section that is written on the way, are those of the reference."""
    ours, truth, n = triton_kernels().topk(x.to(DEVICE), k), reference.topk(x, k), x.numel()
    assert torch.equal(ours[0].cpu(), truth[0]) and laws.same_bits(ours[1].cpu(), truth[1])
    assert ours[2] == truth[2] or min(ours[2], truth[2]) >= kernels.interface.NONFINITE
    room, wanted = (torch.full((positions_max_nbytes(n, k),), fill, dtype=torch.uint8) for fill in (0xEE, 0xDD))
    room = room.to(DEVICE)
    (nbytes, values, key), (least, _, _) = (
        triton_kernels().topk_encode(x.to(DEVICE), k, room),
        reference.topk_encode(x, k, wanted),
    )
    assert nbytes == least and key == ours[2] and laws.same_bits(values.cpu(), truth[1])
    assert torch.equal(room[:nbytes].cpu(), wanted[:nbytes])


ORDERS = {
    "ascending": lambda n: torch.arange(n).float(),
    "descending": lambda n: torch.arange(n).flip(0).float(),
    "largest last": lambda n: torch.cat([laws.normal(n - n // 50), 9 + laws.normal(n // 50)]),
}


def test_the_k_largest_of_few_values_are_found_without_a_miss(misses):
    for n, k in ((2, 1), (300, 100), (2348, 23)):
        same_selection(laws.normal(n, seed=n), k)
    same_selection(torch.full((700,), -0.5), 40)
    same_selection(torch.zeros(300), 4)
    assert not misses


def test_of_equal_magnitudes_the_lowest_index_wins():
    x = torch.randint(-2, 3, (2500,), generator=torch.Generator().manual_seed(1)).float()
    for k in (400, 2500):
        same_selection(x, k)


SOON = ("normal", "two values")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in SOON else pytest.mark.slow)
     for kind in (*SOON, "outliers", "zeros and a one", "constant", *ORDERS)],
)  # fmt: skip
def test_top_k_of_many_values_is_exact(kind, few_samples, misses):
    """Whether the sample leaves a few more than k, too many (ties, zeros), or values far above what it leaves."""
    n = 9001
    x = {**test_parity.KINDS, **ORDERS}[kind](n)
    for k in (1, 70):
        same_selection(x, k)
    found = {"two values": 4, "zeros and a one": 4, "constant": 4, "outliers": 2}.get(kind, 0)
    assert misses == [n] * found, "the road that was meant to be taken"


def test_what_is_not_finite_is_among_the_largest(few_samples):
    x = laws.normal(9001)
    x[7], x[9000] = float("nan"), -float("inf")
    same_selection(x, 70)


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, marks=() if spec == "topk:0.01" else pytest.mark.slow)
     for spec in ("topk:0.01", "topk:0.3", "topk:0.9", "threshold:2.0", "randk:0.01", "uniform:5")],
)  # fmt: skip
def test_parts_of_many_tiles_agree(spec, few_parts, few_samples):
    agree(laws.normal(50_001, seed=5), spec, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.001, 0.02, 0.4, 0.99, 1.0])
def test_values_return_to_their_places(keep):
    for n in (1, 8191, 8193, 20_000):
        agree(laws.normal(n, seed=n), f"topk:{keep}")


@pytest.mark.slow
def test_values_of_every_dtype_return_to_their_places():
    for dtype in laws.DTYPES:
        agree(laws.normal(700, dtype=dtype), "topk:0.1")


def place(section, values, out, weight):
    kept = read_positions_header(section, out.numel()).kept
    assert triton_kernels().sparse_decode(section.to(DEVICE), values[:kept], out, weight)


@pytest.mark.parametrize("weight", [None, 0.5])
def test_sections_that_lie_are_refused_and_nothing_is_added(weight):
    lies = next(mark for mark in test_packing.test_positions_that_lie_are_refused.pytestmark if mark.args[0] == "lie")
    for lie in lies.args[1]:
        out = torch.ones(10, device=DEVICE)
        with pytest.raises(FrameError):
            place(lie, torch.ones(2, device=DEVICE), out, weight)
        assert weight is None or bool((out == 1).all())


@pytest.mark.parametrize("weight", [None, 0.5])
@pytest.mark.parametrize("spec", ["topk:0.1", pytest.param("topk:0.9", marks=pytest.mark.slow), "randk:0.1"])
def test_values_that_are_not_finite_are_refused_and_nothing_is_added(spec, weight):
    codec = laconic.codec(spec)
    for bad in (float("nan"), -float("inf")):
        with kernels.use_backend("triton"):
            packet = codec.encode(laws.normal(700).to(DEVICE))
            packet.sections[1].view(torch.float32)[-1] = bad
            out = torch.ones(700, device=DEVICE)
            with pytest.raises(FrameError, match="finite"):
                codec.decode(packet, out=out) if weight is None else codec.accumulate(packet, out, weight)
        assert weight is None or bool((out == 1).all())


def test_sections_that_begin_between_words_are_written_and_read():
    x, k = laws.normal(2348).to(DEVICE), 40
    apart = torch.zeros(positions_max_nbytes(2348, k) + 1, dtype=torch.uint8, device=DEVICE)
    whole = torch.zeros_like(apart)
    nbytes, values, _ = triton_kernels().topk_encode(x, k, apart[1:])
    assert triton_kernels().topk_encode(x, k, whole[:-1])[0] == nbytes
    assert torch.equal(apart[1 : 1 + nbytes], whole[:nbytes])
    found = torch.full((2348,), 7.0, device=DEVICE)
    section = apart[1 : 1 + nbytes]
    place(section, values, found, None)
    assert torch.equal(found.nonzero(), torch.where(found != 0, x, 0.0).nonzero()) and int((found != 0).sum()) == k


@pytest.mark.parametrize("n, k", [(10, 10), (10, 9), (300, 3), (9000, 700), (9000, 4400), (1 << 31, 5)])
def test_the_limit_holds_the_longest_section(n, k):
    """Positions as far apart as they can be, and as close."""
    for positions in (torch.arange(k), torch.arange(n - k, n), (torch.arange(k, dtype=torch.float64) * (n / k)).long()):
        plan = reference.positions_plan(positions, n)
        assert plan.mode in (ALL, RICE, BITMAP) and plan.nbytes <= positions_max_nbytes(n, k)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize(
    "spec",
    ["topk:0.01", "topk:0.001", "topk:0.3", "topk:0.01|qsgd:4", "threshold:2.5", "randk:0.01", "uniform:8", "fp16"],
)
def test_launches_one_by_one_agree_with_all_in_one(spec):
    """The core's bytes are the reference's; sizes on both sides of where phases become launches of their own."""
    for n in ((1 << 22) - 77, (1 << 22) + 1077, 1 << 24):
        x = laws.normal(n, seed=n)
        frame = laconic.encode(x, spec, seed=n)
        assert laconic.encode(x.cuda(), spec, seed=n) == frame
        assert laws.same_bits(laconic.decode(frame, device="cuda").cpu(), laconic.decode(frame))


def test_sections_with_places_for_another_number_are_read_once_more():
    """One value fewer than the codec keeps takes as many bytes: only the section's head tells."""
    ours, other = laconic.codec("topk:0.3|qsgd:2"), laconic.codec("topk:0.299|qsgd:2")
    packet = other.encode(laws.normal(1000))
    packet = laconic.packet.Packet(str(ours), packet.spec, packet.sections)
    assert read_positions_header(packet.sections[0], 1000).kept == 299 != ours.selector.expected(1000)
    with kernels.use_backend("triton"):
        found = ours.decode(packet.to(torch.device(DEVICE)), out=torch.empty(1000, device=DEVICE))
    assert laws.same_bits(found.cpu(), other.decode(other.encode(laws.normal(1000))))
