"""Claims and tables of kothari2021 follow from its Records."""

from __future__ import annotations

from typing import Any

import pytest

from laconic.records import Record
from laconic_lab.studies.intervals import Interval
from laconic_lab.studies.kothari2021 import STUDY
from laconic_lab.studies.kothari2021.results import RUN, Results, Row
from laconic_lab.studies.kothari2021.times import TIME


def record(name: str, seed: int = 0, part: str = "accuracy", model: str = "vgg11", **values: Any) -> Record:
    fields = {
        "part": part, "name": name, "model": model, "data": "cifar10", "epochs": 2, "device": "cuda", "seed": seed,
        "iterations": 10, "accuracy": [50.0, 86.0], "push_bytes": [500_000_000, 500_000_000],
        "pull_bytes": [200_000_000, 200_000_000], "frames_compared": 12, "frames_other": 0, "workers": 2,
        "mode": "sync", "options": {},
    }  # fmt: skip
    return Record(RUN, fields | values, seed=seed)


def time_of(method: str, link: str, total: float, communication: float, turn: int = 0, **values: Any) -> Record:
    """200 iterations, one exchange each."""
    fields = {
        "model": "vgg11", "method": method, "link": link, "turn": turn, "data": "cifar10", "options": {}, "every": 1,
        "iterations": 200, "iterations_per_epoch": 100, "epochs": 50, "compute_s": 1.0, "encode_s": 0.2,
        "overlapped_s": 0.1, "apply_s": 0.1, "communication_s": communication, "total_s": total,
        "exchange_s": [total / 200] * 200, "valid": True, "link_measured": [95e6, 94e6], "load_average": [0.5, 2.0],
        "link_made_of": "network namespaces", "retries": 0,
    }  # fmt: skip
    return Record(TIME, fields | values)


def few(name: str, seed: int = 0, **values: Any) -> Record:
    return record(name, seed, push_bytes=[200_000, 200_000], pull_bytes=[300_000, 300_000], **values)


SOME = [
    record("1"), record("1", 1, accuracy=[40.0, 87.0]), record("1", 2, accuracy=[40.0, 86.5]),
    record("3"), few("5", accuracy=[60.0, 79.0]), few("6", accuracy=[70.0, 80.0]),
    few("laconic-min", accuracy=[60.0, 85.8]), few("laconic-min", 1, accuracy=[60.0, 86.4]),
    few("without error feedback", part="ingredients", accuracy=[60.0, 70.0]),
    few("less", part="frontier"), record("1", model="lenet5", data="mnist"),
    record("6", model="lenet5", data="mnist", accuracy=[50.0, 85.0]),
    record("5", part="workers", model="lenet5", workers=4, mode="async", staleness_mean=2.5, staleness_most=7,
           diverged=False),
    time_of("1", "unshaped", 10.0, 4.0), time_of("5", "unshaped", 8.0, 2.0), time_of("6", "unshaped", 6.0, 1.0),
    time_of("1", "100mbit", 100.0, 94.0),
]  # fmt: skip


def table(results: Results, title: str) -> list[tuple[str, ...]]:
    return [tuple(row) for one in STUDY.all_tables(results) if one.title == title for row in one.rows]


def intervals_of(records: list[Record]) -> dict[str, Interval]:
    return {one.claim.key: one.evidence.interval for one in STUDY.findings(Results(records))}


def test_claims_are_compared_with_the_records() -> None:
    intervals = intervals_of(SOME)
    assert intervals["vgg_1_mb"].mean == pytest.approx(140.0)
    assert intervals["vgg_3_as_1"].mean == 1.0
    assert intervals["vgg_1_top1"].mean == pytest.approx(86.5) and intervals["vgg_1_top1"].runs == 3
    assert intervals["vgg_6_over_5"].mean == pytest.approx(1.0)
    assert intervals["lenet_loss"].mean == pytest.approx(1.0)
    assert intervals["vgg_comm_5"].mean == 0.5 and intervals["vgg_comm_6"].mean == 0.25
    assert intervals["vgg_minutes_6"].mean == pytest.approx((10 - 6) / 200 * 5000 / 60)
    assert "vgg_2w" not in intervals and "lenet_time_6" not in intervals


