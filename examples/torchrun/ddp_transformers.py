"""Hugging Face Trainer: its DDP module is attached when training begins.

torchrun --standalone --nproc-per-node 2 examples/torchrun/ddp_transformers.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from laconic.collective.trainers import attach_trainer


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
            folder, per_device_train_batch_size=32, max_steps=10, use_cpu=True, report_to=[], save_strategy="no",
            disable_tqdm=True, ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = Trainer(Classifier(), arguments, train_dataset=LargestOfTen())
        attached = attach_trainer(trainer, "ef|thc:4")  # the only new line
        trainer.train()
        stats = attached.attachment.stats()
        if trainer.is_world_process_zero():
            print(f"{stats['steps']} steps, {stats['wire_bytes'] / stats['steps'] / 1e3:.1f} kB each")


if __name__ == "__main__":
    main()
