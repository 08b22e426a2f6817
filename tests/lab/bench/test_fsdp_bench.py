"""``laconic bench fsdp``: settings, tables, and a small run."""

from __future__ import annotations

from typing import Any

import pytest

from laconic.errors import ConfigError
from laconic.records import Record
from laconic_lab.bench.fsdp import FSDPSettings, fsdp_tables, run_fsdp
from laconic_lab.bench.fsdp.settings import way_of


def test_settings_are_checked_and_give_the_command_line() -> None:
    assert FSDPSettings().command() == "laconic bench fsdp"
    settings = FSDPSettings(ways=("local 4 ef|sign",), loss_steps=0)
    assert settings.command() == "laconic bench fsdp --ways 'hsdp,local 4 ef|sign' --loss-steps 0"
    assert (settings.timed(way_of("hsdp")), settings.timed(way_of("local 4 ef|sign"))) == (4, 8)
    way = way_of("local 8 ef:0.9|sign outer=mean:1.3 fragments=4 rates=0.7")
    assert (way.every, way.outer, way.fragments, way.rates) == (8, "mean:1.3", 4, 0.7)
    assert way.title.endswith("`ef:0.9|sign`, `mean:1.3`, 4 fragments, learning rates times 0.7")
    assert way_of("local 8 ef|sign optimizer=adamw").title == "AdamW, LocalSGD every 8, `ef|sign`"
    for match, wrong in (
        ("--ways must be of 'hsdp'", {"ways": ("ddp",)}),
        ("outer must be one of", {"ways": ("local 8 ef|sign outer=sum",)}),
        ("--ways must be of 'hsdp'", {"ways": ("local 8 ef|sign rates=fast",)}),
        ("--ways must be of 'hsdp'", {"ways": ("local 8 ef|sign overlap=2",)}),
        ("--ways must be of 'hsdp'", {"ways": ("local 8 ef|sign optimizer=sgd",)}),
        ("--ways must be of 'hsdp'", {"ways": ("local 0 ef|sign",)}),
        ("--nodes must be at least 2, got 1", {"nodes": 1}),
        ("a rate is a number", {"links": ("fast",)}),
        ("--width must be a multiple of 8 heads", {"width": 100}),
    ):
        with pytest.raises(ConfigError, match=match):
            FSDPSettings(**wrong)  # type: ignore[arg-type]


def step(way: str, step_s: float, counted: float | None) -> Record:
    values: dict[str, Any] = {
        "link": "100mbit", "way": way, "title": way_of(way).title, "nodes": 2, "shards": 2, "made_of": "", "links": [],
        "valid": True, "numel": 10, "step_s": step_s, "step_speed_up": 2.1 / step_s, "node_nbytes_per_step": 100.0,
        "counted_nbytes_per_step": counted, "training": FSDPSettings().training(), "command": "laconic bench fsdp",
    }  # fmt: skip
    return Record("bench.fsdp", values, 0, machine={"cpu": "some", "cores": 2})


def test_tables_judge_the_speed_and_the_counts() -> None:
    [table] = fsdp_tables([step("hsdp", 2.1, None), step("laconic ef|qsgd:4", 0.3, 98.0)])
    assert table.name == "fsdp-100mbit" and [row[2] for row in table.rows] == ["1.0", "7.0"]
    assert [met for met, _ in table.verdicts] == [True, True]
    [table] = fsdp_tables([step("hsdp", 2.1, None), step("laconic ef|qsgd:4", 0.7, 90.0)])
    assert [met for met, _ in table.verdicts] == [False, False]


def loss(way: str, last: float, reached: int | None, seed: int = 0, nodes: int = 2) -> Record:
    values: dict[str, Any] = {
        "way": way, "title": way_of(way).title, "nodes": nodes, "shards": 2, "numel": 10, "steps": 20, "loss": last,
        "reached_step": reached, "node_nbytes_until_goal": 100.0, "fewer_bytes": None if reached is None else 60.0,
        "training": FSDPSettings().training(), "command": "laconic bench fsdp", "curve": [[0, 5.0], [20, last]],
    }  # fmt: skip
    return Record("bench.fsdp.loss", values, seed, machine={"cpu": "some", "cores": 2})


