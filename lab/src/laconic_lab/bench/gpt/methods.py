"""Ways to train the GPT on several ranks: DDP with torch's hooks and with laconic's, dense DiLoCo, and LocalSGD."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from laconic.collective import Attachment, LocalSGD, attach, muon

__all__ = [
    "CLIP", "DEFAULT", "METHODS", "Method", "Trainer", "evaluate", "loss_of", "optimizers_of", "powersgd_phase", "rate",
    "steps_of", "update",
]  # fmt: skip

CLIP = 1.0
"""Norm of a gradient above which it is scaled down."""
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
WARMUP, FINAL = 0.1, 0.1
"""Share of the steps over which learning rates grow; last learning rate, after half a cosine, over the largest."""
POWERSGD_START = 0.1
"""Share of the steps with plain means before PowerSGD starts, as torch's documentation recommends."""
POWERSGD_RANK = 4
ONE_BUCKET_MB = 4096
"""One bucket for PowerSGD, whose callbacks wait: with several buckets it can hang on gloo."""


@dataclass(frozen=True)
class Method:
    """One way to train.

    Args:
        title: Its name in tables.
        optimizer: ``adamw``, ``muon`` (AdamW for vectors, embeddings and head) or, for checks, ``sgd``.
        hook: torch's DDP hook: ``fp16``, ``powersgd`` or none.
        every: Local steps between exchanges with ``LocalSGD``; 0 exchanges gradients with DDP.
        codec: Codec of ``LocalSGD``, or of ``laconic.attach`` where gradients are exchanged.
        outer, fragments, overlap: Arguments of ``LocalSGD``.
        stretch: How many times as long it trains as DDP; None: as the settings say.
    """

    title: str
    optimizer: str = "adamw"
    hook: str | None = None
    every: int = 0
    codec: str = "none"
    outer: str = "mean"
    fragments: int = 1
    overlap: int = 0
    stretch: float | None = None

    @property
    def ours(self) -> bool:
        return self.codec != "none"

    @property
    def period(self) -> int:
        """Steps after which the work of a step repeats."""
        return max(1, self.every // self.fragments)


METHODS = {
    "ddp": Method("AdamW, plain DDP"),
    "fp16": Method("AdamW, `fp16_compress_hook`", hook="fp16"),
    "powersgd": Method(f"AdamW, PowerSGD hook, rank {POWERSGD_RANK}", hook="powersgd"),
    "muon-ddp": Method("Muon, plain DDP", "muon"),
    "muon-fp16": Method("Muon, `fp16_compress_hook`", "muon", hook="fp16"),
    "diloco": Method("DiLoCo: AdamW, dense, every 20, Nesterov", every=20, outer="nesterov"),
    "laconic-sign": Method(
        "laconic: Muon, every 64, `ef|sign`, 4 fragments", "muon", None, 64, "ef|sign", fragments=4, overlap=8
    ),
    "laconic-topk": Method(
        "laconic: Muon, every 20, `ef|topk:0.1|sign`, 4 fragments", "muon", None, 20, "ef|topk:0.1|sign", fragments=4,
        overlap=4,
    ),
    "laconic-adamw": Method(
        "laconic: AdamW, every 32, `ef|sign`, 2 fragments", "adamw", None, 32, "ef|sign", fragments=2, overlap=12
    ),
    "laconic-adamw-8": Method("laconic: AdamW, every 8, `ef|sign`", "adamw", None, 8, "ef|sign", stretch=1.25),
    "laconic-adamw-long": Method(
        "laconic: AdamW, every 32, `ef|sign`, 2 fragments, mean × 1.8", "adamw", None, 32, "ef|sign", "mean:1.8",
        fragments=2, overlap=12,
    ),
    "laconic-adamw-16": Method(
        "laconic: AdamW, every 16, `ef|sign`, 2 fragments, mean × 1.8", "adamw", None, 16, "ef|sign", "mean:1.8",
        fragments=2, overlap=6,
    ),
    "laconic-qsgd": Method("laconic: AdamW, `qsgd:4` of gradients", codec="qsgd:4"),
    "laconic-thc": Method("laconic: AdamW, `ef|thc:4` of gradients", codec="ef|thc:4"),
}  # fmt: skip
DEFAULT = tuple(name for name, method in METHODS.items() if method.optimizer == "adamw" or method.ours)


def steps_of(method: str, steps: int, stretch: float) -> int:
    """Return the steps of a method's training: more where steps are local."""
    one = METHODS[method]
    return round(steps * (one.stretch or stretch)) if one.every else steps


class Trainer:
    """One rank that trains a model by a method.

    Args:
        steps: Steps of the whole training, for the schedule of learning rates.
        lr: AdamW's largest learning rate.
        muon_lr: Muon's.
        powersgd_start: Step at which PowerSGD starts; None: after ``POWERSGD_START`` of the steps.
    """

    def __init__(
        self, method: Method, model: nn.Module, steps: int, *, lr: float, muon_lr: float,
        powersgd_start: int | None = None,
    ) -> None:  # fmt: skip
        self.method, self.model = method, model
        self.optimizers = optimizers_of(method.optimizer, model, lr, muon_lr)
        self.local: LocalSGD | None = None
        self.attached: Attachment | None = None
        self.module = model
        if method.every:
            self.local = LocalSGD(
                model, self.optimizers, every=method.every, codec=method.codec, outer=method.outer,
                fragments=method.fragments, overlap=method.overlap,
            )  # fmt: skip
        else:
            start = powersgd_phase(steps) if powersgd_start is None else powersgd_start
            module = self.module = _data_parallel(method.hook, model, start)
            if method.ours:
                self.attached = attach(module, method.codec)
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(step, steps)) for each in self.optimizers
        ]
        self.backward_s = 0.0
        """Seconds of the last step's forward and backward pass, in which DDP exchanges gradients."""

    def step(self, windows: Tensor) -> None:
        """Train on windows [batch, context + 1]."""
        began = time.perf_counter()
        self.backward(windows)
        self.backward_s = time.perf_counter() - began
        if self.method.optimizer != "sgd":
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        update(self.local, self.optimizers, self.schedules)

    def backward(self, windows: Tensor) -> None:
        self.model.zero_grad()
        torch.autograd.backward(loss_of(self.module, windows))

    def compute_s(self, windows: Tensor) -> float:
        """Return the seconds of a forward and backward pass without an exchange; gradients are dropped."""
        began = time.perf_counter()
        if isinstance(self.module, DistributedDataParallel):
            with self.module.no_sync():
                self.backward(windows)
        else:
            self.backward(windows)
        took = time.perf_counter() - began
        self.model.zero_grad()
        return took

    @property
    def waited_s(self) -> float:
        """Seconds for which LocalSGD has waited so far; 0 with DDP, which does not count them."""
        return 0.0 if self.local is None else float(self.local.stats(residual_norms=False)["waited_s"])

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @contextmanager
    def common_model(self) -> Iterator[nn.Module]:
        """Provide the model that all ranks share: the global model of LocalSGD, DDP's replica."""
        if self.local is None:
            yield self.model
        else:
            with self.local.global_model() as model:
                yield model

    def finish(self) -> None:
        if self.local is not None:
            self.local.finish()
        if self.attached is not None:
            self.attached.detach()


