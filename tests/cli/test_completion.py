"""Shell completion. A shell starts the command for every Tab, so completion must not import torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cli_runner import Run
from laconic.cli import complete
from laconic.cli.app import app
from laconic.codecs import registry
from laconic.train.methods import METHODS
from laconic.train.models import MODELS


def completion_environment(line: str, shell: str = "bash") -> dict[str, str]:
    return {
        "_LACONIC_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1),
        "_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }  # fmt: skip


def completions(line: str, shell: str = "bash") -> list[str]:
    result = CliRunner().invoke(app, [], prog_name="laconic", env=completion_environment(line, shell))
    return result.stdout.split()


@pytest.mark.parametrize("line, words", [
    ("laconic wa", ["watch"]), ("laconic train --method laconic", ["laconic", "laconic-min"]),
    ("laconic train --model le", ["lenet5"]), ("laconic pack --codec topk:0.01|qs", ["topk:0.01|qsgd"]),
    ("laconic lab st", ["status"]),
])  # fmt: skip
def test_words_are_completed(line: str, words: list[str]) -> None:
    assert completions(line) == words


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str) -> None:
    assert "terngrad" in completions("laconic train --push te", shell)[-1]


@pytest.mark.parametrize("args, environment, output", [
    ([], completion_environment("laconic study ja"), "jang2017"), (["--version"], {}, "laconic "),
    (["--show-completion", "zsh"], {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}, "_LACONIC_COMPLETE"),
], ids=["completion", "version", "completion script"])  # fmt: skip
def test_start_does_not_import_torch_or_the_lab(args: list[str], environment: dict[str, str], output: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "laconic", *args]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert output in done.stdout and "typer" in modules
    assert not modules & {"torch", "numpy", "grpc", "matplotlib", "laconic.cluster", "laconic.codecs"}
    lab_packages = ("laconic_lab.bench", "laconic_lab.studies.", "laconic_lab.faults", "laconic_lab.network")
    assert not any(name.startswith(lab_packages) for name in modules)


def test_names_are_those_of_the_packages(run: Run) -> None:
    from laconic import optim
    from laconic.layers import parse_scheme

    assert sorted(complete.STAGES) == registry.names()
    assert tuple(METHODS) == complete.METHODS and tuple(MODELS) == complete.MODELS
    assert complete.OPTIMIZERS == optim.OPTIMIZERS
    for mode in complete.MODES:
        name = mode + "2" if mode.endswith(":") else mode
        assert run("train", "--mode", name, "--explain").exit_code == 0
    for scheme in complete.SCHEMES:
        parse_scheme(f"{scheme}0.1")
