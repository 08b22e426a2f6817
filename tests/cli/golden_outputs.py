"""Run every command at 80 columns, without colour, in ASCII and without extras, and keep what it prints.

``python tests/cli/golden_outputs.py tests/cli/golden`` (``make golden``) writes a file for each command line;
``test_golden_outputs.py`` compares. The laboratory counts as not installed, like every package of an extra.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import io
import os
import re
import shlex
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

ENVIRONMENT = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}

LINES = {
    "root": "laconic",
    "unknown command": "laconic trian",
    "bench": "laconic bench --quick",
    "study": "laconic study oland2015",
    "lab": "laconic lab up",
    "plan": "laconic plan --params 61100840 --step-time 0.6 --workers 16 --every 200 --profile jang2017",
    "plan pipeline": "laconic plan --stages 4 --activations 786432 --step-time 0.2 --bandwidth 100mbit",
    "plan sweep": "laconic plan --params 61100840 --step-time 0.6 --profile jang2017 --sweep workers --plot x.svg",
    "plan unknown model": "laconic plan --model gpt2",
    "tune": "laconic tune",
    "codecs": "laconic codecs",
    "pack": "laconic pack model.safetensors -o model.lac --codec qsgd:4",
    "pack zstd": "laconic pack model.safetensors -o other.lac --codec 'uniform:8|zstd'",
    "unpack list": "laconic unpack model.lac --list",
    "unpack explain": "laconic unpack model.lac --explain",
    "unpack": "laconic unpack model.lac -o again.safetensors",
    "train explain": "laconic train --method 5 --explain",
    "train prepare": "laconic train --method 5 --iterations 20 --run-dir run --prepare",
    "train": "laconic train --iterations 20 --run-dir other",
    "train unknown stage": "laconic train --push qsdg:4",
    "demo": "laconic demo",
    "server": "laconic server run",
    "worker": "laconic worker run --worker 0",
    "certs new": "laconic certs new certs --job digits --host 10.0.0.5 --workers 2",
    "certs show": "laconic certs show certs",
    "watch": "laconic watch run --once",
    "watch tensorboard": "laconic watch run --once --tensorboard boards",
    "calibrate": "laconic calibrate -o profile.json --model nothing",
    "report": "laconic report records.jsonl -o page.html",
}
"""Command lines by the name of their file, in the order in which they run in one folder."""

MASKS = (
    (r"\d[\d.,]* (kB|MB) \(", r"# \1 ("),
    (r"(?<=; |, )[\d.]+ [kM]B(?=; open)", "# kB"),
    (r"\b\d+\.\d\d s\b", "#.## s"),
    (r"\b\d{4}-\d\d-\d\d[T ][\d:]+", "<time>"),
)
"""What may differ between machines and versions."""


def hide_packages(names: set[str]) -> None:
    """Make packages look as if they were not installed, to ``import`` and to ``find_spec``."""
    finder: Any = importlib.machinery.PathFinder
    find = finder.find_spec

    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in names else find(name, path, target)

    finder.find_spec = find_spec
    entry_points = importlib.metadata.entry_points
    importlib.metadata.entry_points = lambda **which: (
        () if str(which.get("group", "")).startswith("laconic.") else entry_points(**which)
    )


def printed(line: str) -> str:
    """Run a command line in this process; return it with what it printed and its exit code."""
    from laconic.cli.app import app

    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True) for _ in range(2)]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            app(shlex.split(line)[1:], prog_name="laconic")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except Exception:
            traceback.print_exc()
            code = -1
    out, err = (stream.buffer.getvalue().decode("utf-8") for stream in streams)  # type: ignore[attr-defined]
    for pattern, mask in MASKS:
        out, err = re.sub(pattern, mask, out), re.sub(pattern, mask, err)
    parts = [f"$ {line}", out.rstrip("\n"), *(f"stderr: {one}" for one in err.splitlines()), f"exit code {code}"]
    return "\n".join(one.rstrip() for one in "\n".join(filter(None, parts)).split("\n")) + "\n"


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[str]:
    """Return the names of the commands that are not groups."""
    if hasattr(command, "commands"):
        return [name for key, inner in command.commands.items() for name in leaves(inner, (*path, key))]
    return [" ".join(path)]


def write_inputs() -> None:
    """Write the files that the command lines read."""
    import torch
    from safetensors.torch import save_file

    from laconic.records import Record, write

    generator = torch.Generator().manual_seed(0)
    tensors = {"layer.weight": torch.randn(128, 64, generator=generator), "layer.bias": torch.zeros(128)}
    save_file(tensors, "model.safetensors")
    write([Record("example", values={"loss": 1.0})], Path("records.jsonl"))


def main(folder: Path) -> None:
    """Write a file for each command line."""
    from laconic.cli.extras import EXTRAS, OTHERS

    hide_packages({*(module for modules in EXTRAS.values() for module in modules), *OTHERS})
    import typer

    from laconic.cli.app import app

    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    helps = {f"{name} help": f"laconic {name} --help" for name in leaves(typer.main.get_command(app))}
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        write_inputs()
        for name, line in {**LINES, **helps}.items():
            (folder / f"{name.replace(' ', '-')}.txt").write_text(printed(line), encoding="utf-8")
        os.chdir("/")


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    main(Path(sys.argv[1]))
