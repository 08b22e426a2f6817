"""Which codec bears a model of one's own? python examples/tune.py [STEPS]

A small model learns to predict the next byte of Python's own source. Copies of it are trained for some steps by several
candidates, with two simulated workers in this process.
"""

from __future__ import annotations

import inspect
import sys

import torch
from torch import Tensor, nn

import laconic

TEXT = torch.frombuffer(bytearray(inspect.getsource(inspect).encode()), dtype=torch.uint8).long()
WINDOW, BATCH, WIDTH = 8, 128, 32
CANDIDATES = ["qsgd:4", "ef|qsgd:4", "ef|topk:0.01|qsgd:4", "local 8 ef|qsgd:4"]


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return windows of the text, and the byte that follows each of them."""
    starts = torch.randint(len(TEXT) - WINDOW, (BATCH,), generator=torch.Generator().manual_seed(number))
    windows = torch.stack([TEXT[start : start + WINDOW + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, -1]


def main(steps: int = 200) -> None:
    torch.manual_seed(0)
    layers = nn.Embedding(256, WIDTH), nn.Flatten(), nn.Linear(WINDOW * WIDTH, 256), nn.ReLU(), nn.Linear(256, 256)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    found = laconic.tune(model, batch, optimizer, candidates=CANDIDATES, steps=steps, rate=10e6, give_up=1.0)
    plain = found.outcomes["none"].loss
    for label, outcome in found.outcomes.items():
        beside = 100 * (outcome.loss / plain - 1)
        print(f"{label:22} loss {outcome.loss:.3f} ({beside:+.1f} %)  {outcome.nbytes:9,.0f} B a step")
    print(found.code)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
