"""Train a model of your own with a parameter server: python examples/server.py

The same without Python: laconic train --script examples/server.py:build --push 'ef|topk:0.05|qsgd:4' …
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from torch import nn

CODEC = "ef|topk:0.05|qsgd:4"


def points(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around ten centres, and the number of each point's centre."""
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return centres[labels] + 2.5 * torch.randn(count, 64, generator=generator), labels


def build() -> tuple[nn.Module, object, object, object]:
    """Return model, training set, test set and loss; the same in every process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, points(1, 8000), points(2, 2000), nn.functional.cross_entropy


def main() -> None:
    command = [sys.executable, "-m", "laconic", "train", "--script", f"{__file__}:build", "--iterations", "100"]
    command += ["--push", CODEC, "--pull", CODEC, "--returns", "gradients", "--workers", "2", "--json"]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(f"accuracy {result['accuracy']:.1f} %, {result['wire_bytes_per_iteration']:,.0f} bytes per iteration")


if __name__ == "__main__":
    main()
