"""Ray Train with local SGD: workers train alone for 10 steps, then exchange what changed, compressed.

One or two workers: if a machine is lost Ray goes on with those that are left, from the last checkpoint.

python examples/ray/ray_local_sgd.py [folder]      (pip install 'laconic[ray]')
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch

import laconic
from laconic.train import build_task

STEPS, SAVE_EVERY = 100, 50


def train(config: dict[str, str]) -> None:
    rank = ray.train.get_context().get_world_rank()
    task = build_task("lenet5", "digits", seed=0)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=2e-3)
    local = laconic.LocalSGD(task.model, optimizer, every=10, codec="ef|topk:0.1|sign")  # instead of prepare_model
    parts, checkpoint = {"model": task.model, "optimizer": optimizer, "local": local}, ray.train.get_checkpoint()
    if (
        checkpoint
    ):  # after a failure Ray starts all workers again, perhaps fewer or more: a new rank takes another's file
        with checkpoint.as_directory() as folder:
            own = Path(folder) / f"rank{rank}.pt"
            saved = torch.load(own if own.exists() else Path(folder) / "rank0.pt")
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    while local.steps < STEPS:
        local.zero_grad()
        task.loss(task.batch(torch.randint(task.num_train, (32,)))).backward()
        local.step()
        if local.steps % SAVE_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save({name: part.state_dict() for name, part in parts.items()}, Path(folder) / f"rank{rank}.pt")
                metrics = {"step": local.steps, "workers": ray.train.get_context().get_world_size()} | local.stats()
                metrics |= {"accuracy": task.evaluate()["accuracy"]}
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
    local.finish()


def main(folder: str) -> None:
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 2)),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=1)),
    )
    metrics = trainer.fit().metrics
    print({key: metrics[key] for key in ("step", "accuracy", "bytes_sent", "workers")})


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()) if sys.argv[1:] else tempfile.mkdtemp())
