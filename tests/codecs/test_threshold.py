from __future__ import annotations

import pytest
import torch

import laconic
import laws

SPECS = [spec for spec in laws.EVERY if spec.startswith("threshold")]


test_law = laws.holds


@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 1000, 300_001])
def test_keeps_exactly_the_values_of_magnitude_t_or_more(dtype, n):
    x = laws.normal(n, seed=n, dtype=dtype)
    x[0] = 0.75
    if n > 2:
        x[1], x[2] = -0.75, 0.5
    assert laws.same_bits(laws.roundtrip(x, "threshold:0.75"), torch.where(x.abs() >= 0.75, x, 0.0))


def test_no_value_reaching_t_sends_a_header():
    frame = laconic.encode(laws.normal(100_000), "threshold:100.0|qsgd:4")
    assert len(frame) < 128
    assert not bool(laconic.decode(frame).any())


def test_all_values_reaching_t_send_no_positions():
    x = laws.normal(10_000).sign() * 2
    assert len(laconic.encode(x, "threshold:1.0")) < 4 * 10_000 + 128
    assert torch.equal(laws.roundtrip(x, "threshold:1.0"), x)
