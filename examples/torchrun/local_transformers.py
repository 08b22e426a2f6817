"""Hugging Face Trainer with local steps: ranks train alone and exchange their compressed changes.

torchrun --standalone --nproc-per-node 2 examples/torchrun/local_transformers.py
"""

from __future__ import annotations

import tempfile

from ddp_transformers import Classifier, LargestOfTen  # the model and the data of the example beside this one
from transformers import Trainer, TrainingArguments

from laconic.collective.local_trainers import local_trainer


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
