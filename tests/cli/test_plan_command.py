"""laconic plan and laconic calibrate, as commands."""

from __future__ import annotations

import itertools
import json
import queue
import shlex
import socket
import threading
from pathlib import Path

import pytest

from cli_runner import Run
from laconic.cli import calibrate, plan
from laconic.plan.profile import load

BASE = ("--params", "25000000", "--step-time", "0.1", "--workers", "4", "--bandwidth", "100mbit")


@pytest.mark.parametrize("example", plan.EXAMPLES)
def test_examples(run: Run, example: str) -> None:
    result = run(*shlex.split(example)[1:])
    assert result.exit_code == 0, result.output
    assert "recommend" in result.stdout
    if "--json" in example:
        assert json.loads(result.stdout)["recommendation"]["codec"]


def test_json_has_what_is_promised(run: Run) -> None:
    result = run("plan", *BASE, "--codec", "qsgd:4", "--codec", "gzip", "--json")
    found = json.loads(result.stdout)
    assert [row["codec"] for row in found["rows"]] == ["none", "bf16", "qsgd:4", "gzip"]
    assert set(found["recommendation"]) == {"codec", "reason", "speedup_fp32", "speedup_bf16"}
    assert found["recommendation"]["codec"] == "qsgd:4" and found["recommendation"]["speedup_fp32"] > 5
    for row in found["rows"]:
        parts = ("compute_s", "encode_s", "push_s", "aggregate_s", "pull_s", "decode_s", "fixed_s")
        assert row["step_s"] == pytest.approx(sum(row[part] for part in parts) - row["hidden_s"])
        assert row["memory_nbytes"] > 0 and row["fits"]


@pytest.mark.parametrize(
    "words, wanted",
    [
        (("--model", "mlp", "--workers", "8", "--bandwidth", "100gbit", "--topology", "ring"), "none"),
        (("--params", "25000000", "--step-time", "0.1", "--workers", "1", "--bandwidth", "10mbit"), "none"),
        (("--params", "25000000", "--step-time", "0.5", "--workers", "4", "--codec", "gzip"), "none"),
        (("--params", "61000000", "--step-time", "0.6", "--workers", "16", "--every", "200", "--profile", "jang2017"),
         "bf16"),
    ],
)  # fmt: skip
def test_it_says_none_when_that_is_true(run: Run, words: tuple[str, ...], wanted: str) -> None:
    assert json.loads(run("plan", *words, "--json").stdout)["recommendation"]["codec"] == wanted


@pytest.mark.parametrize(
    "words, said",
    [
        ((*BASE[:-2], "--bandwidth", "1gbps"), "a rate is a number and one of bit, kbit, mbit, gbit"),
        ((*BASE[:-2], "--bandwidth", "-1gbit"), "a rate is a number"),
        ((*BASE[:4], "--workers", "0"), "workers must be a whole number, at least 1, got 0"),
        (("--params", "0", "--step-time", "1"), "at least one parameter"),
        (("--params", "9", "--step-time", "-1"), "a step takes more than no time"),
        (("--params", "9"), "--params needs --step-time"),
        ((), "what is trained?"),
        (("--model", "nix"), "has no model 'nix'"),
        ((*BASE, "--topology", "star"), "unknown topology 'star'"),
        ((*BASE, "--codec", "qsdg:4"), "unknown stage 'qsdg'"),
        ((*BASE, "--sweep", "colour"), "unknown sweep 'colour'"),
        ((*BASE, "--plot", "x.svg"), "--plot draws a --sweep"),
        ((*BASE, "--rho", "0.1"), "give --rho and --h together"),
        ((*BASE, "--memory", "lots"), "memory is a number"),
        ((*BASE, "--latency", "5 minutes"), "a time is a number"),
        ((*BASE, "--profile", "nix"), "unknown profile 'nix'"),
        ((*BASE, "--what-if", "nowhere"), "--what-if takes model and step time from the run"),
        (("--what-if", "nowhere"), "nowhere is no run folder"),
    ],
)
def test_bad_input_is_one_clear_line(run: Run, words: tuple[str, ...], said: str) -> None:
    result = run("plan", *words)
    assert result.exit_code in (1, 2) and result.stdout == ""
    assert said in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_profile_of_another_version_is_refused(run: Run, work_dir: Path) -> None:
    values = load("jang2017").to_json() | {"version": 99}
    (work_dir / "old.json").write_text(json.dumps(values))
    result = run("plan", *BASE, "--profile", "old.json")
    assert result.exit_code == 1 and "version 99, this laconic reads version 1" in result.stderr


