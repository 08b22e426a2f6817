"""A line reader that stands in for STREET: convolutions, LSTMs along x, and CTC.

The paper trains STREET (Smith et al. 2016) on pictures of French street names, which are not available here. Its model
has a 5 x 5 convolution, pooling, LSTMs of 64 to 256 and an output of 134 classes; so has this one, on synthetic lines
in which each character is a fixed pattern with noise. The planner needs its size and the seconds of a step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CLASSES", "LineReader", "ctc", "lines"]

CLASSES = 134
HEIGHT, WIDTH, CELL = 32, 160, 16


class LineReader(nn.Module):
    """Maps [batch, 1, 32, 160] to log-probabilities [time, batch, 134]; 818,790 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, padding=2), nn.Conv2d(16, 64, 5, padding=2)
        self.columns = nn.LSTM(64, 64, batch_first=True)
        self.lines = nn.LSTM(64, 128, bidirectional=True)
        self.words = nn.LSTM(256, 256)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), (4, 2))
        batch, channels, height, width = x.shape
        columns = x.permute(0, 3, 2, 1).reshape(batch * width, height, channels)
        summed = self.columns(columns)[0][:, -1].view(batch, width, -1).transpose(0, 1)
        words = self.words(self.lines(summed)[0])[0]
        return F.log_softmax(self.head(words), -1)


def lines(count: int, *, characters: int = WIDTH // CELL, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return pictures of random characters and their labels."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, HEIGHT, CELL, generator=generator)
    labels = torch.randint(1, CLASSES, (count, characters), generator=generator)
    drawn = patterns[labels].permute(0, 2, 1, 3).reshape(count, 1, HEIGHT, characters * CELL)
    return drawn + 0.3 * torch.randn(drawn.shape, generator=generator), labels


def ctc(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the CTC loss of lines that fill their pictures."""
    time, batch, _ = outputs.shape
    lengths = torch.full((batch,), time), torch.full((batch,), labels.shape[1])
    loss: Tensor = F.ctc_loss(outputs, labels, *lengths)
    return loss
