from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import running, wait_for
from typer.testing import Result

from cli_runner import Run, file_names

pytest.importorskip("grpc")


def one_line(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    assert len(result.stderr.strip().splitlines()) == 1 and not result.stdout, result.output
    for word in words:
        assert word in result.stderr, result.stderr


@pytest.fixture
def prepared(run: Run, work_dir: Path) -> Path:
    assert run("train", "--workers", "1", "--iterations", "5", "--run-dir", "run", "--prepare").exit_code == 0
    return work_dir


@pytest.fixture
def busy() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "laconic", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_run_by_its_roles_with_a_folder_each(prepared: Path) -> None:
    """As on two hosts: they share nothing but the configuration and an address."""
    other = prepared / "other"
    other.mkdir()
    shutil.copy("run/config.json", other)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start("server", prepared / "run", "--port", port)
    worker = start("worker", other, "--worker", "0", "--server", f"127.0.0.1:{port}")
    try:
        lines, complaint = worker.communicate(timeout=60)
        assert worker.returncode == 0, complaint
        said, complaint = server.communicate(timeout=30)
        assert (server.returncode, said) == (0, ""), complaint
    finally:
        for process in (server, worker):
            process.kill()
    told = [json.loads(line) for line in lines.splitlines()]
    assert [one["iteration"] for one in told] == [1, 2, 3, 4, 5] and {one["worker"] for one in told} == {0}
    assert {"loss", "bytes_sent", "bytes_received", "total_s"} <= set(told[-1])
    assert (prepared / "run" / "checkpoints").is_dir()
    assert [path.name for path in other.iterdir()] == ["config.json"]
    assert wait_for(lambda: running(prepared) == [], 2)


@pytest.mark.parametrize("role", [("server",), ("worker", "--worker", "0")], ids=lambda role: role[0])
def test_a_folder_that_holds_no_run(run: Run, work_dir: Path, role: tuple[str, ...]) -> None:
    one_line(run(*role, "nowhere"), 1, "nowhere is no run folder", "config.json")
    Path("run").mkdir()
    one_line(run(*role, "run"), 1, "run is no run folder")
    Path("run/config.json").write_text("{}")
    one_line(run(*role, "run"), 1, "run/config.json does not hold a configuration")
    one_line(run(*role), 2, "RUN_DIR")
    assert file_names() == ["run"]


def test_an_address_that_cannot_be_listened_on(run: Run, prepared: Path, busy: int) -> None:
    one_line(run("server", "run", "--port", busy), 2, f"cannot listen on 127.0.0.1:{busy}", "in use", "--port")
    one_line(run("server", "run", "--port", "70000"), 2, "--port")
    one_line(run("server", "run", "--host", "192.0.2.1"), 2, "cannot listen on 192.0.2.1:0")
    one_line(run("server", "run", "--host", "0.0.0.0"), 2, "only TLS is allowed", "laconic certs new")
    one_line(run("server", "run", "--certs", "nowhere"), 1, "nowhere")
    assert [path.name for path in Path("run").iterdir()] == ["config.json"]


def test_a_worker_that_nobody_expects(run: Run, prepared: Path) -> None:
    for number in (1, -1):
        one_line(run("worker", "run", "--worker", number), 2, "run has the workers 0 to 0", f"no --worker {number}")
    one_line(run("worker", "run"), 2, "--worker")
    one_line(run("worker", "run", "--worker", "first"), 2, "--worker")
    one_line(run("worker", "run", "--worker", "0", "--incarnation", "-1"), 2, "--incarnation")


@pytest.mark.parametrize("words", [("server", "run"), ("worker", "run", "--worker", "0"), ("train",), ("demo",)])
def test_without_grpc_nothing_starts(
    run: Run, prepared: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str]
) -> None:
    monkeypatch.setattr("laconic.cli.roles.find_spec", lambda name: None)
    one_line(run(*words), 1, "gRPC", "pip install 'laconic[cluster]'")
    assert file_names() == ["run"]


def test_a_server_that_is_not_there(run: Run, prepared: Path) -> None:
    for address in ("nonsense", "10.0.0.5", "10.0.0.5:", ":50051", "10.0.0.5:port", "10.0.0.5:70000"):
        one_line(run("worker", "run", "--worker", "0", "--server", address), 2, "must be host:port", repr(address))
    one_line(run("worker", "run", "--worker", "0", "--server", "10.0.0.5:50051"), 2, "only TLS is allowed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = run("worker", "run", "--worker", "0", "--server", f"127.0.0.1:{port}", "--patience", "0.5")
    assert (
        result.exit_code == 1 and f"no server at 127.0.0.1:{port}" in result.stderr and "Traceback" not in result.output
    )
