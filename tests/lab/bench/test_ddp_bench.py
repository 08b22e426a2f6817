from __future__ import annotations

import io
import json
from typing import Any

import pytest

from laconic.errors import ConfigError
from laconic.records import Record
from laconic_lab.bench.ddp import DDPSettings, ddp_tables, run_ddp
from laconic_lab.bench.ddp.suite import rank_processes


def test_settings_are_checked_and_give_the_command_line() -> None:
    assert DDPSettings().command() == "laconic bench ddp"
    settings = DDPSettings(("local 10 ef|topk:0.1",), ("ddp", "fp16"), train=True, lr=0.1, ranks=4)
    assert settings.command() == "laconic bench ddp 'local 10 ef|topk:0.1' --stock ddp,fp16 --ranks 4 --train --lr 0.1"
    assert settings.ways == ("ddp", "fp16", "local 10 ef|topk:0.1") and DDPSettings().ways[-1].startswith("laconic ")
    for match, wrong in (
        ("--stock must be one of", {"stock": ("ddp", "horovod")}),
        ("must have 'ddp'", {"stock": ("fp16",)}),
        ("qsdg", {"specs": ("qsdg:4",)}),
        ("ranks", {"ranks": 1}),
        ("limit-s", {"limit_s": 0.0}),
    ):
        with pytest.raises(ConfigError, match=match):
            DDPSettings(**wrong)  # type: ignore[arg-type]
    assert DDPSettings(paced=True).command() == "laconic bench ddp --paced"


def record(way: str, step_s: float, **more: object) -> Record:
    values = {
        "way": way, "rate": "100mbit", "ranks": 2, "model": "vgg11", "valid": True, "links": [], "command": "c",
        "failed": None, "numel": 9, "step_s": step_s, "step_quartiles_s": [step_s, step_s], "compute_s": 0.01,
        "exposed_s": step_s - 0.01, "exchange_speed_up": 3.0 / (step_s - 0.01), "sent_nbytes_per_step": 1e6,
        "relative_squared_error": 0.1,
    }  # fmt: skip
    return Record("bench.ddp", values | more)


def test_goals_are_judged_by_exchange_times() -> None:
    records = [record("ddp", 3.01), record("laconic qsgd:4", 0.51), record("laconic ef|topk:0.01|qsgd:4", 0.12)]
    (table,) = ddp_tables([*records, record("quantize-tensor", 0, failed="IndexError")])
    assert table.name == "ddp-100mbit" and table.rows[-1][1] == "fails" and len(table.rows) == 4
    assert [met for met, _ in table.verdicts] == [True, False]
    assert "not what it should be" in ddp_tables([record("ddp", 3.01, valid=False)])[0].notes
    assert "(paced sockets)" in ddp_tables([record("ddp", 3.01, made_of="paced sockets")])[0].notes


def test_training_is_judged_by_accuracy_and_time() -> None:
    common = {
        "rate": "100mbit", "ranks": 2, "model": "lenet5", "data": "mnist", "links": [], "epochs": 1, "batch": 8,
        "iterations": 9, "plain_accuracy": 98.0, "command": "c", "failed": None, "sent_nbytes_per_step": None,
    }  # fmt: skip
    runs = [
        ("ddp", 98.0, 9.0),
        ("fp16", 97.9, 6.0),
        ("laconic ef|thc:4", 97.8, 2.5),
        ("laconic ef|sign", 97.0, None),
    ]
    records = [
        Record("bench.ddp.train", common | {"way": way, "accuracy": accuracy, "train_s": 9.0, "reached_s": reached})
        for way, accuracy, reached in runs
    ]
    (table,) = ddp_tables(records)
    assert table.name == "ddp-train-100mbit-2" and [met for met, _ in table.verdicts] == [True, False, True]
    assert "2.40 times as fast to that accuracy as `fp16`" in table.verdicts[-1][1]


@pytest.mark.slow
def test_small_run_measures_every_exchange() -> None:
    settings = DDPSettings(("none", "ef|topk:0.01|qsgd:4"), ("ddp", "fp16"), ("unshaped",), model="mlp", steps=2)
    records = run_ddp(settings)
    assert [one.values["way"] for one in records] == list(settings.ways)
    by_way = {one.values["way"]: one.values for one in records}
    assert by_way["ddp"]["relative_squared_error"] == by_way["laconic none"]["relative_squared_error"] == 0
    assert by_way["laconic ef|topk:0.01|qsgd:4"]["stats"]["steps"] == 4
    trained = run_ddp(
        DDPSettings(("local 5 qsgd:4",), ("ddp",), ("unshaped",), model="mlp", train=True, epochs=1, test_every=20)
    )
    assert all(one.values["accuracy"] > 30 for one in trained)


@pytest.mark.slow
def test_paced_sockets_slow_steps_to_their_rate() -> None:
    settings = DDPSettings(("qsgd:4",), ("ddp",), ("100mbit",), model="mlp", steps=3, paced=True)
    by_way = {one.values["way"]: one.values for one in run_ddp(settings)}
    plain, ours = by_way["ddp"], by_way["laconic qsgd:4"]
    assert plain["made_of"] == "paced sockets" and len(plain["links"]) == len(plain["links_after"]) == 1
    least = 8 * 4 * plain["numel"] / 100e6
    assert least < plain["step_s"] and (not plain["valid"] or plain["step_s"] < 1.5 * least)
    assert 4 * plain["numel"] < plain["sent_nbytes_per_step"] < 4.1 * plain["numel"]
    assert ours["step_s"] < 0.5 * plain["step_s"] and ours["sent_nbytes_per_step"] < 0.8 * plain["numel"]


def test_ranks_are_killed_before_any_is_waited_for() -> None:
    """A rank that outlives another would print a traceback about its lost connection after Ctrl-C."""
    order: list[str] = []

    class Process:
        def __init__(self, rank: int) -> None:
            self.rank, self.stdout = rank, io.StringIO(f"line of {rank}\n")

        def kill(self) -> None:
            order.append(f"kill {self.rank}")

        def wait(self) -> None:
            order.append(f"wait {self.rank}")

    class Links:
        def popen(self, rank: int, argv: list[str], **options: Any) -> Process:
            assert json.loads(argv[-1]) == {"seed": 1, "rank": rank}
            return Process(rank)

    with rank_processes(Links(), "module", {"seed": 1}, 3) as queues:  # type: ignore[arg-type]
        assert [lines.get(timeout=10) for lines in queues] == ["line of 0\n", "line of 1\n", "line of 2\n"]
        assert [lines.get(timeout=10) for lines in queues] == [None] * 3
    assert order == ["kill 0", "kill 1", "kill 2", "wait 0", "wait 1", "wait 2"]
