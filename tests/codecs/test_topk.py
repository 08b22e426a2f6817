from __future__ import annotations

import math

import pytest
import torch

import laconic
import laws
from laconic import wire

SPECS = [spec for spec in laws.EVERY if spec.startswith("topk")]


test_law = laws.holds


def by_sorting(x, k):
    """Largest magnitudes first, of equal ones the lowest index; all zeros if there is nothing to send."""
    magnitude = x.double().abs()
    if x.numel() > 10_000:
        order = torch.sort(magnitude, descending=True, stable=True).indices[:k]
    else:  # Python's own sort is stable, too
        each = magnitude.tolist()
        order = sorted(range(len(each)), key=lambda i: -each[i])[:k]
    y = torch.zeros_like(x)
    if magnitude.any():
        y[order] = x[order]
    return y


def check(x, keep):
    n = x.numel()
    k = max(1, min(n, int(keep * n + 0.5)))
    frame = laconic.encode(x, f"topk:{keep!r}")
    packet = wire.unpack(frame)
    positions = laconic.codec(packet.codec).positions(packet)
    assert (positions is None and not x.any()) or positions.numel() == k
    assert laws.same_bits(laconic.decode(frame), by_sorting(x, k))


LARGE = 300_007  # past the size from which the threshold is sampled


def ramp(n):
    return torch.arange(1, n + 1, dtype=torch.float32)


DATA = {
    "normal": lambda n: laws.normal(n),
    "all equal": lambda n: torch.full((n,), -2.5),
    "two values": lambda n: torch.where(laws.normal(n) > 1, 1.0, -0.5),
    "two values near by": lambda n: torch.where(laws.normal(n) > 0, 1.0, 1.0 + 2.0**-23),
    "ascending": ramp,
    "descending": lambda n: ramp(n).flip(0),
    "period 16": lambda n: ramp(n) % 16 + 1,
    "period of a sampled stride": lambda n: (ramp(n) % max(1, (n - 16) // 8192) == 0).float() + 0.25,
    "mostly zero": lambda n: laws.normal(n) * (laws.normal(n, seed=1) > 2.5),
    "few not zero": lambda n: (ramp(n) == n // 2 + 1).float() * 3,
    "one block holds all": lambda n: torch.where((ramp(n) > n // 3) & (ramp(n) <= n // 3 + n // 50), ramp(n), 1e-9),
    "heavy tail": lambda n: laws.normal(n) ** 7,
    "zeros of both signs": lambda n: torch.where(laws.normal(n) > 0, 0.0, -0.0),
    "zeros of both signs and a one": lambda n: torch.where(
        ramp(n) == n, 1.0, torch.where(laws.normal(n) > 0, 0.0, -0.0)
    ),
    "subnormal": lambda n: laws.normal(n) * 1e-41,
    "huge": lambda n: laws.normal(n).clamp(-1, 1) * 3.4e38,
}


@pytest.mark.parametrize("keep", [1e-6, 0.01, 0.3, 0.5, 0.51, 1.0])
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("n", [1, 2, 1000, 5003])
def test_equals_a_sort(name, n, keep):
    check(DATA[name](n), keep)


@pytest.mark.parametrize("keep", [1e-6, 0.001, 0.02, 0.4])
@pytest.mark.parametrize("name", DATA)
def test_equals_a_sort_where_the_threshold_is_sampled(name, keep, threads):
    check(DATA[name](LARGE), keep)


@pytest.mark.parametrize("k", [1, 3, 1500, 3000])
def test_equals_a_sort_when_the_sample_sees_none_of_the_large_values(k, threads):
    # All large values in one run of one sampled line at most: the sample expects far fewer than there are.
    x = laws.normal(LARGE) * 0.01
    x[200_000:203_000] = ramp(3000) + 5
    check(x, k / LARGE)


@pytest.mark.parametrize("k", [10, 5000, 140_000])
def test_equals_a_sort_when_nearly_everything_reaches_the_sampled_threshold(k, threads):
    # Magnitudes that agree in their 16 high bits fall into one bin, so the candidates overflow their room.
    x = 1.0 + ramp(LARGE) * 2.0**-27 * (ramp(LARGE) % 7)
    check(x, k / LARGE)


@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
@pytest.mark.parametrize("n", [1000, LARGE])
def test_equals_a_sort_in_every_dtype(dtype, n):
    check(laws.normal(n, dtype=dtype), 0.05)
    check((laws.normal(n) * 3).round().to(dtype), 0.05)


def test_float64_is_compared_in_float64():
    x = torch.tensor([1.0, 1.0 + 1e-12, 1.0 - 1e-12, 1e-300, 1e300], dtype=torch.float64)
    check(x, 0.2)
    check(x, 0.4)


@pytest.mark.parametrize("keep", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("n", [1000, LARGE, 1_000_000])
def test_approx_keeps_about_k_and_at_most_twice(keep, n, threads):
    x, k = laws.normal(n, seed=3), max(1, int(keep * n + 0.5))
    for seed in range(3):
        y = laws.roundtrip(x, f"topk:{keep},approx=true", seed)
        sent = y != 0
        count = int(sent.sum())
        assert count <= 2 * k + 16
        # The rank of a sampled quantile varies by its binomial spread.
        spread = n / 65536 * (65536 * keep * (1 - keep)) ** 0.5 if n > 65536 else 0
        assert abs(count - k) <= 6 * spread + 1
        assert torch.equal(y[sent], x[sent])
        assert float(x[sent].abs().min()) >= float(x[~sent].abs().max()), "a smaller value was kept before a larger one"


@pytest.mark.parametrize("name", DATA)
def test_approx_never_keeps_more_than_it_may(name):
    for keep in (1e-6, 0.01, 0.4):
        k = max(1, int(keep * LARGE + 0.5))
        y = laws.roundtrip(DATA[name](LARGE), f"topk:{keep!r},approx=true")
        assert int((y != 0).sum()) <= 2 * k + 16


@pytest.mark.parametrize("n", [1_000_000, 4_000_000])
@pytest.mark.parametrize("keep", [0.001, 0.01, 0.1])
def test_positions_cost_at_most_1_06_times_their_entropy(n, keep):
    packet = laconic.codec(f"topk:{keep}").encode(laws.normal(n, seed=5))
    k = int(keep * n + 0.5)
    entropy = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    assert packet.sections[1].numel() == 4 * k
    assert 8 * packet.sections[0].numel() <= 1.06 * entropy


def test_positions_of_clustered_entries_never_cost_more_than_a_bitmap():
    x = torch.zeros(100_000)
    x[::2] = 1.0
    packet = laconic.codec("topk:0.5").encode(x)
    assert packet.sections[0].numel() <= 8 + 100_000 // 8


def test_sampled_threshold_does_not_depend_on_threads():
    # All large values in one eighth: too many for one thread's share of the scratch, not too many in all.
    x = laws.normal(4_000_000) * 1e-3
    x[:500_000] += 1.0
    frames = set()
    before = torch.get_num_threads()
    for threads in (1, 2, 8):
        torch.set_num_threads(threads)
        frames.add(laconic.encode(x, "topk:0.1,approx=true", seed=1))
    torch.set_num_threads(before)
    assert len(frames) == 1
