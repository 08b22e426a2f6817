"""Triton's kernels against the reference, bit for bit. ``test_triton.py`` runs this file, in a process of its own:

in Triton's interpreter, on the CPU, which must be asked for before Triton is imported; or compiled, on a GPU.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import test_parity
import torch

import laconic
import laws
from golden import make
from laconic import FrameError, counters, kernels, wire
from laconic.kernels import random, reference
from laconic.kernels.interface import GROUP, SUM_BLOCK, LinearGrid, PackedIntCoding, num_buckets, packed_nbytes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

# numpy, which interprets, warns of quotients and casts that a kernel throws away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SOON = 2048 + 300
"""One whole program of most kernels and a second that is not full, with a tail."""

SPECS = [spec for spec in laws.EVERY if "zstd" not in spec]
UNSERVED = ("deflate",)
"""What goes to the host for now."""


def quick(spec, n):
    """So many values or fewer: the interpreter follows a coder's lanes symbol by symbol."""
    return min(n, 64) if INTERPRETED and "huffman" in spec else n


def triton_kernels():
    from laconic.kernels.triton import backend

    return backend


@pytest.fixture(autouse=True)
def _nothing_gives_way(monkeypatch):
    """A kernel that cannot be compiled gives way to torch, which has the same bytes: here it must not."""
    told = triton_kernels()._tell

    def tell(what, why):
        assert "compiled" not in why, f"{what} {why}"
        told(what, why)

    monkeypatch.setattr(triton_kernels(), "_tell", tell)


def truth_of(x, spec, seed):
    """Sections and values as the reference has them; a coder's goes symbol by symbol, so the core stands in for it."""
    with kernels.use_backend("cpu" if spec in laws.CODED else "reference"):
        packet = wire.unpack(laconic.encode(x, spec, seed=seed))
        values, added = laconic.codec(spec).decode(packet), torch.ones(x.shape)
        laconic.codec(spec).accumulate(packet, added, -0.3)
    return packet, values, added


def reference_decode(frame):
    with kernels.use_backend("reference"):
        return laconic.decode(frame)


def agree(x, spec, seed=0):
    packet, values, added = truth_of(x, spec, seed)
    codec, there = laconic.codec(spec), torch.device(DEVICE)
    with kernels.use_backend("triton"):
        assert kernels.backend_for(x) is triton_kernels()
        ours = codec.encode(x.to(there), seed=seed)
        assert len(ours.sections) == len(packet.sections)
        for number, (mine, other) in enumerate(zip(ours.sections, packet.sections, strict=True)):
            assert laws.same_bits(mine.cpu(), other.contiguous()), f"section {number} of {spec}, {x.numel()} values"
        packet = packet.to(there)
        found = codec.decode(packet, out=torch.empty(x.shape, dtype=x.dtype, device=there))
        assert laws.same_bits(found.cpu(), values), f"{spec}, {x.numel()} values"
        total = torch.ones(x.shape, device=there)
        codec.accumulate(packet, total, -0.3)
        assert laws.same_bits(total.cpu(), added), f"{spec}, {x.numel()} values, added"


FIRST = ("none", "fp16", "qsgd:4", "qsgd:3,norm=l2", "terngrad", "sign", "onebit", "uniform:8", "adaptive", "shared:8",
         "thc:4", "topk:0.3", "randk:0.1", "threshold:0.5", "powersgd:2")  # fmt: skip