@pytest.mark.parametrize("what", plan.SWEEPS)
def test_sweeps_draw_curves(run: Run, work_dir: Path, what: str) -> None:
    pytest.importorskip("matplotlib")
    words = (*BASE, "--codec", "qsgd:4", "--sweep", what)
    found = json.loads(run("plan", *words, "--json").stdout)["sweep"]
    assert found["what"] == what and len(found["x"]) == len(found["speedup_fp32"]["qsgd:4"]) > 5
    if what == "bandwidth":  # the faster the cable, the less a codec brings
        ys = found["speedup_fp32"]["qsgd:4"]
        assert all(a >= b - 1e-9 for a, b in itertools.pairwise(ys))
        result = run("plan", *words, "--plot", "curves.svg")
        assert result.exit_code == 0 and (work_dir / "curves.svg").read_text().startswith("<?xml")
        assert "bit/s of a cable" in result.stdout and "o qsgd:4" in result.stdout


def test_what_if_of_a_run(run: Run, work_dir: Path) -> None:
    """A run of 100 iterations that took 0.2 s each, of which 0.01 s computing: what others would have taken."""
    from laconic.cluster.job import Job
    from laconic.train.run import SUMMARY, Config

    folder = work_dir / "run"
    Config(model="mlp", data="digits", iterations=100, job=Job(workers=4)).save(folder)
    assert "has not ended" in run("plan", "--what-if", folder).stderr
    summary = {"compute_s": 1.0, "total_s": 20.0, "wire_bytes_per_iteration": 8 * 4 * 327_880}
    (folder / SUMMARY).write_text(json.dumps(summary))
    found = json.loads(run("plan", "--what-if", folder, "--codec", "qsgd:4", "--json").stdout)
    rows = {row["codec"]: row for row in found["rows"]}
    # The network is taken to be one over which the run's own codec takes what the run took.
    assert rows["none"]["step_s"] == pytest.approx(0.2, rel=1e-3) and found["run"]["measured_step_s"] == 0.2
    assert found["recommendation"]["codec"] == "qsgd:4" and 4 < found["recommendation"]["speedup_fp32"] < 9
    given = json.loads(run("plan", "--what-if", folder, "--bandwidth", "10mbit", "--json").stdout)
    assert given["asked"]["bandwidth_bit_s"] == 1e7


def test_calibrate_writes_a_profile_that_plan_takes(run: Run, work_dir: Path) -> None:
    first, _ = calibrate.EXAMPLES
    result = run(*shlex.split(first)[1:], "--processes", "1")
    assert result.exit_code == 0, result.output
    assert "qsgd:4" in result.stdout and "machine.json written" in result.stderr
    found = load("machine.json")
    assert list(found.codecs) == ["none", "bf16", "qsgd:4"] and found.crowd == {}
    model = found.models["mlp"]
    assert model.numel == 327_880 and 0 < model.ready[0][0] < 1
    assert model.messages["qsgd:4"]["push"] == pytest.approx(327_880 / 2, rel=0.06)
    planned = run("plan", "--model", "mlp", "--profile", "machine.json", "--workers", "2", "--bandwidth", "10mbit")
    assert planned.exit_code == 0 and "recommended: qsgd:4" in planned.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        (("--device", "tpu"), "device must be cpu or cuda"),
        (("--codec", "qsdg:4"), "unknown stage 'qsdg'"),
        (("--codec", "none", "--model", "nix"), "unknown model 'nix'"),
        (("--processes", "a,b"), "processes are whole numbers"),
        (("--codec", "none", "--quick", "--processes", "1", "--peer", "nowhere"), "a peer is HOST:PORT"),
    ],
)
def test_calibrate_refuses_nonsense(run: Run, work_dir: Path, words: tuple[str, ...], said: str) -> None:
    result = run("calibrate", "-o", "x.json", *words)
    assert result.exit_code in (1, 2) and said in result.stderr
    assert not (work_dir / "x.json").exists()


def test_a_link_is_measured_between_two_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic import link_probe
    from laconic.plan.link import measure_link

    got: dict[str, float] = {}
    ports: queue.SimpleQueue[int] = queue.SimpleQueue()
    real = socket.create_server

    def watched(address: tuple[str, int]) -> socket.socket:
        made = real(address)
        ports.put(made.getsockname()[1])
        return made

    monkeypatch.setattr(link_probe.socket, "create_server", watched)
    other = threading.Thread(target=lambda: got.update(link_probe.serve("127.0.0.1")))
    other.start()
    found = measure_link(f"127.0.0.1:{ports.get(timeout=10)}", seconds=0.5)
    other.join(20)
    assert found["goodput"] == pytest.approx(got["goodput"], rel=0.5) and 0 < found["round_trip"] < 0.1
