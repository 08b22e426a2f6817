"""Scripts under torchrun: the examples, with trainers if they are installed, and a restart after a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from laconic.collective.stats import ExchangeStats

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "torchrun"
TRAINERS = {"ddp_lightning": "lightning", "ddp_accelerate": "accelerate", "ddp_transformers": "transformers"}

CRASH = """
import os, runpy, sys
from pathlib import Path
import torch
folder, script = Path(sys.argv[1]), sys.argv[2]
step, plain = [0], torch.optim.SGD.step
def dying(self, *args, **kwargs):
    step[0] += 1
    if step[0] == 30 and os.environ["RANK"] == "1" and not (folder / "died").exists():
        (folder / "died").touch()
        os._exit(9)
    return plain(self, *args, **kwargs)
torch.optim.SGD.step = dying
sys.argv = [script, str(folder)]
runpy.run_path(script, run_name="__main__")
"""


def torchrun(*args: str | Path, restarts: int = 0) -> str:
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *map(str, args)]
    # Without the last variable torch 2.13 cannot restart: new ranks would connect to the store of the old ones.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_torchrun", "local_sgd"])
def test_example_trains(name):
    output = torchrun(EXAMPLES / f"{name}.py")
    assert float(output.split("accuracy ")[1].split(" %")[0]) > 75 and "kB a step" in output


def final_states(tmp_path, example):
    """Return what each rank has at the end of a training without a crash and of one that is restarted after it."""
    script = tmp_path / "crash.py"
    script.write_text(CRASH)
    states = []
    for name in ("whole", "crashed"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "whole":
            (folder / "died").touch()
        torchrun(script, folder, example, restarts=1)
        states.append([torch.load(folder / f"rank{rank}.pt") for rank in range(2)])
    assert (tmp_path / "crashed" / "died").exists()
    return list(zip(*states, strict=True))


@pytest.mark.slow
def test_local_sgd_restarts_in_the_middle_of_an_exchange_with_the_same_bits(tmp_path):
    # The outer optimizer is SGD, whose 30th step comes after the third checkpoint.
    for whole, crashed in final_states(tmp_path, EXAMPLES / "local_sgd.py"):
        assert whole["local"]["steps"] == crashed["local"]["steps"] == 200
        for key, x in whole["model"].items():
            assert torch.equal(x, crashed["model"][key]), key
        memory, again = whole["local"]["exchange"], crashed["local"]["exchange"]
        assert memory.keys() == again.keys() and any(key.endswith("/residual") for key in memory)
        assert all(torch.equal(memory[key], again[key]) for key in memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_is_attached(name):
    pytest.importorskip(TRAINERS[name], reason=f"no {TRAINERS[name]}")
    output = torchrun(EXAMPLES / f"{name}.py")
    steps, kilobytes = (
        float(word) for word in output.strip().splitlines()[-1].replace(" kB each", "").split(" steps, ")
    )
    assert steps >= 10 and kilobytes < 30  # of 76 without compression


@pytest.mark.slow
def test_restart_after_a_crash_ends_with_the_same_bits(tmp_path):
    for whole, crashed in final_states(tmp_path, EXAMPLES / "ddp_torchrun.py"):
        assert whole["step"] == crashed["step"] == 60
        for part in ("model", "laconic"):
            assert whole[part].keys() == crashed[part].keys()
            differ = [key for key in whole[part] if not torch.equal(whole[part][key], crashed[part][key])]
            assert set(differ) <= {"counts"}, differ
        # Bytes are counted where they leave: ranks that start again compare their settings again. Seconds differ.
        numbers = [place for place, each in enumerate(fields(ExchangeStats)) if not each.name.endswith("_s")]
        counts, again = (each["laconic"]["counts"][numbers] for each in (whole, crashed))
        assert bool((again >= counts).all()) and float((again - counts).max()) < 1000
        assert any(key.endswith("/residual") for key in whole["laconic"])