def test_loss_is_a_difference_by_seed() -> None:
    results = Results(SOME)
    row = results.row("vgg11", "laconic-min")
    assert row is not None and results.loss(row) == pytest.approx([0.2, 0.6]) and results.less(row) == 1400
    (goal,) = table(results, "Fewer bytes without losing accuracy")
    assert goal[3] == "1/1,400" and goal[-1] == "no: its interval"


def test_tables_of_the_paper_show_the_records() -> None:
    results = Results(SOME)
    top1 = {row[:2]: row for row in table(results, "Top-1 accuracy")}
    assert top1["VGG-11", "1"][3] == "86.50 (86.00, 87.00, 86.50)" and top1["VGG-11", "5"][2] == "79"
    cost = {row[:2]: row for row in table(results, "Average cost of an iteration")}
    assert cost["VGG-11", "1"][2:] == ("137", "140", "0.05", "", "0.5")
    times = table(results, "Compute and communication time")
    assert [row[1] for row in times] == ["unshaped"] * 3 + ["100 Mbit/s"]
    assert times[0][3:] == ("5.00", "1.00", "0.50", "20.0", "0.50", "50.0", "50.0", "200", "1.7", "20")
    end = {row[1:3]: row for row in table(results, "End-to-end time")}
    assert end["unshaped", "5"][3:] == ("0.04", "50", "3.3", "", "1.25") and end["100 Mbit/s", "1"][7] == "1.00"
    assert table(results, "Links")[1] == (
        "VGG-11", "100 Mbit/s", "network namespaces", "94 to 95", "yes", "1", "0.5 to 2.0", "0",
    )  # fmt: skip
    assert [row[1] for row in table(results, "What each ingredient is worth")] == [
        "laconic-min", "without error feedback",
    ]  # fmt: skip
    assert table(results, "Four and eight workers") == [("5", "4", "1.4e+05", "", "86.00", "", "2.50, 7", "")]
    assert table(results, "Frames made and compared") == [("13", "156", "0")]


def test_turns_of_a_method_are_added_up() -> None:
    first, second = time_of("5", "1gbit", 10.0, 4.0), time_of("5", "1gbit", 30.0, 4.0, turn=1, iterations=100)
    cell = Results([first, second]).times["vgg11", "1gbit", "5"]
    assert (cell.iterations, cell.seconds(), cell.valid) == (300, pytest.approx(40 / 300), True)
    assert cell.median == pytest.approx(0.1)
    broken = time_of("5", "1gbit", 90.0, 4.0, turn=1, valid=False)
    assert Results([first, broken]).times["vgg11", "1gbit", "5"].seconds() == 0.05
    (shown,) = table(Results([broken]), "Compute and communication time")
    assert shown[1] == "1 Gbit/s (not valid)" and shown[11] == ""  # nothing is extrapolated from an invalid link
    assert not table(Results([broken]), "End-to-end time")
    run = record("5")
    assert table(Results([run, broken]), "Average cost of an iteration")[0][2:] == ("", "140")
    again = Results([first, broken, second]).times["vgg11", "1gbit", "5"]
    assert [turn["iterations"] for turn in again.runs] == [200, 100]
    other = time_of("5", "1gbit", 20.0, 4.0, options={"push": "none"})
    assert Results([first, second, other]).times["vgg11", "1gbit", "5"].runs == [other.values]


def test_times_of_a_busy_machine_are_no_evidence() -> None:
    busy = [time_of(method, "unshaped", 8.0, 2.0, load_average=[9.0, 9.0]) for method in ("1", "5")]
    assert "vgg_comm_5" not in intervals_of(busy)
    assert table(Results(busy), "End-to-end time")[0][1] == "unshaped (busy)"
    calm = time_of("1", "unshaped", 4.0, 2.0, turn=1)
    assert Results([*busy, calm]).times["vgg11", "unshaped", "1"].runs == [calm.values]


def test_without_times_their_tables_and_columns_are_missing() -> None:
    results = Results([one for one in SOME if one.kind == RUN])
    assert not table(results, "End-to-end time") and len(table(results, "Average cost of an iteration")[0]) == 4


