"""On CUDA the torch reference serves: same bytes as on the CPU, tensors stay on their device."""

from __future__ import annotations

import pytest
import torch

import laconic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPECS = [
    *laconic.codec_names(),
    "qsgd:8,norm=l2",
    "qsgd:3,round=nearest",
    "topk:0.01,approx=true",
    "topk:0.01|qsgd:4",
    "randk:0.1|sign",
    "threshold:1.0|fp16",
]


def _values(n: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 257, 5000, 200_001])
@pytest.mark.parametrize("spec", SPECS)
def test_a_cuda_tensor_gives_the_bytes_of_its_cpu_copy(spec, n, dtype):
    x = _values(n, dtype)
    on_cpu, on_cuda = laconic.encode(x, spec, seed=3), laconic.encode(x.cuda(), spec, seed=3)
    assert on_cuda == on_cpu
    out = torch.empty(n, dtype=dtype, device="cuda")
    assert torch.equal(laconic.decode(on_cpu, out=out).cpu(), laconic.decode(on_cpu))
    assert laconic.decode(on_cpu, device="cuda").device.type == "cuda"


@pytest.mark.parametrize("spec", SPECS)
def test_packets_decode_and_add_up_on_the_device(spec):
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
def test_a_channel_remembers_on_the_device(spec):
    on_cpu, on_cuda = laconic.channel(spec), laconic.channel(spec)
    for step in range(5):
        x = _values(8192, torch.float32).view(64, 128) * (step + 1)
        assert on_cuda.encode("w", x.cuda(), seed=step) == on_cpu.encode("w", x, seed=step)
    residual = on_cuda.residual("w")
    assert residual is not None and residual.is_cuda


def test_non_finite_values_are_refused_on_the_device():
    x = torch.zeros(1000, device="cuda")
    x[7] = torch.nan
    for spec in SPECS:
        with pytest.raises(laconic.NonFiniteError):
            laconic.encode(x, spec)
