"""What an attached DDP step takes care of beside the exchange: unused parameters, uneven inputs, errors of backward."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import parse
from laconic.collective.consistency import differing, peer_failure_as_error
from laconic.collective.exchange import NamedTensors
from laconic.collective.groups import device_of
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce
from laconic.errors import ConfigError, NonFiniteError

__all__ = [
    "divides_by_active_ranks", "finds_unused_parameters", "in_backward", "leave_out_unused", "raise_after_backward",
    "require_same_memory", "scale_to_active_ranks",
]  # fmt: skip

_SAMPLE = 1024
"""Values that are looked at first: a gradient that is not zero is recognised without reading all of it."""


def finds_unused_parameters(module: DistributedDataParallel) -> bool:
    """Whether DDP may discard what is exchanged for a parameter: it does if no rank used the parameter."""
    return bool(module.find_unused_parameters or module.static_graph)


def leave_out_unused(
    groups: Mapping[str, NamedTensors], group: dist.ProcessGroup, stats: ExchangeStats
) -> dict[str, NamedTensors]:
    """Return the slots whose codec has no memory, or that are not zero on some rank. All ranks call it.

    A zero mean is what the others have anyway. If they were exchanged, error feedback would count residuals as sent
    that DDP discards.
    """
    with_memory = {spec for spec in groups if parse(spec)[0]}
    flags = [_is_used(x) for spec in groups if spec in with_memory for _, x in groups[spec]]
    if not flags:
        return dict(groups)
    used = torch.tensor(flags, dtype=torch.uint8, device=device_of(group))
    with peer_failure_as_error(group, "looked for unused parameters"), stats.during("wire_s"):
        all_reduce(used, group, stats, dist.ReduceOp.MAX).wait()
    answers = iter(used.tolist())
    left = {
        spec: [pair for pair in named if next(answers)] if spec in with_memory else named
        for spec, named in groups.items()
    }
    return {spec: named for spec, named in left.items() if named}


def _is_used(x: Tensor) -> bool:
    flat = x.reshape(-1)
    return bool(flat[:_SAMPLE].any()) or bool(flat[_SAMPLE:].any())


def divides_by_active_ranks(module: DistributedDataParallel) -> bool:
    """Whether ``join(divide_by_initial_world_size=False)`` is in effect."""
    return module._join_config.enable and not getattr(module, "_divide_by_initial_world_size", True)


def in_backward() -> bool:
    """Whether this thread runs backward. Ranks that ran out of inputs call the hook without."""
    return int(torch._C._current_graph_task_id()) != -1


def scale_to_active_ranks(flat: Tensor, active: bool, group: dist.ProcessGroup, stats: ExchangeStats) -> None:
    """Turn a mean over all ranks into one over those that still have inputs. All ranks call it."""
    count = torch.tensor([int(active)], device=device_of(group))
    with peer_failure_as_error(group, "counted the ranks that have inputs"), stats.during("wire_s"):
        all_reduce(count, group, stats).wait()
    flat.mul_(dist.get_world_size(group) / max(1, int(count)))


def raise_after_backward(errors: list[NonFiniteError]) -> bool:
    """Let this backward raise the first of the errors when it is over; False if no backward is running.

    Errors of a future arrive as a ``RuntimeError``, because DDP waits for it in C++. Errors of a callback keep their
    class. The callback must run after DDP's own, which is queued later: therefore a callback queues it.
    """
    engine = torch.autograd.Variable._execution_engine

    def raise_first() -> None:
        if errors:
            error = errors[0]
            errors.clear()
            raise error

    if not in_backward():
        return False
    engine.queue_callback(lambda: engine.queue_callback(raise_first))
    return True


def require_same_memory(
    state: Mapping[str, Tensor], steps: int, group: dist.ProcessGroup, stats: ExchangeStats
) -> None:
    """Raise ``ConfigError`` on all ranks unless all continue from the same step with the same common memory.

    Args:
        state: What must be equal on all ranks: rounds, scales, warm starts.
    """
    digest = hashlib.blake2b(digest_size=8)
    for key in sorted(state):
        digest.update(f"{key} {list(state[key].shape)} ".encode())
        digest.update(state[key].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    number = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
    with peer_failure_as_error(group, "compared the states from which ranks continue"):
        differ = differing({"steps": torch.tensor([steps]), "memory": number}, group, stats=stats)
    if differ:
        raise ConfigError(
            f"ranks continue from different states (this one from step {steps}): call load_state_dict on all ranks, "
            "each with the state that it saved, or on none"
        )
