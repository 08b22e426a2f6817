"""Decomposition of the quantization error: the same weights, quantized so that only a part of the error remains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laconic_lab.studies.oland2015 import quantizers
from laconic_lab.studies.oland2015.exchange import average_biases
from laconic_lab.studies.oland2015.network import Networks
from laconic_lab.studies.oland2015.quantizers import Linear
from laconic_lab.studies.oland2015.settings import LAYERS, Quantizer

__all__ = ["EPOCHS", "PAPER", "VARIANTS", "dissect"]

EPOCHS = (1, 2, 5, 10, 20, 30, 50, 70, 100)
PAPER, ZERO, FIX = (
    Quantizer("adaptive", c=5),
    Quantizer("adaptive", c=5, zero=True),
    Quantizer("adaptive", c=4, zero=True, tail=0.001),
)
VARIANTS = {
    "exact": "not quantized",
    "paper": "c = 5",
    "shifted": "exact, but the fullest bin is moved as c = 5 moves it on average",
    "centred": "c = 5, but the fullest bin decodes to the mean of its weights",
    "others": "c = 5, but the fullest bin is exact",
    "zero": "c = 5, zero is a level",
    "fix": "c = 4, zero is a level, a thousandth apart",
}


def dissect(networks: Networks, seed: int, num_right: Callable[[], Tensor]) -> dict[str, Any]:
    """Evaluate the mean of all workers' weights in every variant, and measure the first layer's fullest bin.

    Args:
        networks: Networks before an exchange; they are restored.
        num_right: Counts the test images that the first worker classifies correctly.

    Returns:
        For each variant the [runs] correct images, and means over runs of the bin's ``share`` of the weights, its
        ``width``, the distance ``offset`` of its centre from the mean of its weights, and their standard deviation,
        ``spread``.
    """
    saved = [networks.state(k) for k in range(networks.workers)]
    results: dict[str, Any] = {}
    for variant in VARIANTS:
        for i in range(len(LAYERS)):
            decoded = [_decode(variant, networks.layer(k, i), seed) for k in range(networks.workers)]
            networks.layer(0, i).copy_(sum(decoded[1:], decoded[0]) / networks.workers)
        average_biases(networks)
        results[variant] = num_right().cpu()
        for k, state in enumerate(saved):
            networks.restore(k, state)
    return results | _fullest_bin(networks.layer(0, 0), seed)


def _decode(variant: str, x: Tensor, seed: int) -> Tensor:
    if variant == "exact":
        return x.clone()
    quantizer = {"zero": ZERO, "fix": FIX}.get(variant, PAPER)
    fitted = quantizers.fit([quantizer] * len(x), x, seed)
    values, symbols = fitted.decode(x)
    if variant in ("paper", "zero", "fix"):
        return values
    assert isinstance(fitted, Linear) and symbols is not None
    inside, centre, mean = _fullest(fitted, x, symbols)
    kept = {"shifted": x + (centre - mean), "centred": mean.expand(x.shape), "others": x}[variant]
    return torch.where(inside, kept, x if variant == "shifted" else values)


def _fullest(fitted: Linear, x: Tensor, symbols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which weights are in the fullest bin of their run, its centre, and their mean as [runs, 1]."""
    runs, bins = fitted.table.shape
    first = torch.arange(0, runs * bins, bins, device=x.device).unsqueeze(1)
    counts = torch.zeros(runs, bins, device=x.device)
    counts.scatter_add_(1, symbols - first, torch.ones((), device=x.device).expand(symbols.shape))
    fullest = counts.argmax(1, keepdim=True)
    inside = symbols == first + fullest
    return inside, fitted.table.gather(1, fullest), (x * inside).sum(1, keepdim=True) / counts.amax(1, keepdim=True)


def _fullest_bin(x: Tensor, seed: int) -> dict[str, float]:
    fitted = quantizers.fit([PAPER] * len(x), x, seed)
    _, symbols = fitted.decode(x)
    assert isinstance(fitted, Linear) and symbols is not None
    inside, centre, mean = _fullest(fitted, x, symbols)
    share = inside.to(torch.float32).mean(1)
    squares = ((x - mean).square() * inside).mean(1) / share
    return {
        "share": float(share.mean()),
        "width": float((fitted.table[:, 1] - fitted.table[:, 0]).mean()),
        "offset": float((centre - mean).abs().mean()),
        "spread": float(squares.sqrt().mean()),
    }