def test_paper_data_then_seeds_then_length_decide_which_variant_counts() -> None:
    results = Results([record("1", epochs=1), record("1", epochs=2), record("5", epochs=2)])
    row = results.row("vgg11", "1")
    assert row is not None and row.values["epochs"] == 2 and Row.bytes_by_epoch(row.runs[0]) == [7e8, 1.4e9]
    longer = record("1", epochs=50, accuracy=[50.0, 90.0])
    results = Results([record("1"), record("1", 1), longer, record("5", data="digits", epochs=99), record("5")])
    row, five = results.row("vgg11", "1"), results.row("vgg11", "5")
    assert row is not None and row.values["epochs"] == 2 and len(row.runs) == 2
    assert five is not None and five.values["data"] == "cifar10"
    long_five = Results([record("1"), longer, record("5", epochs=50)]).row("vgg11", "5")
    assert long_five is not None and Results([record("1"), longer, record("5", epochs=50)]).loss(long_five) == [4.0]


def evidence_of(key: str, *records: Record) -> Any:
    return {one.claim.key: one.evidence for one in STUDY.findings(Results(records))}.get(key)


def test_readings_of_every_data_set_are_shown() -> None:
    def reading(data: str, epochs: int, held: float) -> Record:
        return record("2w, 4 bits", part="readings", model="lenet5", data=data, epochs=epochs, worker_accuracy=held)

    results = Results([reading("digits", 3, 1.0), reading("digits", 20, 30.0), reading("mnist", 20, 84.0)])
    assert [row[2:5] for row in table(results, "Readings")] == [
        ("digits, 20", "86.00", "30.00"), ("mnist, 20", "86.00", "84.00"),
    ]  # fmt: skip


def test_methods_5_and_6_are_compared_at_one_length() -> None:
    five, six = [few("5", seed, accuracy=[1.0, 70.0]) for seed in range(3)], few("6", epochs=50, accuracy=[1.0, 80.0])
    assert evidence_of("vgg_6_over_5", *five, six) is None
    long_five = few("5", epochs=50, accuracy=[1.0, 79.0])
    assert evidence_of("vgg_6_over_5", *five, long_five, six).interval.mean == pytest.approx(1.0)


def test_loss_on_lenet_names_norms_of_512_values_and_methods_that_were_not_run() -> None:
    def lenet(name: str, **options: str) -> Record:
        return record(name, model="lenet5", data="mnist", epochs=20, options=options, accuracy=[50.0, 85.0])

    some = [lenet("1"), lenet("2"), lenet("3"), lenet("4"), lenet("6")]
    per_layer = lenet("5", push="qsgd:4,bucket=0")
    assert evidence_of("lenet_loss", *some).differs == "5 not run"
    assert evidence_of("lenet_loss", *some, per_layer).differs == ""
    of_512 = [lenet("1"), lenet("5", push="qsgd:4,norm=l2")]
    assert evidence_of("lenet_loss", *of_512).differs == "a norm of 512 values, not of a layer; 2, 3, 4, 6 not run"


def test_times_of_trainings_say_that_they_are_extrapolated() -> None:
    for_lenet = [time_of(method, "unshaped", 8.0, 2.0, model="lenet5") for method in ("1", "6")]
    assert evidence_of("lenet_time_6", *for_lenet).differs == "200 iterations timed, not a training"
    assert evidence_of("vgg_minutes_6", *SOME).differs == "200 iterations timed, not a training"
    assert evidence_of("vgg_comm_6", *SOME).differs == ""
    once = time_of("6", "unshaped", 8.0, 2.0, exchange_s=[8.0], iterations=20, every=20)
    minutes = evidence_of("vgg_minutes_6", *SOME[:-2], once)
    assert minutes.differs == "20 iterations timed, not a training; 1 exchange timed"


def test_goal_of_fewest_bytes_takes_the_best_setting_that_is_small_enough() -> None:
    def tiny(name: str, top1: float, nbytes: int) -> Record:
        return record(name, part="frontier", push_bytes=[nbytes], pull_bytes=[nbytes], accuracy=[50.0, top1])

    large, worse, better = tiny("large", 86.0, 4_000_000), tiny("worse", 80.0, 350_000), tiny("better", 85.0, 300_000)
    assert evidence_of("goal_smallest", record("1"), large) is None
    found = evidence_of("goal_smallest", record("1"), large, worse, better)
    assert found.interval.mean == 1.0 and found.basis.startswith("better, the best of 2: 1/2,333 of the bytes")


def test_changed_options_replace_older_runs() -> None:
    old = [record("5", seed, options={"push": "topk:0.01"}) for seed in (0, 1)]
    results = Results([*old, record("5", options={"push": "topk:0.02"}, accuracy=[1.0, 2.0])])
    row = results.row("vgg11", "5")
    assert row is not None and row.final == [2.0]
