"""Compressed stages under torch's schedules on 2 and 4 gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from stage_runs import BATCH, CPU, MICRO_BATCHES, SINGLE, WIDTH, Part, data, loss_fn, run, take
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    pipeline,
)
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.pipeline import compress
from laconic.pipeline.messages import Position, Receiver, Sender, stage_codec
from ranks import LogCapture, failures, run_ranks, same


def schedules(rank, world, kinds):
    results = {}
    for kind in kinds:
        plain, losses, _, _ = run(kind, rank, world)
        none, none_losses, compressions, _ = run(kind, rank, world, codecs=("none", "none"))
        results[f"none {kind}"] = same(plain, none) and same(losses, none_losses)
        sent = sum(c.stats()[way]["bytes_sent"] for c in compressions for way in ("forward", "backward"))
        coarse, coarse_losses, compressions, _ = run(kind, rank, world, codecs=("qsgd:8", "thc:8"), error_every=1)
        close = [float((a - b).norm() / b.norm()) for a, b in zip(coarse, plain, strict=True)]
        results[f"close {kind}"] = 0 < max(close) < 0.05 and all(
            abs(a - b) < 0.01 * b for a, b in zip(coarse_losses, losses, strict=True)
        )
        stats = [c.stats()[way] for c in compressions for way in ("forward", "backward")]
        results[f"bytes {kind}"] = 3.3 < sent / sum(each["bytes_sent"] for each in stats) < 4
        results[f"errors {kind}"] = all(each["error"] < 0.002 for each in stats if each["messages_sent"])
        results[f"pending {kind}"] = not any(t.arriving for c in compressions for t in (c._forward, c._backward))
    return results


def two_ranks(rank, world):
    results = schedules(rank, world, ("gpipe", "1f1b", "interleaved"))
    results |= simulated(rank, world) | bad_input(rank, world) | nonfinite(rank, world) | resumed(rank, world)
    return results | evaluated(rank, world)


def two_ranks_slowly(rank, world):
    return schedules(rank, world, ("zero bubble", "bfs", "zbv")) | tokens(rank, world) | traced(rank, world)


def simulated(rank, world):
    """The same codecs in one process give the same bits as the pipeline."""
    gradients, _, _, _ = run("gpipe", rank, world, codecs=("qsgd:3", "thc:2"))
    parts = [Part(0), Part(1)]
    forward, backward = stage_codec("qsgd:3", "forward"), stage_codec("thc:2", "backward")
    there = Sender(forward, "forward", 0, seed=0), Receiver(forward, "forward", 1)
    back = Sender(backward, "backward", 1, seed=1), Receiver(backward, "backward", 0)
    for step in range(2):
        for part in parts:
            part.zero_grad()
        x, y = data(step)
        for number, (inputs, target) in enumerate(
            zip(x.tensor_split(MICRO_BATCHES), y.tensor_split(MICRO_BATCHES), strict=True)
        ):
            position = Position(number, 0)
            sent = parts[0](inputs)
            received = torch.empty_like(sent)
            there[1].read(there[0].message(sent, position), received, position)
            received.requires_grad_()
            loss_fn(parts[1](received), target).backward()
            gradient = torch.empty_like(sent)
            back[1].read(back[0].message(received.grad, position), gradient, position)
            sent.backward(gradient)
    expected = [p.grad / MICRO_BATCHES for p in parts[rank].parameters()]
    return {"simulated": same(gradients, expected)}


def bad_input(rank, world):
    results = {}
    stage = PipelineStage(Part(rank), rank, world, CPU)
    for name, arguments, words in (
        ("coder", {"forward": "qsgd:4|rans"}, "forward cannot be 'qsgd:4|rans'"),
        ("memory", {"backward": "ef|qsgd:4"}, "keeps memory between rounds"),
        ("nonfinite", {"nonfinite": "ignore"}, "nonfinite must be one of spread, skip, raise, got 'ignore'"),
        ("error_every", {"error_every": -1}, "error_every must be a whole number from 0 on, got -1"),
        ("timeout_s", {"timeout_s": 0}, "timeout_s must be above 0, got 0"),
    ):
        try:
            compress(stage, **arguments)
            results[f"bad {name}"] = False
        except ConfigError as error:
            results[f"bad {name}"] = words in str(error)
    try:
        compress(Part(0))
    except ConfigError as error:
        results["bad type"] = "expected a torch.distributed.pipelining.PipelineStage, got Part" in str(error)
    first = compress(stage)
    try:
        compress(stage)
    except ConfigError as error:
        results["bad twice"] = "compressed already" in str(error)
    first.detach()
    results["bad detached"] = "get_fwd_send_ops" not in vars(stage) and bool(repr(compress(stage, "qsgd:4")))
    try:
        first.use_samples([1, 2])
    except ConfigError as error:
        results["bad samples"] = "use_samples needs delta=True" in str(error)
    try:
        run("gpipe", rank, world, codecs=("qsgd:4", "qsgd:4" if rank else "qsgd:8"))
    except ConfigError as error:
        results["bad mismatch"] = "different arguments (backward: 'qsgd:" in str(error)
    dist.barrier()
    if rank == 0:  # stage 1 is not compressed
        stage = PipelineStage(Part(0), 0, 3, CPU)
        compression = compress(stage, timeout_s=0.2)
        try:
            compression._neighbours.compare()
        except ConfigError as error:
            results["bad alone"] = "stage 1 has not called laconic.pipeline.compress within 0.2 s" in str(error)
    else:
        results["bad alone"] = True
    return results


def nonfinite(rank, world):
    class Overflowing(Part):
        def inner(self, x):
            return super().inner(x) / (0 if rank == 0 else 1)

    results = {}
    with LogCapture() as log:
        gradients, losses, compressions, _ = run("gpipe", rank, world, codecs=("thc:4", "thc:4"), part=Overflowing)
    results["nonfinite spread"] = all(g.isnan().any() for g in gradients) and all(loss.isnan() for loss in losses)
    results["nonfinite logged"] = rank == 1 or log.has("stage 0 sends activations that are not finite")
    results["nonfinite counted"] = compressions[0].stats()["forward"]["nonfinite"] == (8 if rank == 0 else 0)
    gradients, losses, _, _ = run("gpipe", rank, world, codecs=("thc:4", "thc:4"), part=Overflowing, nonfinite="skip")
    results["nonfinite skip"] = all(loss.isfinite() for loss in losses)
    try:
        run("gpipe", rank, world, codecs=("thc:4", "thc:4"), part=Overflowing, nonfinite="raise")
        results["nonfinite raise"] = False
    except NonFiniteError as error:
        results["nonfinite raise"] = f"stage {rank}" in str(error)
    dist.barrier()
    return results


def resumed(rank, world):
    """A state that is saved and loaded continues with the same bits."""
    results = {}
    for delta in (False, True):
        options = {"codecs": ("qsgd:3", "qsgd:3"), "delta": delta}
        gradients, _, _, _ = run("1f1b", rank, world, steps=4, **options)
        _, _, (saved,), _ = run("1f1b", rank, world, steps=3, **options)
        module = Part(rank)
        stage = PipelineStage(module, rank, world, CPU)
        compression = compress(stage, "qsgd:3", "qsgd:3", delta=delta)
        compression.load_state_dict(saved.state_dict())
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn)
        take(schedule, 3, [stage])
        results[f"resumed delta={delta}"] = same(gradients, [p.grad for p in module.parameters()])
        copies = compression.stats()["copies_nbytes"]
        results[f"copies delta={delta}"] = copies == (4 * BATCH * 8 * WIDTH if delta else 0)
        before = compression.state_dict()
        for wrong in ({}, {**before, "other": torch.zeros(1)}, {**before, "forward/sent": torch.zeros(2)}):
            try:
                compression.load_state_dict(wrong)
                results[f"resumed wrong delta={delta}"] = False
            except InputError:
                results.setdefault(f"resumed wrong delta={delta}", True)
        results[f"resumed same delta={delta}"] = same(before.values(), compression.state_dict().values())
        with LogCapture() as log:
            compression.load_state_dict(before | {"stage": torch.tensor([5, 9])})
        results[f"resumed elsewhere delta={delta}"] = (
            log.has("the state is that of stage 5 of 9") and compression.stats()["copy_resets"] == 1
        )
    return results


def evaluated(rank, world):
    """Evaluation is compressed, changes no memory, and may have another batch; a step may not."""
    results = {}
    _, _, (compression,), schedule = run("1f1b", rank, world, codecs=("qsgd:4", "qsgd:4"), delta=True)
    before = compression.state_dict()
    x, y = data(9, 2 * BATCH)
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        schedule.eval(*((x,) if rank == 0 else ()), target=y if rank else None, losses=losses)
    results["evaluated memory"] = same(before.values(), compression.state_dict().values())
    results["evaluated losses"] = rank == 0 or (
        len(losses) == MICRO_BATCHES and all(loss.isfinite() for loss in losses)
    )
    take(schedule, 2, [compression.stage])
    results["evaluated and trained"] = True
    results["evaluated shape"] = rank == 1
    if rank == 0:
        compression.stage.fwd_cache[0] = (torch.zeros(3, 8, WIDTH),), []
        try:
            compression.stage.get_fwd_send_ops(0)
        except InputError as error:
            results["evaluated shape"] = "equal micro-batches in all steps" in str(error)
    return results


def tokens(rank, world):
    """Integers beside the activations travel as they are."""
    results = {}
    for codecs in (None, ("none", "none"), ("qsgd:8", "qsgd:8")):
        module = Part(rank, tokens=rank == 0)
        stage = PipelineStage(module, rank, world, CPU)
        compressions = [] if codecs is None else [compress(stage, *codecs)]
        schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_fn)
        x, y = data()
        numbers = torch.arange(BATCH)[:, None].expand(BATCH, 5).contiguous()
        schedule.step(*((x, numbers) if rank == 0 else ()), target=y if rank else None)
        gradient = module.layer.weight.grad.clone()
        if codecs is None:
            plain = gradient
        elif codecs[0] == "none":
            results["tokens none"] = torch.equal(gradient, plain)
        else:
            results["tokens close"] = bool((gradient - plain).norm() < 0.05 * plain.norm())
            stats = compressions[0].stats()["forward"]
            results["tokens exempt"] = stats["exempt"] == ({"is int64": MICRO_BATCHES} if rank == 0 else {})
    return results


def traced(rank, world):
    """A stage of torch's tracer is compressed, too."""
    results, gradients = {}, []
    for codecs in (None, ("none", "none"), ("qsgd:8", "qsgd:8")):
        model = nn.Sequential(Part(0), Part(1))
        pipe = pipeline(model, mb_args=(data()[0][: BATCH // MICRO_BATCHES],), split_spec={"1": SplitPoint.BEGINNING})
        stage = pipe.build_stage(rank, CPU)
        if codecs is not None:
            compress(stage, *codecs)
        schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_fn)
        take(schedule, 0, [stage])
        gradients.append([p.grad.clone() for p in stage.submod.parameters()])
    results["traced none"] = same(gradients[0], gradients[1])
    results["traced close"] = all(
        0 < (a - b).norm() < 0.05 * b.norm() for a, b in zip(gradients[2], gradients[0], strict=True)
    )
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(two_ranks, 2, tmp_path_factory.mktemp("two"))


WHAT = ("none", "close", "bytes", "errors", "pending")


@pytest.mark.parametrize("what", [*WHAT, "simulated", "bad", "nonfinite", "resumed", "copies", "evaluated"])
def test_two_ranks(ranks, what):
    assert not failures(ranks, what)


@pytest.mark.slow
def test_other_schedules_tokens_and_traced_stages(tmp_path):
    ranks = run_ranks(two_ranks_slowly, 2, tmp_path)
    for what in (*WHAT, "tokens", "traced"):
        assert not failures(ranks, what)


def four_ranks(rank, world):
    results = {}
    for kind in (*SINGLE, "interleaved"):
        plain, losses, _, _ = run(kind, rank, world)
        none, none_losses, _, _ = run(kind, rank, world, codecs=("none", "none"))
        results[f"none {kind}"] = same(plain, none) and same(losses, none_losses)
        coarse, _, _, _ = run(kind, rank, world, codecs=("thc:8", "qsgd:8"))
        close = [float((a - b).norm() / b.norm()) for a, b in zip(coarse, plain, strict=True)]
        results[f"close {kind}"] = 0 < max(close) < 0.05
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    stage_rank, replicas = mesh.get_local_rank("stage"), mesh.get_group("replica")

    def wrapped(spec):
        def wrap(module):
            ddp = DistributedDataParallel(module, process_group=replicas)
            if spec is not None:
                laconic.attach(ddp, spec, policy=laconic.Policy(min_numel=0, exempt_1d=False))
            return ddp

        return wrap

    def grads(spec, codecs, **options):
        part = lambda index: Part(index, checkpointed=True)  # noqa: E731
        group = mesh.get_group("stage")
        return run("1f1b", stage_rank, 2, codecs=codecs, group=group, wrap=wrapped(spec), part=part, **options)[0]

    plain = grads(None, None)
    results["mesh none"] = same(plain, grads("none", ("none", "none")))
    coarse = grads("qsgd:8", ("qsgd:8", "qsgd:8"))
    results["mesh close"] = all(0 < (a - b).norm() < 0.1 * b.norm() for a, b in zip(coarse, plain, strict=True))
    for gradient in coarse:
        other = gradient.clone()
        dist.all_reduce(other, op=dist.ReduceOp.MAX, group=replicas)
        results["mesh equal"] = results.get("mesh equal", True) and torch.equal(other, gradient)
    return results


@pytest.mark.slow
def test_four_ranks(tmp_path):
    ranks = run_ranks(four_ranks, 4, tmp_path)
    for what in ("none", "close", "mesh"):
        assert not failures(ranks, what)
