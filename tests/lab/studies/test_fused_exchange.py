"""The kernels that compute exchanges and steps on a GPU, against passes of torch and real frames."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from steppers import train_epochs
from torch import nn

from laconic.channels import Channel
from laconic.codecs import parse
from laconic.frames import decode
from laconic.policy import Policy
from laconic.train.models import seeded
from laconic_lab.studies import stepper
from laconic_lab.studies.kothari2021 import computed, passes
from laconic_lab.studies.kothari2021.computed import ComputedChannel, in_order, rounding_keys
from laconic_lab.studies.kothari2021.framed import FrameStepper
from laconic_lab.studies.kothari2021.settings import setting_of
from laconic_lab.studies.kothari2021.stepper import BestStepper, ComputedStepper, LocalStepper
from laconic_lab.studies.stepper import Source

pytest.importorskip("triton", reason="no triton")

from laconic_lab.studies import fused_steps
from laconic_lab.studies.kothari2021 import fused

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

# The interpreter computes with numpy, which warns of quotients that the kernels discard.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]

COUNTS = [4096, 700, 1, 5000, 66000]


def values(seed: int, counts: list[int]) -> torch.Tensor:
    """Return values of several magnitudes: one slot of zeros, one of subnormals, and some equal ones."""
    x = torch.randn(sum(counts), generator=torch.Generator().manual_seed(seed))
    parts = list(x.split(counts))
    parts[1].zero_()
    parts[2].mul_(1e-40)
    parts[3].round_()
    return x.to(DEVICE)


QUANTIZERS = [
    "qsgd:4,norm=l2", "qsgd:2,norm=l2", "qsgd:8", "qsgd:4,round=nearest", "qsgd:3,bucket=1024,norm=l2",
    "qsgd:4,bucket=0,norm=l2", "qsgd:8,bucket=0", "sign", "sign:bucket=128",
]  # fmt: skip


@pytest.mark.parametrize("spec", QUANTIZERS)
@pytest.mark.parametrize("coded", [False, True])
def test_fused_round_trip_equals_that_of_passes(spec: str, coded: bool) -> None:
    quantizer = parse(spec)[1].values
    x = values(7, COUNTS)
    keys = rounding_keys(np.arange(5, 5 + len(COUNTS), dtype=np.uint64) * np.uint64(2**40 + 7)).to(DEVICE)
    random = keys if "sign" not in spec and "nearest" not in spec else None
    kinds = (passes.RoundTrip, fused.RoundTrip)
    wanted, got = (kind(COUNTS, quantizer, DEVICE, coded)(x, random) for kind in kinds)  # type: ignore[arg-type]
    assert got[0].equal(wanted[0]) and got[1].equal(wanted[1])
    assert got[1].tolist() == [True, False, True, True, True]
    if coded:
        assert got[2] is not None and wanted[2] is not None and got[2].equal(wanted[2])


@pytest.mark.parametrize("keep", [1, 0.01])
def test_fused_gaps_and_selector_equal_those_of_passes(keep: float) -> None:
    x, ends = values(8, COUNTS), np.cumsum(COUNTS).tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    counts = [max(1, int(keep * n)) for n in COUNTS]
    low = torch.tensor([[0] * 5, [3, 2, 1, 4, 5], [6] * 5], device=DEVICE)
    positions = passes.Selector(spans, counts, DEVICE).choose(x)
    assert fused.Selector(spans, counts, DEVICE).choose(x).equal(positions)
    wanted, got = (kind(spans, counts, low).high_sums(positions) for kind in (passes.Gaps, fused.Gaps))
    assert got.equal(wanted) and got.min() >= 0


SLOTS = {"a": (96, 100), "bias": (33,), "c": (64, 80), "scalar": (5, 7), "large": (300, 211)}


@pytest.mark.parametrize("spec, small", [
    ("topk:0.01|qsgd:4,norm=l2", "none"), ("ef|topk:0.06|sign", "ef|bf16"), ("qsgd:4,bucket=0,norm=l2", "none"),
    ("momentum:0.9|topk:0.005|qsgd:4|rans:auto", "momentum:0.9|qsgd:8"),
])  # fmt: skip
def test_fused_channel_equals_frames(monkeypatch: pytest.MonkeyPatch, spec: str, small: str) -> None:
    monkeypatch.setattr(computed, "kernels_on", lambda device: fused)
    policy = Policy(small=small)
    names = in_order(SLOTS, policy)
    channel, real = (
        ComputedChannel({n: SLOTS[n] for n in names}, spec, policy, DEVICE, ring=2),
        Channel(spec, policy=policy),
    )
    for r in range(2):
        generator = torch.Generator().manual_seed(r)
        x = {name: torch.randn(SLOTS[name], generator=generator) for name in names}
        x["c"].mul_(torch.rand(x["c"].shape, generator=generator) < 0.001)  # fewer values than Top-k keeps
        seeds = np.array([(r * 77 + i) * 2**33 + 5 for i in range(len(names))], dtype=np.uint64)
        frames = [real.encode(n, x[n], seed=int(seed)) for n, seed in zip(names, seeds, strict=True)]
        flat = torch.cat([one.view(-1) for one in x.values()]).to(DEVICE)
        sent = torch.zeros_like(flat)
        for part in channel.send(flat, rounding_keys(seeds).to(DEVICE), torch.tensor([r], device=DEVICE)):
            part.add_to(sent, 1.0)
        assert sent.cpu().equal(torch.cat([decode(frame).view(-1) for frame in frames]))
        assert channel.nbytes(r + 1)[r] == sum(map(len, frames))
    memories, wanted = channel.memories(names), real.state_dict()
    assert memories.keys() == wanted.keys() and all(memories[key].cpu().equal(wanted[key]) for key in memories)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_weighted_sum_rounds_like_frames_that_are_added(count: int) -> None:
    tensors = [values(seed, COUNTS) for seed in range(count)]
    wanted, out = torch.zeros_like(tensors[0]), torch.full_like(tensors[0], 9.0)
    for x in tensors:
        wanted.add_(x * (1 / count))
    fused_steps.weighted_sum(tensors, 1 / count, out)
    assert out.equal(wanted)


@pytest.mark.parametrize("momentum, decay", [(0.9, 5e-4), (0.0, 5e-3), (0.9, 0.0)])
def test_fused_step_is_one_of_sgd(momentum: float, decay: float) -> None:
    weights, velocity, gradient = (values(seed, COUNTS) for seed in range(3))
    wanted = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.SGD([wanted], lr=0.05, momentum=momentum, weight_decay=decay)
    if momentum:
        optimizer.state[wanted]["momentum_buffer"] = velocity.clone()
    rate = torch.tensor([0.05], device=DEVICE)
    for scale in (1.0, 0.5):
        wanted.grad = gradient * scale
        optimizer.step()
        fused_steps.descend(weights, velocity, gradient * scale, rate, momentum=momentum, decay=decay)
    torch.testing.assert_close(weights, wanted.detach(), rtol=1e-6, atol=1e-7)
    if momentum:
        torch.testing.assert_close(velocity, optimizer.state[wanted]["momentum_buffer"], rtol=1e-6, atol=1e-7)


def normed_model(*_: object, **__: object) -> nn.Module:
    """Return a model whose workers share a pass: a convolution with batch norm, for images of 4 x 4."""
    with seeded(0):
        first = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(256, 40), nn.ReLU(), nn.Linear(40, 10))


@pytest.fixture(scope="module")
def small_images() -> Source:
    source = Source("digits", None, DEVICE)
    for split, count in zip(source.examples, (400, 200), strict=True):
        split.inputs, split.targets = split.inputs[:count, :, ::7, ::7].clone(), split.targets[:count].clone()
    return source


SPARSE = {"push": "topk:0.1|qsgd:4,norm=l2"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("method, kind, changes", [
    ("2w", ComputedStepper, {}), ("6", BestStepper, {"every": 2}),
    pytest.param("1", ComputedStepper, {}, marks=SLOW), pytest.param("5", ComputedStepper, SPARSE, marks=SLOW),
    pytest.param("laconic", LocalStepper, {"every": 2}, marks=SLOW),
])  # fmt: skip
def test_fused_steppers_train_like_frames(
    monkeypatch: pytest.MonkeyPatch, small_images: Source, method: str, kind: type[ComputedStepper], changes: Any
) -> None:
    monkeypatch.setattr(stepper, "build_model", normed_model)
    setting = setting_of("lenet5", method, data="digits", **changes)
    framed = FrameStepper(setting, 1, 2, small_images)
    monkeypatch.setattr(stepper, "_fused_steps", lambda device: fused_steps)
    monkeypatch.setattr(computed, "kernels_on", lambda device: fused)
    fast = kind(setting, 1, 2, small_images)
    for one in (framed, fast):
        train_epochs(one, 2)
    assert fast.curve.frames_compared > 0 and fast.curve.frames_other == 0
    for name in ("held_loss", "test_loss", "push_bytes", "pull_bytes"):  # roundings differ, and positions with them
        assert getattr(fast.curve, name) == pytest.approx(getattr(framed.curve, name), rel=0.02), name