def update(
    local: LocalSGD | None, optimizers: Sequence[torch.optim.Optimizer], schedules: Sequence[LRScheduler]
) -> None:
    """Step the optimizers, through LocalSGD where there is one, and their schedules."""
    for stepped in (local,) if local is not None else optimizers:
        stepped.step()
    for schedule in schedules:
        schedule.step()


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, rank: int, ranks: int) -> float:
    """Return the mean loss over windows in nats a byte; each rank computes a part."""
    part = windows[rank::ranks]
    total = torch.tensor([float(loss_of(model, part)) * part.shape[0], part.shape[0]], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss of predicting each byte of windows [batch, context + 1] from those before it."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step over the largest one."""
    warmup = max(1.0, WARMUP * steps)
    if step + 1 <= warmup:
        return (step + 1) / warmup
    done = (step + 1 - warmup) / max(1.0, steps - warmup)
    return FINAL + (1 - FINAL) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def powersgd_phase(steps: int) -> int:
    """Return the steps before PowerSGD; torch needs two, in which DDP settles its buckets."""
    return max(2, round(POWERSGD_START * steps))


def optimizers_of(name: str, model: nn.Module, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    if name == "muon":
        return muon(model, lr=muon_lr, adamw_lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    if name == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)]  # larger steps diverge with some seeds
    return [torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)]


def _data_parallel(hook: str | None, model: nn.Module, powersgd_start: int) -> DistributedDataParallel:
    if hook == "powersgd":
        module = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=powersgd_start
        )
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return module
    module = DistributedDataParallel(model)
    if hook == "fp16":
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return module
