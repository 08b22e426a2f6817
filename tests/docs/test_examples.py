"""Every example runs, and fits on a screen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT
from typer.testing import CliRunner

from laconic.cli.app import app

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SCREEN = 45
SLOW = {"compressed_layers.py", "server.py", "walk.py", "attach.py"}
"""These start processes, or train for longer; `make test` runs one of them, quickly, below."""


def launched(*words: object, folder: Path, seconds: float = 120) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=seconds, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_an_example_fits_on_a_screen_and_says_how_to_start_it(script):
    text = script.read_text()
    assert len(text.splitlines()) <= SCREEN
    assert script.name in text.split('"""')[1]
    assert script.name in (ROOT / "examples" / "README.md").read_text()


@pytest.mark.parametrize("script", [s for s in EXAMPLES if s.name not in SLOW], ids=lambda script: script.name)
def test_an_example_runs(script, tmp_path):
    assert launched(script, folder=tmp_path).strip()


def torchrun(script: Path, *words: object, folder: Path) -> str:
    return launched("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script, *words, folder=folder)


def test_attach_sends_less_than_plain_ddp(tmp_path):
    said = torchrun(ROOT / "examples" / "attach.py", 20, folder=tmp_path)
    sent, plain = (float(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", said))
    assert 0 < sent < plain / 4 and "accuracy" in said


@pytest.mark.slow
def test_layers_lose_little(tmp_path):
    said = launched(ROOT / "examples" / "compressed_layers.py", folder=tmp_path, seconds=300)
    found = [float(number) for number in re.findall(r"([\d.]+) %", said)]
    assert len(found) == 3 and min(found) > 60


@pytest.mark.slow
def test_a_model_of_ones_own_is_trained_through_a_server(tmp_path):
    said = launched(ROOT / "examples" / "server.py", folder=tmp_path)
    accuracy = re.search(r"accuracy ([\d.]+) %", said)
    assert accuracy is not None and 60 < float(accuracy[1]) < 100


def has_report() -> bool:
    return CliRunner().invoke(app, ["report", "--help"], prog_name="laconic").exit_code == 0


@pytest.mark.slow
@pytest.mark.skipif(not has_report(), reason="there is no `laconic report` yet: examples/walk.py cannot end")
def test_the_walk_ends_with_a_report(tmp_path):
    said = launched(ROOT / "examples" / "walk.py", folder=tmp_path, seconds=300)
    assert "recommended" in said and "report.html" in said
    page = (tmp_path / "walk" / "report.html").read_text()
    assert "<html" in page and "ef|topk:0.01|qsgd:4" in page
