from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from laconic.channels import Channel
from laconic.cluster.job import Job
from laconic.frames import decode
from laconic.policy import Policy
from laconic.records import read
from laconic.train.metrics import MAX_POINTS, SlotCount, Track, missed_updates, relative_error, write_records
from laconic.train.run import Config
from laconic.train.snapshots import SHARE, SampledAccuracy, Snapshots


@pytest.mark.parametrize("count", [1, MAX_POINTS, MAX_POINTS + 1, 1000, 12_345])
def test_track_of_a_long_run_is_thinned(count: int) -> None:
    track = Track()
    for i in range(1, count + 1):
        track.add(i, i / 10, 1 / i, 100 * i, 50 * i)
    columns = track.columns
    iterations = columns["iteration"]
    assert len(iterations) <= MAX_POINTS + 1 and iterations[0] == 1 and iterations[-1] == count
    assert len(iterations) >= min(count, MAX_POINTS // 2) and iterations == sorted(set(iterations))
    assert columns["bytes_sent"] == [100 * i for i in iterations] and columns["seconds"][-1] == count / 10


def test_relative_error_includes_the_residual() -> None:
    policy = Policy(min_numel=0, exempt_1d=False)
    plain, ef = Channel("topk:0.5", policy=policy), Channel("ef|topk:0.5", policy=policy)
    x = torch.tensor([1.0, 3.0])
    for channel in (plain, ef):
        assert relative_error(x, decode(channel.encode("w", x)), channel.residual("w")) == pytest.approx(0.1)
    again = decode(ef.encode("w", x))  # (2, 3) is to be sent, 3 is sent
    assert relative_error(x, again, ef.residual("w")) == pytest.approx(4 / 13)
    zeros = torch.zeros(2)
    assert relative_error(zeros, zeros, None) is None


def test_missed_updates_count_gradients_by_staleness() -> None:
    events = [
        {"event": "pull", "worker": 0}, {"event": "pull", "worker": 1}, {"event": "applied", "worker": 0},
        {"event": "applied", "worker": 1}, {"event": "pull", "worker": 1}, {"event": "applied", "worker": 1},
    ]  # fmt: skip
    assert missed_updates(events) == {0: 2, 1: 1}
    assert missed_updates([]) == {}


def test_records_add_up_all_workers(tmp_path: Path) -> None:
    config = Config(iterations=2, job=Job(workers=2, mode="async", returns="weights"))
    for worker in range(2):
        track = Track()
        track.add(1, 0.5, 2.0, 10, 20)
        track.save(tmp_path, worker, {"w": SlotCount(4, 10 + worker, 20, [0.5 * worker])})
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps({"at": 0.0, "event": what, "worker": 0}) + "\n" for what in ("pull", "applied"))
    )
    write_records(config, tmp_path, {"method": "1", "accuracy": 90.0}, numel=4)
    records = {record.kind: record.values for record in read(tmp_path / "records.jsonl")}
    assert records["train.run"] == {"run": tmp_path.name, "method": "1", "accuracy": 90.0, "numel": 4}
    assert records["train.track"]["worker"] == 1 and records["train.track"]["bytes_received"] == [20]
    assert records["train.slots"]["slots"] == [
        {"slot": "w", "numel": 4, "sent": 21, "received": 40, "errors": [0.0, 0.5]}
    ]
    assert records["train.staleness"]["missed"] == {"0": 1}


def test_snapshots_are_evaluated_after_the_run() -> None:
    torch.set_num_threads(1)
    task = Config().task()
    snapshots = Snapshots(task, iterations=100)
    weight = task.model.get_parameter("head.bias")
    with torch.no_grad():
        for iteration in range(1, 101):
            weight.fill_(0.0)
            weight[iteration // 50] = 1000.0  # always the same digit
            snapshots.update(iteration, iteration / 2, 10 * iteration, 20 * iteration)
    points = snapshots.evaluate(0.01)
    assert points["iteration"] == list(range(10, 101, 10)) and points["bytes_received"][-1] == 2000
    by_digit = {}
    for digit in range(3):
        with torch.no_grad():
            weight.fill_(0.0)
            weight[digit] = 1000.0
        by_digit[digit] = task.evaluate()["accuracy"]
    assert points["accuracy"] == [by_digit[i // 50] for i in points["iteration"]]
    assert snapshots.evaluate(1.0)["iteration"] == [20, 40, 60, 80, 100]  # there is time for five
    assert snapshots.evaluate(3.0) == {} and Snapshots(task, 100).evaluate(0.01) == {}


def test_large_model_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.train.snapshots.MAX_NBYTES", 2_000_000)  # enough for one copy
    snapshots = Snapshots(Config().task(), iterations=10)
    snapshots.update(10, 1.0, 1, 1)
    assert snapshots.evaluate(0.01) == {}


def test_sampled_accuracy_is_written_while_it_takes_little_of_the_time(tmp_path: Path) -> None:
    task = Config().task()
    sampled = SampledAccuracy(task, tmp_path, iterations=100_000, batch=32)
    file = tmp_path / "accuracy.jsonl"
    sampled.update(1999, 1e6)  # not due: samples are 2,000 iterations apart
    assert not file.exists()
    for iteration, seconds in ((2000, 1e6), (2001, 1e6), (4000, 2e6)):
        sampled.update(iteration, seconds)
    sampled.update(6000, sampled._spent_s / SHARE)  # due, but it would exceed the share
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [2000, 4000]
    assert all(64 <= line["examples"] <= 128 for line in lines)
    assert all(line["accuracy"] == task.evaluate(128)["accuracy"] for line in lines)
    few = SampledAccuracy(task, tmp_path / "few", iterations=10, batch=32)
    few.update(1, 1.0)  # one evaluation would take a large part of so short a run
    assert not (tmp_path / "few" / "accuracy.jsonl").exists()
