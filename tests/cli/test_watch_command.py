from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cli_runner import Run, assert_error, file_names
from laconic.cli import watch
from laconic.watch.status import Status, WorkerStatus


def write_run(folder: Path, phase: str = "ended", at: float | None = None, mode: str = "async", **values: Any) -> None:
    """Write the files of a run as its server does."""
    folder.mkdir(parents=True, exist_ok=True)
    job = {"workers": 1, "mode": mode, "push": "qsgd:4", "pull": "none"}
    config = {"model": "mlp", "data": "digits", "method": "2", "iterations": 50, "servers": 1, "job": job}
    (folder / "config.json").write_text(json.dumps(config))
    at = time.time() if at is None else at
    worker = WorkerStatus(
        "computing", 2, 40, 0.125, 1000, 2000, 90_000, applied=40, missed=1, missed_most=3, heard_at=at
    )
    worker.seconds["compute"] = 12.5
    status = Status(
        at=at, began_at=at - 65, phase=phase, version=40, updates=50, iterations=50, received=1000, sent=2000,
        workers=[worker], faults={"lost": 1}, recent=[{"at": at, "what": "the connection of worker 0 broke"}], **values,
    )  # fmt: skip
    (folder / "status.json").write_text(json.dumps(status.to_json()))
    point = {"version": 1, "received": 1, "sent": 2, "missed": 0, "faults": 0}
    lines = [json.dumps(point | {"at": at - 65 + i, "iteration": i, "loss": 1 / (1 + i)}) + "\n" for i in range(20)]
    (folder / "progress.jsonl").write_text("".join(lines))


def test_examples(run: Run, work_dir: Path) -> None:
    write_run(work_dir / "run")
    pytest.importorskip("tensorboardX")
    for example in watch.EXAMPLES[:4]:
        result = run(*shlex.split(example)[1:])
        assert result.exit_code == 0 and result.stdout, result.output
        if "--json" in example:
            assert json.loads(result.stdout)["phase"] == "ended"
    assert file_names() == ["boards", "run"] and len(list(Path("boards/run").iterdir())) == 1


def test_once_prints_the_whole_status(run: Run, work_dir: Path) -> None:
    write_run(work_dir / "run", phase="serving")
    shown = run("watch", "run", "--once").stdout
    for words in ("run  running", "method 2, mlp, digits, async, push qsgd:4", "40 of 50", "1:05", "0.125", "█▄▃",
                  "in 1 kB, out 2 kB", "would have taken 90 kB, 30 times the 3 kB of frames", "at most 3",
                  "computing 12.5", "lost 1", "the connection of worker 0 broke"):  # fmt: skip
        assert words in shown, (words, shown)
    write_run(work_dir / "run", phase="serving", at=time.time() - 100)
    assert re.search(r"no sign of its server for 1\d\d s", run("watch", "run", "--once").stdout)
    write_run(work_dir / "run", phase="failed", failure="the weights overflowed")
    assert "the weights overflowed" in run("watch", "run", "--once").stdout


def test_control_characters_of_the_folder_are_replaced(run: Run, work_dir: Path) -> None:
    write_run(work_dir / "run", phase="failed", failure="\x1b]0;mine\x07 [bold]x[/bold] \x9b31m")
    shown = run("watch", "run", "--once").stdout
    assert not any(letter in shown for letter in "\x1b\x07\x9b") and "[bold]x[/bold]" in shown


def test_watch_ends_with_the_run(run: Run, work_dir: Path) -> None:
    write_run(work_dir / "run", phase="serving")
    timer = threading.Timer(0.5, write_run, (work_dir / "run",))
    timer.start()
    began = time.monotonic()
    result = run("watch", "run", "--every", "0.05")
    assert result.exit_code == 0 and time.monotonic() - began > 0.4
    assert "run  ended" in result.stdout and "running" not in result.stdout, (
        "stdout is not a terminal: only the end is printed"
    )
    timer.join()


def test_watch_waits_for_a_missing_run_with_wait_only(run: Run, work_dir: Path) -> None:
    assert_error(run("watch", "run"), 1, "run is not a run folder", "--wait")
    write_run(work_dir / "elsewhere")  # renamed: with its configuration alone a run is at iteration 0
    timer = threading.Timer(0.3, (work_dir / "elsewhere").rename, (work_dir / "run",))
    timer.start()
    result = run("watch", "run", "--wait", "--json", "--every", "0.05")
    assert json.loads(result.stdout)["iteration"] == 40
    timer.join()


def test_default_is_the_newest_run(run: Run, work_dir: Path) -> None:
    assert_error(run("watch", "--once"), 2, "which run?")
    for name in ("old", "new"):
        write_run(work_dir / "runs" / name)
        time.sleep(0.02)
    assert json.loads(run("watch", "--json").stdout)["run"] == "runs/new"


@pytest.mark.parametrize(
    "words, code, message",
    [
        (("--web", "--host", "0.0.0.0"), 2, "--host must be a loopback address"),
        (("--web", "--once"), 2, "give one of them"),
        pytest.param(
            ("--once", "--tensorboard", "run/config.json"),
            1,
            "cannot write TensorBoard's event files",
            marks=pytest.mark.skipif(find_spec("tensorboardX") is None, reason="no tensorboardX"),
        ),
        (("--every", "0"), 2, "--every"),
    ],
)
def test_invalid_arguments_are_one_line(
    run: Run, work_dir: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    write_run(work_dir / "run")
    assert_error(run("watch", "run", *words), code, message)


@pytest.mark.parametrize("words", [("train", "--iterations", "1"), ("server", "run")])
def test_metrics_are_served_on_loopback_only(run: Run, work_dir: Path, words: tuple[str, ...]) -> None:
    pytest.importorskip("grpc")
    assert_error(run(*words, "--metrics", "0.0.0.0:9464"), 2, "--metrics must be a loopback address")
    assert_error(run(*words, "--metrics", "9464"), 2, "--metrics must be HOST:PORT")
    assert file_names() == []


@pytest.mark.parametrize("words, module, extra", [
    (("watch", "run", "--once", "--tensorboard", "boards"), "tensorboard", "tensorboard"),
    (("train", "--iterations", "1", "--tensorboard", "boards"), "tensorboard", "tensorboard"),
    (("train", "--iterations", "1", "--metrics", "127.0.0.1:0"), "metrics", "watch"),
    (("server", "run", "--metrics", "127.0.0.1:0"), "metrics", "watch"),
], ids=lambda value: " ".join(value[:1]) if isinstance(value, tuple) else value)  # fmt: skip
def test_missing_package_is_one_line_and_starts_nothing(
    run: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], module: str, extra: str
) -> None:
    pytest.importorskip("grpc")
    write_run(work_dir / "run")
    monkeypatch.setattr(f"laconic.watch.{module}.find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert_error(run(*words), 2, f"pip install 'laconic[{extra}]'")
    assert file_names() == ["run"]


def test_web_starts_without_torch_and_serves_until_interrupted(work_dir: Path) -> None:
    write_run(work_dir / "run")
    command = [sys.executable, "-X", "importtime", "-m", "laconic", "watch", "run", "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, imported = process.communicate(timeout=20)
    assert line.startswith("run is shown at http://127.0.0.1:") and process.returncode == 0
    assert " laconic.watch.web" in imported and " torch" not in imported
