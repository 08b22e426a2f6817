"""Gradient exchanges to compare: torch's hooks and laconic's attachments, each on its own DDP module."""

# No `from __future__ import annotations`: DDP compares the hooks' annotations with classes.
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from laconic.collective import Attachment, attach

__all__ = ["DDPExchange", "make_exchange"]

ONE_BUCKET_MB = 4096
"""One bucket for hooks that wait in callbacks (PowerSGD, quantization), which hang with several on gloo."""

POWERSGD_START = 2
"""Steps before PowerSGD starts, in which DDP settles its buckets."""


@dataclass
class DDPExchange:
    name: str
    module: DistributedDataParallel
    attachment: Attachment | None = None
    warmup: int = 2


def make_exchange(name: str, model: nn.Module, **options: Any) -> DDPExchange:
    """Return a DDP module with the named exchange; ``laconic SPEC`` attaches a codec."""
    if name.startswith("laconic "):
        module = DistributedDataParallel(model)
        return DDPExchange(name, module, attach(module, name.removeprefix("laconic "), **options))
    hook, _, rank = name.partition(":")
    if hook == "ddp":
        return DDPExchange(name, DistributedDataParallel(model))
    if hook in ("bf16", "fp16"):
        module = DistributedDataParallel(model)
        module.register_comm_hook(None, _bf16 if hook == "bf16" else default_hooks.fp16_compress_hook)
        return DDPExchange(name, module)
    module = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(rank), start_powerSGD_iter=POWERSGD_START, min_compression_rate=2
        )
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return DDPExchange(name, module, warmup=POWERSGD_START + 2)
    hooks = {
        "quantize-tensor": quantization_hooks.quantization_pertensor_hook,
        "quantize-channel": quantization_hooks.quantization_perchannel_hook,
    }
    module.register_comm_hook(dist.group.WORLD, hooks[name])
    return DDPExchange(name, module)


def _bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16 hook, which cannot be registered without NCCL although gloo can add bf16."""
    reduced: torch.futures.Future[torch.Tensor] = default_hooks._compress_hook(torch.bfloat16, state, bucket)
    return reduced
