"""Whole trainings of kothari2021: which there are, what their Records become, and one by real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laconic.errors import ConfigError
from laconic.records import Record, read
from laconic_lab.bench.cluster.processes import PACED, network
from laconic_lab.studies.kothari2021 import STUDY, trainings
from laconic_lab.studies.kothari2021.results import Results
from laconic_lab.studies.kothari2021.trainings import MODES, SITUATIONS, TRAINING, cases_of, seconds_to, train_all
from laconic_lab.studies.record_log import RecordLog


def test_unequal_trainings_cover_every_mode_in_every_situation() -> None:
    cases = list(cases_of("unequal", None, None))
    assert {(case.situation, case.mode) for case in cases} == {(a, b) for a in SITUATIONS for b in MODES}
    jobs = {case.mode: case.setting.job(0) for case in cases}
    assert jobs["sync, 1 backup"].backup == 1 and jobs["bounded:4"].mode == "bounded:4"
    (free,) = [case for case in cases_of("unequal", ["laconic"], None) if (case.situation, case.mode)[1] == "async"][:1]
    assert free.setting.options["returns"] == "delta"  # without rounds workers cannot repeat the server's steps
    whole = list(cases_of("whole", None, None))
    assert [case.setting.name for case in whole] == ["1", "5", "laconic"] and whole[0].setting.data == "mnist"


def test_time_to_an_accuracy_is_that_of_the_first_copy_that_has_it() -> None:
    values: dict[str, Any] = {"accuracy": [50.0, 95.5, 94.0, 97.0], "accuracy_s": [1.0, 2.0, 3.0, 4.0]}
    assert seconds_to(values, 95.0) == (2.0, 97.0) and seconds_to(values, 98.0) == (None, 97.0)


def training(update: str, seconds: float, *, method: str = "1", part: str = "unequal", **more: Any) -> Record:
    values = {
        "part": part, "model": "lenet5", "method": method, "data": "digits", "epochs": 2, "seed": 0, "workers": 3,
        "situation": "one slow worker", "update": update, "link": "100mbit", "seconds": seconds, "iterations": 9,
        "accuracy": [90.0, 96.0], "accuracy_s": [seconds / 2, seconds], "push_bytes": [1], "pull_bytes": [1],
        "valid": True, "load_average": [0.1, 1.0],
    }  # fmt: skip
    return Record(TRAINING, values | more)


def test_tables_and_the_claim_of_asynchronous_training_follow_from_the_records() -> None:
    slow = training("sync", 99.0, valid=False)  # over an invalid link: does not count
    whole = [training("sync", s, method=m, part="whole", situation="equal") for m, s in (("1", 30.0), ("5", 10.0))]
    results = Results([training("sync", 8.0), slow, training("async", 6.0), *whole])
    findings = {one.claim.key: one for one in STUDY.findings(results)}
    assert findings["async_time"].evidence.interval.mean == 0.75 and findings["async_time"].verdict == "yes, one run"
    tables = {table.title: table.rows for table in STUDY.all_tables(results)}
    assert [row[5] for row in tables["One slow worker, one slow link"]] == ["8.0", "6.0"]
    assert [row[5] for row in tables["Trained from start to end over a slow link"]] == ["1.00", "3.00"]


def test_one_slow_link_needs_network_namespaces(caplog: pytest.LogCaptureFixture) -> None:
    slow = [case for case in cases_of("unequal", None, None) if case.situation == "one slow link"]
    with caplog.at_level("WARNING", "laconic"):
        assert train_all(slow, made_of=PACED) == []
    assert "4 trainings with one slow link are left out" in caplog.text
    with pytest.raises(ConfigError, match="one slow link needs network namespaces"):
        network(PACED, "100mbit", 2, slow="10mbit").__enter__()


@pytest.mark.slow
def test_slow_worker_delays_rounds_but_not_backup_rounds(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "unequal.jsonl")
    cases = [case for case in cases_of("unequal", None, None) if case.situation == "one slow worker"]
    chosen = [case for case in cases if case.mode in ("sync", "sync, 1 backup")]
    records = train_all(chosen, epochs=2, records=log, made_of=PACED)
    waits, goes_on = (record.values for record in records)
    assert waits["seconds"] > goes_on["seconds"] and waits["accuracy_s"][-1] <= waits["seconds"] * 1.01
    assert len(read(tmp_path / "unequal.jsonl")) == 2 and trainings.EXPERIMENTS == ("whole", "unequal")
    valid = [case for case, record in zip(chosen, records, strict=True) if record.values["valid"]]
    again = train_all(valid, epochs=2, records=log, made_of=PACED)  # nothing is trained again
    assert len(read(tmp_path / "unequal.jsonl")) == 2 and len(again) == len(valid)
