"""Every command, found by walking the tree of them: help with examples, --json, and an example that runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command import Run

from laconic.cli.app import app
from laconic.watch.view import Watcher

ROOT = Path(__file__).resolve().parents[2]


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Commands that are no groups, by their words."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from leaves(inner, (*path, name))
    else:
        yield " ".join(path), command


COMMANDS = dict(leaves(typer.main.get_command(app)))

ELSEWHERE = {
    "demo": "cli/test_demo_command.py",
    "codecs": "cli/test_help.py",
    "bench codecs": "cli/test_help.py",
    "bench layers": "cli/test_layers_command.py",
    "pack": "cli/test_help.py",
    "unpack": "cli/test_help.py",
    "train": "cli/test_train_command.py",
    "watch": "cli/test_watch_command.py",
    "certs new": "cli/test_certs_command.py",
    "certs show": "cli/test_certs_command.py",
    "lab up": "lab/test_lab_command.py",
    "lab run": "lab/test_lab_command.py",
    "lab status": "lab/test_lab_command.py",
    "lab down": "lab/test_lab_command.py",
    "calibrate": "cli/test_plan_command.py",
    "plan": "cli/test_plan_command.py",
    "report": "cli/test_report_command.py",
}
"""Commands whose examples are run by tests that say more about them."""

HERE = {
    "bench cluster": "laconic bench cluster --part load --clients 4 --processes 1 --seconds 1 --json",
    "bench collective": "laconic bench collective thc:6 --numel 100000 --repeat 3 --json",
    "bench ddp": "laconic bench ddp qsgd:4 --quick --stock ddp --rates unshaped --json",
    "study": "laconic study oland2015 --part report --records results/oland2015",
    "lab faults": "laconic lab faults --list",
}
"""The quickest example of a command, run by this test."""

PAIR = ("server", "worker")
"""One is nothing without the other: they run together below."""


def shown(run: Run, command: str) -> list[str]:
    """The examples of a command's help."""
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "Examples:" in text
    return [one.strip() for one in text.partition("Examples:")[2].split("$ ")[1:]]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_of_the_command(run: Run, command: str) -> None:
    start = "laconic bench" if command == "bench codecs" else f"laconic {command}"
    examples = shown(run, command)
    assert len(examples) >= 2 and all(example.startswith(start) for example in examples)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_answer_in_json(command: str) -> None:
    assert any("--json" in parameter.opts for parameter in COMMANDS[command].params)


def test_an_example_of_every_command_is_run() -> None:
    assert set(COMMANDS) == {*ELSEWHERE, *HERE, *PAIR}
    for file in ELSEWHERE.values():
        text = (ROOT / "tests" / file).read_text()
        assert "EXAMPLES" in text, f"{file} runs no examples"


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=pytest.mark.slow if one == "bench ddp" else ()) for one in HERE]
)
def test_an_example_runs(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    example = HERE[command]
    assert example in shown(run, command)
    monkeypatch.chdir(ROOT)
    result = run(*shlex.split(example)[1:])
    assert result.exit_code == 0 and result.stdout, result.output
    if "--json" in example:
        assert isinstance(json.loads(result.stdout), dict)


def test_server_and_worker_run_as_their_examples_say(run: Run, here: Path) -> None:
    pytest.importorskip("grpc")
    assert run("train", "--workers", "1", "--iterations", "5", "--run-dir", "run", "--prepare").exit_code == 0
    examples = ["laconic server run --json", "laconic worker run --worker 0 --json"]
    assert all(example in shown(run, example.split()[1]) for example in examples)
    roles = [
        subprocess.Popen(
            [sys.executable, "-m", *shlex.split(example)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for example in examples
    ]
    try:
        told = [process.communicate(timeout=60) for process in roles]
    finally:
        for process in roles:
            process.kill()
    assert [process.returncode for process in roles] == [0, 0], told
    server, worker = (json.loads(out) for out, _ in told)
    assert server["runs"][0]["phase"] == "ended" and server["runs"][0]["version"] == 5
    assert server["runs"][0]["summary"]["accuracy"] > 0 and server["runs"][0]["received"] > 0
    assert worker["worker"] == 0 and worker["runs"][0]["iteration"] == 5
    (seen,) = Watcher(Path("run")).look().workers
    assert seen.loss == worker["runs"][0]["loss"] and seen.bytes_sent == worker["runs"][0]["bytes_sent"] > 0
    assert (seen.state, seen.iteration, seen.applied) == ("done", 5, 5), "as it told its server"
