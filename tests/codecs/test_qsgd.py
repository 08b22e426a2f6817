from __future__ import annotations

import pytest
import torch

import laconic
import laws
from laconic import kernels, wire

SPECS = [spec for spec in laws.QUANTIZERS if spec.startswith("qsgd")]


test_law = laws.holds


def bucket_norms(x, bucket, norm):
    rows = torch.nn.functional.pad(x.double(), (0, -x.numel() % bucket)).view(-1, bucket)
    each = rows.abs().amax(1) if norm == "max" else rows.norm(dim=1)
    return each.repeat_interleave(bucket)[: x.numel()]


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits, bucket", [(2, 128), (3, 512), (4, 512), (8, 256), (12, 1024)])
@pytest.mark.parametrize("rounding, most", [("nearest", 0.5), ("stochastic", 1.0)])
def test_error_is_at_most_half_a_step_to_nearest_and_one_at_random(norm, bits, bucket, rounding, most):
    x = laws.normal(20000, seed=bits)
    step = bucket_norms(x, bucket, norm) / (2 ** (bits - 1) - 1)
    y = laws.roundtrip(x, f"qsgd:{bits},bucket={bucket},norm={norm},round={rounding}")
    assert bool(((y.double() - x.double()).abs() <= most * step * (1 + 1e-5) + 1e-6 * step).all())


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_decoded_values_lie_on_levels(norm):
    x = laws.normal(5000)
    step = bucket_norms(x, 512, norm) / 7
    level = laws.roundtrip(x, f"qsgd:4,norm={norm}").double() / step
    assert bool(((level - level.round()).abs() < 1e-4).all())
    assert float(level.abs().max()) <= 7.0001


@pytest.mark.parametrize("bits", range(2, 13))
def test_rounding_never_exceeds_the_top_level(bits):
    x = torch.cat([torch.full((700,), v) for v in (1.0, -1.0, 0.1, 3e38, 1e-38)])
    for seed in range(20):
        y = laws.roundtrip(x, f"qsgd:{bits},bucket=128", seed)
        assert bool((y.abs() <= x.abs().max() * (1 + 1e-6)).all())
        assert bool((y.sign() * x.sign() >= 0).all())


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("n", [1, 300, 65536, 200_001])
def test_bucket_0_has_one_norm_on_every_backend(norm, n):
    spec, x = f"qsgd:5,bucket=0,norm={norm}", laws.normal(n)
    packet = wire.unpack(laconic.encode(x, spec, seed=3))
    (stored,) = packet.sections[0].clone().view(torch.float32).tolist()
    assert stored == pytest.approx(float(x.abs().max() if norm == "max" else x.double().norm()), rel=1e-6)
    step = stored / 15
    assert bool(((laws.roundtrip(x, spec) - x).abs() <= step * (1 + 1e-5)).all())
    with kernels.use_backend("reference"):
        plain = laconic.encode(x, spec, seed=3)
    assert plain == laconic.encode(x, spec, seed=3)


def test_layer_is_another_word_for_bucket_0():
    assert str(laconic.codec("topk:0.01|qsgd:4,bucket=layer")) == "topk:0.01|qsgd:4,bucket=0"
    with pytest.raises(laconic.ConfigError, match=r"bucket must be 0 \(one norm for the whole tensor\) or a power"):
        laconic.codec("qsgd:4,bucket=100")
    with pytest.raises(laconic.ConfigError, match="bucket must be a power of two"):
        laconic.codec("sign:0")


def test_outlier_affects_only_its_bucket():
    x = laws.normal(2048).clamp(-1, 1)
    x[1024] = 1e6
    error = (laws.roundtrip(x, "qsgd:8,bucket=512") - x).abs()
    assert float(error[:1024].max()) <= 1 / 127 + 1e-6
    assert float(error[1536:].max()) <= 1 / 127 + 1e-6


def test_zero_decodes_to_zero():
    x = laws.normal(4096)
    x[::2] = 0.0
    assert not bool(laws.roundtrip(x, "qsgd:2").view(-1)[::2].any())


@pytest.mark.parametrize("n", [1 << 20, 10_000_000])
def test_four_bits_cost_at_most_4_07_bits_a_value(n):
    frame = laconic.encode(torch.ones(n), "qsgd:4")
    assert 8 * len(frame) / n <= 4.07


def test_noise_does_not_depend_on_the_position():
    # One number all over the tensor, between two levels: the mean over places must be it as well.
    x = torch.full((1 << 20,), 0.3)
    x[::512] = 1.0
    y = laws.roundtrip(x, "qsgd:3,bucket=512")
    rest = torch.ones(x.numel(), dtype=torch.bool)
    rest[::512] = False
    error = (y[rest].double() - 0.3).mean()
    assert abs(float(error)) < 6 * (1 / 3) * 0.5 / rest.sum().sqrt()


@pytest.mark.parametrize("fraction", [0.5, 0.1, 0.01])
def test_noise_of_values_that_share_a_hash_is_uncorrelated(fraction):
    # The 32 rows of a packing group draw on one hash per lane; together they must look like 32 draws.
    x = torch.full((256 * 8192,), fraction / 3)
    x[::256] = 1.0
    up = (laws.roundtrip(x, "qsgd:3,bucket=256") > 0).double().view(-1, 32, 8)[:, :, 1:]
    rows = up.permute(1, 0, 2).reshape(32, -1)
    samples = rows.shape[1]
    assert float((rows.mean(1) - fraction).abs().max()) < 5 * (fraction / samples) ** 0.5
    correlation = torch.corrcoef(rows).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 6 / samples**0.5
