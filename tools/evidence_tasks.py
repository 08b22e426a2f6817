"""A model of a family that no study trains, for ``laconic tune``: evidence of the planner.

::

    laconic tune tools/evidence_tasks.py:lstm --steps 300 --record results/tune/lstm.jsonl --codec …

The codecs are those of ``calibration.STOCK`` that suit gradients, and ``local 8 ef|qsgd:4``, ``local 8 ef|sign``. Each
model predicts the next byte of modules of Python's standard library, with AdamW and two simulated workers.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import logging
import typing
from typing import Any

import torch
from torch import Tensor, nn

WINDOW, BATCH, HELD_OUT = 48, 12, 16
MODULES = (argparse, functools, inspect, json, logging, typing)


def _text() -> Tensor:
    return torch.tensor(list("".join(map(inspect.getsource, MODULES)).encode()), dtype=torch.int64)


class _Predictor(nn.Module):
    """An LSTM that predicts each byte from those before it."""

    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embed(x))[0])
        return logits


def _task(model: nn.Module, name: str, lr: float) -> dict[str, Any]:
    text = _text()
    split = len(text) * 9 // 10

    def windows(number: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(low, high - WINDOW - 1, (BATCH, 1), generator=generator)
        tokens = text[starts + torch.arange(WINDOW + 1)]
        return tokens[:, :-1], tokens[:, 1:]

    return {
        "model": model, "name": name, "batches": lambda number: windows(number, 0, split),
        "held_out": [windows(1_000_000 + number, split, len(text)) for number in range(HELD_OUT)],
        "optimizer": torch.optim.AdamW(model.parameters(), lr),
    }  # fmt: skip


def lstm() -> dict[str, Any]:
    torch.manual_seed(0)
    return _task(_Predictor(), "lstm", 3e-3)
