"""The optimizer over named tensors is torch's, to the bit; learning rates follow from the iteration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.errors import ConfigError, InputError
from laconic.frames import decode, encode
from laconic.optim import SGD, OptimizerSettings, Schedule

SHAPES = {"fc.weight": (37, 19), "fc.bias": (37,), "scale": ()}


def draw(rng: torch.Generator) -> dict[str, Tensor]:
    return {slot: torch.randn(shape, generator=rng) for slot, shape in SHAPES.items()}


@pytest.mark.parametrize("options", [
    {}, {"momentum": 0.9}, {"weight_decay": 5e-4}, {"momentum": 0.9, "weight_decay": 5e-4},
    {"momentum": 0.8, "weight_decay": 1e-2, "nesterov": True},
], ids=str)  # fmt: skip
def test_steps_have_the_bits_of_torch(options: dict[str, Any]) -> None:
    rng = torch.Generator().manual_seed(0)
    ours = draw(rng)
    theirs = {slot: x.clone().requires_grad_() for slot, x in ours.items()}
    optimizer, judge = SGD(**options), torch.optim.SGD(theirs.values(), lr=1.0, **options)
    schedule = Schedule(0.1, "cosine", warmup=5, iterations=50)
    for i in range(50):
        gradients = draw(rng)
        copies = {slot: x.clone() for slot, x in gradients.items()}
        for slot, parameter in theirs.items():
            parameter.grad = gradients[slot].clone()
        judge.param_groups[0]["lr"] = schedule(i)
        judge.step()
        optimizer.step(ours, gradients, lr=schedule(i))
        assert all(torch.equal(ours[slot], theirs[slot]) for slot in SHAPES), i
        assert all(torch.equal(gradients[slot], copies[slot]) for slot in SHAPES)
        if i == 20:  # and after a restart
            state = optimizer.state_dict()
            optimizer = SGD(**options)
            optimizer.load_state_dict(state)
    assert set(optimizer.state_dict()) == (set(SHAPES) if options.get("momentum") else set())


def test_slots_without_gradient_are_unchanged() -> None:
    layer = torch.nn.Linear(2, 2)
    bias = layer.bias.detach().clone()
    weight = layer.weight.detach().clone()
    SGD().step(dict(layer.named_parameters()), {"weight": torch.ones(2, 2)}, lr=0.5)
    assert torch.equal(layer.weight, weight - 0.5) and torch.equal(layer.bias, bias)


def test_state_is_a_copy() -> None:
    parameters, gradients = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    optimizer = SGD(momentum=0.9)
    optimizer.step(parameters, gradients, lr=0.1)
    state = optimizer.state_dict()
    optimizer.step(parameters, gradients, lr=0.1)
    assert state["w"].tolist() == [1, 1]
    optimizer.load_state_dict(state)
    optimizer.step(parameters, gradients, lr=0.1)
    assert state["w"].tolist() == [1, 1]


def test_invalid_gradient_changes_nothing() -> None:
    parameters = {"a": torch.ones(2), "b": torch.ones(3)}
    optimizer = SGD(momentum=0.9)
    with pytest.raises(InputError, match=r"slot 'b' has the shape \[3\], its gradient \[1\]"):
        optimizer.step(parameters, {"a": torch.ones(2), "b": torch.ones(1)}, lr=0.1)
    with pytest.raises(InputError, match="slot 'c' has a gradient, but no parameter"):
        optimizer.step(parameters, {"a": torch.ones(2), "c": torch.ones(1)}, lr=0.1)
    optimizer.load_state_dict({"a": torch.ones(1)})
    with pytest.raises(InputError, match=r"slot 'a' has the shape \[2\], its momentum \[1\]"):
        optimizer.step(parameters, {"a": torch.ones(2)}, lr=0.1)
    assert all(bool((x == 1).all()) for x in parameters.values())


@pytest.mark.parametrize(
    "options",
    [{"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0}, {"weight_decay": math.nan}, {"nesterov": True}],
    ids=str,
)
def test_invalid_option_raises_config_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options)).split('_')[0]}.*"):
        SGD(**options)


@pytest.mark.parametrize("momentum, decay", [(0.0, 0.0), (0.9, 0.0), (0.9, 1e-3), (0.0, 1e-3)])
def test_step_frames_equals_step_of_decoded_tensors(momentum: float, decay: float) -> None:
    rng = torch.Generator().manual_seed(0)
    start = draw(rng)
    by_frames, by_tensors = ({slot: x.clone() for slot, x in start.items()} for _ in range(2))
    one, other = (SGD(momentum=momentum, weight_decay=decay) for _ in range(2))
    for step in range(5):
        gradients = draw(rng)
        frames = {slot: encode(x, "topk:0.1|qsgd:4", seed=step) for slot, x in gradients.items()}
        one.step_frames(by_frames, frames, lr=0.1)
        other.step(by_tensors, {slot: decode(frame) for slot, frame in frames.items()}, lr=0.1)
    for slot, x in by_tensors.items():
        assert torch.allclose(by_frames[slot], x, rtol=1e-6, atol=1e-7)
        assert torch.equal(by_frames[slot], x) or not (momentum or decay)


def test_schedules() -> None:
    assert [Schedule(0.3)(i) for i in (0, 10**6)] == [0.3, 0.3]
    step = Schedule(1.0, "step", warmup=4, every=10, factor=0.5)
    assert [step(i) for i in (0, 1, 3, 4, 9, 10, 19, 20, 35)] == [0.25, 0.5, 1, 1, 1, 0.5, 0.5, 0.25, 0.125]
    cosine = Schedule(0.2, "cosine", iterations=100)
    assert cosine(0) == 0.2 and cosine(50) == 0.1 and cosine(100) == cosine(1000) == 0.0
    rates = [cosine(i) for i in range(101)]
    assert rates == sorted(rates, reverse=True)
    assert rates == pytest.approx([0.1 * (1 + math.cos(math.pi * i / 100)) for i in range(101)])


@pytest.mark.parametrize("arguments, words", [
    ({"lr": 0.0}, "learning rate"), ({"lr": math.inf}, "learning rate"), ({"lr": math.nan}, "learning rate"),
    ({"lr": 0.1, "kind": "linear"}, "unknown schedule 'linear': use constant, step or cosine"),
    ({"lr": 0.1, "warmup": -1}, "warm-up must not be negative, got -1"),
    ({"lr": 0.1, "kind": "step"}, "step needs every >= 1"),
    ({"lr": 0.1, "kind": "step", "every": 3, "factor": 1.5}, "step needs"),
    ({"lr": 0.1, "kind": "cosine"}, "cosine needs more iterations"),
    ({"lr": 0.1, "kind": "cosine", "warmup": 5, "iterations": 5}, r"more iterations than warm-up \(5\), got 5"),
])  # fmt: skip
def test_invalid_schedule_raises_config_error(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Schedule(**arguments)


@pytest.mark.parametrize("kind, shape", [("adamw", (3, 4)), ("muon", (3, 4)), ("muon", (4,))])
def test_named_optimizer_gives_the_bits_of_torch_and_resumes_with_them(kind: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(shape, generator=generator) for _ in range(6))
    expected = start.clone().requires_grad_()
    theirs: torch.optim.Optimizer = (
        torch.optim.Muon([expected], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        if kind == "muon" and len(shape) == 2
        else torch.optim.AdamW([expected], lr=0.01, weight_decay=0.1)
    )
    ours, parameters = OptimizerSettings(optimizer=kind, weight_decay=0.1).make_optimizer(), {"a/w": start.clone()}
    for number, gradient in enumerate(gradients):
        if number == 3:
            state = ours.state_dict()
            assert {key: x.shape for key, x in state.items()}.items() <= ours.state_shapes(parameters).items()
            ours = OptimizerSettings(optimizer=kind, weight_decay=0.1).make_optimizer()
            ours.load_state_dict(state)
        expected.grad = gradient.clone()
        theirs.step()
        ours.step(parameters, {"a/w": gradient}, lr=0.01)
        assert torch.equal(parameters["a/w"], expected)
    with pytest.raises(InputError, match="its gradient"):
        ours.step(parameters, {"a/w": torch.zeros(2, 2)}, lr=0.01)
