"""Triton's kernels by themselves against the reference, bit for bit: interpreted, or compiled on a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import test_parity
import torch
from triton_support import DEVICE, INTERPRETED, MARKS, gpu_only, no_compile_fallback, triton_kernels  # noqa: F401

import laconic
import laws
from laconic import counters, kernels
from laconic.collective.reductions.device_residuals import RoundNumbers
from laconic.kernels import random, reference
from laconic.kernels.interface import IntRounding, LinearGrid, QsgdCoding
from laconic.kernels.sections import GROUP, SUM_BLOCK, PackedIntCoding, num_buckets, packed_nbytes
from laconic.residual_storage import residual_seed

pytestmark = [*MARKS, pytest.mark.usefixtures("no_compile_fallback")]


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8, 11, 16, 31])
def test_packing_agrees_for_every_width(bits):
    backend = triton_kernels()
    for n in (7, 2048 + 257):
        symbols = random.hash32(torch.arange(n), bits) & ((1 << bits) - 1)
        expected = torch.full((packed_nbytes(n, bits),), 0xEE, dtype=torch.uint8)
        reference.pack(symbols, bits, expected)
        packed = torch.full_like(expected, 0xDD, device=DEVICE)
        backend.pack(symbols.to(DEVICE, torch.int32), bits, packed)
        assert torch.equal(packed.cpu(), expected)
        assert torch.equal(backend.unpack(packed, n, bits).cpu().long(), symbols)


def test_unaligned_sections_are_packed_and_unpacked():
    n, bits = 700, 4
    symbols = (torch.arange(n, device=DEVICE) % 16).to(torch.int32)
    unaligned, aligned = (torch.zeros(packed_nbytes(n, bits) + 1, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    triton_kernels().pack(symbols, bits, unaligned[1:])
    triton_kernels().pack(symbols, bits, aligned[:-1])
    assert torch.equal(unaligned[1:], aligned[:-1])
    assert torch.equal(triton_kernels().unpack(unaligned[1:], n, bits), symbols)


@pytest.mark.parametrize(
    "coding", [PackedIntCoding(7, 6, False), PackedIntCoding(15, 8, False), PackedIntCoding(31, 5, True)], ids=str
)
@pytest.mark.parametrize("noise", [None, 3])
def test_packed_integer_encoding_applies_error_feedback(coding, noise):
    for n in (1, 1300):
        x = laws.normal(n, seed=n)
        clips = reference.block_scales(x, False).view(torch.uint8)
        results = []
        for backend, device in ((reference, "cpu"), (triton_kernels(), DEVICE)):
            residual = x.to(device, copy=True)
            out = torch.zeros(laconic.kernels.sections.packed_ints_nbytes(n, coding), dtype=torch.uint8, device=device)
            rounding = IntRounding(None, None, noise)
            backend.packed_int_encode(residual, coding, rounding, feedback=True, clips=clips.to(device), out=out)
            results.append((residual.cpu(), out.cpu(), backend.packed_int_max(out, n, coding)))
        (*expected, largest), (*result, triton_largest) = results
        assert all(map(laws.same_bits, result, expected)) and triton_largest == largest
        assert not torch.equal(expected[0], x)


@pytest.mark.parametrize("bits, l2, stochastic", [(4, False, True), (3, True, False)])
def test_qsgd_feedback_agrees(bits, l2, stochastic):
    for kind in ("normal", "wide range", "huge"):
        n = 1100
        x, memory = test_parity.KINDS[kind](n), laws.normal(n, seed=2) * (kind == "normal")
        results = []
        for backend, device in ((reference, "cpu"), (triton_kernels(), DEVICE)):
            residual = memory.to(device, copy=True)
            norms = torch.zeros(4 * num_buckets(n, 512), dtype=torch.uint8, device=device)
            packed = torch.zeros(packed_nbytes(n, bits), dtype=torch.uint8, device=device)
            coding = QsgdCoding(bits, 512, l2, stochastic)
            amax_bits = backend.qsgd_feedback(x.to(device), residual, coding, seed=3, norms=norms, packed=packed)
            results.append((residual.cpu(), norms.cpu(), packed.cpu(), amax_bits))
        (*expected, amax_bits), (*result, triton_amax_bits) = results
        assert (
            all(laws.same_bits(a, b) for a, b in zip(result, expected, strict=True)) and amax_bits == triton_amax_bits
        ), kind


def test_a_channel_with_fused_error_feedback_sends_the_same_frames():
    on_triton, on_cpu = (laconic.channel("ef|qsgd:4") for _ in range(2))
    for step, scale in enumerate((1.0, 0.0)):
        x = laws.normal(4, 1200, seed=step) * scale
        frame = on_cpu.encode("w", x, seed=step)
        with kernels.use_backend("triton"):
            assert on_triton.encode("w", x.to(DEVICE), seed=step) == frame
    assert laws.same_bits(on_triton.residual("w").cpu(), on_cpu.residual("w"))
    huge = torch.full((4, 1200), laws.FLOAT32_MAX, device=DEVICE)
    with kernels.use_backend("triton"):
        on_triton.encode("v", huge, seed=0)
        on_triton.residual("v").fill_(laws.FLOAT32_MAX)
        with pytest.raises(laconic.NonFiniteError):
            on_triton.encode("v", huge, seed=1)
    assert on_triton.residual("v") is None and on_triton.stats.residual_resets == 1


@pytest.mark.parametrize("more", [False, True])
def test_rotation_agrees(more):
    for n in (1, 1300):
        x, padded = laws.normal(n), num_buckets(n, SUM_BLOCK) * SUM_BLOCK
        add = laws.normal(padded, seed=2) if more else None
        out, expected = torch.empty(padded, device=DEVICE), torch.empty(padded)
        reference.rotate(x, 5, add, expected)
        triton_kernels().rotate(x.to(DEVICE), 5, None if add is None else add.to(DEVICE), out)
        assert laws.same_bits(out.cpu(), expected)


@pytest.mark.parametrize("width, lane", [(4, 8), (3, 16), (12, 32)])
def test_sums_agree(width, lane):
    triton, n = triton_kernels(), 2 * GROUP + 9
    packed = torch.empty(packed_nbytes(n, width), dtype=torch.uint8)
    reference.pack(torch.arange(n) * 7919 % (1 << width), width, packed)
    expected_total = torch.zeros(num_buckets(n, GROUP) * 32 * lane, dtype=torch.uint8)
    total = expected_total.to(DEVICE, copy=True)
    for _ in range(3):
        reference.packed_int_accumulate(packed, n, width, lane, expected_total)
        triton.packed_int_accumulate(packed.to(DEVICE), n, width, lane, total)
    assert torch.equal(total.cpu(), expected_total)
    expected = torch.empty(packed_nbytes(n, width + 2), dtype=torch.uint8)
    packed_total = torch.empty_like(expected, device=DEVICE)
    reference.packed_int_repack(expected_total, n, lane, width + 2, expected)
    triton.packed_int_repack(total, n, lane, width + 2, packed_total)
    assert torch.equal(packed_total.cpu(), expected)
    triton.packed_int_add(total.clone(), total)
    reference.packed_int_add(expected_total.clone(), expected_total)
    assert torch.equal(total.cpu(), expected_total)


@pytest.mark.parametrize("levels", [3, 200, 4096])
def test_histograms_agree(levels):
    x = laws.normal(5000)
    inverse = float(torch.tensor(levels / 6.2, dtype=torch.float32))
    grid = LinearGrid(1.0, float(torch.tensor(-3.1)), inverse, levels)
    assert torch.equal(triton_kernels().histogram(x.to(DEVICE), grid), reference.histogram(x, grid))


def test_momentum_agrees():
    x, velocity, residual = (laws.normal(2500, seed=seed) for seed in (1, 2, 3))
    results = [each.to(DEVICE, copy=True) for each in (velocity, residual)]
    reference.add_momentum(x, 0.9, velocity, residual)
    triton_kernels().add_momentum(x.to(DEVICE), 0.9, *results)
    assert laws.same_bits(results[0].cpu(), velocity) and laws.same_bits(results[1].cpu(), residual)


def test_stochastic_rounding_agrees():
    sizes, seeds = (1, 300, 2500, 5000), (0, 5, -3, 2**63)
    tensors = [laws.normal(n) * torch.exp(20 * laws.normal(n, seed=1)) for n in sizes]
    tensors[1][:3] = torch.tensor([float("inf"), laws.FLOAT32_MAX, -0.0])
    expected = [torch.empty(n, dtype=torch.bfloat16) for n in sizes]
    alone, together = ([torch.empty_like(x, device=DEVICE) for x in expected] for _ in range(2))
    on_device = [x.to(DEVICE) for x in tensors]
    for x, seed, out, other in zip(tensors, seeds, expected, alone, strict=True):
        reference.stochastic_bf16(x, seed, out)
        triton_kernels().stochastic_bf16(x.to(DEVICE), seed, other)
    keys = random.keys(seeds, random.RESIDUALS).to(DEVICE)
    triton_kernels().stochastic_bf16_all(on_device, keys, [x.data_ptr() for x in together])
    for i, wanted in enumerate(expected):
        assert laws.same_bits(alone[i].cpu(), wanted) and laws.same_bits(together[i].cpu(), wanted), sizes[i]


def test_keys_of_residuals_agree():
    inner, names, rounds = (random.splitmix64(7), 9), ("a", "b"), (4, 11)
    counted = RoundNumbers(inner, names, torch.device(DEVICE))
    for number in range(2):
        counted.begin([each + number for each in rounds])
        seeds = [random.splitmix64((each + number) ^ i) for each, i in zip(rounds, inner, strict=True)]
        wanted = random.keys([residual_seed(*each) for each in zip(names, seeds, strict=True)], random.RESIDUALS)
        assert torch.equal(counted.draw(triton_kernels()).cpu(), wanted)


def test_random_positions_agree():
    like = torch.empty(0, device=DEVICE)
    for n, k in ((1, 1), (10, 3), (9000, 1), (9000, 700)):
        positions = triton_kernels().random_positions(n, k, 5, like)
        assert torch.equal(positions.cpu(), reference.random_positions(n, k, 5, torch.empty(0)))


@pytest.mark.parametrize("rows, columns, rank", [(1, 1, 1), (37, 130, 3), (20, 259, 4)])
def test_low_rank_projections_agree(rows, columns, rank):
    x, q, p = laws.normal(rows, columns), laws.normal(rank, columns, seed=1), laws.normal(rows, rank, seed=2)
    for name, other in (("project_rows", q), ("project_columns", p)):
        product = getattr(triton_kernels(), name)(x.to(DEVICE), other.to(DEVICE))
        assert laws.same_bits(product.cpu(), getattr(reference, name)(x, other)), name


def test_fallbacks_to_the_host_are_counted():
    before = counters.counts().get("hosted_kernels", 0)
    with kernels.use_backend("triton"):
        laconic.codec("uniform:8").encode(laws.normal(300).to(DEVICE))
        assert counters.counts().get("hosted_kernels", 0) == before
        laconic.codec("topk:0.3").encode(laws.normal(300).double().to(DEVICE))
        assert counters.counts()["hosted_kernels"] == before + 1
        laconic.codec("uniform:8|deflate").encode(laws.normal(300).to(DEVICE))
    assert counters.counts()["hosted_kernels"] == before + (1 if INTERPRETED else 2)


def reference_decode(frame):
    with kernels.use_backend("reference"):
        return laconic.decode(frame)


def test_the_device_bench_checks_results_before_it_times_them(monkeypatch):
    from laconic_lab.bench import device

    monkeypatch.setattr(device, "PARITY_NUMEL", 300)
    monkeypatch.setattr(device, "SMALL_NUMEL", 300)
    once = device.DeviceWatch.per_call
    monkeypatch.setattr(device.DeviceWatch, "per_call", lambda self, op: once(self, op, calls=1, batches=1))
    settings = device.DeviceSettings(device=DEVICE, numel=600, repeat=2)
    with kernels.use_backend("triton") if INTERPRETED else nullcontext():
        (result,), records = device.run_device(["qsgd:4"], settings)
    assert {"encode_launch", "decode_launch", "accumulate_launch", "feedback"} < set(result.timings)
    assert set(result.plain) == {"encode", "decode"}
    assert [record.kind for record in records] == ["bench.device", "bench.device.codec"]
    assert records[1].values["feedback_floor_x_copy"] == 0.6 and "encode_launch_x_copy" in records[1].values
    monkeypatch.setattr(triton_kernels(), "qsgd_decode", lambda *_, out, **__: out.fill_(1.0))
    monkeypatch.setattr(device, "decode", reference_decode)
    with kernels.use_backend("triton") if INTERPRETED else nullcontext(), pytest.raises(laconic.WrongResultError):
        device._check(laconic.codec("qsgd:4"), laws.normal(700).to(DEVICE), 0)


@gpu_only
def test_an_encoding_can_be_captured_in_a_cuda_graph():
    """The encoder only launches: a replayed graph encodes the new values."""
    from laconic.kernels.triton import qsgd

    x = laws.normal(1 << 20).cuda()
    norms = torch.empty(4 * num_buckets(x.numel(), 512), dtype=torch.uint8, device="cuda")
    packed = torch.empty(packed_nbytes(x.numel(), 4), dtype=torch.uint8, device="cuda")
    arguments = {"coding": QsgdCoding(4, 512, False, True), "seed": 1}
    qsgd.qsgd_encode(x, **arguments, norms=norms, packed=packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qsgd.qsgd_encode(x, **arguments, norms=norms, packed=packed)
    fresh = laws.normal(1 << 20, seed=9)
    x.copy_(fresh)
    graph.replay()
    expected = laconic.codec("qsgd:4").encode(fresh, seed=1)
    assert torch.equal(norms.cpu(), expected.sections[0]) and torch.equal(packed.cpu(), expected.sections[1])
