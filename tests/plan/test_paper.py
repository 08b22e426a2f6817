"""The model of jang2017: values computed by hand, and the shapes of the paper's figures."""

from __future__ import annotations

import math

import pytest

from laconic.errors import ConfigError
from laconic.plan import Naive, Training, Update

# 233 MB over 125 MB/s: M * 1.864 s a transfer; 200 iterations of 0.6 s: 120 s on one node.
ALEXNET = Training(nbytes=233e6, step_s=0.6, bandwidth=125e6, every=200)
GZIP = Naive.of(233e6, times_smaller=1.079, compress_s=8.079, decompress_s=1.898)
# Round numbers: i C = 40 s, W / bandwidth = 0.1 s: they cross at sqrt(40 / 0.1) = 20 workers, 400 at most.
ROUND = Training(nbytes=100.0, step_s=2.0, bandwidth=1000.0, every=20)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-8)


@pytest.mark.parametrize("training, workers, compute, transfer, total, speed_up", [
    (ROUND, 1, 40.0, 0.1, 40.1, 0.99750623441), (ROUND, 4, 10.0, 0.4, 10.4, 3.84615384615),
    (ROUND, 10, 4.0, 1.0, 5.0, 8.0), (ROUND, 20, 2.0, 2.0, 4.0, 10.0), (ROUND, 40, 1.0, 4.0, 5.0, 8.0),
    (ROUND, 400, 0.1, 40.0, 40.1, 0.99750623441), (ALEXNET, 1, 120.0, 1.864, 121.864, 0.98470426049),
    (ALEXNET, 8, 15.0, 14.912, 29.912, 4.01176785236), (ALEXNET, 16, 7.5, 29.824, 37.324, 3.21508948666),
    (ALEXNET, 25, 4.8, 46.6, 51.4, 2.33463035019),
])  # fmt: skip
def test_dense_update_matches_values_computed_by_hand(
    training: Training, workers: int, compute: float, transfer: float, total: float, speed_up: float
) -> None:
    update = training.vanilla(workers)
    assert (update.compute, update.transfer, update.total) == (close(compute), close(transfer), close(total))
    assert training.speed_up(update) == close(speed_up)


@pytest.mark.parametrize(
    "workers, once, total",
    [
        # 2 * 8.079 = 16.158 s compressing; (1 + M) * 1.898 s decompressing, or 2 * 1.898 at best; transfer / 1.079.
        (1, True, 120.0 + 16.158 + 3.796 + 1.72752548656),
        (16, True, 7.5 + 16.158 + 3.796 + 27.64040778499),
        (16, False, 7.5 + 16.158 + 32.266 + 27.64040778499),
        (25, False, 4.8 + 16.158 + 49.348 + 43.18813716404),
    ],
)
def test_update_with_gzip_matches_values_computed_by_hand(workers: int, once: bool, total: float) -> None:
    update = ALEXNET.naive(workers, GZIP, server_decompressions=1 if once else None)
    assert update.total == close(total)
    assert update.compress == close(16.158)


@pytest.mark.parametrize("workers, rho, h, total", [
    (16, 0.2, 1.0, 7.5 + 5.9648), (16, 0.5, 1.0, 7.5 + 14.912), (16, 0.2, 1.3, 9.75 + 5.9648),
    (16, 0.2, 2.0, 15.0 + 5.9648), (16, 0.057, 0.29, 2.175 + 1.699968), (25, 1.0, 1.0, 51.4),
])  # fmt: skip
def test_homomorphic_update_matches_values_computed_by_hand(workers: int, rho: float, h: float, total: float) -> None:
    update = ALEXNET.homomorphic(workers, rho=rho, h=h)
    assert update.total == close(total)
    assert update.total == close(ALEXNET.bound(workers).seconds(rho, h))
    assert ALEXNET.speed_up(update) == close(ALEXNET.bound(workers).over_one_node(rho, h))


def test_transfer_overtakes_computation_where_the_formula_says() -> None:
    assert ROUND.crossover == close(20.0) and ROUND.most_useful == close(400.0)
    assert ALEXNET.crossover == close(math.sqrt(120 * 125e6 / 233e6)) == close(8.0235704274)
    for training in (ROUND, ALEXNET):
        below, above = math.floor(training.crossover - 1e-9), math.floor(training.crossover) + 1
        assert training.vanilla(below).transfer < training.vanilla(below).compute
        assert training.vanilla(above).transfer > training.vanilla(above).compute
        # There it is at its fastest: more workers only make it slower.
        times = [training.vanilla(workers).total for workers in range(1, 3 * above)]
        assert abs(1 + times.index(min(times)) - training.crossover) <= 1


def test_gzip_loses_for_every_number_of_workers_of_the_paper() -> None:
    for workers in range(1, 26):
        for at_server in (1, None):
            assert ALEXNET.naive(workers, GZIP, server_decompressions=at_server).total > ALEXNET.vanilla(workers).total
    # Even at best it would have to save 19.954 s of a transfer of which it saves 7.32 %: from 147 workers on.
    needed = 19.954 / (1.864 * (1 - 1 / 1.079))
    assert math.ceil(needed) == 147
    for workers, wins in ((146, False), (147, True)):
        gzip = ALEXNET.naive(workers, GZIP, server_decompressions=1)
        assert (gzip.total < ALEXNET.vanilla(workers).total) is wins


def test_compression_pays_up_to_a_limit_of_h_that_depends_on_the_workers() -> None:
    """Figure 6b and c: at 16 workers any h to 2.0 pays; at 2 workers h of 1.1 already loses."""
    vanilla = ALEXNET.vanilla(16).total
    assert all(ALEXNET.homomorphic(16, rho=0.5, h=1 + i / 10).total < vanilla for i in range(11))
    assert ALEXNET.homomorphic(2, rho=0.5, h=1.1).total > ALEXNET.vanilla(2).total


def test_time_of_a_training_includes_what_is_done_once() -> None:
    assert ALEXNET.total(Update(1.0, 2.0), iterations=1000, once=7.0) == close(7 + 5 * 3.0)


def test_invalid_field_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="nbytes must be finite and above 0"):
        Training(nbytes=-1, step_s=1, bandwidth=1)
    with pytest.raises(ConfigError, match="workers must be a whole number of at least 1, got 0"):
        ALEXNET.vanilla(0)
    with pytest.raises(ConfigError, match="times_smaller finite and above 0"):
        Naive.of(1.0, times_smaller=0, compress_s=1, decompress_s=1)
    with pytest.raises(ConfigError, match="compress_s must be finite"):
        Naive(0.5, math.nan, 1)
