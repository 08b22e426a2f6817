"""compress and expand: which weights, how many numbers, the same outputs, and everything around a module."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic import counters
from laconic.errors import ConfigError
from laconic.layers import (
    HashedLayer,
    LayerPolicy,
    LowRankLinear,
    MonarchLinear,
    SubspaceLayer,
    layout,
    parse_scheme,
)
from laconic.layers.convert import COMPRESSED
from laconic.layers.factored import truncated
from laconic.train import build_model

SCHEMES = ("monarch:0.2", "lowrank:0.2", "subspace:0.1", "hashed:0.2")
ALL = LayerPolicy(output=True, first_conv=True)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def mixed() -> nn.Module:
    """Convolutions of every kind of argument, norms, an embedding-free head."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, dilation=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding="same", groups=2, bias=False),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, 96),
        nn.Tanh(),
        nn.Linear(96, 10),
    )


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16)


# --------------------------------------------------------------------------------------------------------------- specs


@pytest.mark.parametrize(
    "text", ["monarch:0.1", "monarch:0.05,conv=0.2", "lowrank:0.2", "subspace:0.1", "subspace:0.1,T=7", "hashed:0.5"]
)
def test_a_scheme_is_its_text(text: str) -> None:
    assert str(parse_scheme(text)) == text and parse_scheme(parse_scheme(text)) == parse_scheme(text)


def test_schemes_take_rho_apart() -> None:
    assert parse_scheme("monarch", rho=0.1) == parse_scheme("monarch:0.1") == parse_scheme("monarch:0.1", rho=0.1)
    assert parse_scheme("subspace:T=5,rho=0.2") == parse_scheme("subspace:0.2,T=5")
    assert str(parse_scheme("subspace:0.1,T=100")) == "subspace:0.1"


@pytest.mark.parametrize(
    "text, rho, words",
    [
        ("monarch", None, "scheme 'monarch' needs rho, the fraction of entries that is left: such as monarch:0.1"),
        ("monarc:0.1", None, "unknown scheme 'monarc' in 'monarc:0.1'; valid schemes: hashed, lowrank, monarch, subs"),
        ("lowrank:0", None, r"scheme 'lowrank': rho must be in \(0, 1\), got 0"),
        ("lowrank:1.5", None, r"rho must be in \(0, 1\), got 1.5"),
        ("lowrank:nan", None, "rho must be a finite number"),
        ("monarch:0.1,conv=2", None, r"conv must be in \(0, 1\), got 2"),
        ("subspace:0.1,T=-1", None, "T must not be negative, got -1"),
        ("subspace:0.1,T=x", None, "T must be a whole number"),
        ("subspace:T=4", None, "scheme 'subspace' in 'subspace:T=4' needs rho"),
        ("hashed:0.1,T=4", None, "scheme 'hashed' has no argument 'T'; it takes rho"),
        ("hashed:0.1", 0.2, "'hashed:0.1' says rho 0.1, and rho=0.2 was given as well"),
    ],
)
def test_wrong_schemes_are_told(text: str, rho: float | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_scheme(text, rho=rho)


# --------------------------------------------------------------------------------------------------------------- rules


def test_what_stays_dense_is_said_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="laconic"):
        small = laconic.compress(build_model("lenet5", seed=0), "subspace:0.1")
    found = layout(small)
    assert [slot.name for slot in found.slots if not slot.reason] == ["fc1.weight", "fc2.weight"]
    assert found.exempt["conv1.weight"] == "is the first convolution's"
    assert found.exempt["head.weight"] == "is the output layer's"
    assert found.exempt["conv2.weight"] == "has fewer than 4096 entries"
    assert found.exempt["fc1.bias"] == "is no matrix or kernel"
    assert len(found.slots) == 10 and len(found.exempt) == 8
    for words in ("2 weights to", "is the output layer's (head.weight)", "5 tensors stay dense"):
        assert words in caplog.text
    trained = sum(p.numel() for p in small.parameters() if p.requires_grad)
    assert found.rho == pytest.approx(trained / 61_706) and found.values()["numel_compressed"] == trained


def test_alexnet_has_the_size_that_was_asked_for() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 64, 11), nn.Conv2d(64, 192, 5), nn.Linear(9216, 4096), nn.Linear(4096, 1000))
    from laconic.layers.convert import _plan

    slots, _ = _plan(model, parse_scheme("monarch:0.05,conv=0.2"), LayerPolicy())
    rho = {slot.name: slot.kept / slot.numel for slot in slots}
    assert rho["0.weight"] == rho["3.weight"] == 1.0
    assert 0.18 < rho["1.weight"] <= 0.2 and 0.04 < rho["2.weight"] <= 0.05


