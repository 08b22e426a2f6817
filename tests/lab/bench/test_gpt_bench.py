"""``laconic bench gpt``: settings, times composed from some steps, tables, and small trainings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_runner import Run
from laconic.errors import ConfigError
from laconic.records import Record, read, write
from laconic.report import build
from laconic_lab.bench.gpt import METHODS, GPTSettings, gpt_tables, run_gpt
from laconic_lab.bench.gpt.compose import by_step, composed, curve, reached
from laconic_lab.bench.gpt.settings import show_link
from laconic_lab.bench.gpt.text import load_text

TINY: dict[str, Any] = {
    "ranks": (2,), "links": ("none",), "methods": ("ddp", "laconic-topk", "laconic-qsgd"), "steps": 4,
    "stretch": 1.0, "width": 16, "layers": 1, "heads": 2, "context": 8, "batch": 1, "eval_every": 2, "eval_windows": 8,
}  # fmt: skip


def test_settings_are_checked_and_give_the_command_line() -> None:
    assert GPTSettings().command() == "laconic bench gpt"
    settings = GPTSettings(ranks=(4,), methods=("fp16",), steps=8, paced=True)
    assert settings.command() == "laconic bench gpt --ranks 4 --methods ddp,fp16 --steps 8 --paced"
    assert show_link("20mbit+100ms") == "20 Mbit/s + 100 ms" and show_link("unshaped") == "unshaped"
    for match, wrong in (
        ("--methods must be of ddp", {"methods": ("horovod",)}),
        ("--ranks must be at least 2, got 1", {"ranks": (1,)}),
        ("a rate is a number", {"links": ("fast+5ms",)}),
        ("a time is a number", {"links": ("1mbit+soon",)}),
        ("--steps must be at least 4", {"steps": 1}),
        ("--stretch", {"stretch": 0.5}),
        ("--width must be a multiple of 6 heads", {"width": 100}),
    ):
        with pytest.raises(ConfigError, match=match):
            GPTSettings(**wrong)  # type: ignore[arg-type]


def test_text_is_split_by_file_and_windows_depend_on_the_seed() -> None:
    text = load_text()
    assert text.train.numel() > 5 * text.validation.numel() > 0
    starts = text.windows(8, 2, 3, seed=1)
    assert starts.equal(text.windows(8, 2, 3, seed=1)) and not starts.equal(text.windows(8, 2, 3, seed=2))
    assert text.batch(starts[0], 8).shape == (2, 9) and text.evaluation(8, 5).shape == (5, 9)


def timing(seconds: list[float], composed_from: int, **more: Any) -> dict[str, Any]:
    rows = {name: [1.0] * len(seconds) for name in ("waited", "sent", "received")}
    return {
        "seconds": seconds, "finish_s": 2.0, "finish_nbytes": [5.0, 6.0], "powersgd_start": None,
        "composed_from": composed_from, **rows, **more,
    }  # fmt: skip


def test_steps_that_were_not_timed_repeat_the_mean_of_those_that_were() -> None:
    assert by_step("ddp", [9.0, 9.0, 1.0, 3.0], 5) == [2.0] * 5
    period = METHODS["diloco"].period
    row = [*([7.0] * period), *([1.0] * (period - 1)), 21.0, *([3.0] * (period - 1)), 23.0]
    assert by_step("diloco", row, 2 * period) == [*([2.0] * (period - 1)), 22.0] * 2
    # The first exchange of each of four fragments is left out.
    fragment = METHODS["laconic-sign"].period
    row = [each for exchange in (90.0, 80.0, 70.0, 60.0, 5.0, 7.0) for each in (*([1.0] * (fragment - 1)), exchange)]
    assert by_step("laconic-sign", row, fragment) == [*([1.0] * (fragment - 1)), 6.0]
    # Twenty steps: two plain ones, then PowerSGD.
    assert by_step("powersgd", [9.0, 9.0, 4.0, 8.0, 8.0, 1.0], 20, 3) == [4.0] * 2 + [1.0] * 18


def test_times_of_all_steps_are_compared_with_composed_ones() -> None:
    some = composed("ddp", timing([9.0, 9.0, 1.0, 3.0], 4), 10)
    assert some["real_s"] is None and some["train_s"] == 22.0 and some["sent_nbytes"] == 15.0
    every = composed("ddp", timing([9.0, 9.0, 1.0, 3.0, 2.0], 4), 5)
    assert every["real_s"] == 26.0 and every["composed_s"] == 12.0 and every["clock"][1] == 18.0
    points = curve([[0, 5.0], [2, 3.0], [5, 2.0]], every["clock"], every["train_s"])
    assert points == [[0, 0.0, 5.0], [2, 18.0, 3.0], [5, 26.0, 2.0]]
    assert reached(points, 3.0) == (18.0, 2) and reached(points, 1.0) is None


def record(method: str, reached_s: float | None, **more: Any) -> Record:
    values = {
        "method": method, "title": METHODS[method].title, "ours": METHODS[method].ours, "ranks": 2,
        "link": "100mbit+50ms", "links": [], "made_of": "paced sockets", "valid": True, "failed": None, "steps": 160,
        "training": GPTSettings().training(), "command": "c", "loss": 2.5, "goal_loss": 2.5, "train_s": 200.0,
        "step_s": 1.2, "waiting_share": 0.01, "reached_s": reached_s, "sent_nbytes": 2e6, "received_nbytes": 2e6,
        "numel": 3_000_000, "steps_timed": 6, "composed_from": 6, "composed_s": 200.0, "real_s": None,
        "curve": [[0, 0.0, 5.5], [160, 200.0, 2.5]],
    }  # fmt: skip
    return Record("bench.gpt", values | more, machine={"cpu": "a chip", "cores": 2}, versions={}, commit=None)


def test_goals_are_judged_by_time_waiting_and_confirmed_times() -> None:
    whole = {"steps_timed": 160, "real_s": 195.0}
    records = [
        record("ddp", 200.0, sent_nbytes=2e9, **whole), record("fp16", 120.0), record("powersgd", None),
        record("diloco", None, failed="hung"), record("laconic-sign", 10.0), record("laconic-topk", 50.0),
    ]  # fmt: skip
    (table,) = gpt_tables(records)
    assert table.name == "gpt-2-100mbit-50ms" and table.rows[3][2] == "fails" and table.rows[2][6] == "not reached"
    assert table.rows[4][-1] == "1/1000" and table.rows[4][7] == "20.0"
    assert [met for met, _ in table.verdicts] == [True, True, True, True] and "12.0 times" in table.verdicts[0][1]
    assert "composed 200 s, all 160 steps timed 195 s (+2.6 %)" in table.notes
    slow = [record("ddp", 200.0), record("laconic-sign", 40.0, waiting_share=0.2)]
    assert [met for met, _ in gpt_tables(slow)[0].verdicts] == [False, False]
    # Gradients in every step: compared as ours, and free to wait for the exchange.
    gradients = [record("ddp", 200.0), record("fp16", 120.0), record("laconic-qsgd", 10.0, waiting_share=0.9)]
    (verdict,) = gpt_tables(gradients)[0].verdicts
    assert verdict[0] and "12.0 times as fast as AdamW, `fp16_compress_hook`" in verdict[1]
    assert gpt_tables([record("ddp", 200.0, training={**GPTSettings().training(), "steps": 8})])[0].verdicts == ()


def test_report_draws_loss_against_seconds() -> None:
    report = build([record("ddp", 200.0), record("laconic-sign", 10.0), record("diloco", None, failed="hung")])
    assert {"gpt-loss-time", "gpt-loss-bytes"} <= set(report.plots) and not any("left" in x for x in report.skipped)


def test_two_ranks_end_with_equal_bits_and_finished_work_is_not_repeated() -> None:
    settings = GPTSettings(**TINY)
    saved: list[int] = []
    records = run_gpt(settings, save=lambda measured: saved.append(len(measured)))
    assert [one.kind for one in records] == ["bench.gpt.check", *["bench.gpt.loss"] * 3]
    assert saved == [1, 2, 3, 4] and all(one.values.get("failed") is None for one in records)
    assert [step for step, _ in records[1].values["curve"]] == [0, 2, 4]
    plain, _, gradients = (one.values["curve"] for one in records[1:])
    assert plain[0] == records[2].values["curve"][0] == gradients[0]  # the same weights and text
    assert plain[-1] != gradients[-1] == [4, pytest.approx(plain[-1][1], rel=0.01)]
    assert records[3].values["title"] == "laconic: AdamW, `qsgd:4` of gradients"
    assert run_gpt(settings, finished=records) == records


@pytest.mark.slow
def test_all_methods_run_over_a_paced_link_and_laconic_sends_less(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "gpt.jsonl"
    words = (
        "bench gpt --paced --ranks 2 --links 50mbit+5ms --steps 8 --width 32 --layers 4 --heads 2 --context 16 "
        f"--timed-steps 2 --records {path}"
    )
    result = run(*words.split(), "--json")
    assert result.exit_code == 0, result.output
    by_method = {one["method"]: one for one in json.loads(result.stdout)["records"] if one["kind"] == "bench.gpt"}
    assert set(by_method) == set(GPTSettings().methods) and all(one["failed"] is None for one in by_method.values())
    plain, ours = by_method["ddp"], by_method["laconic-topk"]
    assert plain["sent_nbytes"] > 0.9 * 8 * 4 * plain["numel"] and plain["real_s"] is not None
    assert ours["sent_nbytes"] < 0.1 * plain["sent_nbytes"] and 0 <= ours["waiting_share"] < 1
    assert plain["made_of"] == "paced sockets" and plain["links"][0]["round_trip"] >= 0.009
    # A method that is missing is measured, the others are kept.
    records = read(path)
    write([one for one in records if one.values.get("method") != "fp16"], path)
    assert run(*words.split()).exit_code == 0
    kept = {one.at for one in read(path) if one.values.get("method") != "fp16"}
    assert kept == {one.at for one in records if one.values.get("method") != "fp16"}
    assert len(read(path)) == len(records)
