"""An attachment notices optimizers that do not suit its codec: logged once, counted, and without a trace afterwards."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_hooks

import laconic
from ranks import LogCapture, batches, facts, network

SPARSE = "ef|topk:0.05|qsgd:4"


def attached(spec=SPARSE, *, compiled=False, **options):
    module = DistributedDataParallel(network())
    attachment = laconic.attach(module, spec, **options)
    return (torch.compile(module, backend="eager") if compiled else module), attachment


def train(module, optimizers, steps=3):
    for x, y in batches(0, steps):
        nn.functional.cross_entropy(module(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def unsuited(attachment):
    stats = attachment.stats()
    return stats["unsuited_optimizer_steps"], list(stats["unsuited_optimizers"])


def noticed(rank, world):
    results = {}
    for name, spec, make, expected in (
        ("adamw", SPARSE, torch.optim.AdamW, (3, ["AdamW"])),
        ("momentum", SPARSE, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), (3, ["SGD"])),
        ("momentum twice", "momentum:0.9|topk:0.1", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), (3, ["SGD"])),
        ("plain sgd", SPARSE, lambda p: torch.optim.SGD(p, 0.1), (0, [])),
        ("quantizer", "qsgd:4", torch.optim.AdamW, (0, [])),
    ):
        module, attachment = attached(spec)
        with LogCapture() as logged:
            train(module, [make(module.parameters())])
        lines = [line for line in logged.lines if "does not suit" in line]
        results[name] = unsuited(attachment) == expected and len(lines) == len(expected[1])
        results[f"{name} advice"] = not lines or lines[0].startswith(f"{expected[1][0]} steps attached parameters")
    module, attachment = attached(compiled=True)
    train(module, [torch.optim.AdamW(module.parameters())])
    results["compiled"] = unsuited(attachment) == (3, ["AdamW"])
    return {f"noticed {name}": value for name, value in results.items()}


def left_alone(rank, world):
    """Optimizers of exempt parameters, of other modules, and of steps without compression."""
    results = {}
    module, attachment = attached()
    matrices = [p for p in module.parameters() if p.dim() == 2 and p.numel() >= 4096]
    exempt = [p for p in module.parameters() if p.dim() == 1 or p.numel() < 4096]
    train(module, [torch.optim.SGD(matrices, 0.1), torch.optim.AdamW(exempt)])
    results["exempt parameters"] = unsuited(attachment) == (0, [])
    elsewhere = network()
    train(elsewhere, [torch.optim.AdamW(elsewhere.parameters())])
    results["another module"] = unsuited(attachment) == (0, [])
    module, attachment = attached(warmup_steps=2)
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, [optimizer], 2)
    results["warm-up"] = unsuited(attachment) == (0, [])
    train(module, [optimizer], 2)
    results["after warm-up"] = unsuited(attachment) == (2, ["AdamW"])
    attachment.set("qsgd:4")
    train(module, [optimizer], 2)
    results["another codec"] = unsuited(attachment) == (2, ["AdamW"])
    attachment.set(SPARSE)
    train(module, [optimizer], 1)
    results["the codec again"] = unsuited(attachment) == (3, ["AdamW"])
    late = torch.optim.AdamW(network().parameters())
    train(module, [late], 1)
    late.add_param_group({"params": matrices_of(module)})
    train(module, [late], 1)
    results["group added later"] = unsuited(attachment)[0] == 4
    return {f"alone {name}": value for name, value in results.items()}


def matrices_of(module):
    return [p for p in module.parameters() if p.dim() == 2]


def hooks(rank, world):
    gc.collect()
    before = len(torch_hooks._global_optimizer_post_hooks)
    module, first = attached()
    _, second = attached()
    installed = len(torch_hooks._global_optimizer_post_hooks)
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, [optimizer])
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    results = {"optimizer is not held": alive() is None, "installed once": installed == 1 and before <= 1}
    first.detach()
    results["stays for the others"] = len(torch_hooks._global_optimizer_post_hooks) == 1
    second.detach()
    results["removed with the last"] = not torch_hooks._global_optimizer_post_hooks
    results["counts remain"] = unsuited(first) == (3, ["AdamW"])
    return {f"hook {name}": value for name, value in results.items()}


test_fact_holds_on_all_ranks = facts([noticed, left_alone, hooks], 1, {
    "unsuited optimizers are logged once and counted": "noticed",
    "other parameters and uncompressed steps are not counted": "alone",
    "the hook is installed once and removed": "hook",
})  # fmt: skip
