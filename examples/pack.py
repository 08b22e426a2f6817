"""Compress a checkpoint and measure the accuracy of the model: python examples/pack.py [SPEC …]

The same from the command line: laconic pack model.safetensors -o model.lac --codec 'uniform:8|rans'
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from laconic.checkpoints import pack_file, unpack_file
from laconic.train import build_task


def main(*specs: str) -> None:
    torch.set_num_threads(1)
    task = build_task("mlp", "digits", seed=0)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=1e-3)
    for step in range(200):
        optimizer.zero_grad()
        task.loss(task.batch(torch.arange(64 * step, 64 * step + 64) % task.num_train)).backward()
        optimizer.step()

    folder = Path(tempfile.mkdtemp())
    save_file(task.model.state_dict(), folder / "model.safetensors")
    before = (folder / "model.safetensors").stat().st_size
    print(f"{'float32':24}{before:>10,} bytes  {task.evaluate()['accuracy']:.2f} %")
    for spec in specs or ("bf16", "uniform:8|rans", "adaptive:5|huffman", "uniform:4"):
        pack_file(folder / "model.safetensors", folder / "model.lac", spec, force=True)
        unpack_file(folder / "model.lac", folder / "again.safetensors", force=True)
        task.model.load_state_dict(load_file(folder / "again.safetensors"))
        nbytes = (folder / "model.lac").stat().st_size
        print(f"{spec:24}{nbytes:>10,} bytes  {task.evaluate()['accuracy']:.2f} %")


if __name__ == "__main__":
    main(*sys.argv[1:])
