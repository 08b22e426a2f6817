"""Lightning with local steps: a strategy lets ranks train alone and exchange their compressed changes.

torchrun --standalone --nproc-per-node 2 examples/torchrun/local_lightning.py
"""

from __future__ import annotations

import ddp_lightning
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from laconic.collective.local_trainers import lightning_local


class Classifier(ddp_lightning.Classifier):
    """The model of the example beside this one, with AdamW, which local steps suit."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=32)
    strategy = lightning_local(every=5, codec="ef|topk:0.1|sign")  # instead of "ddp"
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=20, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), data)
    if trainer.global_rank == 0:
        stats = strategy.local.stats()
        sent = (stats["bytes_sent"] + stats["bytes_reduced"]) / stats["steps"]  # without the first weights
        print(f"{stats['steps']} steps, {sent / 1e3:.2f} kB each")


if __name__ == "__main__":
    main()
