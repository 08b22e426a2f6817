from __future__ import annotations

import pytest
import torch

import laconic
import laws
import mutate
from laconic import ConfigError, FrameError

SPECS = [spec for spec in laws.QUANTIZERS if spec.startswith("bins")]


test_law = laws.holds


def squared_error(x, spec):
    return float((laws.roundtrip(x, spec) - x).square().sum() / x.square().sum())


def kept_by_topk(n, seed=0):
    """Return the values of a gaussian that the top 1/64 keeps."""
    x = laws.normal(64 * n, seed=seed)
    return x[x.abs() >= x.abs().kthvalue(63 * n + 1).values]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket", [128, 1024, 65536])
def test_decodes_to_the_mean_of_the_values_in_a_bin(bits, bucket):
    x = laws.normal(70001, seed=bucket) + 0.3
    y = laws.roundtrip(x, f"bins:{bits},bucket={bucket}")
    for part, decoded in list(laws.by_bucket(bucket, x.double(), y.double()))[-3:]:
        means = decoded.unique()
        assert len(means) <= 1 << bits
        for mean in means:
            torch.testing.assert_close(part[decoded == mean].mean(), mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_bins_are_intervals(bits):
    x = laws.normal(4096).sort().values
    y = laws.roundtrip(x, f"bins:{bits}")
    assert bool((y.diff() >= 0).all()) and len(y.unique()) == 1 << bits


LIMITS = {"gaussian": (0.37, 0.122, 0.038, 0.0125), "topk": (0.013, 0.0045, 0.0015, 0.00052)}
"""Squared error over squared norm for 1 to 4 bits; the best 2^bits levels give 0.363, 0.117, 0.034, 0.010 and 0.012,
0.0041, 0.0012, 0.0004."""


@pytest.mark.parametrize("kind", LIMITS)
def test_squared_error_is_close_to_the_least_possible(kind):
    x = kept_by_topk(1 << 14) if kind == "topk" else laws.normal(1 << 16)
    for bits, limit in enumerate(LIMITS[kind], 1):
        assert squared_error(x, f"bins:{bits}") < limit


def test_two_bits_have_less_error_than_other_codecs_of_two_bits():
    for x in (laws.normal(1 << 16), kept_by_topk(1 << 14)):
        error = squared_error(x, "bins:2")
        assert all(error < 0.5 * squared_error(x, spec) for spec in ("sign", "onebit", "qsgd:2", "uniform:2"))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 3, 300, 4096, 5000])
def test_two_values_are_kept(bits, n):
    x = torch.where(laws.normal(n, seed=7) > 0.5, 3.0, -0.25)
    for values in (x, torch.full((n,), -0.7), torch.full((n,), 2.0**-149), 1e38 * x):
        torch.testing.assert_close(laws.roundtrip(values, f"bins:{bits}"), values, rtol=1e-6, atol=0)


def test_mean_of_huge_values_does_not_overflow():
    x = torch.full((4096,), laws.FLOAT32_MAX)
    torch.testing.assert_close(laws.roundtrip(x, "bins:2"), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-41, 1e-30, 1e20, 1e37])
def test_error_does_not_depend_on_the_scale(scale):
    x = laws.normal(5000)
    torch.testing.assert_close(
        squared_error((x * scale).double(), "bins:2"), squared_error(x, "bins:2"), rtol=1e-2, atol=0
    )


def test_bucket_of_zeros_decodes_to_zeros():
    x = torch.cat([torch.zeros(4096), laws.normal(4096), -torch.zeros(5)])
    y = laws.roundtrip(x, "bins:3")
    assert not bool(y[:4096].any()) and not bool(y[8192:].any()) and bool(y[4096:8192].all())


def test_error_is_smaller_than_the_input():
    for kind in (laws.normal, laws.gradients, laws.weights):
        for n in (1, 2, 129, 5000):
            assert squared_error(kind(n, seed=n), "bins:1,bucket=128") < 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_mean_that_is_not_finite_raises_frame_error(value, backend):
    frame = mutate.Frame.read(laconic.encode(laws.normal(300), "bins:2,bucket=128"))
    for at in range(12):
        section = bytearray(frame.sections[0])
        section[4 * at : 4 * at + 4] = laws.bytes_of(torch.tensor([value]))
        changed = mutate.Frame.read(frame.write())
        changed.sections[0] = bytes(section)
        with laconic.kernels.use_backend(backend), pytest.raises(FrameError, match="mean that is not a finite number"):
            laconic.decode(changed.write())


def test_bits_a_value():
    n = 1 << 20
    for bits in (1, 2, 3, 4):
        nbytes = len(laconic.encode(laws.normal(n), f"bins:{bits}"))
        assert 8 * nbytes / n <= bits + (32 << bits) / 4096 + 0.001


@pytest.mark.parametrize("spec", ["bins:0", "bins:5", "bins:2,bucket=100"])
def test_invalid_arguments_raise_config_error(spec):
    with pytest.raises(ConfigError, match="bins"):
        laconic.codec(spec)
