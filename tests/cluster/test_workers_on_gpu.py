"""Workers whose models are on a GPU encode and decode there; the result is that of workers on the CPU."""

from __future__ import annotations

import pytest
import torch

from laconic import counters
from laconic.train import Task, build_task
from laconic.train.methods import METHODS
from laconic_lab.faults.recovery import Training, job_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class GpuTraining(Training):
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
    run, cpu_run = GpuTraining(job, tmp_path / "gpu", exchanges), Training(job, tmp_path / "cpu", exchanges)
    run.run(dies=1, at=exchanges // 2, delivered=True)
    cpu_run.run()
    assert loss_of(run.weights()) < before
    assert loss_of(run.weights()) == pytest.approx(loss_of(cpu_run.weights()), rel=0.2)
    assert counters.counts().get("reference_kernels", 0) == fallbacks, "the reference backend was used"
