"""Error feedback inside a quantizer: both backends that need no compiler, against each other and by hand."""

from __future__ import annotations

import pytest
import torch

import laws
from laconic.kernels import cpu, reference
from laconic.kernels.interface import NONFINITE, QsgdCoding
from laconic.kernels.sections import num_buckets, packed_nbytes

CODING = QsgdCoding(bits=4, bucket=512, l2=False, stochastic=True)


def fed_back(backend, x, memory):
    n, residual = x.numel(), memory.clone()
    norms = torch.zeros(4 * num_buckets(n, 512), dtype=torch.uint8)
    packed = torch.zeros(packed_nbytes(n, 4), dtype=torch.uint8)
    key = backend.qsgd_feedback(x, residual, CODING, seed=3, norms=norms, packed=packed)
    return key, residual, norms, packed


@pytest.mark.parametrize("n", [1, 300, 5003])
def test_the_residual_is_what_was_not_sent(n):
    x, memory = laws.normal(n, seed=1), laws.normal(n, seed=2)
    key, residual, norms, packed = fed_back(cpu, x, memory)
    truth = fed_back(reference, x, memory)
    assert key == truth[0]
    assert all(laws.same_bits(a, b) for a, b in zip((residual, norms, packed), truth[1:], strict=True))
    sent = torch.empty(n)
    reference.qsgd_decode(norms, packed, bits=4, bucket=512, out=sent, weight=None)
    assert laws.same_bits(residual, (memory + x) - sent)


def test_a_sum_that_is_not_finite_or_zero_is_told():
    huge = torch.full((300,), laws.FLOAT32_MAX)
    for backend in (cpu, reference):
        assert fed_back(backend, huge, huge)[0] >= NONFINITE
        key, residual, *_ = fed_back(backend, torch.ones(300), -torch.ones(300))
        assert key == 0 and not residual.any()
