"""What compressing a run's layers was worth, by the planner's bound on what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from laconic.layers import layout
from laconic.layers.measurement import MAX_VARIATION, timings
from laconic.plan import Bound
from laconic.train.run import Config

__all__ = ["judge", "sentence"]

TURNS, BUDGET_S = 9, 10.0


def judge(config: Config, summary: Mapping[str, Any], *, bandwidth: float, threads: int = 1) -> dict[str, Any]:
    """Rho and h of a run's layers, and the bound for its workers at a server's link of so many bits per second.

    Rho is what went over the wire over what the dense model's 32 bits would have taken; h is the layers' and what
    encoding adds to it. One step of the dense model is timed on this machine, with as many threads as a worker has.

    Args:
        config: Of the run, with layers.
        summary: What the run measured.
        bandwidth: Of the server's link, in bits per second.
        threads: That torch computes with meanwhile.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        task = config.task()
        dense = replace(config, layers=None).task()
        found = timings(
            dense.model, task.model, tuple(task.batch(torch.arange(config.batch))), loss=dense.loss_function,
            repeat=TURNS, budget_s=BUDGET_S,
        )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    raw = 8 * task.dense_numel * config.job.workers * config.exchanges
    rho = summary["wire_bytes_per_iteration"] * config.iterations / raw
    told: dict[str, Any] = {
        "rho_layers": layout(task.model).rho,
        "rho": rho,
        "h": found.h if found.variation <= MAX_VARIATION else None,
        "h_variation": found.variation,
        "exempt": layout(task.model).exempt,
        "bandwidth_bit_s": bandwidth,
    }
    if told["h"] is None:
        return told
    # A minibatch of the paper's is that of all workers together, on one node.
    bound = Bound(
        workers=config.job.workers,
        nbytes=4 * task.dense_numel,
        step_s=config.job.workers * min(found.dense),
        bandwidth=bandwidth / 8,
        every=config.job.every,
    )
    h = bound.with_encoding(found.h, summary["encode_s"] / config.exchanges)
    return told | {
        "h_with_encoding": h,
        "slope": bound.slope,
        "r_min": bound.r_min(rho, h),
        "r_min_dense": bound.r_min(),
        "speedup_over_one_node": bound.over_one_node(rho, h),
        "speedup_over_dense": bound.over_vanilla(rho, h),
    }


def sentence(told: Mapping[str, Any]) -> str:
    """The same for people."""
    from laconic.units import show_rate

    sizes = f"rho {told['rho_layers']:.3g} by layers, {told['rho']:.3g} on the wire"
    if told["h"] is None:
        return f"{sizes}; step times vary by {100 * told['h_variation']:.0f} %, too much for an h to rely on"
    gain = told["speedup_over_dense"]
    worth = f"{gain:.2f} times as fast as dense" if gain >= 1 else f"slower than dense ({gain:.2f} times as fast)"
    link = show_rate(told["bandwidth_bit_s"])
    return (
        f"{sizes}, h {told['h']:.2f} ({told['h_with_encoding']:.2f} with encoding): at {link} an exchange takes "
        f"{told['r_min']:.3g} times the ideal (dense {told['r_min_dense']:.3g}), {worth}, "
        f"{told['speedup_over_one_node']:.2f} times as fast as one node"
    )
