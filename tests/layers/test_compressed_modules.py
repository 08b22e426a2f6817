"""Compressed layers as ordinary modules: states, copies, optimizers, gradients, dtypes, torch.compile."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from layer_models import SCHEMES, images, mixed_network
from torch import Tensor, nn

import laconic
from laconic.layers import LayerPolicy, layout
from laconic.layers.convert import COMPRESSED
from laconic.train import build_model


@pytest.mark.parametrize("scheme", SCHEMES)
def test_state_dicts_copies_and_pickles_restore_the_model(scheme: str) -> None:
    x = images()
    model = laconic.compress(mixed_network(), scheme, init="fresh", seed=3).eval()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    other = laconic.compress(mixed_network(), scheme, init="fresh", seed=4).eval()
    assert not torch.equal(model(x), other(x))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(model(x), other(x))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(model(x), copied(x)) and layout(copied) == layout(model)
        step(copied, torch.optim.SGD(copied.parameters(), lr=0.1), x)
        assert not torch.equal(model(x), copied(x))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), torch.arange(len(x)) % 10)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4, momentum=0.5),
}


@pytest.mark.parametrize(
    "scheme, name",
    [("monarch:0.2", "adam"), ("lowrank:0.2", "rmsprop"), ("hashed:0.2", "adamw"), ("hashed:0.2", "sgd")]
    + [("subspace:0.1,T=20", name) for name in OPTIMIZERS],  # renewals change the state of each optimizer
)
def test_loss_falls_with_any_optimizer(scheme: str, name: str) -> None:
    model, x = laconic.compress(mixed_network(), scheme, init="fresh"), images(8)
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = [step(model, optimizer, x) for _ in range(25)]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_follow_from_those_of_the_dense_weight(scheme: str) -> None:
    model = laconic.compress(nn.Linear(70, 90), scheme, policy=LayerPolicy(output=True, min_coordinates=64))
    x, y = torch.randn(5, 70), torch.randn(5, 90)
    parameters = [p for p in model.parameters() if p.requires_grad]
    direct = torch.autograd.grad(F.mse_loss(model(x), y), parameters)
    weight = model.weight
    g, gb = torch.autograd.grad(F.mse_loss(F.linear(x, weight, model.bias), y), [weight, model.bias], retain_graph=True)
    through = torch.autograd.grad(weight, [p for p in parameters if p is not model.bias], g)
    expected = dict(zip([id(p) for p in parameters if p is not model.bias], through, strict=True)) | {
        id(model.bias): gb
    }
    for parameter, gradient in zip(parameters, direct, strict=True):
        torch.testing.assert_close(gradient, expected[id(parameter)], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme", ["monarch:0.2", "lowrank:0.2", "hashed:0.2"])
def test_gradients_pass_a_numerical_check(scheme: str) -> None:
    layer = nn.Linear(24, 30).double()
    policy = LayerPolicy(output=True, min_numel=0, min_coordinates=64, min_rank=2)
    model = laconic.compress(layer, scheme, policy=policy)
    assert isinstance(model, COMPRESSED)
    x = torch.randn(3, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *_: model(x), (x, *(p for p in model.parameters() if p.requires_grad)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bfloat16_float64_and_autocast_work(scheme: str) -> None:
    model, x = laconic.compress(mixed_network(), scheme, init="fresh").eval(), images()
    exact = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and g.dtype == torch.float32 and bool(g.isfinite().all()) for g in grads)
    half = copy.deepcopy(model).to(torch.bfloat16)
    torch.testing.assert_close(half(x.bfloat16()).float(), exact, rtol=0.1, atol=0.1)
    assert half.to(torch.float64)(x.double()).dtype == torch.float64


@pytest.mark.parametrize("scheme", ["subspace:0.1", "hashed:0.2"])
def test_embeddings_are_compressed(scheme: str) -> None:
    model = nn.Sequential(nn.Embedding(300, 40, padding_idx=0), nn.Linear(40, 40), nn.Linear(40, 8))
    small = laconic.compress(model, scheme)
    x = torch.randint(300, (4, 7))
    torch.testing.assert_close(laconic.expand(small)(x), small(x))
    assert isinstance(small[0], COMPRESSED) and "padding_idx=0" in str(laconic.expand(small))
    assert layout(laconic.compress(model, "lowrank:0.1")).exempt["0.weight"].endswith("which lowrank has no form for")


def test_loss_of_a_gpt_falls_in_a_subspace() -> None:
    model = laconic.compress(build_model("gpt", seed=0), "subspace:0.1,T=5")
    x = torch.randint(256, (2, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch itself
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled_model_computes_the_same(scheme: str) -> None:
    model, x = laconic.compress(mixed_network(), scheme, init="fresh"), images()
    compiled = torch.compile(model, fullgraph=True)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(copied.parameters(), lr=0.05) for copied in (model, twin)]
    for _ in range(3):
        losses = [step(*pair, x) for pair in zip((compiled, twin), optimizers, strict=True)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
