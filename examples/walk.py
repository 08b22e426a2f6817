"""Plan, train and report, cell by cell: python examples/walk.py, or open it as a notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path("walk")


def laconic(*arguments: str) -> str:
    print("$ laconic", *arguments, flush=True)
    return subprocess.run(
        [sys.executable, "-m", "laconic", *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


# %% The problem: LeNet-5, four machines, a server behind 10 Mbit/s. How much of a step is communication?
case = ["--model", "lenet5", "--workers", "4", "--bandwidth", "10mbit"]
plan = json.loads(laconic("plan", *case, "--codec", "qsgd:4", "--codec", "topk:0.01|qsgd:4", "--json"))
plain = next(row for row in plan["rows"] if row["codec"] == "none")
print(f"float32: {1e3 * plain['step_s']:.0f} ms an iteration, of which {1e3 * plain['compute_s']:.0f} compute")

# %% The plan: which codec is fastest?
advice = plan["recommendation"]
print(f"recommended: {advice['codec']}, {advice['speedup_fp32']:.1f} times as fast: {advice['reason']}")

# %% The training: float32, and the codec with error feedback, so that the values that top-k drops are sent later.
spec = "ef|topk:0.01|qsgd:4"
common = ["--model", "lenet5", "--iterations", "150", "--workers", "2", "--json"]
runs = {
    "float32": ["--method", "3"],
    "compressed": ["--push", spec, "--pull", spec, "--returns", "gradients"],
}
for name, flags in runs.items():
    run = json.loads(laconic("train", *flags, *common, "--run-dir", str(FOLDER / name)))
    print(f"{name}: {run['accuracy']:.1f} %, {run['wire_bytes_per_iteration'] / 1e3:.1f} kB an iteration")

# %% The report: one HTML page.
laconic("report", *(str(FOLDER / name) for name in runs), "-o", str(FOLDER / "report.html"))
print(f"wrote {FOLDER / 'report.html'}")