def test_a_rank_is_never_below_eight() -> None:
    model = nn.Sequential(nn.Linear(392, 50), nn.Linear(50, 10))
    small = laconic.compress(model, "lowrank:0.01")
    assert isinstance(small[0], LowRankLinear) and small[0].rank == 8
    small = laconic.compress(model, "monarch:0.01")
    assert isinstance(small[0], MonarchLinear) and small[0].blocks * small[0].rank >= 8
    narrow = nn.Sequential(nn.Linear(512, 8), nn.Linear(8, 8))
    reason = layout(laconic.compress(narrow, "lowrank:0.1")).exempt["0.weight"]
    assert reason == "would not be smaller: 4160 numbers for 4096"
    conv = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 64, 5), nn.Linear(8, 8))
    assert "too few channels for a rank of 8" in layout(laconic.compress(conv, "lowrank:0.1")).exempt["1.weight"]


def test_rules_come_first() -> None:
    model = mixed()
    small = laconic.compress(
        model, "monarch:0.2", policy={"3": "dense", "10.weight": "lowrank:0.9", "5": "subspace:0.1"}
    )
    found = layout(small)
    assert found.exempt["3.weight"] == "matches '3'" and type(small[3]) is nn.Conv2d
    assert isinstance(small[10], LowRankLinear) and isinstance(small[5], SubspaceLayer)
    assert isinstance(small[8], MonarchLinear)
    with pytest.raises(ConfigError, match="no weight matches 'conv'"):
        laconic.compress(model, "monarch:0.2", policy={"conv": "dense"})
    with pytest.raises(ConfigError, match="unknown scheme 'thin'"):
        laconic.compress(model, "monarch:0.2", policy={"3": "thin:0.1"})
    with pytest.raises(ConfigError, match="min_rank is too small"):
        LayerPolicy(min_rank=0)


def test_layers_that_do_more_stay_as_they_are() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    hooked = nn.Linear(100, 100)
    hooked.register_forward_hook(lambda *_: None)
    frozen = nn.Linear(100, 100)
    frozen.weight.requires_grad_(False)
    model = nn.ModuleDict(
        {
            "odd": Odd(100, 100),
            "hooked": hooked,
            "frozen": frozen,
            "attention": nn.MultiheadAttention(64, 2),
            "sparse": nn.Embedding(100, 100, sparse=True),
            "plain": nn.Linear(100, 100),
            "head": nn.Linear(100, 10),
        }
    )
    found = layout(laconic.compress(model, "subspace:0.1"))
    assert [slot.name for slot in found.slots if not slot.reason] == ["plain.weight"]
    assert "does more than multiply" in found.exempt["odd.weight"] and "hooks" in found.exempt["hooked.weight"]
    assert "sparse" in found.exempt["sparse.weight"] and "frozen.weight" not in found.exempt
    assert set(found.exempt) >= {"attention.in_proj_weight", "attention.out_proj.weight"}


def test_tied_weights_are_refused_and_shared_layers_are_not() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.middle, self.head = nn.Embedding(128, 64), nn.Linear(64, 64), nn.Linear(64, 128)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.middle(self.embedding(x)))
            return y

    with pytest.raises(ConfigError, match=r"embedding.weight and head.weight are one tensor.*'dense'"):
        laconic.compress(Tied(), "subspace:0.1")
    small = laconic.compress(Tied(), "subspace:0.1", policy={"embedding": "dense", "head": "dense"})
    assert small.head.weight is small.embedding.weight and isinstance(small.middle, SubspaceLayer)
    layer = nn.Linear(96, 96)
    small = laconic.compress(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(96, 4)), "lowrank:0.3")
    assert small[0] is small[2] and isinstance(small[0], LowRankLinear)
    small(torch.randn(2, 96)).sum().backward()


def test_a_model_that_is_one_layer() -> None:
    layer = nn.Linear(128, 128)
    assert type(laconic.compress(layer, "lowrank:0.2")) is nn.Linear  # it is the output layer
    small = laconic.compress(layer, "lowrank:0.2", policy=ALL)
    assert isinstance(small, LowRankLinear) and type(laconic.expand(small)) is nn.Linear


def test_wrong_uses_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = mixed()
    with pytest.raises(ConfigError, match="init must be project or fresh, got 'zero'"):
        laconic.compress(model, "lowrank:0.1", init="zero")
    small = laconic.compress(model, "lowrank:0.1")
    with pytest.raises(ConfigError, match="compressed already"):
        laconic.compress(small, "lowrank:0.1")
    with pytest.raises(ConfigError, match=r"not made by laconic\.compress"):
        layout(model)
    with caplog.at_level(logging.WARNING, logger="laconic"):
        laconic.compress(nn.Sequential(nn.Linear(4, 4)), "lowrank:0.1")
    assert "no weight is left to compress" in caplog.text


