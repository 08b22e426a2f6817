"""Ways to choose one of 64 values: bits of a position, and the squared norm beside that of the largest values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.codecs.topk import num_kept

__all__ = ["CHUNKS", "KEEP", "PRICES", "largest", "largest_of_chunks", "least_information", "priced"]

KEEP = 1 / 64
CHUNKS = (64, 128, 256, 4096)
"""Chunks that each keep one of 64 values."""
PRICES = (0.05, 0.1, 0.2)
"""Squared norm that a bit must earn, in units of the smallest square among the largest values."""
ROUNDS = 4


def largest(change: Tensor) -> Tensor:
    """Return whether each value is one of the largest magnitudes."""
    selected = torch.zeros(change.numel(), dtype=torch.bool)
    selected[change.abs().reshape(-1).topk(num_kept(KEEP, change.numel())).indices] = True
    return selected.view(change.shape)


def largest_of_chunks(change: Tensor, chunk: int) -> tuple[float, float]:
    """Return the bits of a position, and the squared norm of the largest values of each chunk.

    Values behind the last whole chunk are left out; the norm is scaled to all of them.
    """
    each, n = num_kept(KEEP, chunk), change.numel() // chunk * chunk
    squares = change.double().reshape(-1)[:n].view(-1, chunk).square()
    bits = math.log2(math.comb(chunk, each)) / each
    return bits, float(squares.topk(each, dim=1).values.sum()) * change.numel() / n


def priced(change: Tensor, price: float) -> Tensor:
    """Return whether each value is selected if its square must also pay for its position.

    A position costs log2((1 - p) / p) bits, with p the product of the rates of its row and its column. These rates
    follow from the selection, so both are computed in turns.
    """
    squares, selected = change.double().square(), largest(change)
    least, k = float(squares[selected].min()), int(selected.sum())
    for _ in range(ROUNDS):
        mask = selected.double()
        rate, columns = float(mask.mean()), torch.ones(mask.shape[1], dtype=torch.float64)
        for _ in range(3):
            rows = (mask.sum(1) + 1) / (rate * columns.sum() + 1)
            columns = (mask.sum(0) + 1) / (rate * rows.sum() + 1)
        p = (rate * rows[:, None] * columns).clamp(1e-5, 0.9)
        worth = squares - price * least * ((1 - p) / p).log2()
        selected = torch.zeros(worth.numel(), dtype=torch.bool)
        selected[worth.reshape(-1).topk(k).indices] = True
        selected = selected.view(change.shape)
    return selected


def least_information(change: Tensor, share: float) -> float:
    """Return the least bits of a sent value of any selection that keeps this share of the largest values' squared norm.

    The information between the values and a random selection, in the limit of long messages, if values are independent:
    the selection that needs least chooses a value with a probability that is a logistic function of its square.
    """
    squares = change.double().reshape(-1).square()
    kept = squares.topk(num_kept(KEEP, squares.numel())).values
    goal, unit = share * float(kept.sum()), float(kept.min())
    soft, hard = 0.0, 400.0  # steepness; a selection becomes harder, and its norm grows, with it
    for _ in range(40):
        steepness = (soft + hard) / 2
        p = _probabilities(squares / unit, steepness)
        soft, hard = (steepness, hard) if float((p * squares).sum()) < goal else (soft, steepness)
    mean = p.mean()
    return float((_entropy(mean) - _entropy(p).mean()) / mean)


def _probabilities(squares: Tensor, steepness: float) -> Tensor:
    """Return logistic probabilities whose mean is ``KEEP``."""
    low, high = 0.0, float(squares.max()) + 40.0
    for _ in range(50):
        middle = (low + high) / 2
        p = torch.sigmoid(steepness * (squares - middle))
        low, high = (middle, high) if float(p.mean()) > KEEP else (low, middle)
    return p


def _entropy(p: Tensor) -> Tensor:
    nats: Tensor = torch.special.entr(p) + torch.special.entr(1 - p)
    return nats / math.log(2)
