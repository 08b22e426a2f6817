"""Drift: whether replicas still hold the same parameters, to the bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._core import crc32c

__all__ = ["differing"]


def differing(parameters: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> list[str]:
    """Names of the parameters that are not the same on all ranks. All ranks call it, and get the same answer."""
    sums = torch.tensor([_checksum(x) for x in parameters.values()], dtype=torch.int64)
    both = torch.cat([sums, -sums])
    if dist.get_backend(group) == "nccl":
        both = both.cuda()
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    most, least = both.cpu().chunk(2)
    return [name for name, same in zip(parameters, (most == -least).tolist(), strict=True) if not same]


def _checksum(x: Tensor) -> int:
    plain = x.detach().cpu().contiguous()
    return crc32c(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else 0
