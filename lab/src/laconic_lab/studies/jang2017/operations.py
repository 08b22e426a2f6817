"""Figures 3 and 8: time of AlexNet's training by operation, from torch's profiler."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from laconic.plan.calibration import check_device
from laconic.train.models import build_model

__all__ = ["GROUPS", "share"]

GROUPS = {
    "convolution": ("conv",), "matrix product": ("addmm", "mm", "gemm", "linear", "matmul", "bmm"),
    "pooling": ("pool",), "relu": ("relu", "threshold", "clamp"), "loss": ("softmax", "nll_loss", "cross_entropy"),
    "optimizer": ("foreach", "sgd", "add_", "mul_", "addcmul", "addcdiv"),
}  # fmt: skip
"""Parts of operations' names; an operation belongs to the first group that has one of them."""


def share(device: str = "cpu", *, batch: int | None = None, steps: int = 3, model: str = "alexnet") -> dict[str, Any]:
    """Return the shares of a training step's time by group of operations."""
    where = check_device(device)
    size = batch or (256 if device == "cuda" else 16)
    network = build_model(model, seed=0).to(where)
    side = {"alexnet": 224, "resnet50": 224, "vgg11": 32}[model]
    classes = 10 if model == "vgg11" else 1000
    x, y = torch.randn(size, 3, side, side, device=where), torch.randint(classes, (size,), device=where)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, foreach=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=kinds) as profiled:
        for _ in range(steps):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    took: dict[str, float] = {}
    calls: dict[str, int] = {}
    for event in profiled.key_averages():
        if event.key.startswith("ProfilerStep"):
            continue
        own = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if own > 0:
            took[event.key] = took.get(event.key, 0.0) + own
            calls[event.key] = event.count
    total = sum(took.values())
    groups = dict.fromkeys([*GROUPS, "other"], 0.0)
    for name, own in took.items():
        groups[_group(name)] += own / total
    top = sorted(took, key=lambda name: -took[name])[:12]
    return {
        "model": model, "device": device, "batch": size, "steps": steps, "step_s": total / steps / 1e6,
        "groups": groups, "operations": {name: took[name] / total for name in top},
        "calls": {name: calls[name] / steps for name in top}, "threads": torch.get_num_threads(),
    }  # fmt: skip


def _group(name: str) -> str:
    low = name.lower()
    return next((group for group, words in GROUPS.items() if any(word in low for word in words)), "other")
