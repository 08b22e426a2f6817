"""Measurements of a machine: codecs, a model, processes and transport."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laconic import counters
from laconic.errors import LaconicError
from laconic.plan.calibration import GZIP, Encoding, codec_point, gradient_like, model_times, sum_sizes, summable
from laconic.plan.costs import Network
from laconic.plan.messages import Workload, message_of
from laconic.plan.processes import processes_per_core, run_simultaneously, slowdown_factors
from laconic.plan.profile import Profile, Transport, load, shipped
from laconic.plan.transport import Exchange, fit_transport
from laconic.train import calibrate as calibration

MILLION = 1_000_000


def test_sums_grow_with_the_workers_and_keep_their_size_on_a_ring() -> None:
    two, sixteen = (sum_sizes("thc:4", MILLION, workers) for workers in (2, 16))
    assert two[0] == pytest.approx(sixteen[0], rel=0.01) and two[0] == pytest.approx(MILLION / 2, rel=0.05)
    assert two[0] < two[1] < sixteen[1] <= 1.1 * MILLION
    push, pull = sum_sizes("shared:8", MILLION, 4, ring=True)
    assert push == pull == pytest.approx(MILLION, rel=0.03)
    assert summable("ef|thc:4") and not summable("qsgd:4") and not summable(GZIP)


@pytest.mark.parametrize("spec", ["none", "qsgd:4", "thc:4", "ef|topk:0.01|qsgd:4", GZIP])
def test_codec_is_timed_on_frames_that_decode(spec: str) -> None:
    x = gradient_like(8192)
    point = codec_point(spec, x, budget_s=0.01)
    assert min(point.seconds) > 0 and point.nbytes > 0
    if spec != GZIP:
        encoding = Encoding(spec, x)
        encoding.decode()
        error = float((encoding.out - x).square().sum() / x.square().sum())
        assert error < (1.0 if "topk" in spec else 0.2) and len(encoding.frame) == pytest.approx(point.nbytes, rel=0.05)
        for _ in range(40):
            encoding.add()


def test_model_is_timed_with_its_own_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 10))
    batch = torch.randn(16, 100), torch.randint(10, (16,))
    times = model_times(model, batch, nn.functional.cross_entropy, ["qsgd:4", "thc:4"], turns=2)
    assert times.numel == 11_110 and sorted(times.numels) == [10, 100, 1000, 10_000]
    assert times.numels[-1] in (100, 10_000)  # gradients of the first layer come last
    assert times.ready[-1][1] == 1.0 and all(0 < time <= 1 for time, _ in times.ready)
    # 10,000 values in 4 bits, three small slots in float32.
    assert times.messages["qsgd:4"]["push"] == pytest.approx(5000 + 4440, rel=0.1)
    workload = Workload.of_model(times)
    message = message_of(Profile("x"), workload, "qsgd:4", Network(2, 1e9))
    assert workload.numel == 11_110 and message.push == times.messages["qsgd:4"]["push"]


def test_processes_start_together_and_report_a_number() -> None:
    program = "import os; print('ready', flush=True); input(); print({})"
    pids = run_simultaneously(2, ["-c", program.format("os.getpid()")])
    assert len(set(pids)) == 2
    for broken in ("raise SystemExit(3)", program.format("0")):
        with pytest.raises(LaconicError, match="a measuring process"):
            run_simultaneously(1, ["-c", broken])
    assert processes_per_core(1) == 1.0 and processes_per_core(64) > processes_per_core(2) >= 1.0


@pytest.mark.slow
def test_more_processes_than_cores_are_slower_than_one() -> None:
    cores = os.cpu_count() or 1
    factors = slowdown_factors([2 * cores], seconds=0.3)
    assert 2.0 <= factors[2 * cores] < 8.0


def test_fit_recovers_the_transport_of_exact_exchanges() -> None:
    transport = Transport(0.008, 0.0009, 6e-9)
    exchanges = [
        Exchange(slots, nbytes, 0.02 + transport.seconds(slots) + transport.byte_s * nbytes, 0.02)
        for slots, nbytes in ((2, 1e4), (34, 1e4), (2, 8e6), (2, 3.2e7))
    ]
    fitted = fit_transport(exchanges)
    assert fitted.exchange_s == pytest.approx(0.008) and fitted.slot_s == pytest.approx(0.0009)
    assert fitted.byte_s == pytest.approx(6e-9)


def test_fit_has_no_negative_times_if_noise_hides_a_term() -> None:
    exchanges = [Exchange(2, 1e4, 0.010, 0.0), Exchange(34, 1e4, 0.009, 0.0), Exchange(2, 8e6, 0.05, 0.0)]
    fitted = fit_transport(exchanges)
    assert fitted.slot_s == 0.0 and fitted.exchange_s > 0 and fitted.byte_s > 0


@pytest.mark.slow
def test_transport_of_real_processes_is_measured() -> None:
    pytest.importorskip("grpc")
    transport = calibration.measure_transport(load("cpu"), exchanges=8)
    assert 1e-4 < transport.exchange_s < 1.0 and 0 <= transport.slot_s < 0.1 and 0 <= transport.byte_s < 1e-6


@pytest.mark.slow
def test_exchanges_of_real_ranks_are_measured() -> None:
    measured = calibration.measure_ranks("cpu", turns=6)
    assert set(measured) == {"none", "sum", "twoshot"}
    for way, times in measured.items():
        assert (1e-4 if way != "none" else 0.0) < times.exchange_s < 1.0 and 0 <= times.slot_s < 0.1
        assert 0 < times.byte_s < 1e-6


@pytest.mark.slow
def test_one_rank_exchanges_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with one GPU: NCCL needs one for each rank."""
    monkeypatch.setattr(calibration, "rank_count", lambda device: 1)
    measured = calibration.measure_ranks("cpu", turns=6)
    assert set(measured) == {"none", "sum", "twoshot"} and measured["twoshot"].exchange_s > 0
    assert "exchanges with itself" in calibration._about("cpu", 1, True)


