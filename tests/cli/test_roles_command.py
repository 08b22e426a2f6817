from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import running

from cli_runner import Run, assert_error, file_names
from laconic.watch.view import Watcher
from waiting import eventually

pytest.importorskip("grpc")


@pytest.fixture
def prepared(run: Run, work_dir: Path) -> Path:
    assert run("train", "--workers", "1", "--iterations", "5", "--run-dir", "run", "--prepare").exit_code == 0
    return work_dir


@pytest.fixture
def busy() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "laconic", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_server_and_worker_train_with_separate_folders(prepared: Path) -> None:
    """As on two hosts: they share nothing but the configuration and an address."""
    other = prepared / "other"
    other.mkdir()
    shutil.copy("run/config.json", other)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start("server", prepared / "run", "--port", port, "--json")
    worker = start("worker", other, "--worker", "0", "--server", f"127.0.0.1:{port}")
    try:
        lines, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
        summary, errors = server.communicate(timeout=30)
        assert server.returncode == 0, errors
    finally:
        for process in (server, worker):
            process.kill()
            process.communicate()
    reports = [json.loads(line) for line in lines.splitlines()]
    assert [report["iteration"] for report in reports] == [1, 2, 3, 4, 5]
    assert {report["worker"] for report in reports} == {0}
    assert {"loss", "bytes_sent", "bytes_received", "total_s"} <= set(reports[-1])
    (result,) = json.loads(summary)["runs"]
    assert (result["phase"], result["version"]) == ("ended", 5)
    assert result["summary"]["accuracy"] > 0 and result["received"] > 0
    (status,) = Watcher(Path("run")).view().workers
    assert status.loss == reports[-1]["loss"] and status.bytes_sent == reports[-1]["bytes_sent"] > 0
    assert (status.state, status.iteration, status.applied) == ("done", 5, 5)
    assert (prepared / "run" / "checkpoints").is_dir()
    assert [path.name for path in other.iterdir()] == ["config.json"]
    assert eventually(lambda: running(prepared) == [], 2)


def test_worker_with_json_prints_its_last_report(run: Run, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(run_dir: Path, number: int, *, report: Callable[[dict[str, Any]], None], **_: Any) -> None:
        for iteration in (1, 2):
            report({"run_dir": str(run_dir), "iteration": iteration})

    monkeypatch.setattr("laconic.train.worker_process.work", work)
    result = json.loads(run("worker", "run", "--worker", "0", "--json").stdout)
    assert result == {"worker": 0, "runs": [{"run_dir": "run", "iteration": 2}]}


@pytest.mark.parametrize("role", [("server",), ("worker", "--worker", "0")], ids=lambda role: role[0])
def test_folder_without_a_run_is_one_line(run: Run, work_dir: Path, role: tuple[str, ...]) -> None:
    assert_error(run(*role, "nowhere"), 1, "nowhere is not a run folder", "config.json")
    Path("run").mkdir()
    assert_error(run(*role, "run"), 1, "run is not a run folder")
    Path("run/config.json").write_text("{}")
    assert_error(run(*role, "run"), 1, "run/config.json does not hold a configuration")
    assert_error(run(*role), 2, "RUN_DIR")
    assert file_names() == ["run"]


def test_unusable_address_is_one_line(run: Run, prepared: Path, busy: int) -> None:
    assert_error(run("server", "run", "--port", busy), 2, f"cannot listen on 127.0.0.1:{busy}", "in use", "--port")
    assert_error(run("server", "run", "--port", "70000"), 2, "--port")
    assert_error(run("server", "run", "--host", "192.0.2.1"), 2, "cannot listen on 192.0.2.1:0")
    assert_error(run("server", "run", "--host", "0.0.0.0"), 2, "needs TLS", "laconic certs new")
    assert_error(run("server", "run", "--certs", "nowhere"), 1, "nowhere")
    assert [path.name for path in Path("run").iterdir()] == ["config.json"]


def test_unknown_worker_is_one_line(run: Run, prepared: Path) -> None:
    for number in (1, -1):
        assert_error(
            run("worker", "run", "--worker", number), 2, "--worker must be from 0 to 0 in run", f"got {number}"
        )
    assert_error(run("worker", "run"), 2, "--worker")
    assert_error(run("worker", "run", "--worker", "first"), 2, "--worker")
    assert_error(run("worker", "run", "--worker", "0", "--incarnation", "-1"), 2, "--incarnation")


@pytest.mark.parametrize("words", [("server", "run"), ("worker", "run", "--worker", "0"), ("train",), ("demo",)])
def test_missing_grpc_is_one_line_and_starts_nothing(
    run: Run, prepared: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str]
) -> None:
    monkeypatch.setattr("laconic.cli.roles.find_spec", lambda name: None)
    assert_error(run(*words), 2, "gRPC", "pip install 'laconic[cluster]'")
    assert file_names() == ["run"]


def test_unreachable_server_is_one_line(run: Run, prepared: Path) -> None:
    for address in ("nonsense", "10.0.0.5", "10.0.0.5:", ":50051", "10.0.0.5:port", "10.0.0.5:70000"):
        assert_error(run("worker", "run", "--worker", "0", "--server", address), 2, "must be host:port", repr(address))
    assert_error(run("worker", "run", "--worker", "0", "--server", "10.0.0.5:50051"), 2, "needs TLS")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = run("worker", "run", "--worker", "0", "--server", f"127.0.0.1:{port}", "--patience", "0.5")
    assert (
        result.exit_code == 1 and f"no server at 127.0.0.1:{port}" in result.stderr and "Traceback" not in result.output
    )


def test_interrupted_server_says_so_at_once_and_saves_a_checkpoint(prepared: Path) -> None:
    server = start("server", prepared / "run")
    try:
        assert eventually((prepared / "run" / "server.json").exists, 120)
        server.send_signal(signal.SIGINT)
        assert server.stderr is not None
        first = server.stderr.readline()
        _, errors = server.communicate(timeout=60)
    finally:
        server.kill()
        server.communicate()
    assert first == "laconic: stopping...\n" and server.returncode == 130
    assert "continue with --resume" in errors and "Traceback" not in errors
    assert list((prepared / "run" / "checkpoints").iterdir())
