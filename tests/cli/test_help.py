"""Every command explains itself, and its examples run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from command import Run, laconic

import laconic as package
from laconic.cli import certs, codecs, demo, pack, report, roles, train, unpack
from laconic.cli.app import app
from laconic_lab.cli import bench, bench_cluster, bench_collective, bench_ddp, bench_layers, study

COMMANDS = {
    "demo": demo.EXAMPLES,
    "codecs": codecs.EXAMPLES,
    "bench": bench.EXAMPLES,
    "pack": pack.EXAMPLES,
    "unpack": unpack.EXAMPLES,
    "train": train.EXAMPLES,
    "server": roles.SERVER,
    "worker": roles.WORKER,
    "certs": certs.EXAMPLES,
    "study": study.EXAMPLES,
    "report": report.EXAMPLES,
}
RUN_HERE = ("codecs", "bench", "pack", "unpack")
"""Those of demo, train, report and certs run in the tests of these commands; those of roles need several hosts."""
EXAMPLES = [
    example
    for command in RUN_HERE
    for example in COMMANDS[command]
    # Those of other benches take minutes: tests/bench runs smaller ones, test_layers_command.py those of layers.
    if example not in (*bench_cluster.EXAMPLES, *bench_collective.EXAMPLES, *bench_ddp.EXAMPLES, *bench_layers.EXAMPLES)
]


REGISTERED = [
    *(command.name or command.callback.__name__ for command in app.registered_commands),  # type: ignore[union-attr]
    *(str(group.name) for group in app.registered_groups),
]


@pytest.mark.parametrize("command", REGISTERED)
def test_every_command_has_examples(run: Run, command: str) -> None:
    result = run(command, "--help")
    shown = " ".join(result.stdout.split())
    assert result.exit_code == 0 and "Examples:" in shown and f"$ laconic {command}" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_examples(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    assert "Examples:" in shown and len(COMMANDS[command]) >= 2
    for example in COMMANDS[command]:
        assert example.startswith(f"laconic {command}") and f"$ {example}" in shown


@pytest.mark.parametrize(
    "command, words",
    [
        ("demo", ("--methods", "--html", "--record", "HTML file")),
        ("train", ("--workers", "--servers", "--prepare", "--resume", "--explain")),
        ("server", ("config.json", "--host", "--port", "--certs", "laconic certs new", "--prepare", "--resume")),
        ("worker", ("config.json", "--server", "--certs", "--incarnation", "laconic server --help")),
    ],
)
def test_help_explains_several_hosts(run: Run, command: str, words: tuple[str, ...]) -> None:
    shown = " ".join(run(command, "--help").stdout.split())
    assert [word for word in words if word not in shown] == []


def test_benches_are_told_apart(run: Run) -> None:
    """Codecs when the first word is no bench, as before there was another."""
    for words in ("cluster", *bench_cluster.EXAMPLES):
        assert words in " ".join(run("bench", "cluster", "--help").stdout.split())
    small = ("sign", "--no-peers", "--numel", "20000", "--repeat", "1", "--json")
    named, unnamed = (run("bench", *words, *small) for words in (["codecs"], []))
    assert named.exit_code == unnamed.exit_code == 0
    assert json.loads(named.stdout)["command"] == json.loads(unnamed.stdout)["command"]
    wrong = run("bench", "clusters")
    assert wrong.exit_code == 2 and "unknown stage 'clusters'" in wrong.stderr


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(run: Run, model: Path, example: str) -> None:
    _, *words = shlex.split(example)
    if words[0] == "bench":
        words += ["--quick", "--numel", "20000", "--repeat", "1"]
        if not any(word for word in words[1:] if (not word.startswith("--") and ":" in word) or word == "sign"):
            words.append("--no-peers")  # all codecs: their peers would take the time of all other tests together
    if words[0] == "unpack":
        assert run("pack", model, "-o", "model.lac", "--codec", "qsgd:8").exit_code == 0
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert result.stdout
    if "--json" in words:
        assert isinstance(json.loads(result.stdout), dict)


def test_bare_command_and_version(run: Run) -> None:
    bare = run()
    assert bare.exit_code == 0 and all(command in bare.stdout for command in COMMANDS)
    version = run("--version")
    assert version.exit_code == 0 and version.stdout.strip() == f"laconic {package.__version__}"


def test_module_is_the_command() -> None:
    done = laconic("--version")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("laconic ")


def test_import_stays_light() -> None:
    import subprocess
    import sys

    code = "import sys, laconic; print([m for m in ('typer', 'rich', 'safetensors', 'zstandard') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
