"""The bound of jang2017, compared with values computed by hand."""

from __future__ import annotations

import math

import pytest

from laconic.errors import ConfigError
from laconic.plan import Bound

# AlexNet of 61.1 M float32 on 16 workers at 1 Gbit/s, 0.6 s a minibatch: M² W / BW = 256 * 244.4e6 / 125e6 = 500.5 s.
ALEXNET = Bound(workers=16, nbytes=244.4e6, step_s=0.6, bandwidth=125e6)
# Round numbers: k = 4² * 100 / (2 * 5 * 20) = 8; ideal 2 * 5 / 4 = 2.5 s; a dense exchange 4 * 100 / 20 = 20 s.
ROUND = Bound(workers=4, nbytes=100.0, step_s=5.0, bandwidth=20.0, every=2)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-12)


def test_every_quantity_of_an_example_in_round_numbers() -> None:
    assert ROUND.ideal_s == close(2.5)
    assert ROUND.slope == close(8.0)
    assert ROUND.seconds() == close(22.5)
    assert ROUND.seconds(0.1, 0.5) == close(1.25 + 2.0)
    assert ROUND.seconds(0.25, 1.2) == close(3.0 + 5.0)
    assert ROUND.r_min() == close(9.0)
    assert ROUND.r_min(0.1, 0.5) == close(1.3)
    assert ROUND.r_min(0.25, 1.2) == close(3.2)
    assert ROUND.over_one_node() == close(4 / 9)
    assert ROUND.over_one_node(0.1, 0.5) == close(4 / 1.3)
    assert ROUND.over_vanilla(0.1, 0.5) == close(9 / 1.3)
    assert ROUND.over_vanilla(1.0, 1.0) == close(1.0)
    assert ROUND.largest_rho(0.5, target=1.3) == close(0.1)
    assert ROUND.largest_h(0.1, target=1.3) == close(0.5)
    assert ROUND.with_encoding(0.5, 0.25) == close(0.6)
    assert ROUND.every_iterations(20).slope == close(0.8)


def test_feasibility_changes_at_the_bound() -> None:
    assert ROUND.feasible(0.125, 1.0, target=2.0) and not ROUND.feasible(0.126, 1.0, target=2.0)
    assert ROUND.largest_rho(2.0, target=1.5) == 0.0 and ROUND.largest_rho(0.5, target=100.0) == 1.0
    assert ROUND.largest_h(0.5, target=1.0) == close(-3.0)
    assert ROUND.beats_one_node(0.4, 0.7) and not ROUND.beats_one_node(0.4, 0.8)  # 0.7 + 3.2 = 3.9, 0.8 + 3.2 = 4
    assert ROUND.beats_vanilla(0.5, 4.9) and not ROUND.beats_vanilla(0.5, 5.0)  # 1 + 8 / 2 = 5


@pytest.mark.parametrize(
    "every, rho, h, r_min, over_one, over_vanilla",
    [
        (200, 1.0, 1.0, 5.1711, 3.0941, 1.0),  # k = 500.5312 / 120 = 4.17109
        (20, 1.0, 1.0, 42.711, 0.37461, 1.0),
        (200, 0.057, 0.29, 0.52775, 30.317, 9.7983),  # factors in fully connected layers and convolutions
        (20, 0.057, 0.29, 2.6675, 5.9981, 16.011),
        (200, 0.1, 1.06, 1.4771, 10.832, 3.5008),  # a subspace
        (1, 0.1, 1.06, 84.482, 0.18939, 9.8864),
    ],
)
def test_alexnet_matches_values_computed_by_hand(
    every: int, rho: float, h: float, r_min: float, over_one: float, over_vanilla: float
) -> None:
    bound = ALEXNET.every_iterations(every)
    assert bound.r_min(rho, h) == pytest.approx(r_min, rel=2e-4)
    assert bound.over_one_node(rho, h) == pytest.approx(over_one, rel=2e-4)
    assert bound.over_vanilla(rho, h) == pytest.approx(over_vanilla, rel=2e-4)
    assert bound.seconds(rho, h) == pytest.approx(bound.r_min(rho, h) * every * 0.6 / 16, rel=1e-12)
    assert bound.feasible(rho, h, target=r_min * 1.001) and not bound.feasible(rho, h, target=r_min * 0.999)


def test_one_gigabit_needs_less_than_two_per_cent_when_every_iteration_is_exchanged() -> None:
    assert ALEXNET.slope == pytest.approx(834.22, rel=1e-4)
    assert ALEXNET.largest_rho(1.0, target=16.0) == pytest.approx(15 / 834.22, rel=1e-4)


@pytest.mark.parametrize("options, message", [
    ({"workers": 0}, "workers must be a whole number of at least 1, got 0"),
    ({"every": 1.5}, "every must be a whole number"), ({"nbytes": 0.0}, "nbytes must be finite and above 0"),
    ({"step_s": math.nan}, "step_s must be finite and above 0"),
    ({"bandwidth": math.inf}, "bandwidth must be finite and above 0"),
])  # fmt: skip
def test_invalid_field_raises_config_error(options: dict[str, float], message: str) -> None:
    values = {"workers": 2, "nbytes": 1.0, "step_s": 1.0, "bandwidth": 1.0} | options
    with pytest.raises(ConfigError, match=message):
        Bound(**values)  # type: ignore[arg-type]
    for rho, h in ((-0.1, 1.0), (0.1, math.nan)):
        with pytest.raises(ConfigError, match="must be finite and at least 0"):
            ROUND.r_min(rho, h)
