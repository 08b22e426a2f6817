"""Ranks join and leave: a LocalSGD continues with the ranks of another group."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective.consistency import peer_failure_as_error
from laconic.collective.exchange import Exchange, rank_independent
from laconic.collective.groups import device_of, ranks_of
from laconic.collective.transport import broadcast, broadcast_all
from laconic.errors import InputError

if TYPE_CHECKING:
    from laconic.collective.local.localsgd import LocalSGD

__all__ = ["regroup"]

log = logging.getLogger("laconic")

_OUTER, _EXCHANGE = "outer", "exchange"


def regroup(local: LocalSGD, group: dist.ProcessGroup | None) -> None:
    """Let a LocalSGD continue with the ranks of another group. ``LocalSGD.regroup`` describes it."""
    before, rounds = local.exchange, local._rounds
    try:
        local._apply_in_flight()
    except Exception as error:  # of any kind: the old group may be gone
        log.warning("the exchange under way is dropped, its changes are exchanged again: %s", error)
    rounds.close()
    local._join(group, rounds.stats)
    local._require_same_settings("regroup")
    with torch.no_grad(), peer_failure_as_error(local.group, "received the state of the ranks that stay"):
        steps = local._rounds.gather(float(local.steps))[0]
        source = steps.index(max(steps))
        common = _broadcast_state(_common_state(local, before), source, local)
        in_step = _receive_anchors(local, source)
    for fragment in local._fragments:
        memory: dict[str, dict[str, Any]] = {}
        for key, value in common.items():
            kind, name, part = key.split("//", 2)
            if kind == _OUTER and name in fragment.names:
                memory.setdefault(name, {})[part] = value
        fragment.outer.load(memory, ())
        if not in_step:
            fragment.restore()
            fragment.tokens = 0.0
        fragment.exchanged_at = int(common[f"steps//{fragment.index}//exchanged_at"])
    local.steps = int(common["steps//all//taken"])
    _carry_residuals(local, before, common, keep=in_step and not rounds.failed)
    local.residual_resets += before.residual_resets  # those of the new exchange begin at zero
    local.regroups += 1
    log.info(
        "LocalSGD continues with %d ranks from step %d, %s", local._rounds.size, local.steps,
        "with this rank's own progress" if in_step else "from the global model",
    )  # fmt: skip


def _common_state(local: LocalSGD, before: Exchange) -> dict[str, Any]:
    """Return what is equal on all ranks that stay: rounds and warm starts of codecs, the outer optimizer's memory."""
    state: dict[str, Any] = {"steps//all//taken": local.steps}
    for fragment in local._fragments:
        state[f"steps//{fragment.index}//exchanged_at"] = fragment.exchanged_at
        for name, memory in fragment.outer.state().items():
            state |= {f"{_OUTER}//{name}//{part}": value for part, value in memory.items()}
    return state | {f"{_EXCHANGE}//{key}": x for key, x in rank_independent(before.state_dict()).items()}


def _receive_anchors(local: LocalSGD, source: int) -> bool:
    """Take over the source's global model; True if it is the one that this rank had, bit for bit."""
    anchors = [anchor for fragment in local._fragments for anchor in fragment.anchors]
    had = [anchor.clone() for anchor in anchors]
    broadcast_all(anchors, ranks_of(local.group)[source], local.group, local.exchange.stats)
    return all(torch.equal(before, now) for before, now in zip(had, anchors, strict=True))


def _carry_residuals(local: LocalSGD, before: Exchange, common: Mapping[str, Any], *, keep: bool) -> None:
    shared = {key.partition("//")[2]: x for key, x in common.items() if key.startswith(f"{_EXCHANGE}//")}
    anchors = [
        pair for fragment in local._fragments for pair in zip(fragment.names, fragment.anchors, strict=True)
    ]  # fmt: skip
    kept = keep and local.exchange.carry_residuals(before, anchors)
    residuals = local.exchange.state_dict() if kept else {}
    own = {key: x for key, x in residuals.items() if key not in rank_independent(residuals)}
    local.exchange.load_state_dict(shared | own)
    if not kept:
        for fragment in local._fragments:
            fragment.displaced = False
        if any(key not in rank_independent(state) for state in [before.state_dict()] for key in state):
            local.residual_resets += 1
            log.warning("this rank's residuals do not fit the ranks it continues with: they are reset")


def _broadcast_state(state: Mapping[str, Any], source: int, local: LocalSGD) -> dict[str, Any]:
    """Return the source's state on all ranks: numbers and tensors by name, without pickle."""
    stats, group, sender = local.exchange.stats, local.group, ranks_of(local.group)[source]
    device = device_of(group)
    tensors = {key: x for key, x in state.items() if isinstance(x, Tensor)}
    described = [(key, list(x.shape), str(x.dtype).removeprefix("torch.")) for key, x in tensors.items()]
    numbers = {key: x for key, x in state.items() if key not in tensors}
    text = torch.tensor(list(json.dumps([described, numbers]).encode()), dtype=torch.uint8, device=device)
    length = torch.tensor([text.numel()], device=device)
    broadcast(length, sender, group, stats)
    if local._rounds.rank != source:
        text = torch.empty(int(length), dtype=torch.uint8, device=device)
    broadcast(text, sender, group, stats)
    described, result = json.loads(bytes(text.tolist()))
    for key, shape, dtype in described:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise InputError(f"rank {source} announces a tensor {key!r} of unknown dtype {dtype!r}")
        x = tensors[key].to(device) if local._rounds.rank == source else torch.empty(shape, dtype=kind, device=device)
        broadcast(x, sender, group, stats)
        result[key] = x.cpu()
    return dict(result)
