"""Writes the profile of a plain and of attached steps on a GPU: tables of kernels and of the host, and a trace of each.

python tools/profile_step.py gpt2 FOLDER ef|qsgd:4 ef|thc:4
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from laconic_lab.bench.device_step import WARM_UP, StepBench, StepSettings, one_rank


def main(model: str, folder: Path, specs: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = StepSettings(model=model, device="cuda" if torch.cuda.is_available() else "cpu")
    with one_rank(torch.device(settings.device)):
        bench = StepBench(settings)
        for spec in ["plain", *specs]:
            if spec != "plain":
                bench.attachment.set(spec)
            step = partial(bench.step, "ddp" if spec == "plain" else "attached")
            for _ in range(WARM_UP):
                step()
            bench.wait()
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
            with profile(activities=activities, acc_events=True) as profiler:
                step()
                bench.wait()
            name = spec.replace("|", "-").replace(":", "")
            averages = profiler.key_averages()
            with (folder / f"{name}.txt").open("w") as file:
                for order in ("self_device_time_total", "self_cpu_time_total"):
                    print(averages.table(sort_by=order, row_limit=60, max_name_column_width=70), file=file)
            profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
            print(spec, "written", flush=True)
        bench.attachment.detach()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
