"""Workers whose models are on a GPU encode and decode there; the result is that of workers on the CPU."""

from __future__ import annotations

import pytest
import torch
from test_recovery import Run, job_of

from laconic import counters
from laconic.train import Task, build_task
from laconic.train.methods import METHODS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class GpuRun(Run):
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
    fallbacks = counters.counts().get("reference_kernels", 0)
    run, cpu_run = GpuRun(job, tmp_path / "gpu", exchanges), Run(job, tmp_path / "cpu", exchanges)
    run.go(dies=1, at=exchanges // 2, delivered=True)
    cpu_run.go()
    assert loss_of(run.weights()) < before
    assert loss_of(run.weights()) == pytest.approx(loss_of(cpu_run.weights()), rel=0.2)
    assert counters.counts().get("reference_kernels", 0) == fallbacks, "the reference backend was used"
