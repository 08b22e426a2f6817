"""Results of a job: those of one process, the same bits every time, the same weights on every worker."""

from __future__ import annotations

import pytest
import torch
from helpers import BATCH, train

from laconic.cluster.job import Job
from laconic.train import Shards, build_task
from laconic.train.methods import METHODS, method_options

STEPS = 50


def single_process(job: Job, steps: int) -> dict[str, torch.Tensor]:
    """Return the weights after plain SGD in one process on the batches of all workers."""
    task = build_task("mlp", "digits", seed=job.seed)
    shards = Shards(task.num_train, job.workers, BATCH, job.seed)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=job.lr, momentum=job.momentum)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(task.batch(shards.joined(step))).backward()
        optimizer.step()
    return {name: p.detach() for name, p in task.model.named_parameters()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


def test_method_1_is_sgd_on_the_joined_batch() -> None:
    job = Job(workers=2, lr=0.05, **method_options("1"))
    core, _ = train(job, STEPS)
    assert distance(core.parameters, single_process(job, STEPS)) < 1e-5


def test_method_3_equals_method_1_up_to_rounding() -> None:
    one, _ = train(Job(workers=2, lr=0.05, **method_options("1")), 20)
    three, workers = train(Job(workers=2, lr=0.05, **method_options("3")), 20)
    assert distance(three.parameters, one.parameters) < 1e-5
    for worker in workers:  # they took the same steps as the server
        assert distance({name: p.detach() for name, p in worker.parameters.items()}, three.parameters) == 0


@pytest.mark.parametrize("method", [name for name in METHODS if name != "2w"])
def test_run_gives_the_same_bits_every_time(method: str) -> None:
    job = Job(**{"workers": 2, "lr": 0.05, "seed": 3, **method_options(method)})
    exchanges = 6 if job.every == 1 else 2
    first, _ = train(job, exchanges)
    again, _ = train(job, exchanges)
    assert distance(again.parameters, first.parameters) == 0


def test_seed_changes_the_result() -> None:
    first, second = (train(Job(**{"lr": 0.05, "seed": seed, **method_options("4")}), 4)[0] for seed in (3, 4))
    assert distance(first.parameters, second.parameters) > 0


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("2w", "2")])
def test_workers_and_server_hold_the_same_weights(method: str) -> None:
    job = Job(**{"workers": 3, "lr": 0.05, **method_options(method)})
    core, workers = train(job, 4 if job.every == 1 else 2)
    held = [{name: p.detach() for name, p in worker.parameters.items()} for worker in workers]
    for weights in held[1:]:
        assert distance(weights, held[0]) == 0
    if job.pull == "none" or job.reply_kind.workers_step:
        assert distance(held[0], core.parameters) == 0


def test_method_6_takes_the_change_of_the_worker_with_the_lowest_loss() -> None:
    events: list[dict[str, object]] = []
    job = Job(**{"workers": 2, "lr": 0.05, **method_options("6"), "push": "none"})
    core, workers = train(job, 1, events=events)
    scores = []
    for worker in workers:
        task = build_task("mlp", "digits", seed=job.seed)
        shards = Shards(task.num_train, job.workers, BATCH, job.seed)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=job.lr, momentum=job.momentum)
        for step in range(job.every):
            optimizer.zero_grad()
            task.loss(task.batch(shards.indices(worker.number, step))).backward()
            optimizer.step()
        scores.append((task.judge(), {name: p.detach() for name, p in task.model.named_parameters()}))
    best = min(scores, key=lambda score: score[0])[1]
    worst = max(scores, key=lambda score: score[0])[1]
    assert distance(core.parameters, best) < 1e-5 < distance(core.parameters, worst)


def test_counted_bytes_are_those_of_the_frames() -> None:
    job = Job(workers=2, lr=0.05, push="qsgd:4", pull="qsgd:8", returns="gradients")
    _, workers = train(job, 3)
    weights = list(workers[0].parameters.values())
    from laconic.channels import Channel

    for codec, counted in (("qsgd:4", workers[0].bytes_sent), ("qsgd:8", workers[0].bytes_received)):
        channel = Channel(codec)
        assert counted == 3 * sum(len(channel.encode(str(i), torch.randn(p.shape))) for i, p in enumerate(weights))
