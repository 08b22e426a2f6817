"""Lightning: a callback attaches the DDP module, also on a CPU, and stops a run whose hook is not called.

torchrun --standalone --nproc-per-node 2 examples/torchrun/ddp_lightning.py
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laconic.collective.trainers import lightning_callback


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=32)
    callback = lightning_callback("ef|topk:0.05|qsgd:4")
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=20, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), data)
    if trainer.global_rank == 0:
        stats = callback.attachment.stats()
        print(f"{stats['steps']} steps, {stats['wire_bytes'] / stats['steps'] / 1e3:.1f} kB each")


if __name__ == "__main__":
    main()
