"""Hugging Face Trainer with local steps: ranks train alone and exchange their compressed changes.

torchrun --standalone --nproc-per-node 2 examples/torchrun/local_transformers.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from laconic.collective.local_trainers import local_trainer


class LargestOfTen(Dataset[dict[str, torch.Tensor]]):
    """Vectors, with the index of the largest of their first ten numbers as the class."""

    def __init__(self) -> None:
        self.x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.x[index, :10].argmax()}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=32, max_steps=20, use_cpu=True, report_to=[], save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(Classifier(), arguments, train_dataset=LargestOfTen())
        trained = local_trainer(trainer, every=5, codec="ef|topk:0.1|sign")  # the only new line
        trainer.train()
        stats = trained.local.stats()
        if trainer.is_world_process_zero():
            sent = (stats["bytes_sent"] + stats["bytes_reduced"]) / stats["steps"]  # without the first weights
            print(f"{stats['steps']} steps, {sent / 1e3:.2f} kB each")


if __name__ == "__main__":
    main()