def test_part_that_fails_is_left_out_of_the_profile_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise LaconicError("no server")

    for name in ("measure_transport", "measure_ranks"):
        monkeypatch.setattr(calibration, name, fail)
    before = counters.counts().get("calibration_incomplete", 0)
    profile = calibration.calibrate("x", codecs=["none"], quick=True)
    assert profile.transport is None and profile.collective == {} and profile.codecs["none"]
    assert counters.counts()["calibration_incomplete"] == before + 2


@pytest.mark.parametrize(
    "load_average, others, busy", [(0.1, 0.02, False), (9.0, 0.02, False), (0.1, 0.4, True), (99.0, None, True)]
)
def test_machine_is_busy_if_other_processes_use_its_cores(
    load_average: float, others: float | None, busy: bool
) -> None:
    assert calibration.busy(load_average, others) is busy


def fields(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all fields; names of codecs, models and numbers of processes become ``*``."""
    if isinstance(value, list):
        for item in value[:3]:
            yield from fields(item, f"{path}[]")
    elif isinstance(value, dict):
        named = path in ("codecs", "models", "slowdown", "collective") or path.endswith(".messages")
        for name, item in value.items():
            yield from fields(item, f"{path}.{'*' if named else name}".lstrip("."))
    elif value is not None:
        yield path


def test_every_field_of_a_shipped_profile_is_written_by_calibrate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jang2017 is exempt: it holds the figures of the paper, which its ``source`` says."""
    monkeypatch.setattr(calibration, "measure_transport", lambda *args, **options: Transport(0.01, 0.001, 1e-9))
    ranks = {way: Transport(0.01, 0.001, 1e-9) for way in ("none", "sum", "twoshot")}
    monkeypatch.setattr(calibration, "measure_ranks", lambda device, turns: ranks)
    monkeypatch.setattr(calibration, "slowdown_factors", lambda counts, **options: dict.fromkeys(counts, 1.0))
    profile = calibration.calibrate("x", models=["lenet5"], codecs=["qsgd:4"], processes=[2], quick=True)
    profile.save(tmp_path / "x.json")
    assert load(tmp_path / "x.json") == profile and profile.load is not None
    # Everything that a profile can hold is measured, but for the link, which needs a --peer. (Outside of git there is
    # no commit).
    assert {one.name for one in dataclasses.fields(Profile) if not getattr(profile, one.name)} - {"commit"} == {"links"}
    written, *others = (
        set(fields(json.loads(json.dumps(one.to_json())))) for one in (profile, *map(load, {*shipped()} - {"jang2017"}))
    )
    assert all(shipped_fields - written - {"machine.gpu"} == set() for shipped_fields in others)
    assert load("jang2017").source.startswith("Jang, Na and Yoon 2017")