"""One of each kernel but coders', which have files of their own; the others have tests that are slow."""


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=() if spec in FIRST else pytest.mark.slow) for spec in SPECS]
)
def test_bytes_and_values_agree(spec):
    agree(laws.normal(quick(spec, SOON if not spec.endswith(",approx=true") else 70_000), seed=3), spec, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_every_size_agrees(spec):
    sizes = (1, 2, 8, 255, 256, 257, 511, 512, 1023, 1025, 2048, 2049, 4096, 6145, 10_000)
    for n in sorted({quick(spec, size) for size in sizes}):
        agree(laws.normal(n, seed=n), spec, seed=n)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_dtypes_agree(spec, dtype):
    agree(laws.normal(quick(spec, 1300), seed=4, dtype=dtype), spec, seed=5)


GOLDEN = [case for case in make.CASES if "zstd" not in case.spec and not isinstance(case, make.SumCase)]


@pytest.mark.slow
@pytest.mark.parametrize("case", GOLDEN, ids=[case.name for case in GOLDEN])
def test_golden_frames_are_read_and_written_alike(case):
    x, frozen = case.make(), case.path.read_bytes()
    with kernels.use_backend("triton"):
        packet = wire.unpack(frozen).to(torch.device(DEVICE))
        codec = laconic.codec(packet.codec)
        found = codec.decode(packet, out=torch.empty(x.shape, dtype=x.dtype, device=DEVICE))
        gradient = case.gradient()
        written = laconic.encode(x.to(DEVICE), case.spec, seed=case.seed, gradient=gradient)
    assert make.digest(found.cpu()) == make.digests()[case.name]
    assert written == frozen or not case.bytes_are_ours


OFTEN = ("qsgd:4", "qsgd:3,norm=l2", "sign:128", "onebit:256", "terngrad", "thc:4", "shared:5,round=stochastic",
         "uniform:5", "topk:0.3")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", test_parity.KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_odd_values_agree(spec, kind):
    for n in sorted({quick(spec, size) for size in (9, 700, 2051)}):
        agree(test_parity.KINDS[kind](n), spec, seed=n)


@pytest.mark.parametrize("kind", ["wide range", "zeros and minus one"])
@pytest.mark.parametrize("spec", OFTEN)
def test_odd_values_agree_where_it_matters_most(spec, kind):
    agree(test_parity.KINDS[kind](300), spec, seed=1)


@pytest.mark.parametrize("spec", ["qsgd:4", "terngrad", "sign", "onebit", "uniform:8", "shared:8", "thc:4", "topk:0.1",
                                  "threshold:0.5", "randk:0.5", "fp16", "none"])  # fmt: skip
def test_what_is_not_finite_is_seen(spec):
    for bad in (float("nan"), -float("inf")):
        x = torch.full((300,), 0.5, device=DEVICE)
        x[299] = bad
        with kernels.use_backend("triton"), pytest.raises(laconic.NonFiniteError):
            laconic.codec(spec).encode(x)


@pytest.mark.parametrize("spec", ["qsgd:4", "terngrad", "sign", "onebit", "shared:8", "thc:4", "fp16"])
@pytest.mark.parametrize("weight", [None, 0.5])
def test_numbers_that_lie_are_refused(spec, weight):
    x, codec = laws.normal(700), laconic.codec(spec)
    for bad in (float("nan"), float("inf") if spec == "fp16" or weight else -1.0):
        with kernels.use_backend("triton"):
            packet = codec.encode(x.to(DEVICE))
            section = packet.sections[1 if spec in ("shared:8", "thc:4") else 0]
            numbers = section.view(torch.float16 if spec == "fp16" else torch.float32)
            numbers[-1] = bad
            out = torch.zeros(700, device=DEVICE)
            with pytest.raises(FrameError):
                codec.decode(packet, out=out) if weight is None else codec.accumulate(packet, out, weight)
            assert bool(torch.isfinite(out).all())


def test_bytes_that_are_no_five_ternary_values_are_refused():
    codec, x = laconic.codec("terngrad"), laws.normal(700)
    with kernels.use_backend("triton"):
        packet = codec.encode(x.to(DEVICE))
        packet.sections[1][-1] = 243
        with pytest.raises(FrameError, match="ternary"):
            codec.decode(packet)


def test_a_sum_above_its_total_is_refused():
    x, clips, lanes = torch.zeros(700, device=DEVICE), torch.ones(1, device=DEVICE), torch.full((700,), 16)
    packed = torch.empty(packed_nbytes(700, 5), dtype=torch.uint8)
    reference.pack(lanes, 5, packed)
    with pytest.raises(FrameError, match="a sum above 15"):
        triton_kernels().packed_int_decode(
            packed.to(DEVICE), clips.view(torch.uint8), PackedIntCoding(15, 5, True), total=15,
            rotation_seed=None, out=x, weight=None,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------- kernels by themselves


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8, 11, 16, 31])
def test_symbols_of_every_width_return(bits):
    ours = triton_kernels()
    for n in (7, 2048 + 257):
        symbols = random.hash32(torch.arange(n), bits) & ((1 << bits) - 1)
        truth = torch.full((packed_nbytes(n, bits),), 0xEE, dtype=torch.uint8)
        reference.pack(symbols, bits, truth)
        found = torch.full_like(truth, 0xDD, device=DEVICE)
        ours.pack(symbols.to(DEVICE, torch.int32), bits, found)
        assert torch.equal(found.cpu(), truth)
        assert torch.equal(ours.unpack(found, n, bits).cpu().long(), symbols)


