"""Cells of the comparison of predictions with real runs, and the calibration of the machine."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from laconic.plan.background_load import OtherProcesses
from laconic.plan.calibration import model_times
from laconic.plan.candidates import Candidate
from laconic.plan.costs import Message
from laconic.plan.processes import processes_per_core, run_simultaneously
from laconic.plan.profile import ModelTimes
from laconic.units import parse_rate, parse_time, shaper_burst
from laconic_lab.bench.gpt.settings import link_parts
from laconic_lab.studies.jang2017 import tasks
from laconic_lab.studies.trainer import single_thread

__all__ = [
    "BUSY",
    "CODECS",
    "ENOUGH_S",
    "EXPERIMENT",
    "FEW_BYTES",
    "HELD_OUT",
    "LEAST",
    "LOCAL",
    "MOST",
    "RATES",
    "SUMMED",
    "UNLIMITED",
    "WARM_UP",
    "WORKERS",
    "Calibrated",
    "Cell",
    "beyond_burst",
    "rate_of",
    "step_together",
    "times_of",
    "wait_until_calm",
]  # fmt: skip

EXPERIMENT = "runs"

WORKERS = (2, 4)
HELD_OUT = ("300mbit",)
"""Links that the model of time was never changed for: it was made before they were run."""
RATES = ("60mbit+15ms", *HELD_OUT, "30mbit+40ms", "unshaped", "100mbit", "1gbit")
CODECS = ("none", "fp16", "qsgd:4", "topk:0.01|qsgd:4", "thc:4", "adaptive:5.0|huffman")
LOCAL = "local 8 ef|sign"
"""What DDP is compared with, too: changes of 8 local steps."""
MODEL = {
    "60mbit+15ms": "gpt", "300mbit": "resnet", "30mbit+40ms": "gpt", "unshaped": "mlp", "100mbit": "mlp",
    "1gbit": "vgg11",
}  # fmt: skip
"""Model for each link, so that an exchange takes seconds and not minutes."""
WARM_UP, LEAST, MOST, ENOUGH_S = 3, 10, 60, 5.0
"""Exchanges that do not count, the fewest and the most that do, and the seconds that these should take."""
BUSY = 0.15
"""Largest share of all cores that other processes may use; a cell with more is no evidence."""
SUMMED = ("thc:4",)
FEW_BYTES = {"ps": "topk:0.001", "twoshot": "topk:0.001", "sum": "thc:3"}
"""A codec by reduction whose messages are small, and which is not predicted."""
UNLIMITED = 1e15
"""Bits per second of a link without a shaper: the machine is slower."""


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

    @property
    def candidate(self) -> Candidate:
        return Candidate.parse(self.codec)

    @property
    def link(self) -> tuple[float, float]:
        """Bits per second, and seconds of a round trip."""
        rate, delay = link_parts(self.rate)
        return UNLIMITED if rate is None else parse_rate(rate), 2 * parse_time(delay)

    def __str__(self) -> str:
        return f"{self.engine}, {self.workers} workers, {self.rate}, {self.codec}"


@dataclass(frozen=True)
class Calibrated:
    """Times of a machine shared by as many processes as a cell has workers, for one model and engine.

    Args:
        times: The model's step alone, its gradients, and codecs on them.
        step_s: Seconds of the same step while all workers compute.
        fixed_s: Seconds of an exchange of two slots with almost no values.
        slot_s: Seconds that each further slot adds.
        byte_s: Seconds of the server for each byte that it receives or sends.
        load: Load average before the calibration.
        ways: ``fixed_s`` and ``slot_s`` by reduction, for engines with several.
        contention_s: By reduction, seconds that an exchange with few bytes took beyond all that was measured one thing
            at a time: computation, transport and server share the cores of one machine.
    """

    times: ModelTimes
    step_s: float
    fixed_s: float
    slot_s: float
    byte_s: float
    load: float
    ways: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    contention_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Calibrated:
        """Return the calibration of a Record."""
        times = values["times"]
        times = ModelTimes(**{
            **times, "numels": tuple(times["numels"]), "dims": tuple(times["dims"]),
            "ready": tuple((time, share) for time, share in times["ready"]),
        })  # fmt: skip
        names = ("step_s", "fixed_s", "slot_s", "byte_s", "load")
        ways = {way: (base, slot_s) for way, (base, slot_s) in values["ways"].items()}
        contention_s = values.get("contention_s", {})
        return cls(times, **{name: values[name] for name in names}, ways=ways, contention_s=contention_s)

    @property
    def slowdown(self) -> float:
        return max(1.0, self.step_s / self.times.step_s)


def rate_of(model: str) -> str:
    return next(rate for rate, name in MODEL.items() if name == model)


def beyond_burst(message: Message, bits_s: float, links: float) -> Message:
    """Return the message without the bytes that pass an emulated link at once after it was idle.

    Args:
        links: Messages of this size that share the burst of a link.
    """
    burst = shaper_burst(bits_s) / links if bits_s < UNLIMITED else 0.0
    return replace(message, push=max(0.0, message.push - burst), pull=max(0.0, message.pull - burst))


def wait_until_calm(seconds: float = 60.0) -> None:
    """Wait until other processes leave the machine alone for a second. Their share counts, not the load average, which
    still has the processes of the cell before.
    """
    end, others = time.monotonic() + seconds, OtherProcesses([os.getpid()])
    while time.monotonic() < end:
        time.sleep(1)
        if (others.share() or 0.0) <= BUSY / 2:
            break


_STEPS = """
import statistics, sys, time, torch
torch.set_num_threads(1)
from laconic_lab.studies.jang2017 import tasks
from laconic_lab.studies.trainer import single_thread
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


@cache
def step_together(model: str, processes: int, seconds: float = 3.0) -> float:
    """Return the seconds of a step while several processes compute it: their CPU time, as they take turns."""
    times = run_simultaneously(processes, ["-c", _STEPS, model, str(seconds)])
    return statistics.fmean(times) * processes_per_core(processes)


@cache
def times_of(model: str, codecs: tuple[str, ...]) -> ModelTimes:
    """Return the times of a model's step alone and of codecs on its gradients. All engines share one measurement."""
    with single_thread():
        torch.manual_seed(0)
        network, (x, y), _, loss = getattr(tasks, model)()
        size = tasks.BATCH[model]
        # Summed packets are sent with error feedback.
        sent = {f"ef|{codec}" if codec in SUMMED else codec: codec for codec in codecs}
        times = model_times(network, (x[:size], y[:size]), loss, sent, turns=9)
        return replace(times, messages={sent[spec]: message for spec, message in times.messages.items()})
