"""Ways to exchange gradients: torch's hooks and laconic's attachments, each on a DDP module of its own."""

# No `from __future__ import annotations` here: DDP compares hooks' annotations with classes, not with their names.
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from laconic.collective import Attachment, attach

__all__ = ["Way", "make_way"]

ONE_BUCKET_MB = 4096
"""PowerSGD's and the quantization hooks wait in callbacks, and hang with several buckets on gloo."""

POWERSGD_START = 2
"""Steps without PowerSGD, which DDP needs to settle its buckets."""


@dataclass
class Way:
    name: str
    module: DistributedDataParallel
    attachment: Attachment | None = None
    warmup: int = 2


def make_way(name: str, model: nn.Module, **options: Any) -> Way:
    """A DDP module that exchanges that way; ``laconic SPEC`` with what ``attach`` takes."""
    if name.startswith("laconic "):
        module = DistributedDataParallel(model)
        return Way(name, module, attach(module, name.removeprefix("laconic "), **options))
    hook, _, rank = name.partition(":")
    if hook == "ddp":
        return Way(name, DistributedDataParallel(model))
    if hook in ("bf16", "fp16"):
        module = DistributedDataParallel(model)
        module.register_comm_hook(None, _bf16 if hook == "bf16" else default_hooks.fp16_compress_hook)
        return Way(name, module)
    module = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(rank), start_powerSGD_iter=POWERSGD_START, min_compression_rate=2
        )
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return Way(name, module, warmup=POWERSGD_START + 2)
    hooks = {
        "quantize-tensor": quantization_hooks.quantization_pertensor_hook,
        "quantize-channel": quantization_hooks.quantization_perchannel_hook,
    }
    module.register_comm_hook(dist.group.WORLD, hooks[name])
    return Way(name, module)


def _bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own, which refuses to be registered without NCCL though gloo can add bf16."""
    found: torch.futures.Future[torch.Tensor] = default_hooks._compress_hook(torch.bfloat16, state, bucket)
    return found
