"""What a shell offers after Tab; it asks by starting the command each time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cli_runner import Run
from laconic.cli import complete
from laconic.codecs import registry
from laconic.train.methods import METHODS
from laconic.train.models import MODELS


def offered(line: str, shell: str = "bash") -> tuple[list[str], str]:
    """Words after a line, and what was imported to find them."""
    words = line.split(" ")
    environment = {
        **os.environ,
        "_LACONIC_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    command = [sys.executable, "-X", "importtime", "-m", "laconic"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout.split(), done.stderr


@pytest.mark.parametrize(
    "line, words",
    [
        ("laconic wa", ["watch"]),
        ("laconic train --method laconic", ["laconic", "laconic-min"]),
        ("laconic train --model le", ["lenet5"]),
        ("laconic pack --codec topk:0.01|qs", ["topk:0.01|qsgd"]),
        ("laconic lab st", ["status"]),
        ("laconic study ja", ["jang2017"]),
    ],
)
def test_words_are_offered_without_loading_torch(line: str, words: list[str]) -> None:
    found, imported = offered(line)
    assert found == words and " typer" in imported
    assert " torch" not in imported and " numpy" not in imported and " grpc" not in imported


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str) -> None:
    assert "terngrad" in offered("laconic train --push te", shell)[0][-1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_be_taught(shell: str) -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "laconic", "--show-completion", shell]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "_LACONIC_COMPLETE" in done.stdout


def test_names_are_those_that_there_are(run: Run) -> None:
    assert sorted(complete.STAGES) == registry.names()
    assert tuple(METHODS) == complete.METHODS and tuple(MODELS) == complete.MODELS
    for mode in complete.MODES:
        whole = mode + "2" if mode.endswith(":") else mode
        assert run("train", "--mode", whole, "--explain").exit_code == 0
    for scheme in complete.SCHEMES:
        from laconic.layers import parse_scheme

        parse_scheme(f"{scheme}0.1")
