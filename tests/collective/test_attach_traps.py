"""attach in scripts that do unusual things: unused parameters, copies, uneven inputs, one rank that differs."""

from __future__ import annotations

import copy
import gc
import io
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import laconic
from laconic.collective import differing
from laconic.collective.groups import timeout_of
from ranks import LogCapture, batches, failures, network, parameters, run_ranks, same

COMPRESS_ALL = laconic.Policy(min_numel=0, exempt_1d=False)


def backward(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    module.zero_grad()
    nn.functional.cross_entropy(module(x), y).backward()


def same_on_ranks(module: nn.Module) -> bool:
    return not differing(dict(module.named_parameters()))


class TwoPaths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.a(x) + self.b(x) if both else self.a(x)


def unused_parameters(rank, world):
    """A parameter that no rank uses keeps its residual; one that some rank uses is exchanged."""
    results = {}
    for spec in ("ef|topk:0.05", "ef|thc:4"):
        module = DistributedDataParallel(TwoPaths(), find_unused_parameters=True)
        attachment = laconic.attach(module, spec, policy=COMPRESS_ALL)

        def residual(name: str, attachment=attachment) -> float:
            state = attachment.state_dict()
            kept = [x for key, x in state.items() if f"/{name}" in key and key.endswith("/residual")]
            return float(torch.stack([x.norm() for x in kept]).norm()) if kept else 0.0

        kept = []
        for step, (x, y) in enumerate(batches(rank, 9)):
            uses_both = step < 3 or (step == 8 and rank == 1)
            module.zero_grad()
            nn.functional.cross_entropy(module(x, uses_both), y).backward()
            kept.append(residual("b.weight"))
            if 3 <= step < 8:
                results[f"unused {spec} {step}"] = module.module.b.weight.grad is None
        results[f"unused {spec} before"] = kept[2] > 0
        results[f"unused {spec} kept"] = kept[2:8] == [kept[2]] * 6
        results[f"unused {spec} used by one rank"] = bool(module.module.b.weight.grad.any()) and kept[8] != kept[2]
        results[f"unused {spec} same"] = not differing({"b": module.module.b.weight.grad})
        attachment.detach()
    return results


def timeouts(rank, world):
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=77))
    module = DistributedDataParallel(network(), process_group=group)
    results = {}
    for given, expected in ((None, 77.0), (9.0, 9.0)):
        attachment = laconic.attach(module, "qsgd:4", timeout_s=given)
        results[f"timeout {given}"] = timeout_of(attachment._group) == timedelta(seconds=expected)
        attachment.detach()
    local = laconic.LocalSGD(network(), None, every=2, codec="qsgd:4", overlap=1, group=group)
    results["timeout of LocalSGD"] = timeout_of(local.group) == timedelta(seconds=77)
    return results


def copies(rank, world):
    """Copies of an attached module are plain DDP modules, which can be attached themselves."""
    module = DistributedDataParallel(network())
    attachment = laconic.attach(module, "qsgd:4")
    x, y = next(iter(batches(rank, 1)))
    backward(module, x, y)
    average = AveragedModel(module)
    average.update_parameters(module)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    copied = copy.deepcopy(module)
    results = {"copies averaged": same(parameters(average.module), parameters(module))}
    for name, other in (("deepcopy", copied), ("pickle", loaded)):
        backward(other, x, y)
        plain = [p.grad.clone() for p in other.parameters()]
        again = laconic.attach(other, "bf16", policy=COMPRESS_ALL)
        backward(other, x, y)
        compressed = [p.grad for p in other.parameters()]
        results[f"copies {name} plain"] = not differing({str(i): g for i, g in enumerate(plain)})
        results[f"copies {name} attached"] = again.stats()["bytes_sent"] > 0 and not same(plain, compressed)
        again.detach()
    results["copies leave the original attached"] = attachment.attached and attachment.stats()["steps"] == 1
    attachment.detach()
    return results


def leaks(rank, world):
    """Attach and detach many times: threads and file descriptors do not grow, and states can still be read."""
    module = DistributedDataParallel(network())

    def used() -> tuple[int, int]:
        gc.collect()
        return len([*Path("/proc/self/task").iterdir()]), len([*Path("/proc/self/fd").iterdir()])

    counts, x_y = [], next(iter(batches(rank, 1)))
    for _ in range(4):
        attachment = laconic.attach(module, "ef|qsgd:4")
        backward(module, *x_y)
        attachment.detach()
        state, stats = attachment.state_dict(), attachment.stats()
        dist.barrier()
        counts.append(used())
    backward(module, *x_y)
    return {
        "leaks none": counts[-1] <= counts[0],
        "leaks state": any(key.endswith("/residual") for key in state) and stats["steps"] == 1,
    }


def raised_errors(rank, world):
    """A value that is not finite raises NonFiniteError in backward, and the next step is as usual."""
    module = DistributedDataParallel(network(), bucket_cap_mb=0.01)
    attachment = laconic.attach(module, "qsgd:4", nonfinite="raise")
    results, optimizer = {}, torch.optim.SGD(module.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches(rank, 6)):
        if step in (1, 2, 4):
            x = x * float("nan") if rank == 1 else x
            with pytest.raises(laconic.NonFiniteError, match="not finite"):
                backward(module, x, y)
        else:
            backward(module, x, y)
            results[f"raised step {step}"] = all(bool(torch.isfinite(p.grad).all()) for p in module.parameters())
            optimizer.step()
    results["raised counted"] = attachment.stats()["skipped_nonfinite"] >= 3
    results["raised same"] = same_on_ranks(module)
    attachment.detach()
    return results


