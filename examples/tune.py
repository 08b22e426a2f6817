"""Which codec bears a model of one's own? python examples/tune.py [STEPS]

A small recurrent model learns to predict bytes of Python's own source. Copies of it are trained for some steps by
several candidates, with two simulated workers in this process.
"""

from __future__ import annotations

import inspect
import sys

import torch
from torch import Tensor, nn

import laconic

TEXT = torch.frombuffer(bytearray(inspect.getsource(inspect).encode()), dtype=torch.uint8).long()
WINDOW, BATCH = 32, 16
CANDIDATES = ["qsgd:4", "ef|qsgd:4", "ef|topk:0.01|qsgd:4", "local 8 ef|qsgd:4"]


class Predictor(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return windows of the text and the bytes that follow each position."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(TEXT) - WINDOW - 1, (BATCH,), generator=generator)
    windows = torch.stack([TEXT[start : start + WINDOW + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def main(steps: int = 200) -> None:
    torch.manual_seed(0)
    model = Predictor()
    found = laconic.tune(
        model, batch, torch.optim.AdamW(model.parameters(), 3e-3), candidates=CANDIDATES, steps=steps, rate=10e6,
        give_up=1.0,
    )  # fmt: skip
    plain = found.outcomes["none"].loss
    for label, outcome in found.outcomes.items():
        beside = 100 * (outcome.loss / plain - 1)
        print(f"{label:22} loss {outcome.loss:.3f} ({beside:+.1f} %)  {outcome.nbytes:9,.0f} B a step")
    print(found.code)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
