"""Help and examples of the commands ``bench``, ``study`` and ``lab``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from cli_runner import Run, help_text
from laconic_lab.cli import (
    bench,
    bench_cluster,
    bench_collective,
    bench_ddp,
    bench_fsdp,
    bench_gpt,
    bench_layers,
    study,
)

ROOT = Path(__file__).resolve().parents[3]

CODEC_BENCH_EXAMPLES = [
    example
    for example in bench.EXAMPLES
    if not any(
        example in command.EXAMPLES
        for command in (bench_cluster, bench_collective, bench_ddp, bench_fsdp, bench_gpt, bench_layers)
    )
]

QUICKEST = {
    "bench cluster": "laconic bench cluster --part load --clients 4 --processes 1 --seconds 1 --json",
    "bench collective": "laconic bench collective thc:6 --numel 100000 --repeat 3 --json",
    "bench ddp": "laconic bench ddp qsgd:4 --quick --stock ddp --rates unshaped --json",
    "study": "laconic study oland2015 --part report --records results/oland2015",
    "lab faults": "laconic lab faults --list",
}
"""The quickest example of each command. The other commands have test files of their own."""


@pytest.mark.parametrize("command, examples", [("bench", bench.EXAMPLES), ("study", study.EXAMPLES)])
def test_help_shows_the_examples(run: Run, command: str, examples: tuple[str, ...]) -> None:
    shown = help_text(run, command)
    assert "Examples:" in shown and len(examples) >= 2
    for example in examples:
        assert example.startswith(f"laconic {command}") and f"$ {example}" in shown


def test_bench_without_a_known_subcommand_is_the_codec_bench(run: Run) -> None:
    for words in ("cluster", *bench_cluster.EXAMPLES):
        assert words in help_text(run, "bench", "cluster")
    small = ("sign", "--no-peers", "--numel", "20000", "--repeat", "1", "--json")
    named, unnamed = (run("bench", *words, *small) for words in (["codecs"], []))
    assert named.exit_code == unnamed.exit_code == 0
    assert json.loads(named.stdout)["command"] == json.loads(unnamed.stdout)["command"]
    wrong = run("bench", "clusters")
    assert wrong.exit_code == 2 and "'clusters' is neither a benchmark" in wrong.stderr


@pytest.mark.parametrize("example", CODEC_BENCH_EXAMPLES)
def test_example_of_the_codec_bench_runs(run: Run, work_dir: Path, example: str) -> None:
    _, *words = shlex.split(example)
    words += ["--quick", "--numel", "20000", "--repeat", "1"]
    if not any(word for word in words[1:] if (not word.startswith("--") and ":" in word) or word == "sign"):
        words.append("--no-peers")  # peers of all codecs would take longer than all other tests together
    result = run(*words)
    assert result.exit_code == 0 and result.stdout, result.output
    if "--json" in words:
        assert isinstance(json.loads(result.stdout), dict)


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=pytest.mark.slow if name == "bench ddp" else ()) for name in QUICKEST]
)
def test_quickest_example_runs(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    example = QUICKEST[command]
    assert f"$ {example}" in help_text(run, *command.split())
    monkeypatch.chdir(ROOT)
    result = run(*shlex.split(example)[1:])
    assert result.exit_code == 0 and result.stdout, result.output
    if "--json" in example:
        assert isinstance(json.loads(result.stdout), dict)
