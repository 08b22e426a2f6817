"""The gain of a run's compressed layers: the planner's bound, computed from what the run measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from laconic.layers import layout
from laconic.layers.step_time import MAX_VARIATION, timings
from laconic.plan import Bound
from laconic.train.run import SUMMARY, Config, write_atomically

__all__ = ["describe", "measure", "measure_run"]

TURNS, BUDGET_S = 9, 10.0


def measure(config: Config, summary: Mapping[str, Any], *, bandwidth: float, threads: int = 1) -> dict[str, Any]:
    """Return rho and h of a run's layers, and the planner's bound for its workers.

    Rho is the bytes on the wire relative to the dense model's in 32 bits; h is the layers' relative step time, with the
    time of encoding. One step of the dense model is timed on this machine, with as many threads as a worker has.

    Args:
        config: Configuration of the run, with layers.
        bandwidth: Rate of the server's link, in bits per second.
        threads: Number of torch's threads during the measurement.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        task = config.task()
        dense = replace(config, layers=None).task()
        times = timings(
            dense.model, task.model, tuple(task.batch(torch.arange(config.batch))), loss=dense.loss_function,
            repeat=TURNS, budget_s=BUDGET_S,
        )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    raw = 8 * task.dense_numel * config.job.workers * config.exchanges
    rho = summary["wire_bytes_per_iteration"] * config.iterations / raw
    result: dict[str, Any] = {
        "rho_layers": layout(task.model).rho, "rho": rho, "h": times.h if times.variation <= MAX_VARIATION else None,
        "h_variation": times.variation, "exempt": layout(task.model).exempt, "bandwidth_bit_s": bandwidth,
    }  # fmt: skip
    if result["h"] is None:
        return result
    # The paper's minibatch is that of all workers together, on one node.
    bound = Bound(
        workers=config.job.workers, nbytes=4 * task.dense_numel, step_s=config.job.workers * min(times.dense),
        bandwidth=bandwidth / 8, every=config.job.every,
    )  # fmt: skip
    h = bound.with_encoding(times.h, summary["encode_s"] / config.exchanges)
    return result | {
        "h_with_encoding": h, "slope": bound.slope, "r_min": bound.r_min(rho, h), "r_min_dense": bound.r_min(),
        "speedup_over_one_node": bound.over_one_node(rho, h), "speedup_over_dense": bound.over_vanilla(rho, h),
    }  # fmt: skip


def measure_run(run_dir: Path, config: Config, summary: Mapping[str, Any], *, bandwidth: float) -> dict[str, Any]:
    """Add the result of ``measure`` to the summary of a run, also in its folder."""
    completed = {**summary, **measure(config, summary, bandwidth=bandwidth)}
    write_atomically(run_dir / SUMMARY, json.dumps(completed, indent=2))
    return completed


def describe(result: Mapping[str, Any]) -> str:
    """Return the result of ``measure`` as a sentence."""
    from laconic.units import show_rate

    sizes = f"rho {result['rho_layers']:.3g} by layers, {result['rho']:.3g} on the wire"
    if result["h"] is None:
        return f"{sizes}; step times vary by {100 * result['h_variation']:.0f} %, too much to compute h"
    gain = result["speedup_over_dense"]
    worth = f"{gain:.2f} times as fast as dense" if gain >= 1 else f"slower than dense ({gain:.2f} times as fast)"
    link = show_rate(result["bandwidth_bit_s"])
    return (
        f"{sizes}, h {result['h']:.2f} ({result['h_with_encoding']:.2f} with encoding): at {link} an exchange takes "
        f"{result['r_min']:.3g} times the ideal (dense {result['r_min_dense']:.3g}), {worth}, "
        f"{result['speedup_over_one_node']:.2f} times as fast as one node"
    )
