"""Help texts of all commands, the light import of the library, and the commands of a missing laconic-lab."""

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

import laconic as package
from cli_runner import Run, help_text, laconic
from laconic.cli import certs, codecs, demo, pack, report, roles, train, unpack
from laconic.cli.app import app

EXAMPLES = {
    "demo": demo.EXAMPLES, "codecs": codecs.EXAMPLES, "pack": pack.EXAMPLES, "unpack": unpack.EXAMPLES,
    "train": train.EXAMPLES, "server": roles.SERVER, "worker": roles.WORKER, "certs": certs.EXAMPLES,
    "report": report.EXAMPLES,
}  # fmt: skip


def leaf_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the commands that are not groups, with their full names."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from leaf_commands(inner, (*path, name))
    else:
        yield " ".join(path), command


COMMANDS = dict(leaf_commands(typer.main.get_command(app)))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_two_examples_and_json(run: Run, command: str) -> None:
    start = "laconic bench" if command == "bench codecs" else f"laconic {command}"
    shown = help_text(run, *command.split())
    examples = [example.strip() for example in shown.partition("Examples:")[2].split("$ ")[1:]]
    assert len(examples) >= 2 and all(example.startswith(start) for example in examples)
    assert any("--json" in parameter.opts for parameter in COMMANDS[command].params)


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_shows_the_tested_examples(run: Run, command: str) -> None:
    shown = help_text(run, *command.split())
    assert [example for example in EXAMPLES[command] if f"$ {example}" not in shown] == []


@pytest.mark.parametrize("command, words", [
    ("demo", ("--methods", "--html", "--record", "HTML file")),
    ("train", ("--workers", "--servers", "--prepare", "--resume", "--explain")),
    ("server", ("config.json", "--host", "--port", "--certs", "laconic certs new", "--prepare", "--resume")),
    ("worker", ("config.json", "--server", "--certs", "--incarnation", "laconic server --help")),
])  # fmt: skip
def test_help_explains_several_hosts(run: Run, command: str, words: tuple[str, ...]) -> None:
    shown = help_text(run, *command.split())
    assert [word for word in words if word not in shown] == []


@pytest.mark.parametrize("example", [*codecs.EXAMPLES, *pack.EXAMPLES, *unpack.EXAMPLES])
def test_example_runs(run: Run, model: Path, example: str) -> None:
    """Examples of demo, train, watch, certs, plan and report run in the tests of these commands."""
    _, *words = shlex.split(example)
    if words[0] == "unpack":
        assert run("pack", model, "-o", "model.lac", "--codec", "qsgd:8").exit_code == 0
    result = run(*words)
    assert result.exit_code == 0 and result.stdout, result.output
    if "--json" in words:
        assert isinstance(json.loads(result.stdout), dict)


def test_bare_command_and_version(run: Run) -> None:
    bare = run()
    assert bare.exit_code == 0 and all(command in bare.stdout for command in EXAMPLES)
    version = run("--version")
    assert version.exit_code == 0 and version.stdout.strip() == f"laconic {package.__version__}"


def test_python_m_laconic_is_the_command() -> None:
    done = laconic("--version")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("laconic ")


def test_import_of_the_library_loads_no_command_line_package() -> None:
    code = "import sys, laconic; print([m for m in ('typer', 'rich', 'safetensors', 'zstandard') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
