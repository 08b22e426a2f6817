"""Checks that all ranks do the same: equal settings, equal parameters, and no rank lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic._core import crc32c
from laconic.collective.process_groups import backend_of, rank_in
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce
from laconic.errors import ConfigError, LaconicError

__all__ = ["describe", "differing", "peer_failure_as_error", "require_same_on_all_ranks"]


@contextmanager
def peer_failure_as_error(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """Turn the backend's error about a lost rank into a ``LaconicError`` that says what to do."""
    try:
        yield
    except LaconicError:
        raise
    except RuntimeError as error:
        cause = " ".join(str(error).split())
        raise LaconicError(
            f"rank {rank_in(group)} lost another rank while it {doing}: that rank died, or did not answer within "
            f"the group's timeout. Restart from the last checkpoint. ({cause[:300]})"
        ) from error


def differing(
    parameters: Mapping[str, Tensor], group: dist.ProcessGroup | None = None, *, stats: ExchangeStats | None = None,
) -> list[str]:  # fmt: skip
    """Return the names of the tensors that differ between ranks. All ranks call it, and get the same answer."""
    checksums = torch.tensor([_checksum(x) for x in parameters.values()], dtype=torch.int64)
    bounds = torch.cat([checksums, -checksums])
    if backend_of(group) == "nccl":
        bounds = bounds.cuda()
    all_reduce(bounds, group, stats or ExchangeStats(), dist.ReduceOp.MAX).wait()
    highest, negated_lowest = bounds.cpu().chunk(2)
    equal = (highest == -negated_lowest).tolist()
    return [name for name, same in zip(parameters, equal, strict=True) if not same]


def _checksum(x: Tensor) -> int:
    plain = x.detach().cpu().contiguous()
    return crc32c(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else 0


def require_same_on_all_ranks(
    call: str, settings: Mapping[str, str], group: dist.ProcessGroup | None, stats: ExchangeStats
) -> None:
    """Raise ``ConfigError`` on all ranks unless all have the same settings.

    Frames of another codec would be decoded without an error, so this is checked before the first exchange.

    Args:
        call: The function that the user called on all ranks.
        settings: What must be equal, by name. All ranks have the same names.
    """
    texts = {name: torch.tensor(list(text.encode()), dtype=torch.uint8) for name, text in settings.items()}
    with peer_failure_as_error(group, f"compared the arguments of {call}"):
        differ = differing(texts, group, stats=stats)
    if differ:
        shown = "; ".join(f"{name} here: {settings[name][:100]}" for name in differ)
        raise ConfigError(f"ranks call {call} with different arguments ({shown}): use the same on all ranks")


def describe(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the settings that follow from named tensors: names, shapes and dtypes, and which kernels serve them."""
    named = list(tensors)
    return {
        "devices": repr(sorted({_device_kind(x) for _, x in named})),
        "parameters": repr([(name, list(x.shape), str(x.dtype)) for name, x in named]),
    }


def _device_kind(x: Tensor) -> str:
    return f"{x.device.type}{' with kernels' if kernels.multi_tensor_backend_for(x) is not None else ''}"
