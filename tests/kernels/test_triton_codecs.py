"""Codecs on Triton's kernels against the reference, bit for bit: interpreted, or compiled on a GPU."""

from __future__ import annotations

import pytest
import test_parity
import torch
from triton_support import (  # noqa: F401
    DEVICE,
    INTERPRETED,
    MARKS,
    agree,
    few,
    gpu,
    gpu_only,
    no_compile_fallback,
    triton_kernels,
)

import laconic
import laws
from golden import make
from laconic import FrameError, kernels, wire
from laconic.kernels import reference
from laconic.kernels.interface import PackedIntSum
from laconic.kernels.sections import PackedIntCoding, packed_nbytes

pytestmark = [*MARKS, pytest.mark.usefixtures("no_compile_fallback")]

SOON = 2048 + 300
"""One full program of most kernels and a second that is not full and has a tail."""

SPECS = [spec for spec in laws.EVERY if "zstd" not in spec]


QUICK = ("none", "fp16", "qsgd:4", "qsgd:3,norm=l2", "terngrad", "sign", "onebit", "bins:2", "uniform:8", "adaptive",
         "shared:8", "thc:4", "topk:0.3", "randk:0.1", "threshold:0.5", "powersgd:2")  # fmt: skip
"""One codec per kernel, without coders, which have files of their own; the others are slow."""

EXHAUSTIVE = [pytest.param(spec, marks=pytest.mark.slow if spec in QUICK or not INTERPRETED else gpu) for spec in SPECS]
"""Every size, dtype and kind of value: interpreted, of one codec per kernel; compiled, of all codecs."""


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=() if spec in QUICK else pytest.mark.slow) for spec in SPECS]
)
def test_sections_and_values_agree(spec):
    agree(laws.normal(few(spec, SOON if not spec.endswith(",approx=true") else 70_000), seed=3), spec, seed=7)


@pytest.mark.parametrize("spec", EXHAUSTIVE)
def test_sections_and_values_agree_for_every_size(spec):
    sizes = (1, 2, 8, 255, 256, 257, 511, 512, 1023, 1025, 2048, 2049, 4096, 6145, 10_000)
    for n in sorted({few(spec, size) for size in sizes}):
        agree(laws.normal(n, seed=n), spec, seed=n)


@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
@pytest.mark.parametrize("spec", EXHAUSTIVE)
def test_sections_and_values_agree_for_every_dtype(spec, dtype):
    agree(laws.normal(few(spec, 1300), seed=4, dtype=dtype), spec, seed=5)


GOLDEN = [case for case in make.CASES if "zstd" not in case.spec and not isinstance(case, make.SumCase)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=gpu if INTERPRETED and case.make().numel() > 20_000 else pytest.mark.slow)
        for case in GOLDEN
    ],
    ids=[case.name for case in GOLDEN],
)
def test_golden_frames_are_read_and_written(case):
    x, frozen = case.make(), case.path.read_bytes()
    with kernels.use_backend("triton"):
        packet = wire.unpack(frozen).to(torch.device(DEVICE))
        codec = laconic.codec(packet.codec)
        decoded = codec.decode(packet, out=torch.empty(x.shape, dtype=x.dtype, device=DEVICE))
        gradient = case.gradient()
        written = laconic.encode(x.to(DEVICE), case.spec, seed=case.seed, gradient=gradient)
    assert make.digest(decoded.cpu()) == make.digests()[case.name]
    assert written == frozen or not case.bytes_are_ours


MOST_USED = ("qsgd:4", "qsgd:3,norm=l2", "sign:128", "onebit:256", "bins:3,bucket=128", "terngrad", "thc:4",
             "shared:5,round=stochastic", "uniform:5", "topk:0.3")  # fmt: skip


@pytest.mark.parametrize("kind", test_parity.KINDS)
@pytest.mark.parametrize("spec", EXHAUSTIVE)
def test_unusual_values_agree(spec, kind):
    for n in sorted({few(spec, size) for size in (9, 700, 2051)}):
        agree(test_parity.KINDS[kind](n), spec, seed=n)


@pytest.mark.parametrize("kind", ["wide range", "zeros and minus one"])
@pytest.mark.parametrize("spec", MOST_USED)
def test_unusual_values_agree_for_the_most_used_codecs(spec, kind):
    agree(test_parity.KINDS[kind](300), spec, seed=1)


@pytest.mark.parametrize("spec", ["qsgd:4", "terngrad", "sign", "onebit", "bins:2", "uniform:8", "shared:8", "thc:4",
                                  "topk:0.1", "threshold:0.5", "randk:0.5", "fp16", "none"])  # fmt: skip
def test_non_finite_values_raise(spec):
    x = torch.full((300,), 0.5, device=DEVICE)
    x[299] = float("nan") if len(spec) % 2 else -float("inf")
    with kernels.use_backend("triton"), pytest.raises(laconic.NonFiniteError):
        laconic.codec(spec).encode(x)


@pytest.mark.parametrize("spec", ["qsgd:4", "terngrad", "sign", "onebit", "bins:2", "shared:8", "thc:4", "fp16"])
@pytest.mark.parametrize("weight", [None, 0.5])
def test_invalid_scales_are_rejected(spec, weight):
    codec = laconic.codec(spec)
    packet = codec.encode(laws.normal(700)).to(torch.device(DEVICE))
    section = packet.sections[1 if spec in ("shared:8", "thc:4") else 0]
    scales = section.view(torch.float16 if spec == "fp16" else torch.float32)
    scales[-1] = float("nan") if weight else float("inf") if spec in ("fp16", "bins:2") else -1.0
    out = torch.zeros(700, device=DEVICE)
    with kernels.use_backend("triton"), pytest.raises(FrameError):
        codec.decode(packet, out=out) if weight is None else codec.accumulate(packet, out, weight)
    assert bool(torch.isfinite(out).all())


def test_bytes_above_242_are_no_ternary_values():
    codec = laconic.codec("terngrad")
    packet = codec.encode(laws.normal(700)).to(torch.device(DEVICE))
    packet.sections[1][-1] = 243
    with kernels.use_backend("triton"), pytest.raises(FrameError, match="ternary"):
        codec.decode(packet)


def test_a_sum_above_its_total_is_rejected():
    x, clips, lanes = torch.zeros(700, device=DEVICE), torch.ones(1, device=DEVICE), torch.full((700,), 16)
    packed = torch.empty(packed_nbytes(700, 5), dtype=torch.uint8)
    reference.pack(lanes, 5, packed)
    total = PackedIntSum(packed.to(DEVICE), clips.view(torch.uint8), PackedIntCoding(15, 5, True), 15)
    with pytest.raises(FrameError, match="a sum above 15"):
        triton_kernels().packed_int_decode(total, rotation_seed=None, out=x, weight=None)


@gpu_only
def test_a_cuda_tensor_gets_the_triton_backend():
    assert kernels.backend_for(torch.ones(8, device="cuda")) is triton_kernels()


@gpu_only
@pytest.mark.parametrize("spec", [spec for spec in SPECS if "deflate" not in spec])
def test_large_tensors_agree_with_the_core(spec):
    """The C++ core, whose bytes are the reference's, is fast enough for these sizes."""
    for n in (1 << 20, 3_000_001):
        x = laws.normal(n, seed=n)
        frame = laconic.encode(x, spec, seed=n)
        assert laconic.encode(x.cuda(), spec, seed=n) == frame
        assert laws.same_bits(laconic.decode(frame, device="cuda").cpu(), laconic.decode(frame))
