"""The saved state of LocalSGD: everything that a run needs, besides model and optimizers, to continue with its bits."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from laconic.collective.exchange import rank_independent
from laconic.collective.local.rounds import PendingRound
from laconic.collective.saved_state import saved_count, saved_counts, saved_like, saved_world
from laconic.errors import InputError
from laconic.residuals import saved_by_name

if TYPE_CHECKING:
    from laconic.collective.local.localsgd import LocalSGD

__all__ = ["load", "save"]

log = logging.getLogger("laconic")

MOST = 2**62
"""The largest option of an optimizer, and number of tokens, that is taken from a file."""


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
    """Replace the state of a LocalSGD by a saved one; an invalid state, or one of another model, changes nothing."""
    fragments = local._fragments
    missing = [key for key in ("steps", "world", "exchange", "anchors", "outer") if key not in saved_by_name(saved)]
    if missing:
        raise InputError(f"expected the result of LocalSGD.state_dict: {missing[0]!r} is missing")
    like = {name: x for each in fragments for name, x in zip(each.names, each.anchors, strict=True)}
    anchors = saved_by_name(saved["anchors"])
    for name, anchor in like.items():
        if not isinstance(anchors.get(name), Tensor) or anchors[name].shape != anchor.shape:
            raise InputError(f"the saved state has no parameter {name!r} of shape {list(anchor.shape)}")
        saved_like(f"anchors/{name}", anchors[name], anchor)
    steps, counts = saved_count("steps", saved["steps"]), saved_counts(saved)
    exchanges, load_residuals = saved_count("exchanges", saved.get("exchanges", 0)), _checked_residuals(local, saved)
    # A state of an earlier version has one fragment, and nothing in flight.
    layout = saved.get("fragments") or [{"names": list(anchors)}]
    places = _checked_layout(local, layout, steps)
    memory, settings = _checked_outer(local, saved_by_name(saved["outer"]), like)
    pending = _checked_pending(local, saved.get("in_flight"), [[like[n] for n in place.names] for place in places])
    local._drop_in_flight()
    _arrange(local, [place.names for place in places])
    with torch.no_grad():
        for fragment in fragments:
            for name, anchor in zip(fragment.names, fragment.anchors, strict=True):
                anchor.copy_(anchors[name])
    for fragment, each in zip(fragments, settings, strict=True):
        fragment.outer.load(memory, each)
    local.steps = steps
    local.exchange.stats.load(counts)
    local._rounds.stats.exchanges = exchanges
    kept = load_residuals()
    for fragment, place in zip(fragments, places, strict=True):
        fragment.exchanged_at, fragment.tokens = place.exchanged_at, place.tokens
        # Without its residual a rank's parameters differ from the global model by what it has not sent.
        fragment.displaced = place.displaced and kept
    if pending is not None:
        index, due, parts = pending
        local._in_flight = PendingRound(fragments[index], due, **parts, done=True)


class _Place(NamedTuple):
    """What a saved state says about a fragment."""

    names: list[str]
    exchanged_at: int
    tokens: float
    displaced: bool


def _checked_layout(local: LocalSGD, layout: Any, steps: int) -> list[_Place]:
    if not isinstance(layout, list | tuple) or not all(isinstance(each, Mapping) for each in layout):
        raise InputError("'fragments' in the saved state must be a list of fragments")
    held = [each.get("names") for each in layout]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in held):
        raise InputError("each of 'fragments' in the saved state must have the names of its parameters")
    if len(layout) != len(local._fragments) or sorted(itertools.chain(*held)) != sorted(local._replica.names):
        raise InputError(
            f"the state was saved with fragments={len(layout)}, this LocalSGD has fragments={len(local._fragments)} or "
            "other parameters: use the same"
        )
    places = []
    for names, each in zip(held, layout, strict=True):
        at = saved_count("exchanged_at", each.get("exchanged_at", steps - steps % local.every))
        tokens, displaced = each.get("tokens", 0.0), each.get("displaced", False)
        if at > steps or not _is_number(tokens) or not tokens >= 0 or not isinstance(displaced, bool):
            raise InputError(f"fragments in the saved state: cannot continue from step {at} with tokens {tokens!r:.40}")
        places.append(_Place(list(names), at, float(tokens), displaced))
    return places


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


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_meta and not value.is_complex() and math.isfinite(value.item())
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST


def _checked_outer(local: LocalSGD, saved: Mapping[str, Any], like: Mapping[str, Tensor]) -> tuple[Any, list[Any]]:
    """Return the memory of the outer optimizer by parameter, and its settings by fragment."""
    state, settings = saved.get("state"), saved.get("settings")
    if "param_groups" in saved:  # an earlier version saved the state of one torch optimizer
        settings = [saved["param_groups"]]
        if isinstance(state, Mapping):
            state = {dict(enumerate(like)).get(index, "unknown"): memory for index, memory in state.items()}
    if not isinstance(settings, list) or len(settings) != len(local._fragments):
        raise InputError("the saved state must have settings of the outer optimizer for each fragment")
    optimizers = [fragment.outer.optimizer for fragment in local._fragments]
    for optimizer, groups in zip(optimizers, settings, strict=True):
        if not isinstance(groups, list):
            raise InputError("the settings of the outer optimizer in the saved state must be lists of groups")
        for ours, theirs in zip(optimizer.param_groups, groups, strict=False):
            _check_settings(ours, saved_by_name(theirs))
    plain = all(type(optimizer) is torch.optim.SGD for optimizer in optimizers)
    checked: dict[str, dict[str, Any]] = {}
    for name, memory in saved_by_name(state).items():
        checked[name] = {}
        for part, value in saved_by_name(memory).items() if name in like else ():
            fits = isinstance(value, Tensor) and value.shape == like[name].shape and value.numel() > 1
            if fits or (plain and value is not None):
                checked[name][part] = saved_like(f"outer/{name}/{part}", value, like[name])
            elif value is None or _is_number(value):
                checked[name][part] = value
            else:
                raise InputError(f"'outer/{name}/{part}' in the saved state does not fit its parameter, or not finite")
    return checked, settings


def _check_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ``InputError`` unless the options of a parameter group are of the same kinds as ours."""
    for key, value in theirs.items():
        mine = ours.get(key)
        if key == "params" or (key not in ours and (value is None or isinstance(value, str))):
            continue
        if isinstance(mine, tuple):  # betas
            fits = isinstance(value, tuple | list) and len(value) == len(mine) and all(map(_is_number, value))
        elif (isinstance(mine, int | float | Tensor) and not isinstance(mine, bool)) or key not in ours:
            fits = _is_number(value)
        else:
            fits = value is None or isinstance(value, bool) if mine is None else isinstance(value, type(mine))
        if not fits:
            raise InputError(f"{key!r} of the outer optimizer in the saved state is not an option: {value!r:.40}")


