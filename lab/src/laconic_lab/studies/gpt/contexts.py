"""What contexts tell about a sparse message: ideal bits of its positions and signs.

The probability that a value is sent (or positive) is a logistic function of features of its context. The function is
fitted to the messages of one exchange; those of the next exchange are measured by it, so that every figure is a code
length that a sender and a receiver could reach who both know the features. Values are coded row by row: *so far* means
what was coded before in the same message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from laconic_lab.studies.gpt.messages import HISTORY, Exchange

__all__ = ["NEEDS_SPARSE", "POSITIONS", "SIGNS", "code_length", "position_features", "sign_features"]

PRIORS = (1.0, 8.0)
"""Events that an estimated rate of a row or column assumes at the mean rate: with few, it follows chance."""
RIDGE = 1e-2
MAX_STEPS = 50

_SO_FAR_ROW, _SO_FAR_COLUMN = ("row so far 1", "row so far 8"), ("column so far 1", "column so far 8")
_NEIGHBOURS = ("above", "left", "left 16")
_SENT_HERE = (*(f"own {age}" for age in range(1, HISTORY + 1)), "all 1", "all 2", "all")
_SENT_LINES = ("own rows", "own columns", "rows", "columns")
_WEIGHTS = tuple(f"{what} {power}" for what in ("weight", "moved", "recent") for power in (1, 8, 64))
_WEIGHT_LINES = ("weight rows", "weight columns", "moved rows", "moved columns")

POSITIONS: Mapping[str, Sequence[str]] = {
    "none": (),
    "row so far": _SO_FAR_ROW,
    "column so far": _SO_FAR_COLUMN,
    "row and column so far": (*_SO_FAR_ROW, *_SO_FAR_COLUMN),
    "row, column and neighbours so far": (*_SO_FAR_ROW, *_SO_FAR_COLUMN, *_NEIGHBOURS),
    "rows and columns of earlier messages": _SENT_LINES,
    "what was sent here before": _SENT_HERE,
    "common weights here": _WEIGHTS,
    "common weights of row and column": _WEIGHT_LINES,
    "all of these": (
        *_SO_FAR_ROW, *_SO_FAR_COLUMN, *_NEIGHBOURS, *_SENT_LINES, *_SENT_HERE, *_WEIGHTS, *_WEIGHT_LINES,
    ),
    "norms of the change's rows and columns, unsent": ("change rows", "change columns"),
}  # fmt: skip
"""Contexts of positions by the features that they use. The last one is a bound: its norms would have to be sent."""
NEEDS_SPARSE = ("rows and columns of earlier messages", "what was sent here before", "all of these")
"""Contexts that only a training whose own messages are sparse can tell about."""

_SIGN_SENT, _SIGN_WEIGHTS = ("own last", "all last", "all"), ("weight", "weight size", "moved", "moved size", "recent")
SIGNS: Mapping[str, Sequence[str]] = {
    "none": (),
    "row and column so far": ("row", "column"),
    "what was sent here before": _SIGN_SENT,
    "common weights here": _SIGN_WEIGHTS,
    "all of these": ("row", "column", *_SIGN_SENT, *_SIGN_WEIGHTS),
}


def position_features(
    selected: Tensor, worker: int, change: Tensor, before: Sequence[Exchange], common: Tensor, initial: Tensor
) -> dict[str, Tensor]:
    """Return the features of each value of a matrix, flat.

    Args:
        selected: Whether each value is sent.
        change: The change itself, for the bound.
        before: Earlier exchanges, the newest at the end.
        common: The weights that all workers have.
        initial: The weights at the start of the training.
    """
    mask, rate = selected.double(), float(selected.double().mean())
    rows, columns = mask.shape
    features: dict[str, Tensor] = {}
    elapsed = (
        torch.arange(columns, dtype=torch.float64)[None] * rate,
        torch.arange(rows, dtype=torch.float64)[:, None] * rate,
    )
    for name, counts, expected in (
        ("row", mask.cumsum(1) - mask, elapsed[0]), ("column", mask.cumsum(0) - mask, elapsed[1])
    ):  # fmt: skip
        for prior in PRIORS:
            features[f"{name} so far {prior:g}"] = ((counts + prior) / (expected + prior)).log()
    padded = torch.nn.functional.pad(mask, (16, 1, 1, 0))
    features["above"] = sum((padded[:-1, 16 + d : 16 + d + columns] for d in (-1, 0, 1)), torch.zeros(()))
    features["left"] = sum((padded[1:, 16 - d : 16 - d + columns] for d in (1, 2)), torch.zeros(()))
    features["left 16"] = sum((padded[1:, 16 - d : 16 - d + columns] for d in range(1, 17)), torch.zeros(()))
    past = [(each.signs != 0).double() for each in reversed(before)][:HISTORY]
    for age in range(1, HISTORY + 1):
        features[f"own {age}"] = past[age - 1][worker] if age <= len(past) else torch.zeros_like(mask)
        if age <= 2:
            features[f"all {age}"] = past[age - 1].sum(0) if age <= len(past) else torch.zeros_like(mask)
    everyone = torch.cat(past) if past else torch.zeros(1, rows, columns, dtype=torch.float64)
    own = torch.stack([each[worker] for each in past]) if past else everyone
    features["all"] = everyone.sum(0).log1p()
    for prefix, sent in (("", everyone), ("own ", own)):
        for name, dim in (("rows", 2), ("columns", 1)):
            counts = sent.sum((0, dim), keepdim=True)[0]
            features[prefix + name] = (
                (counts + 2) / (float(sent.mean()) * sent.shape[0] * mask.shape[dim - 1] + 2)
            ).log()
    recent = common - before[0].common if before else torch.zeros_like(common)
    for name, values in (("weight", common), ("moved", common - initial), ("recent", recent)):
        quantiles = _quantiles(values)
        for power in (1, 8, 64):
            features[f"{name} {power}"] = quantiles**power
    for name, values in (("weight", common), ("moved", common - initial), ("change", change)):
        squares = values.double().square() + 1e-30
        for line, dim in (("rows", 1), ("columns", 0)):
            features[f"{name} {line}"] = (squares.mean(dim, keepdim=True) / squares.mean()).log()
    return {name: values.expand(rows, columns).reshape(-1) for name, values in features.items()}


def sign_features(
    selected: Tensor, worker: int, change: Tensor, before: Sequence[Exchange], common: Tensor, initial: Tensor
) -> dict[str, Tensor]:
    """Return the features of the sign of each sent value; arguments as above."""
    signs = torch.where(selected, change.sign(), 0.0).double()
    past = [each.signs.double() for each in reversed(before)][:HISTORY] or [torch.zeros(worker + 1, *signs.shape)]
    moved = common - initial
    features = {
        "row": (signs.cumsum(1) - signs).clamp(-4, 4), "column": (signs.cumsum(0) - signs).clamp(-4, 4),
        "own last": past[0][worker], "all last": past[0].sum(0), "all": torch.cat(past).sum(0).clamp(-4, 4),
        "weight": common.sign(), "weight size": common.sign() * _quantiles(common),
        "moved": moved.sign(), "moved size": moved.sign() * _quantiles(moved),
        "recent": (common - before[0].common).sign() if before else torch.zeros_like(common),
    }  # fmt: skip
    return {name: values.double()[selected] for name, values in features.items()}


def _quantiles(values: Tensor) -> Tensor:
    """Return the share of magnitudes that are smaller; 0 for zeros, however many there are."""
    flat = values.abs().reshape(-1)
    order = torch.empty(flat.numel(), dtype=torch.float64)
    order[flat.argsort(stable=True)] = torch.arange(flat.numel(), dtype=torch.float64) / flat.numel()
    return torch.where(flat > 0, order, 0.0).view(values.shape)


def code_length(
    fitted: tuple[Mapping[str, Tensor], Tensor], measured: tuple[Mapping[str, Tensor], Tensor], names: Sequence[str]
) -> float:
    """Return the bits of the measured outcomes by a logistic function of these features, fitted to other outcomes."""
    columns, outcomes = fitted
    spread = {name: (float(columns[name].mean()), float(columns[name].std())) for name in names}
    centres = {name: (mean, deviation) for name, (mean, deviation) in spread.items() if deviation > 1e-9}

    def matrix(features: Mapping[str, Tensor], n: int) -> Tensor:
        scaled = [(features[name] - mean) / deviation for name, (mean, deviation) in centres.items()]
        return torch.stack([torch.ones(n, dtype=torch.float64), *scaled], 1)

    weights = _fit(matrix(columns, outcomes.numel()), outcomes.double())
    logits = matrix(measured[0], measured[1].numel()) @ weights
    nats = torch.nn.functional.binary_cross_entropy_with_logits(logits, measured[1].double(), reduction="sum")
    return float(nats) / math.log(2)


def _fit(x: Tensor, y: Tensor) -> Tensor:
    """Return the weights of least ridge-penalised logistic loss, by Newton's method with halved steps."""
    weights = torch.zeros(x.shape[1], dtype=torch.float64)
    share = float(y.mean().clamp(1e-6, 1 - 1e-6))
    weights[0] = math.log(share / (1 - share))
    penalty = torch.full_like(weights, RIDGE)
    penalty[0] = 0.0
    loss: Callable[[Tensor], float] = lambda w: float(  # noqa: E731
        torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y, reduction="sum") + (penalty * w * w).sum() / 2
    )
    value = loss(weights)
    for _ in range(MAX_STEPS):
        p = torch.sigmoid(x @ weights)
        gradient = x.T @ (p - y) + penalty * weights
        curvature = (x * (p * (1 - p))[:, None]).T @ x + torch.diag(penalty + 1e-6)
        step = torch.linalg.solve(curvature, gradient)
        for _ in range(24):
            tried = loss(weights - step)
            if tried < value:
                break
            step = step / 2
        else:
            break
        done = value - tried < 1e-7 * value
        weights, value = weights - step, tried
        if done:
            break
    return weights
