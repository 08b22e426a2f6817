"""Whether all ranks are about to do the same, asked before they do: of frames nobody can tell later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.collective.drift import differing
from laconic.collective.exchange import peer_failure_as_error
from laconic.errors import ConfigError

__all__ = ["describe", "require_same_on_all_ranks"]


def require_same_on_all_ranks(call: str, plans: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """``ConfigError`` on all ranks unless all have the same plans: frames of another codec would be read, silently.

    Args:
        call: What the user called on all ranks.
        plans: What must be the same, by its name. All ranks have the same names.
        group: The ranks.
    """
    with peer_failure_as_error(group, f"compared what it gives {call} with others"):
        differ = differing({what: _as_bytes(text) for what, text in plans.items()}, group)
    if differ:
        shown = "; ".join(f"{what} here: {plans[what][:100]}" for what in differ)
        raise ConfigError(f"ranks do not call {call} alike ({shown}): give it the same on all ranks")


def describe(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """What of named tensors decides what travels together, and in which form."""
    named = list(tensors)
    return {
        "devices": repr(sorted({_served_by(x) for _, x in named})),
        "parameters": repr([(name, list(x.shape), str(x.dtype)) for name, x in named]),
    }


def _served_by(x: Tensor) -> str:
    return f"{x.device.type}{' with kernels' if kernels.multi_tensor_backend_for(x) is not None else ''}"


def _as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