def _checked_residuals(local: LocalSGD, saved: Mapping[str, Any]) -> Callable[[], bool]:
    """Check the exchange's memory; return the function that loads it, with False if residuals are dropped."""
    ours, theirs = (local._rounds.rank, local._rounds.size), saved_world(saved)
    held = saved_by_name(saved["exchange"])
    replace = local.exchange.checked_state(held if theirs == ours else rank_independent(held))

    def load_residuals() -> bool:
        if theirs != ours:
            log.warning("residuals were saved by rank %d of %d, this is rank %d of %d: they are reset", *theirs, *ours)
        kept = replace() and theirs == ours
        local.residual_resets += not kept
        return kept

    return load_residuals


def _checked_pending(
    local: LocalSGD, saved: Any, anchors: list[list[Tensor]]
) -> tuple[int, int, dict[str, Any]] | None:  # fmt: skip
    """Return the index of the fragment under way, the step at which it is due, and its tensors."""
    if saved is None:
        return None
    if not {"fragment", "due", "changes", "buffers"} <= set(saved_by_name(saved)):
        raise InputError("'in_flight' in the saved state must have a fragment, due, changes and buffers")
    index, due = saved_count("in_flight/fragment", saved["fragment"]), saved_count("in_flight/due", saved["due"])
    if index >= len(anchors):
        raise InputError(f"'in_flight/fragment' in the saved state must be below {len(anchors)}, got {index}")
    now = dict(local._replica.float_buffers())

    def values(key: str, likes: list[Tensor]) -> list[Tensor]:
        found = saved.get(key) or []
        if not isinstance(found, list) or len(found) != len(likes):
            raise InputError(f"'in_flight/{key}' in the saved state must be a list of {len(likes)} tensors")
        return [saved_like(f"in_flight/{key}", x, like) for x, like in zip(found, likes, strict=True)]

    def buffers(key: str) -> dict[str, Tensor]:
        found = saved_by_name(saved.get(key, {}))
        unknown = [name for name in found if name not in now]
        if unknown:
            raise InputError(f"'in_flight/{key}' in the saved state: the model has no buffer {unknown[0]!r}")
        # A buffer may hold infinities, such as those of a mask.
        return {name: saved_like(f"in_flight/{key}/{name}", x, now[name], finite=False) for name, x in found.items()}

    return index, due, {
        "changes": values("changes", anchors[index]), "buffers": list(buffers("buffers").items()),
        "starts": values("starts", anchors[index] if saved.get("starts") else []),
        "buffer_starts": buffers("buffer_starts"),
    }  # fmt: skip
