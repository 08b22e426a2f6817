"""The saved state of LocalSGD: everything that a run needs, besides model and optimizers, to continue with its bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laconic.collective.exchange import rank_independent
from laconic.collective.local.fragments import Fragment
from laconic.collective.local.rounds import PendingRound
from laconic.collective.saved_state import saved_count, saved_counts, saved_world
from laconic.errors import InputError, NonFiniteError

if TYPE_CHECKING:
    from laconic.collective.local.localsgd import LocalSGD

__all__ = ["load", "save"]

log = logging.getLogger("laconic")


def save(local: LocalSGD) -> dict[str, Any]:
    """Return the state. An exchange that is under way must have its result."""
    fragments, pending = local._fragments, local._in_flight
    anchors = {name: x for fragment in fragments for name, x in zip(fragment.names, fragment.anchors, strict=True)}
    return {
        "steps": local.steps,
        "counts": local.exchange.stats.saved(),
        "exchanges": local._rounds.stats.exchanges,
        "world": torch.tensor([local._rounds.rank, local._rounds.size]),
        "exchange": local.exchange.state_dict(),
        "anchors": {name: anchors[name].clone() for name in local._replica.names},
        "outer": {
            "state": {name: memory for fragment in fragments for name, memory in fragment.outer.state().items()},
            "settings": [fragment.outer.settings() for fragment in fragments],
        },
        "fragments": [
            {
                "names": list(fragment.names), "exchanged_at": fragment.exchanged_at, "tokens": fragment.tokens,
                "displaced": fragment.displaced,
            }
            for fragment in fragments
        ],
        "in_flight": None if pending is None else {
            "fragment": pending.fragment.index,
            "due": pending.due,
            "changes": [x.clone() for x in pending.changes],
            "buffers": {name: x.clone() for name, x in pending.buffers},
            "starts": [x.clone() for x in pending.starts],
            "buffer_starts": {name: x.clone() for name, x in pending.buffer_starts.items()},
        },
    }  # fmt: skip


def load(local: LocalSGD, saved: Mapping[str, Any]) -> None:
    """Replace the state of a LocalSGD by a saved one; a state of another model, or not finite, changes nothing."""
    fragments = local._fragments
    missing = [key for key in ("steps", "world", "exchange", "anchors", "outer") if key not in saved]
    if missing:
        raise InputError(f"expected the result of LocalSGD.state_dict: {missing[0]!r} is missing")
    for fragment in fragments:
        for name, anchor in zip(fragment.names, fragment.anchors, strict=True):
            if name not in saved["anchors"] or saved["anchors"][name].shape != anchor.shape:
                raise InputError(f"the saved state has no parameter {name!r} of shape {list(anchor.shape)}")
            if not bool(saved["anchors"][name].to(anchor.dtype).isfinite().all()):
                raise NonFiniteError(f"the anchor of {name!r} in the saved state is not finite: load an earlier state")
    # A state of an earlier version has one fragment, and nothing in flight.
    layout = saved.get("fragments") or [{"names": list(saved["anchors"])}]
    names = sorted(name for each in layout for name in each["names"])
    if len(layout) != len(fragments) or names != sorted(local._replica.names):
        raise InputError(
            f"the state was saved with fragments={len(layout)}, this LocalSGD has fragments={len(fragments)} or other "
            "parameters: use the same"
        )
    steps, counts = saved_count("steps", saved["steps"]), saved_counts(saved)
    exchanges, load_residuals = saved_count("exchanges", saved.get("exchanges", 0)), _checked_residuals(local, saved)
    local._drop_in_flight()
    _arrange(local, [each["names"] for each in layout])
    with torch.no_grad():
        for fragment in fragments:
            for name, anchor in zip(fragment.names, fragment.anchors, strict=True):
                anchor.copy_(saved["anchors"][name])
    _load_outer(fragments, saved["outer"], list(saved["anchors"]))
    local.steps = steps
    local.exchange.stats.load(counts)
    local._rounds.stats.exchanges = exchanges
    kept = load_residuals()
    for fragment, each in zip(fragments, layout, strict=True):
        fragment.exchanged_at = int(each.get("exchanged_at", local.steps - local.steps % local.every))
        fragment.tokens = float(each.get("tokens", 0.0))
        # Without its residual a rank's parameters differ from the global model by what it has not sent.
        fragment.displaced = bool(each.get("displaced", False)) and kept
    if saved.get("in_flight") is not None:
        local._in_flight = _pending(local, saved["in_flight"])


def _arrange(local: LocalSGD, layout: list[list[str]]) -> None:
    """Let each fragment hold the parameters that it held in the saved run, which may have included some later."""
    held = {
        name: (parameter, anchor)
        for each in local._fragments
        for name, parameter, anchor in zip(each.names, each.parameters, each.anchors, strict=True)
    }
    for fragment, names in zip(local._fragments, layout, strict=True):
        if fragment.names != names:
            fragment.names = list(names)
            fragment.parameters, fragment.anchors = (list(each) for each in zip(*(held[n] for n in names), strict=True))
            fragment.outer = local._outer_step(fragment.names, fragment.anchors)


def _load_outer(fragments: list[Fragment], saved: Mapping[str, Any], names: list[str]) -> None:
    if "param_groups" in saved:  # an earlier version saved the state of one torch optimizer
        state = {names[index]: memory for index, memory in saved["state"].items()}
        settings = [saved["param_groups"]]
    else:
        state, settings = saved["state"], saved["settings"]
    for fragment, each in zip(fragments, settings, strict=True):
        fragment.outer.load(state, each)


def _checked_residuals(local: LocalSGD, saved: Mapping[str, Any]) -> Callable[[], bool]:
    """Check the exchange's memory; return the function that loads it, with False if residuals are dropped."""
    ours, theirs = (local._rounds.rank, local._rounds.size), saved_world(saved)
    memory = saved["exchange"] if theirs == ours else rank_independent(saved["exchange"])
    replace = local.exchange.checked_state(memory)

    def load_residuals() -> bool:
        if theirs != ours:
            log.warning("residuals were saved by rank %d of %d, this is rank %d of %d: they are reset", *theirs, *ours)
        kept = replace() and theirs == ours
        local.residual_resets += not kept
        return kept

    return load_residuals


def _pending(local: LocalSGD, saved: Mapping[str, Any]) -> PendingRound:
    fragment = local._fragments[int(saved["fragment"])]
    now = dict(local._replica.float_buffers())

    def placed(x: Tensor, like: Tensor) -> Tensor:
        return x.detach().to(like.device, like.dtype).clone()

    changes = [placed(x, anchor) for x, anchor in zip(saved["changes"], fragment.anchors, strict=True)]
    buffers = [(name, placed(x, now[name])) for name, x in saved["buffers"].items()]
    starts = [placed(x, anchor) for x, anchor in zip(saved["starts"], fragment.anchors, strict=False)]
    buffer_starts = {name: placed(x, now[name]) for name, x in saved["buffer_starts"].items()}
    return PendingRound(
        fragment, int(saved["due"]), changes, buffers, starts=starts, buffer_starts=buffer_starts, done=True
    )  # fmt: skip
