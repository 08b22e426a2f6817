"""Cells of a comparison of the planner with real runs, and what is measured of a machine before."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from laconic.plan.calibration import SIZES, codec_points, model_times
from laconic.plan.processes import processes_per_core, run_simultaneously
from laconic.plan.profile import ModelTimes, Profile
from laconic_lab.studies.jang2017 import tasks

__all__ = [
    "CALM",
    "CODECS",
    "ENOUGH_S",
    "EXPERIMENT",
    "LEAST",
    "MOST",
    "RATES",
    "SUMMED",
    "WARM_UP",
    "WORKERS",
    "Calibrated",
    "Cell",
    "generic",
    "rate_of",
    "step_together",
    "times_of",
    "wait_until_calm",
]  # fmt: skip

EXPERIMENT = "runs"

WORKERS = (2, 4)
RATES = ("100mbit", "1gbit")
CODECS = ("none", "fp16", "qsgd:4", "topk:0.01|qsgd:4", "thc:4", "adaptive:5.0|huffman")
MODEL = {"100mbit": "mlp", "1gbit": "vgg11"}
"""A model whose exchange takes seconds, not minutes, at that rate."""
WARM_UP, LEAST, MOST, ENOUGH_S = 3, 10, 60, 12.0
"""Exchanges that do not count, the fewest and the most that do, and seconds that these are meant to take."""
CALM = 1.5
"""The load average up to which nobody else works."""
SUMMED = ("thc:4",)


class Cell(NamedTuple):
    engine: str
    workers: int
    rate: str
    codec: str

    @property
    def key(self) -> str:
        return json.dumps([EXPERIMENT, *self])

    @property
    def model(self) -> str:
        return MODEL[self.rate]

    def __str__(self) -> str:
        return f"{self.engine}, {self.workers} workers, {self.rate}, {self.codec}"


@dataclass(frozen=True)
class Calibrated:
    """A machine while so many processes share it, as far as one model and engine need it.

    Args:
        times: The model's step alone, its gradients and what codecs make of them.
        step_s: Of the same step while all workers compute.
        fixed_s: Of an exchange of two slots with next to nothing in them.
        slot_s: That each more slot adds.
        byte_s: Of the server, for each byte that it takes or gives.
        load: The load average before.
        ways: For engines with several ways to exchange: the same two by way.
    """

    times: ModelTimes
    step_s: float
    fixed_s: float
    slot_s: float
    byte_s: float
    load: float
    ways: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def slowdown(self) -> float:
        return max(1.0, self.step_s / self.times.step_s)


def rate_of(model: str) -> str:
    return next(rate for rate, name in MODEL.items() if name == model)


def wait_until_calm(calm: float = CALM, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while os.getloadavg()[0] > calm and time.monotonic() < end:
        time.sleep(2)


_STEPS = """
import statistics, sys, time, torch
torch.set_num_threads(1)
from laconic_lab.studies.jang2017 import tasks
name, seconds = sys.argv[1], float(sys.argv[2])
torch.manual_seed(0)
model, (x, y), _, loss = getattr(tasks, name)()
x, y = x[:tasks.BATCH[name]], y[:tasks.BATCH[name]]
def step():
    model.zero_grad(set_to_none=True)
    begin = time.process_time()
    loss(model(x), y).backward()
    return time.process_time() - begin
step(); step()
print("ready", flush=True); sys.stdin.readline()
end, took = time.perf_counter() + seconds, []
while time.perf_counter() < end or len(took) < 5:
    took.append(step())
print(statistics.median(took), flush=True)
"""


def step_together(model: str, processes: int, seconds: float = 3.0) -> float:
    """Seconds of a step while so many processes compute it: of their processors' time, and they take turns."""
    times = run_simultaneously(processes, ["-c", _STEPS, model, str(seconds)])
    return statistics.fmean(times) * processes_per_core(processes)


def times_of(model: str, codecs: Sequence[str]) -> ModelTimes:
    """The model's step alone, and codecs on its gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        network, (x, y), _, loss = getattr(tasks, model)()
        size = tasks.BATCH[model]
        # Summed packets are sent with error feedback.
        sent = {f"ef|{codec}" if codec in SUMMED else codec: codec for codec in codecs}
        found = model_times(network, (x[:size], y[:size]), loss, sent, turns=9)
        return replace(found, messages={sent[spec]: message for spec, message in found.messages.items()})
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def generic() -> Profile:
    """For what is not measured on the model's own gradients: small slots as they are."""
    found = codec_points(["none"], sizes=SIZES[:2], notify=lambda message: None)
    return Profile("here", codecs={spec: tuple(points) for spec, points in found.items()})
