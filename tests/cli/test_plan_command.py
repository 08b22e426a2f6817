"""The command ``laconic plan``."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_runner import Run
from laconic.cli import plan
from laconic.plan.profile import load
from laconic.plan.sweep import SWEEPS

BASE = ("--params", "25000000", "--step-time", "0.1", "--workers", "4", "--bandwidth", "100mbit", "--family",
        "convolutional")  # fmt: skip
SPARSE_AND_NOT = ("topk:0.01|qsgd:4", "qsgd:4")
EXAMPLES = Path(__file__).parents[2] / "examples"


def planned(run: Run, *words: object) -> dict[str, Any]:
    result = run("plan", *words, "--json")
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


@pytest.mark.parametrize("example", plan.EXAMPLES)
def test_example_of_the_help_runs(run: Run, example: str) -> None:
    result = run(*shlex.split(example)[1:])
    assert result.exit_code == 0, result.output
    assert "recommend" in result.stdout
    if "--json" in example:
        assert json.loads(result.stdout)["recommendation"]["codec"]


def test_json_has_the_documented_fields(run: Run) -> None:
    words = ("--params", "1000000", *BASE[2:], "--codec", "ef|qsgd:4", "--codec", "gzip")
    values = planned(run, *words)
    assert [row["codec"] for row in values["rows"]] == ["none", "bf16", "ef|qsgd:4", "gzip"]
    assert set(values["recommendation"]) == {
        "codec", "reason", "speedup_fp32", "speedup_bf16", "speedup_same_quality", "model_error", "evidence",
    }  # fmt: skip
    assert values["recommendation"]["codec"] == "ef|qsgd:4" and values["recommendation"]["speedup_fp32"] > 5
    assert values["recommendation"]["evidence"]["model"] == "lenet5" and values["rows"][1]["objection"] == "no evidence"
    assert (values["asked"]["family"], values["asked"]["optimizer"]) == ("convolutional", "momentum")
    for row in values["rows"]:
        parts = ("compute_s", "encode_s", "push_s", "aggregate_s", "pull_s", "decode_s", "fixed_s")
        assert row["step_s"] == pytest.approx(sum(row[part] for part in parts) - row["hidden_s"])
        assert row["memory_nbytes"] > 0 and row["fits"]


def test_table_fits_80_columns_and_wide_shows_the_parts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("--model", "vgg11", "--workers", "4", "--bandwidth", "100mbit")
    lines = run("plan", *words).stdout.splitlines()
    assert max(map(len, lines)) <= 80 and " ".join(lines[2].split()) == "codec bytes step speed-up quality"
    sparse, quantized = (next(line for line in lines if line.startswith(f" {codec} ")) for codec in SPARSE_AND_NOT)
    assert sparse.split()[-2:] == ["far", "worse"] and quantized.split()[-2:] == ["no", "evidence"]
    monkeypatch.delenv("COLUMNS")
    wide = run("plan", *words, "--wide").stdout
    assert "pays below" in wide and any(line.startswith(" topk:0.01|qsgd:4 ") for line in wide.splitlines())


def test_pipeline_has_a_row_for_each_codec(run: Run) -> None:
    words = ("--stages", "2", "--activations", "786432", "--step-time", "0.05", "--bandwidth", "100mbit")
    values = planned(run, *words, "--codec", "thc:4", "--schedule", "gpipe", "--micro-batches", "8")
    assert [row["codec"] for row in values["rows"]] == ["none", "thc:4"]
    assert values["recommendation"]["codec"] == "thc:4" and values["recommendation"]["speedup"] > 4
    assert (values["asked"]["schedule"], values["asked"]["micro_batches"]) == ("gpipe", 8)


@pytest.mark.parametrize(
    "words, codec",
    [
        (("--model", "mlp", "--workers", "8", "--bandwidth", "100gbit", "--topology", "ring"), "none"),
        (("--params", "25000000", "--step-time", "0.1", "--workers", "1", "--bandwidth", "10mbit"), "none"),
        (("--params", "25000000", "--step-time", "0.5", "--workers", "4", "--codec", "gzip"), "none"),
        (("--params", "61000000", "--step-time", "0.6", "--workers", "16", "--every", "200", "--profile", "jang2017"),
         "none"),
        (("--model", "lenet5", "--workers", "4", "--bandwidth", "10mbit", "--give-up", "0.5%", "--codec", "ef|thc:4"),
         "ef|thc:4"),
    ],
)  # fmt: skip
def test_recommendation_of_the_shipped_profiles(run: Run, words: tuple[str, ...], codec: str) -> None:
    assert planned(run, *words)["recommendation"]["codec"] == codec


@pytest.mark.parametrize(
    "profile, model, topology",
    [("cpu", "mlp", "ps"), ("cpu", "vgg11", "ring"), ("cpu", "mlp", "twoshot"), ("jang2017", "alexnet", "ps")],
)
def test_example_script_prints_what_the_command_computes(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, profile: str, model: str,
    topology: str,
) -> None:  # fmt: skip
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "plan", raising=False)
    import plan as example

    monkeypatch.setattr(example, "RATES", ("100mbit", "10gbit"))
    example.main(profile, model, topology)
    lines = capsys.readouterr().out.splitlines()[-len(example.RATES) :]
    for rate, line in zip(example.RATES, lines, strict=True):
        words = ("--profile", profile, "--model", model, "--topology", topology, "--workers", "4", "--bandwidth", rate)
        values = planned(run, *words)
        chosen = values["recommendation"]
        best = next(row for row in values["rows"] if row["codec"] == chosen["codec"])
        plain, step, speedup, codec = re.search(r"([\d.]+) ms +([\d.]+) ms +([\d.]+)×  (.+)$", line).groups()  # type: ignore[union-attr]
        assert codec == chosen["codec"] and speedup == f"{chosen['speedup_fp32']:.2f}"
        assert (plain, step) == (f"{1e3 * values['rows'][0]['step_s']:.1f}", f"{1e3 * best['step_s']:.1f}")


@pytest.mark.parametrize("words, message", [
    ((*BASE[:-4], "--bandwidth", "1gbps"), "a rate is a number and one of bit, kbit, mbit, gbit"),
    ((*BASE[:4], "--workers", "0"), "workers must be a whole number of at least 1, got 0"),
    (("--params", "0", "--step-time", "1"), "params must be a whole number of at least 1, got 0"),
    (("--params", "9", "--step-time", "-1"), "the step time must be finite and above 0, got -1 s"),
    (("--params", "9"), "--params needs --step-time"), ((), "give --model NAME, or --params N --step-time S"),
    (("--model", "nix"), "has no model 'nix'"),
    (("--model", "gpt", "--profile", "jang2017"), "measure it by `laconic calibrate --model gpt -o FILE`"),
    ((*BASE, "--topology", "star"), "topology must be one of ps, ring, twoshot, fsdp, hsdp, got 'star'"),
    ((*BASE, "--codec", "qsdg:4"), "unknown stage 'qsdg'"),
    ((*BASE, "--sweep", "colour"), "--sweep must be one of workers, bandwidth, rho, h, got 'colour'"),
    ((*BASE, "--plot", "x.svg"), "--plot draws a --sweep"),
    ((*BASE, "--rho", "0.1"), "--rho and --h describe compressed layers: give both"),
    ((*BASE, "--memory", "lots"), "a size is a number"), ((*BASE, "--memory", "0gib"), "a size must be above 0"),
    ((*BASE, "--latency", "5 minutes"), "a time is a number"),
    ((*BASE, "--profile", "nix"), "profile must be a file or one of cpu, h200, jang2017, got 'nix'"),
    ((*BASE, "--what-if", "nowhere"), "--what-if takes model and step time from the run"),
    (("--what-if", "nowhere"), "nowhere is not a run folder"),
    (("--stages", "2", "--step-time", "1"), "--stages needs --activations"),
    (("--stages", "1", "--step-time", "1", "--activations", "9"), "stages must be at least 2, got 1"),
    (("--stages", "2", "--params", "9"), "--params does not apply to a pipeline"),
    (("--stages", "2", "--step-time", "1", "--activations", "9", "--codec", "union"), "messages of a fixed size"),
    ((*BASE, "--give-up", "little"), "--give-up must be a percentage such as 0.5%, got 'little'"),
    ((*BASE, "--evidence", "nowhere.json"), "cannot read the evidence nowhere.json"),
    ((*BASE, "--micro-batches", "8"), "--micro-batches describes a pipeline: give --stages, too"),
])  # fmt: skip
def test_invalid_input_prints_one_line(run: Run, words: tuple[str, ...], message: str) -> None:
    result = run("plan", *words)
    assert result.exit_code in (1, 2) and result.stdout == ""
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_profile_of_another_version_is_rejected(run: Run, work_dir: Path) -> None:
    (work_dir / "old.json").write_text(json.dumps(load("jang2017").to_json() | {"version": 99}))
    result = run("plan", *BASE, "--profile", "old.json")
    assert result.exit_code == 1 and "version 99, this laconic reads version 3" in result.stderr


def test_profile_without_transport_prints_a_warning(run: Run, work_dir: Path) -> None:
    (work_dir / "mine.json").write_text(json.dumps(load("jang2017").to_json() | {"transport": None, "name": "mine"}))
    result = run("plan", *BASE, "--profile", "mine.json", "--json")
    assert "laconic: profile mine has no transport: that of the shipped profile cpu is used" in result.stderr
    given = planned(run, *BASE, "--profile", "jang2017")["rows"]
    assert all(a["step_s"] > b["step_s"] for a, b in zip(json.loads(result.stdout)["rows"], given, strict=True))


@pytest.mark.parametrize("parameter", SWEEPS)
def test_sweep_draws_curves(run: Run, work_dir: Path, parameter: str) -> None:
    words = (*BASE, "--codec", "qsgd:4", "--sweep", parameter)
    curves = planned(run, *words)["sweep"]
    assert curves["what"] == parameter and len(curves["x"]) == len(curves["speedup_fp32"]["qsgd:4"]) > 5
    if parameter == "bandwidth":  # the faster the link, the less a codec gains
        pytest.importorskip("matplotlib")
        assert all(a >= b - 1e-9 for a, b in itertools.pairwise(curves["speedup_fp32"]["qsgd:4"]))
        result = run("plan", *words, "--plot", "curves.svg")
        assert result.exit_code == 0 and (work_dir / "curves.svg").read_text().startswith("<?xml")
        assert "bit/s of a link" in result.stdout and "o qsgd:4" in result.stdout


def test_what_if_fits_the_rate_to_the_run(run: Run, work_dir: Path) -> None:
    """A run of 100 iterations of 0.2 s, of which 0.01 s are computation."""
    from laconic.cluster.job import Job
    from laconic.train.run import SUMMARY, Config

    folder = work_dir / "run"
    Config(model="mlp", data="digits", iterations=100, job=Job(workers=4)).save(folder)
    assert "has not ended" in run("plan", "--what-if", folder).stderr
    summary = {"compute_s": 1.0, "total_s": 20.0, "wire_bytes_per_iteration": 8 * 4 * 327_880}
    (folder / SUMMARY).write_text(json.dumps(summary))
    values = planned(run, "--what-if", folder, "--codec", "ef|thc:4", "--give-up", "0.1%")
    rows = {row["codec"]: row for row in values["rows"]}
    assert rows["none"]["step_s"] == pytest.approx(0.2, rel=1e-3) and values["run"]["measured_step_s"] == 0.2
    assert values["recommendation"]["codec"] == "ef|thc:4" and 4 < values["recommendation"]["speedup_fp32"] < 9
    given = planned(run, "--what-if", folder, "--bandwidth", "10mbit", "--codec", "ef|thc:4")
    assert given["asked"]["bandwidth_bit_s"] == 1e7
