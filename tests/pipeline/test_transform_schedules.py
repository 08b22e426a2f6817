"""Transform coding under torch's schedules on 2 gloo ranks: gradients, states of different steps, evaluation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from stage_runs import BATCH, CPU, MICRO_BATCHES, Part, data, loss_fn, run, take
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from laconic.errors import ConfigError
from laconic.pipeline import compress
from ranks import failures, run_ranks, same

TRANSFORM_PERIOD = 134
"""Messages in which a basis of ``klt:6`` travels, for micro-batches of these sizes."""


def gradients(rank, world):
    """Transform coding gives close gradients once both ends have a basis, and a resumed run the same bits."""
    results, steps = {}, 2 * TRANSFORM_PERIOD // MICRO_BATCHES + 2
    options = {"codecs": ("klt:6", "klt:6"), "error_every": 1}
    for kind in ("gpipe", "1f1b", "interleaved"):
        plain, _, _, _ = run(kind, rank, world, steps=steps)
        ours, _, compressions, _ = run(kind, rank, world, steps=steps, **options)
        close = [float((a - b).norm() / b.norm()) for a, b in zip(ours, plain, strict=True)]
        results[f"gradients {kind}"] = 0 < max(close) < 0.1  # noise, in which no direction stands out
        numbers = {
            transform.number
            for compression in compressions
            for traffic in (compression._forward, compression._backward)
            for _, transforms in traffic.transforms()
            for transform in transforms.by_tensor.values()
        }
        results[f"gradients counts {kind}"] = numbers == {steps * MICRO_BATCHES}
        results[f"gradients pending {kind}"] = not any(
            t.arriving for c in compressions for t in (c._forward, c._backward)
        )
    _, _, (saved,), _ = run("1f1b", rank, world, steps=steps - 1, **options)
    ours, _, _, _ = run("1f1b", rank, world, steps=steps, **options)
    module = Part(rank)
    stage = PipelineStage(module, rank, world, CPU)
    compression = compress(stage, "klt:6", "klt:6", error_every=1)
    compression.load_state_dict(saved.state_dict())
    take(Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn), steps - 1, [stage])
    results["gradients resumed"] = same(ours, [p.grad for p in module.parameters()])
    return results


def states(rank, world):
    """Stages that load states of different steps, or not all of them, raise ConfigError before a message is sent."""
    results, saved = {}, {}
    for steps in (1, 2):
        _, _, (compression,), _ = run("1f1b", rank, world, codecs=("klt:6", "klt:6"), steps=steps)
        saved[steps] = compression.state_dict()
    missing = {name: x for name, x in saved[2].items() if "/receiver/klt/" not in name}
    for name, state, words in (
        ("step", saved[rank + 1], "the stages have loaded states that do not belong together: stage"),
        ("part", missing, "8 messages of 64 x 64 values"),
        ("alone", saved[1] if rank == 0 else None, "call load_state_dict alike on all stages"),
    ):
        stage = PipelineStage(Part(rank), rank, world, CPU)
        compression = compress(stage, "klt:6", "klt:6", timeout_s=0.5)
        if state is not None:
            compression.load_state_dict(state)
        dist.barrier()
        try:
            take(Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn), 2, [stage])
            results[f"states {name}"] = False
        except ConfigError as error:
            results[f"states {name}"] = words in str(error) and "\n" not in str(error)
        dist.barrier()
    # A run goes back to an earlier state.
    _, _, (compression,), schedule = run("1f1b", rank, world, codecs=("klt:6", "klt:6"), steps=2)
    for steps in (1, 2, 2):
        compression.load_state_dict(saved[steps])
        take(schedule, 2, [compression.stage])
    results["states again"] = {each[5] for each in compression._forward.shared()} == {3 * MICRO_BATCHES}
    return results


def evaluation(rank, world):
    """Evaluation with another batch, before and after training, leaves the numbers of both ends alone."""
    _, _, (compression,), schedule = run("1f1b", rank, world, codecs=("klt:6", "klt:6"), steps=0)
    stage, before = compression.stage, compression.state_dict()
    x, y = data(9, 2 * BATCH)
    with torch.no_grad():
        schedule.eval(*((x,) if rank == 0 else ()), target=y if rank else None)
    results = {"evaluation first": before.keys() == compression.state_dict().keys()}
    for step in range(2):
        take(schedule, step, [stage])
        with torch.no_grad():
            schedule.eval(*((x,) if rank == 0 else ()), target=y if rank else None)
    take(schedule, 2, [stage])
    shared = compression._forward.shared() + compression._backward.shared()
    results["evaluation later"] = len(shared) == 2 and {each[5] for each in shared} == {3 * MICRO_BATCHES}
    return results


def two_ranks(rank, world):
    return gradients(rank, world) | states(rank, world) | evaluation(rank, world)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(two_ranks, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("what", ["gradients", "states", "evaluation"])
def test_transform_coding_on_two_ranks(ranks, what):
    assert not failures(ranks, what)
