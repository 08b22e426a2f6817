"""CUDA tensors give the bytes of CPU tensors and stay on their device, with Triton and without it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import laconic
import laws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SPECS = [
    *laconic.codec_names(), "qsgd:8,norm=l2", "qsgd:3,round=nearest", "topk:0.01,approx=true", "topk:0.01|qsgd:4",
    "randk:0.1|sign", "threshold:1.0|fp16", "uniform:30", "adaptive:4.0,zero=true",
    "adaptive:6.0,m=6,f=1.0,integer=true", "adaptive:3.0,tail=0.01", "adaptive:12.0,zero=true,tail=0.001|rans:auto",
    *laws.CODED,
]  # fmt: skip

# Images of GPU machines often have torch and little else.
needs_zstd = pytest.mark.skipif(find_spec("zstandard") is None, reason="no zstandard")
every_spec = pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=needs_zstd) if "zstd" in spec else spec for spec in SPECS]
)


def _values(n: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 257, 5000, 200_001])
@every_spec
def test_a_cuda_tensor_gives_the_bytes_of_its_cpu_copy(spec, n, dtype):
    x = _values(n, dtype)
    on_cpu, on_cuda = laconic.encode(x, spec, seed=3), laconic.encode(x.cuda(), spec, seed=3)
    assert on_cuda == on_cpu
    out = torch.empty(n, dtype=dtype, device="cuda")
    assert torch.equal(laconic.decode(on_cpu, out=out).cpu(), laconic.decode(on_cpu))
    assert laconic.decode(on_cpu, device="cuda").device.type == "cuda"


@every_spec
def test_packets_decode_and_accumulate_on_the_device(spec):
    x = _values(5000, torch.float32).cuda()
    codec = laconic.codec(spec)
    packet = codec.encode(x, seed=1)
    assert all(section.is_cuda for section in packet.sections)
    decoded = codec.decode(packet)
    total = torch.ones_like(x)
    codec.accumulate(packet, total, 0.5)
    assert decoded.is_cuda
    assert torch.equal(decoded.cpu(), laconic.decode(laconic.encode(x, spec, seed=1)))
    torch.testing.assert_close(total, 1 + 0.5 * decoded, rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", ["ef|topk:0.01|qsgd:4", "momentum:0.9|topk:0.01"])
def test_a_channel_keeps_its_residual_on_the_device(spec):
    on_cpu, on_cuda = laconic.channel(spec), laconic.channel(spec)
    for step in range(5):
        x = _values(8192, torch.float32).view(64, 128) * (step + 1)
        assert on_cuda.encode("w", x.cuda(), seed=step) == on_cpu.encode("w", x, seed=step)
    residual = on_cuda.residual("w")
    assert residual is not None and residual.is_cuda


@pytest.mark.parametrize("spec", ["adaptive:5.0|huffman", "adaptive:4.0,tail=0.01|rans", "uniform:12|rans:auto"])
def test_several_coded_chunks_give_the_bytes_of_their_cpu_copy(spec):
    x = _values(1_100_003, torch.float32)
    frame = laconic.encode(x, spec, seed=3)
    assert laconic.encode(x.cuda(), spec, seed=3) == frame
    packet = laconic.codec(spec).encode(x.cuda(), seed=3)
    assert laws.same_bits(laconic.codec(spec).decode(packet).cpu(), laconic.decode(frame))


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_levels_by_gradient_are_the_same_for_a_gradient_on_either_device(on):
    x, gradient = _values(5000, torch.float32), _values(70_001, torch.float32)
    expected = laconic.encode(x, "adaptive:4.0,by=grad|huffman", gradient=gradient)
    assert laconic.encode(x.cuda(), "adaptive:4.0,by=grad|huffman", gradient=gradient.to(on)) == expected


@pytest.mark.parametrize("kind", ["huge", "subnormal", "mostly zero", "far from zero"])
def test_adaptive_bins_are_the_same_at_the_ends_of_float32(kind):
    x = {
        "huge": _values(5000, torch.float32).clamp(-1, 1) * laws.FLOAT32_MAX,
        "subnormal": _values(5000, torch.float32) * 1e-41,
        "mostly zero": _values(5000, torch.float32) * (_values(5001, torch.float32)[1:] > 3),
        "far from zero": 1000 + _values(5000, torch.float32) * 1e-3,
    }[kind]
    for spec in ("adaptive:5.0", "adaptive:12.0,zero=true", "adaptive:5.0,tail=0.01|rans", "uniform:8|huffman"):
        assert laconic.encode(x.cuda(), spec) == laconic.encode(x, spec), spec


def test_invalid_coded_symbols_raise_frame_error_on_the_device():
    codec = laconic.codec("adaptive:5.0|rans")
    packet = codec.encode(_values(5000, torch.float32).cuda())
    for at in (4, 5, 6, 40, -1):
        section = packet.sections[1].clone()
        section[at] ^= 0x81
        with pytest.raises(laconic.FrameError):
            codec.decode(laconic.Packet(packet.codec, packet.spec, (packet.sections[0], section)))


def test_non_finite_values_raise_on_the_device():
    x = torch.zeros(1000, device="cuda")
    x[7] = torch.nan
    for spec in SPECS:
        with pytest.raises(laconic.NonFiniteError):
            laconic.encode(x, spec)


@pytest.mark.skipif(find_spec("triton") is None, reason="no triton")
def test_the_selector_keeps_what_a_stable_sort_puts_first():
    from laconic.kernels.triton.topk_batched import Selector

    torch.manual_seed(0)
    sizes, counts = [1, 5000, 4096, 100_001, 70_000], [1, 5, 4096, 1000, 699]
    many = torch.randn(sum(sizes), device="cuda")
    few = torch.randint(-2, 3, (sum(sizes),), device="cuda").float()  # ties everywhere
    ends = torch.tensor(sizes).cumsum(0).tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    selector = Selector(spans, counts, torch.device("cuda"))
    for x in (many, few, torch.zeros_like(few)):
        expected = [
            x[begin:end].abs().sort(descending=True, stable=True).indices[:k].sort().values + begin
            for (begin, end), k in zip(spans, counts, strict=True)
        ]
        assert torch.equal(selector.choose(x), torch.cat(expected))
