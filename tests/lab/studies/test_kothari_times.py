"""Times of a real server: what is measured, left out, and measured again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laconic.errors import ConfigError, LaconicError
from laconic.records import read
from laconic_lab.bench.cluster import processes
from laconic_lab.network import Link
from laconic_lab.studies.kothari2021 import STUDY, times
from laconic_lab.studies.kothari2021.settings import setting_of
from laconic_lab.studies.kothari2021.times import Plan
from laconic_lab.studies.record_log import RecordLog


def report(done: int, **values: Any) -> dict[str, Any]:
    """Return the report of a worker after so many exchanges of 2 s, half of which is computation."""
    reported = {"total_s": 5 + 2.0 * done, "compute": 1.0 * done, "encode": 0.1 * done, "communication": 0.8 * done,
            "overlapped": 0.3 * done, "apply": 0.2 * done, "bytes_sent": 100 * done, "bytes_received": 50 * done,
            "retries": 0}  # fmt: skip
    return reported | values


REPORTS = [[report(i + 1) for i in range(6)], [report(i + 1, compute=3.0 * (i + 1)) for i in range(7)]]


def test_summary_leaves_out_the_warm_up() -> None:
    summary = times._summary(REPORTS, 2, every=5)
    assert (summary["iterations"], summary["total_s"], summary["compute_s"]) == (20, 8.0, 8.0)
    assert summary["exchange_s"] == [2.0] * 4 and summary["median_s"] == pytest.approx(0.4)
    assert summary["bytes_per_iteration"] == 60 and summary["push_bytes_per_iteration"] == 40  # of both


@pytest.mark.parametrize(
    "exchanges, seconds, ends", [(99, 1, False), (100, 1, True), (20, 30, True), (19, 31, False), (20, 29, False)]
)
def test_turn_ends_after_enough_exchanges_or_seconds(exchanges: int, seconds: float, ends: bool) -> None:
    assert times._Enough(exchanges=100, least=20, seconds=30).reached(exchanges, seconds) == ends


@pytest.mark.parametrize("changes", [{"links": ["10gbit"]}, {"turns": 0}, {"iterations": 0}, {"cell_seconds": 0.0}])
def test_invalid_plan_raises_config_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"at least 1|unknown link '10gbit'"):
        Plan(**changes)


@pytest.mark.slow
def test_times_of_a_real_server_and_workers_are_recorded(tmp_path: Path) -> None:
    settings = [setting_of("lenet5", "5", data="digits")]
    plan = Plan(iterations=4, turns=1, links=["100mbit"])
    reported: list[tuple[str, int, int]] = []
    path = tmp_path / "times.jsonl"
    (record,) = times.measure_all(
        settings, plan, records=RecordLog(path), made_of=processes.PACED, progress=lambda *one: reported.append(one)
    )
    values = record.values
    assert (values["iterations"], values["epochs"], values["iterations_per_epoch"], values["every"]) == (10, 20, 30, 1)
    assert len(values["exchange_s"]) == 10 and 0 < values["compute_s"] < values["total_s"]
    spent = values["compute_s"] + values["communication_s"] + values["apply_s"]
    assert spent == pytest.approx(values["total_s"], rel=0.2)
    assert 60_000 < values["bytes_per_iteration"] < 70_000
    assert reported == [("lenet5, 100mbit, method 5, turn 1", 0, 1), ("times", 1, 1)]
    assert [one.kind for one in read(path)] == ["kothari2021.time"]


class Wire(SimpleNamespace):
    """A network with a given link on which nothing runs."""

    made_of, certs, host = "words", None, "127.0.0.1"

    def measure(self) -> list[Link]:
        return [Link(1e9, self.goodput, 1e-4, "bbr")]

    def reach(self, port: int) -> str:
        return f"{self.host}:{port}"

    def start(self, host: int) -> Callable[..., Any]:
        return lambda argv, **options: subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], **options)


def test_invalid_or_busy_turns_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, trained, load = Wire(goodput=5e8), [], [9.0]

    @contextmanager
    def network(*_: Any) -> Iterator[Wire]:
        yield wire

    reports = [[report(i + 1) for i in range(12)]] * 2  # with a warm-up of three exchanges only nine count

    def train(net: Any, run_dir: Path, warm_up: int, enough: Any) -> Any:
        trained.append(enough)
        return reports

    monkeypatch.setattr(processes, "network", network)
    monkeypatch.setattr(times, "_train", train)
    monkeypatch.setattr(times.os, "getloadavg", lambda: (load[0], 0.0, 0.0))

    def go() -> list[Any]:
        plan = Plan(links=["1gbit"], cell_seconds=10)
        return STUDY.run("times", models=["lenet5"], methods=["1", "6"], data="digits", timing=plan, records=tmp_path)

    assert [one.values["valid"] for one in go()] == [False] * 4
    assert trained[0] == (100, 10, 5.0) and trained[1] == (10, 10, 5.0)
    wire.goodput = 9.5e8
    assert [one.values["valid"] for one in go()] == [True] * 4 and len(trained) == 8
    reports[:] = [[report(i + 1) for i in range(13)]] * 2
    go()
    assert len(trained) == 10  # method 1 has ten exchanges now; method 6 had eleven before
    go()
    assert len(trained) == 10  # others work still
    load[0] = 1.0
    go()
    go()
    assert len(trained) == 14
    timed = STUDY.load(tmp_path).times
    assert list(timed) == [("lenet5", "1gbit", "1"), ("lenet5", "1gbit", "6")] and timed["lenet5", "1gbit", "1"].valid


def test_server_that_ends_raises_laconic_error(tmp_path: Path) -> None:
    with pytest.raises(LaconicError, match="the server has ended with exit code 3"):
        times._train(Wire(), tmp_path, 1, times._Enough(1, 1, 1.0))  # type: ignore[arg-type]
