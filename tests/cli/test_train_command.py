from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import running

from cli_runner import Run, assert_error, file_names
from laconic.cli import train
from laconic.cli.progress import ProgressLog, TimeLeft, progress_line
from laconic.train.methods import METHODS
from laconic.train.run import Config
from waiting import eventually

pytest.importorskip("grpc")

KEYS = {
    "accuracy", "wire_bytes_per_iteration", "iterations", "compute_s", "encode_s", "communication_s", "total_s",
    "workers", "method", "codec_push", "codec_pull",
}  # fmt: skip

SUMMARY: dict[str, Any] = {
    "method": "5", "model": "mlp", "data": "digits", "workers": 2, "iterations": 20, "codec_push": "topk:0.01|qsgd:4",
    "codec_pull": "none", "accuracy": 91.25, "wire_bytes_per_iteration": 37_100.0, "compute_s": 1.5, "encode_s": 0.25,
    "communication_s": 2.0, "total_s": 3.75,
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Replace the launcher; return the configurations that it gets."""
    configs: list[Config] = []

    def launch(runs: dict[Path, Config], **_: Any) -> list[dict[str, Any]]:
        configs.extend(runs.values())
        return [SUMMARY]

    monkeypatch.setattr("laconic.train.launch.launch", launch)
    return configs


def test_example_trains_to_its_end(run: Run, work_dir: Path) -> None:
    (example,) = (example for example in train.EXAMPLES if "--json" in example)
    result = run(*shlex.split(example)[1:], "--run-dir", work_dir / "run")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert set(summary) >= KEYS | {"run_dir"}
    assert (summary["method"], summary["iterations"], summary["workers"]) == ("laconic", 20, 2)
    assert 0 < summary["wire_bytes_per_iteration"] < 100_000 and summary["accuracy"] > 30
    assert summary["run_dir"] == str(work_dir / "run") and file_names() == ["run"]
    assert json.loads(Path("run/summary.json").read_text())["accuracy"] == summary["accuracy"]
    assert running(work_dir) == []
    again = ("train", "--method", "laconic", "--iterations", "20", "--run-dir", "run")
    assert_error(run(*again), 1, "run holds a run already", "--resume")
    assert_error(run(*again, "--prepare"), 1, "run holds a run already")
    assert_error(run(*again, "--resume", "--model", "lenet5"), 2, "another configuration")
    Path("run/config.json").write_text("{}")
    assert_error(run(*again, "--resume"), 1, "does not hold a configuration")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_missing_device_is_one_line_and_starts_nothing(run: Run, work_dir: Path) -> None:
    assert_error(run("train", "--device", "cuda", "--run-dir", "run"), 2, "no CUDA device is available", "--device cpu")
    assert_error(run("train", "--device", "tpu", "--run-dir", "run"), 2, "auto, cpu or cuda", "'tpu'")
    assert file_names() == []


@pytest.mark.parametrize(
    "number, until, code",
    [
        (signal.SIGINT, "server.json", 130),
        pytest.param(signal.SIGINT, "config.json", 130, marks=pytest.mark.slow),  # while the server starts
        pytest.param(signal.SIGTERM, "server.json", 128 + signal.SIGTERM, marks=pytest.mark.slow),
    ],
    ids=["interrupted", "interrupted while starting", "terminated"],
)
def test_signal_ends_all_processes(work_dir: Path, number: int, until: str, code: int) -> None:
    """As from a terminal, all processes receive the signal; at most 3 s later none is left."""
    command = [sys.executable, "-m", "laconic", "train", "--workers", "1", "--iterations", "1000000"]
    command += ["--run-dir", str(work_dir / "run")]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert eventually(lambda: (work_dir / "run" / until).exists() and len(running(work_dir)) == 3, 120)
        began = time.monotonic()
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        seconds = time.monotonic() - began
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code and "Traceback" not in stderr
    assert eventually(lambda: running(work_dir) == [], 2)
    if number == signal.SIGINT:
        assert seconds < 3 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        assert [line for line in stderr.splitlines() if line.startswith("laconic: ")] == [
            "laconic: stopping...", "laconic: interrupted",
        ]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_explained_flags_equal_the_method(run: Run, work_dir: Path, launched: list[Config], method: str) -> None:
    explained = run("train", "--method", method, "--explain")
    assert explained.exit_code == 0 and METHODS[method][0] in explained.stdout and not launched
    command, _, _ = explained.stdout.partition("  # ")
    name, *flags = shlex.split(command)
    assert name == "laconic" and "--method" not in flags
    assert json.loads(run("train", "--method", method, "--explain", "--json").stdout)["flags"] == flags[1:]
    short = ("--iterations", "20")
    assert run("train", "--method", method, *short).exit_code == run(*flags, *short).exit_code == 0
    by_name, by_flags = launched
    assert by_name == by_flags and by_name.method == method and by_name.iterations == 20


def test_flags_override_the_method(run: Run, work_dir: Path, launched: list[Config]) -> None:
    assert run("train", "--method", "5", "--push", "qsgd:8", "--iterations", "3").exit_code == 0
    assert run("train", "--push", "qsgd:8", "--iterations", "3").exit_code == 0
    assert run("train", "--every", "7", "--sends", "changes", "--iterations", "8").exit_code == 0
    assert run("train", "--epochs", "2", "--batch", "100").exit_code == 0
    changed, custom, rounded, epochs = launched
    assert (changed.method, changed.job.push, changed.job.returns) == ("5", "qsgd:8", "gradients")
    assert (custom.method, custom.job.push) == ("custom", "qsgd:8")
    assert rounded.iterations == 14
    assert (epochs.method, epochs.iterations) == ("1", 2 * 19)  # half of 3,800 images in batches of 100


def test_optimizer_is_passed_on_with_a_rate_of_its_own(run: Run, work_dir: Path, launched: list[Config]) -> None:
    assert run("train", "--optimizer", "adamw", "--push", "qsgd:4", "--iterations", "3").stderr == ""
    warned = run("train", "--optimizer", "adamw", "--push", "ef|topk:0.01|qsgd:4", "--iterations", "3")
    assert "does not suit adamw" in warned.stderr and len(warned.stderr.splitlines()) == 1
    first, _ = launched
    assert (first.job.optimizer, first.job.lr, first.method) == ("adamw", 0.001, "custom")


def test_text_output_shows_the_summary(
    run: Run, work_dir: Path, launched: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("train", "--method", "5", "--iterations", "20", "--run-dir", "here")
    for text in ("topk:0.01|qsgd:4", "91.25 %", "37.1 kB", "3.75 s", "wrote here"):
        assert text in result.stdout
    assert "saved" not in result.stdout and "restarts" not in result.stdout
    more = {"bytes_saved": 2_000_000, "overlapped_s": 0.5, "restarts": 1, "accuracy": None}
    monkeypatch.setattr("laconic.train.launch.launch", lambda *_, **__: [SUMMARY | more])
    result = run("train", "--iterations", "20")
    for text in ("2 MB", "0.50 s", "restarts"):
        assert text in result.stdout
    assert "accuracy" not in result.stdout
    monkeypatch.setattr("laconic.train.launch.launch", lambda *_, **__: [SUMMARY])
    shown = json.loads(run("train", "--iterations", "20", "--json").stdout)
    assert shown.items() >= SUMMARY.items() and shown["run_dir"].startswith("runs/")


def test_prepare_writes_the_folder_and_starts_nothing(run: Run, work_dir: Path, launched: list[Config]) -> None:
    (example,) = (example for example in train.EXAMPLES if "--prepare" in example)
    result = run(*shlex.split(example)[1:])
    assert result.exit_code == 0 and "laconic server run" in result.stdout and "0 to 3" in result.stdout
    assert file_names() == ["run"] and [path.name for path in Path("run").iterdir()] == ["config.json"] and not launched
    config = Config.load(Path("run"))
    assert (config.method, config.job.workers) == ("5", 4)
    shown = json.loads(run("train", "--run-dir", "other", "--prepare", "--json").stdout)
    assert shown["run_dir"] == "other" and Config.from_json(shown["config"]) == Config.load(Path("other"))


@pytest.mark.parametrize("args, code, words", [
    (["--workers", "0"], 2, "workers must be an integer of at least 1, got 0"),
    (["--servers", "0"], 2, "servers must be an integer of at least 1, got 0"),
    (["--method", "9"], 2, "unknown method '9'"), (["--method", "9", "--explain"], 2, "unknown method '9'"),
    (["--model", "nope"], 2, "unknown model 'nope'"), (["--data", "nope"], 2, "unknown data set 'nope'"),
    (["--epochs", "1"], 2, "give --epochs or --iterations, not both"),
    (["--data", "mnist", "--data-dir", "nowhere"], 1, "there are none in nowhere"),
    (["--data", "cifar10", "--model", "vgg11"], 1, "set data_dir or"),
    (["--batch", "0"], 2, "batch must be at least 1, got 0"),
    (["--batch", "100000"], 2, "too few for a batch of 100000"),
    (["--schedule", "often"], 2, "unknown schedule 'often'"), (["--push", "ef"], 2, "'ef' has no codec after"),
    (["--mode", "late"], 2, "mode must be sync, async or bounded:S"),
    (["--optimizer", "adam"], 2, "optimizer must be one of sgd, adamw, muon, got 'adam'"),
    (["--optimizer", "muon", "--bundled"], 2, "muon needs matrices"),
    (["--optimizer", "adamw", "--momentum", "0.5"], 2, "--momentum is for --optimizer sgd"),
    (["--optimizer", "adamw", "--returns", "gradients"], 2, "runs on the server and needs"),
    (["--optimizer", "adamw", "--layers", "subspace:0.1"], 2, "need optimizer=sgd"),
    (["--lr", "nan"], 2, "lr must be a finite number"), (["--script", "nothing.py:f"], 1, "there is no file"),
    (["--resume"], 2, "--resume needs the --run-dir"), (["--prepare"], 2, "--prepare needs the --run-dir"),
    (["--resume", "--run-dir", "none"], 1, "none is not a run folder"),
    (["--resume", "--prepare", "--run-dir", "none"], 2, "give one of them"),
    (["--run-dir", "file"], 1, "file is a file"), (["--run-dir", "file/run"], 1, "file is a file"),
    (["--run-dir", "/proc/run"], 1, "/proc"),
])  # fmt: skip
def test_invalid_input_is_one_line_and_starts_nothing(
    run: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, words: str
) -> None:
    monkeypatch.delenv("LACONIC_DATA", raising=False)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    Path("file").touch()
    assert_error(run("train", "--iterations", "3", *args), code, words)
    assert file_names() == ["file"]


def test_number_of_servers_is_passed_on(run: Run, work_dir: Path, launched: list[Config]) -> None:
    assert run("train", "--servers", "2", "--iterations", "3").exit_code == 0 and launched[0].servers == 2


def test_zero_iterations_is_one_line(run: Run, work_dir: Path) -> None:
    assert_error(run("train", "--iterations", "0"), 2, "at least one iteration, got 0")
    assert_error(run("train", "--epochs", "-1"), 2, "at least one iteration")
    assert file_names() == []


def report(worker: int, iteration: int, **values: Any) -> dict[str, Any]:
    counts = {"bytes_sent": 1_000_000, "bytes_received": 500_000, "bytes_raw": 6_500_000, "total_s": 2.0}
    return {"run_dir": "run", "worker": worker, "iteration": iteration, "loss": 0.5 + worker} | counts | values


def test_progress_line_has_iteration_loss_speed_and_saved_bytes() -> None:
    assert progress_line([report(0, 21), report(1, 20)]) == "iteration 20, loss 1.000, 1.50 MB/s, 10 MB saved"
    assert progress_line([report(0, 1, total_s=0.0)]).startswith("iteration 1, loss 0.500, ")
    assert progress_line([report(0, 1, bytes_raw=0)]).endswith(", 0 B saved")


def test_time_left_counts_from_the_first_report(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 110.0])
    monkeypatch.setattr("laconic.cli.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    left = TimeLeft(1_000)
    assert (left(400), left(400), left(420)) == ("", "", ", 0:04:50 left")


def test_progress_log_prints_lines_if_stderr_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    log = ProgressLog(every=0.0)
    log("iteration 1")
    ProgressLog(every=60.0)("iteration 2")
    assert capsys.readouterr().err == "iteration 1\n"
