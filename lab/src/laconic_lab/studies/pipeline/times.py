"""Step times of real pipelines over slow links: each rank is a process with one stage."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any

from laconic.errors import ConfigError, LaconicError
from laconic.records import Record
from laconic_lab.bench.ddp.links import Links, connected
from laconic_lab.bench.ddp.suite import rank_processes
from laconic_lab.bench.gpt.settings import link_parts
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.trainer import Progress

__all__ = ["CODECS", "KIND", "LINKS", "MODELS", "time_steps"]

KIND = "pipeline.time"
CODECS = ("none", "bf16", "qsgd:8", "thc:4", "qsgd:4", "klt:4")
LINKS = ("100mbit",)
STAGES = (2, 4)
STEPS = 5
LIMIT_S = 600.0
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"width": 768, "context": 1024, "windows": 1, "pause_s": 0.0013},
    "small": {"size": "small", "windows": 8},
}
"""``gpt2``: activations of GPT-2's shape; computing is a pause as long as an H200 needs for a window's forward pass of
half of GPT-2 (63.4 ms a step of 8 windows in docs/gpu.md), backward twice as long. ``small``: a GPT of the other
experiments, computed here."""
MICRO_BATCHES = 4


def time_steps(
    log: RecordLog, *, methods: Sequence[str] | None, links: Sequence[str] | None, steps: int | None,
    progress: Progress | None, deadline: Deadline,
) -> list[Record]:  # fmt: skip
    """Time steps of 1F1B by each codec, model, number of stages and link; return their Records.

    Args:
        deadline: When to end although cells are left.
    """
    codecs = CODECS if methods is None else [name for name in CODECS if any(text in name for text in methods)]
    if not codecs:
        raise ConfigError(f"--methods must match one of {', '.join(CODECS)}, got {', '.join(methods or [])}")
    units = [
        (link, stages, model, codec)
        for link in links or LINKS
        for stages in STAGES
        for model in MODELS
        for codec in codecs
    ]
    count = steps or STEPS
    keys = {unit: json.dumps([*unit, count]) for unit in units}
    for link in links or LINKS:
        for stages in STAGES:
            left = [unit for unit in units if unit[:2] == (link, stages) and keys[unit] not in log]
            if not left:
                continue
            deadline.check()
            rate, delay = link_parts(link)
            with connected(rate, stages, paced=rate is None, delay=delay) as wires:
                measured = [one.values() for one in wires.measure()] if rate is not None else []
                valid = all(one.valid for one in wires.measure()) if rate is not None else True
                tasks = [{"model": model, "codec": codec, "steps": count} for _, _, model, codec in left]
                for unit, result in zip(left, _results(wires, stages, tasks), strict=True):
                    values = {"key": keys[unit], "link": link, "stages": stages, "model": unit[2], "codec": unit[3],
                              "made_of": wires.made_of, "links": measured, "valid": valid,
                              "micro_batches": MICRO_BATCHES, **result}  # fmt: skip
                    log.add(Record(KIND, values))
                    if progress is not None:
                        progress(
                            f"{link}, {stages} stages, {unit[2]}", sum(keys[one] in log for one in units), len(units)
                        )
                    if any(keys[one] not in log for one in left):
                        deadline.check()
    return [log.records[keys[unit]] for unit in units]


def _results(wires: Links, stages: int, tasks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    address, port = wires.store()
    options = {
        "ranks": stages, "store": f"tcp://{address}:{port}", "interface": wires.interface, "tasks": tasks,
        "models": MODELS, "micro_batches": MICRO_BATCHES,
    }  # fmt: skip
    module = "laconic_lab.studies.pipeline.rank"
    with rank_processes(wires, module, options, stages) as (lines, *_):
        for task in tasks:
            deadline = time.monotonic() + LIMIT_S
            try:
                line = lines.get(timeout=deadline - time.monotonic())
            except queue.Empty:
                line = None
            if line is None:
                raise LaconicError(f"{task['codec']} on {stages} ranks failed or took over {LIMIT_S:g} s; see above")
            yield json.loads(line)
        lines.get(timeout=LIMIT_S)
