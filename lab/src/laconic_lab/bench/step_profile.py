"""Where the milliseconds of a step go: kernels, copies, NCCL, and the host's waits, as torch's profiler sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["profile_step"]

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
STEPS = 1
LISTED = 16


def profile_step(
    step: Callable[[], None], wait: Callable[[], None], model_kernels: frozenset[str] = frozenset()
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return milliseconds and numbers of a step, and the names of its kernels.

    Args:
        wait: Waits for the device.
        model_kernels: Names of the kernels of a plain step; those that are not among them are listed as added.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(STEPS):
            step()
            wait()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    waits = [0.0, 0.0]
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            _count(kernels[event.name], event.device_time_total)
        elif event.name in WAITS:
            _count(waits, event.cpu_time_total)
    # The last wait of each step belongs to the measurement.
    totals = {
        "kernels": _sum(kernels, lambda name: not _is_copy(name)), "copies": _sum(kernels, _is_copy),
        "nccl": _sum(kernels, lambda name: "nccl" in name.lower()),
        "added": _sum(kernels, lambda name: name not in model_kernels),
        "waits": {"ms": waits[0] / 1e3 / STEPS, "count": waits[1] / STEPS - 1},
        "largest": [
            {"name": name, "ms": micros / 1e3 / STEPS, "count": count / STEPS}
            for name, (micros, count) in sorted(kernels.items(), key=lambda item: -item[1][0])
            if name not in model_kernels
        ][:LISTED],
    }  # fmt: skip
    return totals, frozenset(kernels)


def _count(into: list[float], micros: float) -> None:
    into[0] += micros
    into[1] += 1


def _is_copy(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset"))


def _sum(kernels: dict[str, list[float]], chosen: Callable[[str], bool]) -> dict[str, float]:
    times = [timed for name, timed in kernels.items() if chosen(name)]
    return {
        "ms": sum(micros for micros, _ in times) / 1e3 / STEPS,
        "count": sum(count for _, count in times) / STEPS,
    }
