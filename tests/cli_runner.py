"""Run the ``laconic`` command in tests, in this process or as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

Run = Callable[..., Result]


def file_names() -> list[str]:
    """Return the names of all files in the working folder, including hidden ones."""
    return sorted(path.name for path in Path().iterdir())


def assert_error(result: Result, code: int, *words: str) -> None:
    """Assert that a command failed with one line on stderr that contains these words, and printed no result."""
    assert result.exit_code == code, result.output
    assert len(result.stderr.strip().splitlines()) == 1 and not result.stdout, result.output
    for word in words:
        assert word in result.stderr, result.stderr


def help_text(run: Run, *command: str) -> str:
    """Return a command's help on one line, long examples without their line breaks."""
    result = run(*command, "--help")
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.replace(" \\\n", " ").split())


def laconic(*args: object) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    command = [sys.executable, "-m", "laconic", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run() -> Run:
    """Return a function that runs the command in this process."""
    from laconic.cli.app import app

    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args], prog_name="laconic")
