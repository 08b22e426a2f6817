"""200 steps with VGG-11's gradients and DDP's default buckets, under a watchdog that ends the ranks after a minute."""

from __future__ import annotations

import faulthandler
import time
from functools import partial

import pytest
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collective import differing
from laconic_lab.bench.ddp.synthetic import PregeneratedGradients, Synthetic
from ranks import run_ranks

STEPS = 200
WATCHDOG_S = 60.0
MIXED = {
    "*conv2-weight": "bf16", "*conv4-weight": "ef|thc:4", "*conv5-weight": "qsgd:4", "*conv7-weight": "ef|powersgd:2",
}  # fmt: skip


def train(rank, world, *, spec, policy):
    module = DistributedDataParallel(Synthetic("vgg11"))
    gradients = PregeneratedGradients(module.module.numel, rank)
    attachment = laconic.attach(module, spec, policy=policy)
    began = time.monotonic()
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)  # prints where every thread is
    for step in range(STEPS):
        module.zero_grad()
        module(gradients.at(step)).backward()
    faulthandler.cancel_dump_traceback_later()
    seconds = time.monotonic() - began
    return {
        "seconds": seconds,
        "same": differing({name: p.grad for name, p in module.named_parameters()}) == [],
        "steps": attachment.stats()["steps"],
        "numel": gradients.numel,
        "specs": len(set(attachment.stats()["exempt"].values())),
    }


@pytest.mark.slow
@pytest.mark.parametrize("spec, policy", [
    ("qsgd:4", None), ("ef|thc:4", None), ("ef|topk:0.01|qsgd:4", None), ("ef|powersgd:4", None),
    ("ef|topk:0.01|qsgd:4", MIXED),
], ids=["qsgd", "thc", "topk", "powersgd", "mixed"])  # fmt: skip
def test_two_hundred_steps_end_within_a_minute(spec, policy, tmp_path):
    ranks = run_ranks(partial(train, spec=spec, policy=policy), 2, tmp_path)
    print(f"{spec}: {STEPS} steps in {max(rank['seconds'] for rank in ranks):.1f} s")
    for rank in ranks:
        assert rank["same"] and rank["steps"] == STEPS and rank["numel"] > 9_000_000
        assert policy is None or rank["specs"] == len(MIXED) + 2  # the policy's codecs, and two reasons of exempt slots