def test_sections_that_begin_between_words_are_served():
    n, bits = 700, 4
    symbols = (torch.arange(n, device=DEVICE) % 16).to(torch.int32)
    apart, whole = (torch.zeros(packed_nbytes(n, bits) + 1, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    triton_kernels().pack(symbols, bits, apart[1:])
    triton_kernels().pack(symbols, bits, whole[:-1])
    assert torch.equal(apart[1:], whole[:-1])
    assert torch.equal(triton_kernels().unpack(apart[1:], n, bits), symbols)


@pytest.mark.parametrize(
    "coding", [PackedIntCoding(7, 6, False), PackedIntCoding(15, 8, False), PackedIntCoding(31, 5, True)], ids=str
)
@pytest.mark.parametrize("noise", [None, 3])
def test_error_feedback_is_part_of_the_encoding(coding, noise):
    for n in (1, 2500):
        x = laws.normal(n, seed=n)
        clips = reference.block_scales(x, False).view(torch.uint8)
        results = []
        for backend, device in ((reference, "cpu"), (triton_kernels(), DEVICE)):
            left = x.to(device, copy=True)
            out = torch.zeros(laconic.kernels.interface.packed_ints_nbytes(n, coding), dtype=torch.uint8, device=device)
            backend.packed_int_encode(
                left,
                coding,
                factor=None,
                rotation_seed=None,
                rounding_seed=noise,
                feedback=True,
                clips=clips.to(device),
                out=out,
            )
            results.append((left.cpu(), out.cpu(), backend.packed_int_max(out, n, coding)))
        (left, out, most), (found, sent, largest) = results
        assert laws.same_bits(found, left) and laws.same_bits(sent, out) and largest == most
        assert not torch.equal(left, x)


@pytest.mark.parametrize("bits, l2, stochastic", [(4, False, True), (3, True, False)])
def test_error_feedback_of_qsgd_is_one_pass_with_the_same_bits(bits, l2, stochastic):
    for kind in ("normal", "wide range", "huge", "zeros and a one"):
        n = 2500
        x, memory = test_parity.KINDS[kind](n), laws.normal(n, seed=2) * (kind == "normal")
        results = []
        for backend, device in ((reference, "cpu"), (triton_kernels(), DEVICE)):
            residual = memory.to(device, copy=True)
            norms = torch.zeros(4 * num_buckets(n, 512), dtype=torch.uint8, device=device)
            packed = torch.zeros(packed_nbytes(n, bits), dtype=torch.uint8, device=device)
            key = backend.qsgd_feedback(
                x.to(device), residual, bits=bits, bucket=512, l2=l2, stochastic=stochastic, seed=3, norms=norms,
                packed=packed,
            )  # fmt: skip
            results.append((residual.cpu(), norms.cpu(), packed.cpu(), key))
        (*truth, key), (*found, other) = results
        assert all(laws.same_bits(a, b) for a, b in zip(found, truth, strict=True)) and key == other, kind


def test_a_channel_that_feeds_back_in_one_pass_sends_the_same_frames():
    ours, truth = (laconic.channel("ef|qsgd:4") for _ in range(2))
    for step, scale in enumerate((1.0, 0.0, 3.0)):
        x = laws.normal(4, 1200, seed=step) * scale
        frame = truth.encode("w", x, seed=step)
        with kernels.use_backend("triton"):
            assert ours.encode("w", x.to(DEVICE), seed=step) == frame
    assert laws.same_bits(ours.residual("w").cpu(), truth.residual("w"))
    huge = torch.full((4, 1200), laws.FLOAT32_MAX, device=DEVICE)
    with kernels.use_backend("triton"):
        ours.encode("v", huge, seed=0)
        ours.residual("v").fill_(laws.FLOAT32_MAX)
        with pytest.raises(laconic.NonFiniteError):
            ours.encode("v", huge, seed=1)
    assert ours.residual("v") is None and ours.stats.residual_resets == 1


@pytest.mark.parametrize("more", [False, True])
def test_rotation_agrees(more):
    for n in (1, 2500):
        x, room = laws.normal(n), num_buckets(n, SUM_BLOCK) * SUM_BLOCK
        add = laws.normal(room, seed=2) if more else None
        ours, truth = torch.empty(room, device=DEVICE), torch.empty(room)
        reference.rotate(x, 5, add, truth)
        triton_kernels().rotate(x.to(DEVICE), 5, None if add is None else add.to(DEVICE), ours)
        assert laws.same_bits(ours.cpu(), truth)


@pytest.mark.parametrize("width, lane", [(4, 8), (3, 16), (12, 32)])
def test_sums_agree(width, lane):
    ours, n = triton_kernels(), 2 * GROUP + 9
    packed = torch.empty(packed_nbytes(n, width), dtype=torch.uint8)
    reference.pack(torch.arange(n) * 7919 % (1 << width), width, packed)
    truth = torch.zeros(num_buckets(n, GROUP) * 32 * lane, dtype=torch.uint8)
    total = truth.to(DEVICE, copy=True)
    for _ in range(3):
        reference.packed_int_accumulate(packed, n, width, lane, truth)
        ours.packed_int_accumulate(packed.to(DEVICE), n, width, lane, total)
    assert torch.equal(total.cpu(), truth)
    wanted = torch.empty(packed_nbytes(n, width + 2), dtype=torch.uint8)
    found = torch.empty_like(wanted, device=DEVICE)
    reference.packed_int_repack(truth, n, lane, width + 2, wanted)
    ours.packed_int_repack(total, n, lane, width + 2, found)
    assert torch.equal(found.cpu(), wanted)
    ours.packed_int_add(total.clone(), total)
    reference.packed_int_add(truth.clone(), truth)
    assert torch.equal(total.cpu(), truth)


@pytest.mark.parametrize("levels", [3, 200, 4096])
def test_histograms_agree(levels):
    x = laws.normal(5000)
    inverse = float(torch.tensor(levels / 6.2, dtype=torch.float32))
    grid = LinearGrid(1.0, float(torch.tensor(-3.1)), inverse, levels)
    assert torch.equal(triton_kernels().histogram(x.to(DEVICE), grid), reference.histogram(x, grid))


def test_momentum_agrees():
    x, velocity, residual = (laws.normal(2500, seed=seed) for seed in (1, 2, 3))
    ours = [each.to(DEVICE, copy=True) for each in (velocity, residual)]
    reference.add_momentum(x, 0.9, velocity, residual)
    triton_kernels().add_momentum(x.to(DEVICE), 0.9, *ours)
    assert laws.same_bits(ours[0].cpu(), velocity) and laws.same_bits(ours[1].cpu(), residual)


def test_random_positions_agree():
    like = torch.empty(0, device=DEVICE)
    for n, k in ((1, 1), (10, 3), (9000, 1), (9000, 700), (9000, 8999)):
        found = triton_kernels().random_positions(n, k, 5, like)
        assert torch.equal(found.cpu(), reference.random_positions(n, k, 5, torch.empty(0)))


@pytest.mark.parametrize("rows, columns, rank", [(1, 1, 1), (37, 130, 3), (20, 259, 4)])
def test_products_agree(rows, columns, rank):
    x, q, p = laws.normal(rows, columns), laws.normal(rank, columns, seed=1), laws.normal(rows, rank, seed=2)
    for name, other in (("project_rows", q), ("project_columns", p)):
        found = getattr(triton_kernels(), name)(x.to(DEVICE), other.to(DEVICE))
        assert laws.same_bits(found.cpu(), getattr(reference, name)(x, other)), name


def test_what_the_host_does_is_counted():
    before = counters.counts().get("hosted_kernels", 0)
    with kernels.use_backend("triton"):
        laconic.codec("uniform:8").encode(laws.normal(300).to(DEVICE))
        assert counters.counts().get("hosted_kernels", 0) == before
        laconic.codec("topk:0.3").encode(laws.normal(300).double().to(DEVICE))
        assert counters.counts()["hosted_kernels"] == before + 1
        laconic.codec("uniform:8|deflate").encode(laws.normal(300).to(DEVICE))
    assert counters.counts()["hosted_kernels"] == before + (1 if INTERPRETED else 2)


def test_the_bench_times_what_it_has_checked(monkeypatch):
    from laconic_lab.bench import device

    monkeypatch.setattr(device, "PARITY_NUMEL", 700)
    monkeypatch.setattr(device, "SMALL_NUMEL", 300)
    once = device.DeviceWatch.per_call
    monkeypatch.setattr(device.DeviceWatch, "per_call", lambda self, op: once(self, op, calls=1, batches=1))
    settings = device.DeviceSettings(device=DEVICE, numel=1000, repeat=3)
    with kernels.use_backend("triton") if INTERPRETED else nullcontext():
        (result,), records = device.run_device(["qsgd:4"], settings)
    assert {"encode_launch", "decode_launch", "accumulate_launch", "feedback"} < set(result.timings)
    assert set(result.plain) == {"encode", "decode"}
    assert [record.kind for record in records] == ["bench.device", "bench.device.codec"]
    assert records[1].values["feedback_floor_x_copy"] == 0.6 and "encode_launch_x_copy" in records[1].values
    monkeypatch.setattr(triton_kernels(), "qsgd_decode", lambda *_, out, **__: out.fill_(1.0))
    monkeypatch.setattr(device, "decode", lambda frame: reference_decode(frame))
    with kernels.use_backend("triton") if INTERPRETED else nullcontext(), pytest.raises(laconic.WrongResultError):
        device._check(laconic.codec("qsgd:4"), laws.normal(700).to(DEVICE), 0)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_a_cuda_tensor_is_served_by_triton():
    assert kernels.backend_for(torch.ones(8, device="cuda")) is triton_kernels()


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not any(name in spec for name in UNSERVED)])
def test_large_tensors_agree_with_the_core(spec):
    """The core's bytes are the reference's; it is the one that can keep up."""
    for n in (1 << 20, 3_000_001):
        x = laws.normal(n, seed=n)
        frame = laconic.encode(x, spec, seed=n)
        assert laconic.encode(x.cuda(), spec, seed=n) == frame
        assert laws.same_bits(laconic.decode(frame, device="cuda").cpu(), laconic.decode(frame))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_an_encoding_fits_a_cuda_graph():
    """Launches alone, no wait: what the graph replays on new values gives the bytes of these."""
    from laconic.kernels.triton import qsgd

    x = laws.normal(1 << 20).cuda()
    norms = torch.empty(4 * num_buckets(x.numel(), 512), dtype=torch.uint8, device="cuda")
    packed = torch.empty(packed_nbytes(x.numel(), 4), dtype=torch.uint8, device="cuda")
    arguments = {"bits": 4, "bucket": 512, "l2": False, "stochastic": True, "seed": 1}
    qsgd.qsgd_encode(x, **arguments, norms=norms, packed=packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qsgd.qsgd_encode(x, **arguments, norms=norms, packed=packed)
    fresh = laws.normal(1 << 20, seed=9)
    x.copy_(fresh)
    graph.replay()
    truth = laconic.codec("qsgd:4").encode(fresh, seed=1)
    assert torch.equal(norms.cpu(), truth.sections[0]) and torch.equal(packed.cpu(), truth.sections[1])