def python_reducer(rank, world):
    import torch._dynamo.config as config

    before, config.optimize_ddp = config.optimize_ddp, "python_reducer"
    try:
        module = DistributedDataParallel(network())
        laconic.attach(module, "none").detach()
        with pytest.raises(laconic.ConfigError, match="optimize_ddp"):
            laconic.attach(module, "qsgd:4")
    finally:
        config.optimize_ddp = before
    return {"python reducer": True}


def only_one_rank(rank, world):
    module = DistributedDataParallel(network(), process_group=dist.new_group(list(range(world))))
    if rank == 0:
        with pytest.raises(laconic.LaconicError, match="waited for all ranks to call attach"):
            laconic.attach(module, "qsgd:4", timeout_s=1.0)
    dist.barrier()
    return {"one rank": True}


def uneven_inputs(rank, world):
    """``join`` divides by the ranks that still have inputs, if it is told to."""
    results = {}
    for division in (True, False):
        gradients = {}
        for spec in ("plain", "none", "bf16"):
            module = DistributedDataParallel(network())
            if spec != "plain":
                attachment = laconic.attach(
                    module, spec, policy=COMPRESS_ALL if spec == "bf16" else None, check_every=1
                )
            with module.join(divide_by_initial_world_size=division):
                for x, y in batches(rank, 2 + 2 * rank):
                    backward(module, x, y)
            gradients[spec] = [p.grad.clone() for p in module.parameters()]
            if spec != "plain":
                attachment.detach()
        for spec in ("none", "bf16"):
            close = all(
                torch.allclose(x, y, rtol=0.02, atol=1e-3)
                for x, y in zip(gradients["plain"], gradients[spec], strict=True)
            )
            results[f"join {division} {spec}"] = close
    return results


def state_of_one_rank(rank, world):
    """A state that only rank 0 loads is refused on all ranks in the next step."""
    results = {}
    x_y = next(iter(batches(rank, 1)))
    for spec in ("ef|qsgd:4", "ef|powersgd:2", "none"):
        module = DistributedDataParallel(network())
        options = {"check_every": 5} if spec == "none" else {}
        attachment = laconic.attach(module, spec, policy=COMPRESS_ALL, **options)
        for _ in range(2):
            backward(module, *x_y)
        saved = attachment.state_dict()
        attachment.detach()
        for loads, everywhere in ((True, True), (rank == 0, False)):
            module = DistributedDataParallel(network())
            attachment = laconic.attach(module, spec, policy=COMPRESS_ALL, **options)
            if loads:
                attachment.load_state_dict(saved)
            if everywhere:
                backward(module, *x_y)
                results[f"state {spec} resumed"] = attachment.stats()["steps"] == 3
                attachment.detach()
            else:
                with pytest.raises(RuntimeError, match="continue from different states"):
                    backward(module, *x_y)
                results[f"state {spec} refused"] = True
    return results


def composable_replicate(rank, world):
    module = replicate(network())
    attachment = laconic.attach(module, "ef|qsgd:4")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with LogCapture() as logged:
        for x, y in batches(rank, 3):
            backward(module, x, y)
            optimizer.step()
    stats = attachment.stats()
    return {
        "replicate same": same_on_ranks(module) and stats["steps"] == 3,
        "replicate names": sorted(stats["exempt"]) == ["0.bias", "2.bias", "4.bias", "4.weight"],
        "replicate bytes": stats["bytes_sent"] > 0 and not logged.has("error"),
        "replicate serves": attachment.serves(module),
    }


class FabricModule(nn.Module):
    """Wraps a DDP module as Lightning Fabric's ``setup`` does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward_module(x)


def fabric(rank, world):
    module = FabricModule(DistributedDataParallel(network()))
    attachment = laconic.attach(module, "qsgd:4")
    for x, y in batches(rank, 2):
        backward(module, x, y)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    results = {"fabric same": attachment.serves(module) and not differing(gradients)}
    results["fabric steps"] = attachment.stats()["steps"] == 2 and attachment.stats()["bytes_sent"] > 0
    attachment.detach()
    return results


def wrong_on_one_rank(rank, world):
    """A spec that is wrong on one rank raises there at once, and the other rank says for whom it waited."""
    module = DistributedDataParallel(network(), process_group=dist.new_group(list(range(world))))
    match = "waited for all ranks to call attach" if rank else "nonsense"
    with pytest.raises(laconic.LaconicError, match=match):
        laconic.attach(module, "qsgd:4" if rank else "nonsense:4", timeout_s=1.0)
    dist.barrier()
    return {"wrong spec": True}


def traps(rank, world):
    parts = (
        unused_parameters, timeouts, copies, leaks, raised_errors, python_reducer, only_one_rank, uneven_inputs,
        state_of_one_rank, composable_replicate, fabric, wrong_on_one_rank,
    )  # fmt: skip
    return {name: result for part in parts for name, result in part(rank, world).items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(traps, 2, tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(
    "what",
    [
        "unused",
        "timeout",
        "copies",
        "leaks",
        "raised",
        "python reducer",
        "one rank",
        "join",
        "state",
        "replicate",
        "fabric",
        "wrong",
    ],
)
def test_trap(what, ranks):
    assert not failures(ranks, what)
