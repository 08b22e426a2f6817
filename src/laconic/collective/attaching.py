"""attach: one line that makes a DDP or FSDP2 module exchange its gradients compressed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import parse
from laconic.collective.attachment import Attachment, AttachOptions
from laconic.collective.ddp import DDPAttachment, ddp_of_replicate, unwrapped
from laconic.errors import ConfigError
from laconic.policy import Policy
from laconic.residual_storage import ResidualStorage

__all__ = ["attach"]


def attach(
    module: nn.Module, spec: str, *, policy: Policy | Mapping[str, str] | None = None, warmup_steps: int = 0,
    check_every: int = 0, error_every: int = 0, nonfinite: str = "spread", timeout_s: float | None = None,
    scaler: torch.amp.GradScaler | None = None, replicate: dist.ProcessGroup | Any | None = None,
    gather: str | None = None, gather_delta: bool = False, residual_dtype: torch.dtype = torch.float32,
    residual_device: str | torch.device | None = None,
) -> Attachment:  # fmt: skip
    """Exchange the gradients of a DDP or FSDP2 module compressed. All ranks call it before backward.

    Codecs whose packets can be added (``shared``, ``thc``, ``powersgd``, ``randk``, ``union``) use one all-reduce; all
    others send shards to their owners and means back (``TwoShot``). Gradients are exchanged during backward.

    A codec that does not suit the optimizer (``ef|topk`` under AdamW; see ``laconic.suitability``) is logged once, with
    what to use instead, and counted in ``stats()["unsuited_optimizer_steps"]``. So is a biased codec without ``ef``.

    Args:
        module: A DDP module, or one to which ``replicate`` or ``fully_shard`` was applied, also inside
            ``torch.compile``.
        spec: A codec or channel: ``ef|topk:0.01|qsgd:4``, ``ef|thc:4``, ``qsgd:4``; ``none`` is plain DDP or FSDP, bit
            for bit (and DDP has no hook, until ``set`` or ``check_every`` need one).
        policy: Codecs by parameter-name pattern; by default small and one-dimensional parameters are not compressed.
        warmup_steps: Number of first steps without compression.
        check_every: Number of steps between comparisons of the replicas' parameters, which log an error if they
            differ; 0: never.
        error_every: Number of steps between measurements of each slot's encoding error, for ``stats``; 0: never.
        nonfinite: What to do with a tensor if a value of some rank is not finite: ``spread`` (NaN on all ranks, as in
            plain DDP, so that a gradient scaler notices), ``skip`` (leave it out) or ``raise`` on all ranks.
        timeout_s: How long to wait for other ranks before the step fails; by default as long as the module's group.
        scaler: The gradient scaler of the training loop, if there is one. Residuals then follow its scale; without it
            they are added in the unit of the scale at which they arose.
        replicate: For FSDP2, the slow dimension: a mesh of one dimension, ``mesh["replicate"]``, or its process group.
            The model is sharded over the other dimension, and gradients of shards are exchanged with the counterparts
            in the other replicas. Not needed for a model that ``fully_shard`` has on a mesh of two dimensions.
        gather: For FSDP2 without replicas, the codec of gathered parameters, such as ``qsgd:8``; None: unchanged.
        gather_delta: Gather parameters as differences to those of the last forward pass, which every rank then keeps
            whole. Backward needs no message, and fewer bits suffice, such as ``qsgd:4``.
        residual_dtype: In which residuals are kept between steps: ``torch.float32``, or ``torch.bfloat16``, which takes
            half of the memory and is rounded stochastically.
        residual_device: None keeps residuals beside the gradients; ``cpu`` keeps those of a GPU in pinned memory of the
            host, which its kernels read and write in every step.
    """
    parse(spec)
    options = AttachOptions(
        policy, warmup_steps, check_every, error_every, nonfinite, timeout_s, scaler,
        ResidualStorage.of(residual_dtype, residual_device),
    )  # fmt: skip
    inner = unwrapped(module)
    parts = list(inner.modules()) if isinstance(inner, nn.Module) else []
    kinds = {kind.__name__ for part in parts for kind in type(part).__mro__}
    if "FSDPModule" in kinds:
        try:
            from laconic.collective.fsdp import attach_fsdp  # torch's FSDP2 is imported where it is used
        except ImportError as error:
            raise ConfigError(
                f"modules of FSDP2 need a newer torch than {torch.__version__} ({error}): update torch, or use "
                "DistributedDataParallel"
            ) from error
        return attach_fsdp(inner, spec, options, replicate=replicate, gather=gather, delta=gather_delta)
    for name, value in (("replicate", replicate), ("gather", gather), ("gather_delta", gather_delta or None)):
        if value is not None:
            raise ConfigError(f"{name} is for modules of FSDP2 (fully_shard), got a {type(inner).__name__}")
    if isinstance(inner, DistributedDataParallel):
        return DDPAttachment(inner, spec, options)
    composed = ddp_of_replicate(inner)
    if composed is not None:
        return DDPAttachment(composed[0], spec, options, composed[1])
    if "FullyShardedDataParallel" in kinds:
        raise ConfigError("FSDP1 modules are not supported: shard with FSDP2, torch.distributed.fsdp.fully_shard")
    raise ConfigError(
        f"expected a DistributedDataParallel module, got {type(module).__name__}: wrap it first, "
        "DistributedDataParallel(model), or shard it, fully_shard(model)"
    )
