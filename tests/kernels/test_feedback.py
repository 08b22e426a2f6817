"""Error feedback fused into qsgd: the CPU backends agree with each other and with the formula."""

from __future__ import annotations

import pytest
import torch

import laws
from laconic.kernels import cpu, reference
from laconic.kernels.interface import NONFINITE, QsgdCoding
from laconic.kernels.sections import num_buckets, packed_nbytes

CODING = QsgdCoding(bits=4, bucket=512, l2=False, stochastic=True)


def encode_with_feedback(backend, x, memory):
    n, residual = x.numel(), memory.clone()
    norms = torch.zeros(4 * num_buckets(n, 512), dtype=torch.uint8)
    packed = torch.zeros(packed_nbytes(n, 4), dtype=torch.uint8)
    amax_bits = backend.qsgd_feedback(x, residual, CODING, seed=3, norms=norms, packed=packed)
    return amax_bits, residual, norms, packed


@pytest.mark.parametrize("n", [1, 300, 5003])
def test_residual_is_the_encoding_error(n):
    x, memory = laws.normal(n, seed=1), laws.normal(n, seed=2)
    amax_bits, residual, norms, packed = encode_with_feedback(cpu, x, memory)
    expected = encode_with_feedback(reference, x, memory)
    assert amax_bits == expected[0]
    assert all(laws.same_bits(a, b) for a, b in zip((residual, norms, packed), expected[1:], strict=True))
    sent = torch.empty(n)
    reference.qsgd_decode(norms, packed, bits=4, bucket=512, out=sent, weight=None)
    assert laws.same_bits(residual, (memory + x) - sent)


def test_amax_bits_report_sums_that_are_not_finite_or_zero():
    huge = torch.full((300,), laws.FLOAT32_MAX)
    for backend in (cpu, reference):
        assert encode_with_feedback(backend, huge, huge)[0] >= NONFINITE
        amax_bits, residual, *_ = encode_with_feedback(backend, torch.ones(300), -torch.ones(300))
        assert amax_bits == 0 and not residual.any()
