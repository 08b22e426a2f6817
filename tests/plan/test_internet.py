"""Low-communication training over the internet, on paper."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from laconic.errors import ConfigError
from laconic.plan.internet import DATA_CENTRE, HOME, Fleet, Line, LocalTraining, Prediction, predict
from laconic.units import GOODPUT

COVENANT = LocalTraining(every=30, step_tokens=192 * 2048, up_bits=14 / 64, exchange="gather")
"""SparseLoCo as in arXiv:2603.08163: 64 of 4,096 values by 14 bits, H = 30, batches of 192 sequences of 2,048."""


def test_bytes_of_a_round_are_those_that_covenant_published() -> None:
    """1/4,380 of float32 gradients up and about 1/219 down with 20 replicas: notes of the paper, per step."""
    fleet = Fleet(20, tokens_s=10_000.0, line=replace(HOME, spread=0.0))
    prediction = predict(72e9, 1.1e12, fleet, COVENANT, rounds=3)
    dense = 30 * 4 * 72e9
    assert dense / prediction.sent == pytest.approx(4380, rel=0.01) and dense / prediction.received == pytest.approx(
        219, rel=0.06
    )


def test_utilisation_beside_the_published_one_of_covenant() -> None:
    """Published are 94.5 % and 70 s of waiting: rounds of 20 minutes. The lines given explain it only with overlap."""
    tokens_s = 30 * 192 * 2048 / (20 * 60)
    fleet = Fleet(20, tokens_s=tokens_s, line=replace(HOME, spread=0.0))
    open_ended = predict(72e9, 1.1e12, fleet, COVENANT, rounds=3)
    # Nothing hidden: 1.97 GB up take 150 s at 110 Mbit/s and 37 GB down 627 s at 500 Mbit/s.
    assert open_ended.exchange_s == pytest.approx((1.97e9 / 110e6 + 19 * 1.97e9 / 500e6) * 8 / GOODPUT, rel=0.01)
    assert open_ended.utilisation == pytest.approx(1200 / (1200 + open_ended.exchange_s), rel=1e-6)
    assert 0.6 < open_ended.utilisation < 0.7
    hidden = predict(72e9, 1.1e12, fleet, replace(COVENANT, overlap=18), rounds=3)
    assert hidden.utilisation == pytest.approx(0.945, abs=0.02)


def test_small_fleet_is_computed_by_hand() -> None:
    fleet = Fleet(4, tokens_s=100.0, line=Line(8e6, 8e6))
    training = LocalTraining(every=10, step_tokens=100.0, up_bits=8.0, exchange="server", server_rate=16e6)
    result = predict(1e6, 1e6, fleet, training, rounds=5)
    # 4 MB through a server of 2 MB/s, each way, at the goodput of the lab's links; steps take 10 s.
    assert result.exchange_s == pytest.approx(4 / GOODPUT) and result.round_s == pytest.approx(10 + 4 / GOODPUT)
    assert result.utilisation == pytest.approx(10 / (10 + 4 / GOODPUT)) and result.sent == result.received == 1e6
    assert result.days == pytest.approx(1e6 / (4 * 1000 / result.round_s) / 86_400)
    more = predict(1e6, 1e6, fleet, replace(training, servers=4), rounds=5)
    assert more.exchange_s == pytest.approx(2 / GOODPUT)  # now each replica's own link is the slowest


def test_fragments_overlap_quorum_and_time_help_what_they_should() -> None:
    fleet = Fleet(64, tokens_s=1000.0, line=HOME, spread=0.4)
    training = LocalTraining(every=40, step_tokens=4000.0, up_bits=1.0)

    def predicted(**changes: Any) -> Prediction:
        return predict(7e9, 1e12, fleet, replace(training, **changes), rounds=40)

    def utilisation(**changes: Any) -> float:
        return predicted(**changes).utilisation

    plain = utilisation()
    assert utilisation(overlap=30) > plain and utilisation(fragments=4, overlap=9) > plain
    assert utilisation(by_time=True) > 1.3 * plain  # nobody waits for the slowest
    assert predicted(quorum=0.8).round_s < predicted().round_s  # at the price of the work of the others
    assert utilisation(up_bits=0.125) > plain


def test_churn_loses_work_and_replicas() -> None:
    fleet = Fleet(100, tokens_s=1000.0, line=DATA_CENTRE)
    training = LocalTraining(every=30, step_tokens=4000.0, up_bits=1.0, exchange="server", servers=8)
    steady = predict(7e9, 1e12, fleet, training)
    unsteady = predict(7e9, 1e12, replace(fleet, stay_h=2.0, away_s=600.0), training)
    assert steady.present == 1 and unsteady.present == pytest.approx(2 / (2 + (600 + 11.7) / 3600), abs=0.04)
    assert unsteady.utilisation < steady.utilisation and unsteady.days > steady.days


def test_regions_save_long_distance_traffic_of_a_gather() -> None:
    fleet = Fleet(100, tokens_s=1000.0)
    training = LocalTraining(every=30, step_tokens=4000.0, up_bits=0.2, exchange="gather")
    one, ten = (predict(7e9, 1e12, replace(fleet, regions=n), training, rounds=20) for n in (1, 10))
    assert ten.received < one.received / 9 and ten.utilisation > one.utilisation


def test_ten_thousand_replicas_take_seconds() -> None:
    began = time.process_time()
    fleet = Fleet(10_000, tokens_s=1000.0, spread=0.3, stay_h=10.0, away_s=300.0)
    prediction = predict(70e9, 1e12, fleet, LocalTraining(100, 4000.0, 0.1, quorum=0.9, overlap=50), rounds=100)
    assert 0 < prediction.utilisation < 1 and time.process_time() - began < 10


@pytest.mark.parametrize("make, message", [
    (lambda: Line(0, 1), "rates above 0"), (lambda: Fleet(1, 1.0), "replicas must be at least 2"),
    (lambda: LocalTraining(10, 1.0, 1.0, exchange="mail"), "exchange must be one of server, twoshot, gather"),
    (lambda: LocalTraining(10, 1.0, 1.0, fragments=3), "every must be a multiple of fragments"),
    (lambda: LocalTraining(8, 1.0, 1.0, fragments=4, overlap=2), "overlap must be below 2 steps"),
    (lambda: predict(0, 1, Fleet(2, 1.0), LocalTraining(1, 1.0, 1.0)), "params, tokens and rounds"),
])  # fmt: skip
def test_invalid_setting_raises_config_error(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
