"""Ray Train: one line compresses the gradients; a worker dies, Ray restarts from a checkpoint that holds residuals.

python examples/ray/ray_attach.py [folder]      (pip install 'laconic[ray]')
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import ray.train
import ray.train.torch
import torch
from torch import nn

import laconic
from laconic.train import build_task

STEPS, SAVE_EVERY, DIES_AT = 60, 20, 30


def train(config: dict[str, str]) -> None:
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    task = build_task("lenet5", "digits", seed=0)
    model = ray.train.torch.prepare_model(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attachment = laconic.attach(model, "ef|qsgd:4")  # the only new line
    parts = {"model": model, "optimizer": optimizer, "laconic": attachment}
    start, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:  # this rank's file; a new rank takes another's, without residuals
            own = Path(folder) / f"rank{rank}.pt"
            saved = torch.load(own if own.exists() else Path(folder) / "rank0.pt")
        start = saved["step"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    died = Path(config["folder"]) / "died"
    for step in range(start, STEPS):
        if step == DIES_AT and rank == world - 1 and not died.exists():
            died.touch()
            time.sleep(5)  # Ray takes note of a checkpoint within seconds
            os._exit(9)
        batch = task.batch(torch.randint(task.num_train, (32,)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:  # every worker adds a file of its own to the same checkpoint
            with tempfile.TemporaryDirectory() as folder:
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save(states | {"step": step + 1}, Path(folder) / f"rank{rank}.pt")
                counts = {key: attachment.stats()[key] for key in ("wire_bytes", "residual_resets")}
                metrics = counts | {"start": start, "step": step + 1, "accuracy": task.evaluate()["accuracy"]}
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main(folder: str) -> None:
    failures = ray.train.FailureConfig(max_failures=1)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ray.train.ScalingConfig(num_workers=2),  # (1, 2) lets Ray go on with one worker
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(storage_path=folder, failure_config=failures),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()) if sys.argv[1:] else tempfile.mkdtemp())
