"""What the steppers of all studies share: flat parameters, evaluations and the examples of an epoch."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from steppers import host_transfers_forbidden

from laconic.records import Record
from laconic.train.data_shards import Shards
from laconic.train.examples import ImageExamples
from laconic.train.models import build_model
from laconic.train.task import Task, cross_entropy
from laconic_lab.studies.evaluation import Evaluation, on_device
from laconic_lab.studies.flat_parameters import FlatParameters
from laconic_lab.studies.record_log import RecordLog

CPU = torch.device("cpu")


def vgg_task(seed: int = 0) -> Task:
    """Return a task with batch norm, on random images."""
    generator = torch.Generator().manual_seed(seed)
    sets = [
        ImageExamples(
            torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator),
            torch.randint(0, 10, (count,), generator=generator),
            "cifar10",
        )
        for count in (400, 150)
    ]
    return Task("vgg", build_model("vgg11", seed=seed), *sets, cross_entropy, holdout=0.5, seed=seed)


@pytest.mark.parametrize("channels_last", [False, True])
def test_flat_parameters_hold_weights_and_gradients_in_their_order(channels_last: bool) -> None:
    task = vgg_task()
    names = [name for name, _ in task.model.named_parameters()][::-1]
    before = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    parameters = FlatParameters(task, names, channels_last)
    assert parameters.flat.equal(torch.cat([before[name].view(-1) for name in names]))
    weights = dict(task.model.named_parameters())
    assert weights["conv2.weight"].is_contiguous() is not channels_last
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(weights[name].shape, generator=generator) for name in names]
    strided = [g.contiguous(memory_format=torch.channels_last) if g.dim() == 4 else g for g in gradients]
    assert parameters.gather(strided).equal(torch.cat([g.view(-1) for g in gradients]))
    parameters.flat.mul_(2.0)
    parameters.publish()
    assert all(weights[name].equal(2 * before[name]) for name in names)
    with torch.no_grad():
        for name in names:
            weights[name].mul_(2.0)
    parameters.collect()
    assert parameters.flat.equal(torch.cat([4 * before[name].view(-1) for name in names]))


def test_copies_with_channels_last_train_like_views() -> None:
    losses = []
    for channels_last in (False, True):
        task = vgg_task()
        parameters = FlatParameters(task, [name for name, _ in task.model.named_parameters()], channels_last)
        for step in range(3):
            parameters.publish()
            loss = task.loss(task.batch(torch.arange(16 * step, 16 * step + 16)))
            gradients = torch.autograd.grad(loss, parameters.parameters)
            parameters.flat.sub_(0.005 * parameters.gather(gradients))
            losses.append(float(loss.detach()))
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-3) and losses[0] != losses[2]


def test_evaluation_equals_that_of_the_task() -> None:
    task, other = vgg_task(), vgg_task()
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1.5)
    evaluation = Evaluation(task, on_device(task.tested(), CPU))
    for one in (task, other):
        tested, held = one.evaluate(), one.judge()
        assert evaluation.of(one) == (tested["accuracy"], tested["loss"], held)
        assert float(evaluation.judge(one)) == held
    assert task.evaluate() != other.evaluate() and all(module.training for module in task.model.modules())


def test_judging_can_be_captured_in_a_cuda_graph() -> None:
    task = vgg_task()
    evaluation = Evaluation(task, on_device(task.tested(), CPU))
    with host_transfers_forbidden():
        evaluation.judge(task)


def test_epoch_has_the_examples_of_its_iterations() -> None:
    shards = Shards(100, 2, 8, seed=1)
    for epoch in (0, 2):
        first = epoch * shards.iterations_per_epoch
        joined = [shards.indices(1, first + i) for i in range(shards.iterations_per_epoch)]
        assert shards.epoch(1, epoch).equal(torch.cat(joined))


def _add_records(path: Path, process: int) -> None:
    log = RecordLog(path)
    for number in range(20):
        log.add(Record("kothari2021.run", {"key": f"{process}/{number}", "curve": [0.5] * 2000}, seed=0))


def test_processes_share_a_file_of_records(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.jsonl"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_records, args=(path, number)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert RecordLog(path).records.keys() == {f"{process}/{number}" for process in range(2) for number in range(20)}


def test_half_a_record_at_the_end_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "accuracy.jsonl"
    RecordLog(path).add(Record("kothari2021.run", {"key": "a"}, seed=0))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert list(RecordLog(path).records) == ["a"] and "half a record" in caplog.text
    assert path.read_bytes() == whole