def test_losses_are_compared_with_hsdp_of_the_same_optimizer() -> None:
    ways = [loss("hsdp", 2.0, 20), loss("hsdp muon", 1.0, 10), loss("laconic thc:4 muon", 1.005, 10)]
    [table] = fsdp_tables([*ways, loss("local 4 ef|sign", 1.5, None)])
    assert [row[2] for row in table.rows] == ["+0.00", "+0.00", "+0.50", "+50.00"]
    assert [met for met, _ in table.verdicts] == [True, False, False]
    assert table.verdicts[0][1].endswith("by the same optimizer: Muon, `thc:4`: met")
    assert table.verdicts[1][1].endswith("by the same optimizer: Muon, LocalSGD every 4, `ef|sign`: missed")
    assert table.verdicts[2][1].endswith("until HSDP's loss by AdamW: Muon, LocalSGD every 4, `ef|sign`: missed")


def test_command_of_losses_is_named_once() -> None:
    records = [loss("hsdp", 2.0, 20), loss("laconic thc:4", 2.0, 20, seed=1)]
    for record in records:
        record.values["command"] += f" --seed {record.seed} --ways '{record.values['way']}' --links x"
    [table] = fsdp_tables(records)
    assert table.notes.endswith("By `laconic bench fsdp --links x` with these `--ways`.")


def test_losses_of_other_numbers_of_nodes_have_a_table_of_their_own() -> None:
    four = [loss("hsdp", 3.0, 20, nodes=4), loss("local 1 ef|sign", 3.3, None, nodes=4)]
    two, other = fsdp_tables([loss("hsdp", 2.0, 20), *four, loss("laconic thc:4", 2.02, None)])
    assert (two.name, other.name) == ("fsdp-loss", "fsdp-loss-4x2")
    assert [row[2] for row in two.rows] == ["+0.00", "+1.00"] and other.rows[0][1] == "3.0000"


def test_losses_of_several_seeds_are_compared_seed_by_seed() -> None:
    stock = [loss("hsdp", 2.0, 20), loss("hsdp", 4.0, 20, seed=1), loss("hsdp muon", 2.0, 20)]
    ours = [loss("laconic thc:4", 2.01, 20), loss("laconic thc:4", 4.06, None, seed=1)]
    none = [loss("laconic none", 2.0, 20), loss("laconic none muon", 2.0, 20)]
    [table] = fsdp_tables([*stock, *ours, *none])
    assert table.rows[2][1:5] == ("3.0350", "+1.00 (+0.50 to +1.50)", "2", "not reached")
    assert [met for met, _ in table.verdicts] == [True, True, True]
    [table] = fsdp_tables([stock[0], loss("laconic none", 2.0000001, 20)])
    assert [met for met, _ in table.verdicts] == [False]


@pytest.mark.slow
def test_small_run_gives_records_of_steps_and_losses() -> None:
    settings = FSDPSettings(
        ways=("laconic ef|qsgd:4", "local 2 ef|sign"), links=("unshaped",), timed_steps=1, loss_steps=4, width=16,
        layers=1, heads=2, context=8, eval_every=2, eval_windows=8,
    )  # fmt: skip
    records = run_fsdp(settings)
    assert [record.kind for record in records] == ["bench.fsdp"] * 3 + ["bench.fsdp.loss"] * 3
    losses = {record.values["way"]: record.values for record in records[3:]}
    reached = losses["hsdp"]["reached_step"]  # so short a training may reach its last loss at once
    assert losses["hsdp"]["fewer_bytes"] == (pytest.approx(4 / reached) if reached else None)
    assert not losses["hsdp"]["nbytes_counted"]
    assert losses["local 2 ef|sign"]["node_nbytes"] < 0.6 * losses["hsdp"]["node_nbytes"]
    assert len(fsdp_tables(records)) == 2
