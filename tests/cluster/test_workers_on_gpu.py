"""Workers whose models are on a GPU: they encode and decode there, and what the server holds is of them all."""

from __future__ import annotations

import pytest
import torch
from test_recovery import Run, job_of

from laconic import counters
from laconic.train import Task, build_task
from laconic.train.methods import METHODS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class OnGpu(Run):
    def task(self) -> Task:
        task = super().task()
        task.model.cuda()
        return task


def loss_of(weights):
    task = build_task("mlp", "digits", seed=0)
    with torch.no_grad():
        for name, parameter in task.model.named_parameters():
            parameter.copy_(weights[name])
    return task.evaluate()["loss"]


@pytest.mark.parametrize("method", METHODS)
def test_workers_on_a_gpu_train_with_a_server(method, tmp_path):
    job, exchanges = job_of(method)
    before = loss_of({name: p.detach() for name, p in build_task("mlp", "digits", seed=0).model.named_parameters()})
    slow = counters.counts().get("reference_kernels", 0)
    run, undisturbed = OnGpu(job, tmp_path / "gpu", exchanges), Run(job, tmp_path / "cpu", exchanges)
    run.go(dies=1, at=exchanges // 2, delivered=True)
    undisturbed.go()
    assert loss_of(run.weights()) < before
    assert loss_of(run.weights()) == pytest.approx(loss_of(undisturbed.weights()), rel=0.2)
    assert counters.counts().get("reference_kernels", 0) == slow, "plain torch stood in for kernels"