# ------------------------------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("init", ["project", "fresh"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_expand_computes_the_same(scheme: str, init: str) -> None:
    model, x = mixed(), images()
    before = copy.deepcopy(model.state_dict())
    small = laconic.compress(model, scheme, init=init)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    kinds = [type(module) for module in small.modules() if isinstance(module, COMPRESSED)]
    assert len(kinds) == 3
    for part in small.modules():
        if isinstance(part, SubspaceLayer):
            nn.init.normal_(part.z, std=0.05)
    dense = laconic.expand(small)
    assert [type(module) for module in dense] == [type(module) for module in model]
    assert {n: p.shape for n, p in dense.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(p.requires_grad for p in dense.parameters())
    for each in (small, dense):
        each.eval()
    torch.testing.assert_close(dense(x), small(x), rtol=1e-4, atol=1e-5)
    dense_only = laconic.expand(dense)
    torch.testing.assert_close(dense_only(x), dense(x), rtol=0, atol=0)
    assert any(isinstance(module, COMPRESSED) for module in small.modules())


CONVOLUTIONS = [
    nn.Conv2d(16, 32, 3),
    nn.Conv2d(16, 32, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    nn.Conv2d(32, 64, 3, groups=2, padding=1),
    nn.Conv2d(16, 32, 5, padding=2, padding_mode="reflect", bias=False),
    nn.Conv2d(16, 32, 3, padding="same", dilation=2),
]


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("scheme", ["lowrank:0.5", "subspace:0.2", "hashed:0.3"])
def test_convolutions_keep_their_arguments(scheme: str, layer: nn.Conv2d) -> None:
    policy = LayerPolicy(output=True, first_conv=True, min_numel=0, min_rank=4)
    small = laconic.compress(layer, scheme, policy=policy)
    assert isinstance(small, COMPRESSED)
    x = torch.randn(2, layer.in_channels, 11, 12)
    like = layer._conv_forward(x, small.weight, layer.bias)
    torch.testing.assert_close(small(x), like, rtol=1e-4, atol=1e-5)
    last = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(small(last), like, rtol=1e-4, atol=1e-5)
    dense = laconic.expand(small)
    torch.testing.assert_close(dense(x), like, rtol=1e-4, atol=1e-5)
    assert str(dense) == str(layer)


@pytest.mark.parametrize("shape", [(64, 64), (63, 50), (100, 37)])
def test_monarch_of_any_size_and_batch(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    layer = MonarchLinear.project(weight, bias, 4, 3)
    for x in (torch.randn(1, inputs), torch.randn(2, 3, inputs), torch.randn(inputs, 5).T, torch.randn(inputs)):
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, bias), rtol=1e-4, atol=1e-4)
    # Each block is the best of its rank.
    rows, columns = -(-outputs // 4), -(-inputs // 4)
    block, found = weight[rows : 2 * rows, :columns], layer.weight[rows : 2 * rows, :columns]
    left, values, right = torch.linalg.svd(block, full_matrices=False)
    torch.testing.assert_close(found, left[:, :3] * values[:3] @ right[:3], rtol=1e-4, atol=1e-4)


def test_projection_of_what_fits_is_exact() -> None:
    low = torch.randn(200, 10) @ torch.randn(10, 120)
    torch.testing.assert_close(LowRankLinear.project(low, None, 10).weight, low, rtol=1e-4, atol=1e-3)
    monarch = MonarchLinear.fresh(torch.randn(96, 64), None, 4, 2)
    again = MonarchLinear.project(monarch.weight.detach(), None, 4, 2)
    torch.testing.assert_close(again.weight, monarch.weight, rtol=1e-4, atol=1e-5)
    layer = nn.Linear(64, 64, bias=False)
    shared = HashedLayer(layer, 1000, seed=3)
    with torch.no_grad():
        layer.weight.copy_(shared.weight)
    torch.testing.assert_close(HashedLayer(layer, 1000, seed=3).weight, shared.weight, rtol=1e-5, atol=1e-7)
    assert torch.equal(SubspaceLayer(layer, 0.1, 100, seed=1).weight, layer.weight)


def test_leading_directions_of_a_large_matrix() -> None:
    x = torch.randn(1100, 40) @ torch.randn(40, 1200) + 0.01 * torch.randn(1100, 1200)
    left, right = truncated(x, 40)
    values = torch.linalg.svdvals(x)
    best = float(values[40:].square().sum().sqrt())
    assert float((x - left @ right).norm()) < 1.02 * best


@pytest.mark.parametrize("scheme", ["monarch:0.1", "monarch:0.3", "lowrank:0.1", "hashed:0.1"])
def test_fresh_weights_keep_the_variance_of_activations(scheme: str) -> None:
    layer = nn.Linear(600, 500)
    small = laconic.compress(layer, scheme, policy=ALL, init="fresh")
    x = torch.randn(2000, 600)
    with torch.no_grad():
        ratio = float((small(x) - layer.bias).var() / (layer(x) - layer.bias).var())
    assert 0.85 < ratio < 1.15
    conv = nn.Conv2d(32, 64, 3)
    with torch.no_grad():
        ratio = float(laconic.compress(conv, scheme, policy=ALL, init="fresh").weight.var() / conv.weight.var())
    assert 0.8 < ratio < 1.2


def test_a_projection_that_loses_most_says_so(caplog: pytest.LogCaptureFixture) -> None:
    before = counters.counts().get("layers that lose most of a weight", 0)
    laconic.compress(nn.Linear(300, 300), "lowrank:0.1", policy=ALL, init="fresh")
    assert counters.counts().get("layers that lose most of a weight", 0) == before
    laconic.compress(nn.Linear(300, 300), "lowrank:0.1", policy=ALL)
    assert counters.counts()["layers that lose most of a weight"] == before + 1
    assert "give init='fresh'" in caplog.text


def test_all_follows_from_the_seed() -> None:
    state = torch.get_rng_state()
    for scheme in SCHEMES:
        one, same, other = (
            laconic.compress(mixed_again(), scheme, init="fresh", seed=seed).state_dict() for seed in (1, 1, 2)
        )
        assert all(torch.equal(one[name], same[name]) for name in one)
        assert any(not torch.equal(one[name], other[name]) for name in one)
    torch.set_rng_state(state)
    before = torch.get_rng_state()
    laconic.compress(nn.Linear(128, 128), "lowrank:0.1", policy=ALL, init="fresh")
    torch.rand(1)
    after = torch.rand(1)
    torch.set_rng_state(before)
    nn.Linear(128, 128)
    torch.rand(1)
    assert torch.equal(torch.rand(1), after)


def mixed_again() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return mixed()


# -------------------------------------------------------------------------------------------------------- like a module


@pytest.mark.parametrize("scheme", SCHEMES)
def test_states_go_out_and_in(scheme: str) -> None:
    x = images()
    one = laconic.compress(mixed(), scheme, init="fresh", seed=3).eval()
    step(one, torch.optim.SGD(one.parameters(), lr=0.1), x)
    other = laconic.compress(mixed(), scheme, init="fresh", seed=4).eval()
    assert not torch.equal(one(x), other(x))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(one(x), other(x))
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(one(x), copied(x)) and layout(copied) == layout(one)
        step(copied, torch.optim.SGD(copied.parameters(), lr=0.1), x)
        assert not torch.equal(one(x), copied(x))


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheme", ["monarch:0.2", "lowrank:0.2", "subspace:0.1,T=20", "hashed:0.2"])
def test_any_optimizer_learns(scheme: str, optimizer: str) -> None:
    model, x = laconic.compress(mixed(), scheme, init="fresh"), images(8)
    found = OPTIMIZERS[optimizer](model.parameters())
    losses = [step(model, found, x) for _ in range(25)]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_dense_weight(scheme: str) -> None:
    """By the chain rule through ``weight``, entry by entry."""
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
    for parameter, found in zip(parameters, direct, strict=True):
        torch.testing.assert_close(found, expected[id(parameter)], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme", ["monarch:0.2", "lowrank:0.2", "hashed:0.2"])
def test_gradients_pass_a_numerical_check(scheme: str) -> None:
    layer = nn.Linear(24, 30).double()
    policy = LayerPolicy(output=True, min_numel=0, min_coordinates=64, min_rank=2)
    model = laconic.compress(layer, scheme, policy=policy)
    assert isinstance(model, COMPRESSED)
    x = torch.randn(3, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *_: model(x), (x, *(p for p in model.parameters() if p.requires_grad)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bfloat16_and_autocast(scheme: str) -> None:
    model, x = laconic.compress(mixed(), scheme, init="fresh").eval(), images()
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
def test_embeddings(scheme: str) -> None:
    model = nn.Sequential(nn.Embedding(300, 40, padding_idx=0), nn.Linear(40, 40), nn.Linear(40, 8))
    small = laconic.compress(model, scheme)
    x = torch.randint(300, (4, 7))
    torch.testing.assert_close(laconic.expand(small)(x), small(x))
    assert isinstance(small[0], COMPRESSED) and "padding_idx=0" in str(laconic.expand(small))
    assert layout(laconic.compress(model, "lowrank:0.1")).exempt["0.weight"].endswith("which lowrank has no form for")


def test_a_gpt_learns_in_a_subspace() -> None:
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
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled(scheme: str) -> None:
    model, x = laconic.compress(mixed(), scheme, init="fresh"), images()
    compiled = torch.compile(model, fullgraph=True)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, twin)]
    for _ in range(3):
        losses = [step(each, found, x) for each, found in zip((compiled, twin), optimizers, strict=True)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
