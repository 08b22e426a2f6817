"""Models: parameter counts, shapes of inputs and outputs, weights that depend on the seed alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laconic.errors import ConfigError
from laconic.train import MODELS, build_model
from laconic.train.models import GPT, GPTConfig

PARAMETERS = {
    "mlp": 327_880, "lenet5": 61_706, "vgg11": 9_231_114, "alexnet": 61_100_840, "resnet50": 25_557_032,
    "vgg11fc": 34_440_970, "gpt": 875_264,
}  # fmt: skip
SHAPES = {  # of inputs and outputs; small images where a model takes seconds
    "mlp": ((3, 1, 28, 28), (3, 10)),
    "lenet5": ((3, 1, 28, 28), (3, 10)),
    "vgg11": ((2, 3, 32, 32), (2, 10)),
    "alexnet": ((1, 3, 224, 224), (1, 1000)),
    "resnet50": ((1, 3, 64, 64), (1, 1000)),
    "vgg11fc": ((2, 3, 32, 32), (2, 10)),
    "gpt": ((2, 128), (2, 128, 256)),
}


@pytest.fixture(scope="module", params=MODELS)
def built(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    """One model at a time: the large ones take hundreds of megabytes."""
    return request.param, build_model(request.param, seed=1)


def test_number_of_parameters(built: tuple[str, nn.Module]) -> None:
    name, model = built
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_forward_and_backward(built: tuple[str, nn.Module]) -> None:
    name, model = built
    inputs, outputs = SHAPES[name]
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, inputs, generator=rng) if name == "gpt" else torch.randn(inputs, generator=rng)
    y = model(x)
    assert y.shape == outputs and y.dtype == torch.float32
    nn.functional.cross_entropy(y.flatten(0, -2), torch.zeros(outputs[:-1], dtype=torch.int64).flatten()).backward()
    for slot, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), slot
    # Repeating a step gives the same result: the model has no randomness.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert torch.equal(model(x), y)


@pytest.mark.parametrize("name", ["mlp", "lenet5", "vgg11", "gpt"])
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    before = torch.get_rng_state()
    first = build_model(name, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        torch.rand(3)
        again, other = build_model(name, seed=5).state_dict(), build_model(name, seed=6).state_dict()
    assert all(torch.equal(first[slot], again[slot]) for slot in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_global_generator_is_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*shape: int) -> Tensor:
        torch.rand(1)
        raise MemoryError

    monkeypatch.setattr(nn, "Linear", fails)
    before = torch.get_rng_state()
    with pytest.raises(MemoryError):
        build_model("mlp", seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_parameter_names() -> None:
    for name in ("mlp", "lenet5", "vgg11", "gpt"):
        slots = dict(build_model(name, seed=0).named_parameters())
        assert "head.weight" in slots and not any(slot[0].isdigit() for slot in slots)


def test_gpt_is_causal() -> None:
    model = build_model("gpt", seed=0).eval()
    x = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[0, 20] += 1
    y, z = model(x), model(changed % 256)
    torch.testing.assert_close(y[:, :20], z[:, :20])
    assert not torch.allclose(y[:, 20:], z[:, 20:])


def test_gpt_accepts_other_dimensions() -> None:
    small = GPT(GPTConfig(vocabulary=16, context=8, width=12, layers=1, heads=3))
    assert small(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 16)


def test_unknown_model_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown model 'vgg16': use one of mlp, lenet5, vgg11, alexnet"):
        build_model("vgg16", seed=0)


def test_resnet50_has_a_small_first_convolution_on_cifar10() -> None:
    model = build_model("resnet50", seed=1, data="cifar10")
    assert sum(parameter.numel() for parameter in model.parameters()) == 23_520_842
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
