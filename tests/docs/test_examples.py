"""Every example runs and fits on one screen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SCREEN = 45
SLOW = {"compressed_layers.py", "server.py", "walk.py", "attach.py", "pipeline.py"}
"""Examples that start processes or train for longer; `make test` runs one of them, shortened."""


def run_script(*arguments: object, folder: Path, seconds: float = 120) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=seconds,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_example_fits_on_a_screen_and_is_listed(script):
    text = script.read_text()
    assert len(text.splitlines()) <= SCREEN
    assert script.name in text.split('"""')[1]
    assert script.name in (ROOT / "examples" / "README.md").read_text()


@pytest.mark.slow
def test_script_on_the_first_screen_of_readme_trains_on_two_ranks(tmp_path):
    (block,) = (block for block in blocks(ROOT / "README.md") if block.mark == "file")
    (tmp_path / block.why).write_text(block.text)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    printed = run_script(*launcher, block.why, folder=tmp_path)
    sent, plain = (int(number.replace(",", "")) for number in re.findall(r"[\d,]{5,}", printed.splitlines()[0]))
    assert printed.count("sent") == 2 and 0 < sent < plain / 6


@pytest.mark.parametrize("script", [s for s in EXAMPLES if s.name not in SLOW], ids=lambda script: script.name)
def test_example_exits_zero_and_prints(script, tmp_path):
    steps = ["10"] if script.name == "tune.py" else []
    assert run_script(script, *steps, folder=tmp_path).strip()


def torchrun(script: Path, *arguments: object, folder: Path) -> str:
    return run_script(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script, *arguments, folder=folder
    )


def test_attach_example_sends_less_than_plain_ddp(tmp_path):
    output = torchrun(ROOT / "examples" / "attach.py", 20, folder=tmp_path)
    sent, plain = (float(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", output))
    assert 0 < sent < plain / 4 and "accuracy" in output


@pytest.mark.slow
def test_hsdp_example_continues_from_its_checkpoint(tmp_path):
    script = ROOT / "examples" / "torchrun" / "hsdp.py"
    assert "steps 0 to 3" in torchrun(script, "--steps", 3, folder=tmp_path)
    output = torchrun(script, "--steps", 3, folder=tmp_path)
    sent = re.search(r"steps 3 to 6: loss [\d.]+, (\d+) kB a step", output)
    assert sent is not None and int(sent[1]) < 340 / 4


@pytest.mark.slow
def test_pipeline_example_sends_less_and_learns(tmp_path):
    output = torchrun(ROOT / "examples" / "pipeline.py", folder=tmp_path)
    numbers = [float(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", output)]
    assert len(numbers) == 4 and all(
        0 < sent < plain / 4 for sent, plain in zip(numbers[::2], numbers[1::2], strict=True)
    )
    loss = re.search(r"loss ([\d.]+)", output)
    assert loss is not None and float(loss[1]) < 1.0


@pytest.mark.slow
def test_compressed_layers_example_keeps_accuracy(tmp_path):
    output = run_script(ROOT / "examples" / "compressed_layers.py", folder=tmp_path, seconds=300)
    accuracies = [float(number) for number in re.findall(r"([\d.]+) %", output)]
    assert len(accuracies) == 3 and min(accuracies) > 60


@pytest.mark.slow
def test_server_example_trains_a_custom_model(tmp_path):
    output = run_script(ROOT / "examples" / "server.py", folder=tmp_path)
    accuracy = re.search(r"accuracy ([\d.]+) %", output)
    assert accuracy is not None and 60 < float(accuracy[1]) < 100


@pytest.mark.slow
def test_walk_example_writes_a_report(tmp_path):
    output = run_script(ROOT / "examples" / "walk.py", folder=tmp_path, seconds=300)
    assert "recommended" in output and "report.html" in output
    page = (tmp_path / "walk" / "report.html").read_text()
    assert "<html" in page and "ef|topk:0.01|qsgd:4" in page
