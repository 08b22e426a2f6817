"""compress and expand: which weights are compressed, how many numbers are kept, and equal outputs."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from layer_models import SCHEMES, images, mixed_network
from torch import Tensor, nn

import laconic
from laconic import counters
from laconic.errors import ConfigError
from laconic.layers import HashedLayer, LayerPolicy, LowRankLinear, MonarchLinear, SubspaceLayer, layout, parse_scheme
from laconic.layers.convert import COMPRESSED, _plan
from laconic.layers.factored import truncated
from laconic.train import build_model

ALL = LayerPolicy(output=True, first_conv=True)


def test_exempt_weights_are_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="laconic"):
        small = laconic.compress(build_model("lenet5", seed=0), "subspace:0.1")
    result = layout(small)
    assert [slot.name for slot in result.slots if not slot.reason] == ["fc1.weight", "fc2.weight"]
    assert result.exempt["conv1.weight"] == "is the first convolution's"
    assert result.exempt["head.weight"] == "is the output layer's"
    assert result.exempt["conv2.weight"] == "has fewer than 4096 entries"
    assert result.exempt["fc1.bias"] == "is no matrix or kernel"
    assert len(result.slots) == 10 and len(result.exempt) == 8
    for text in ("2 weights to", "is the output layer's (head.weight)", "5 tensors stay dense"):
        assert text in caplog.text
    trained = sum(p.numel() for p in small.parameters() if p.requires_grad)
    assert result.rho == pytest.approx(trained / 61_706) and result.values()["numel_compressed"] == trained


def test_kept_numbers_match_rho() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 64, 11), nn.Conv2d(64, 192, 5), nn.Linear(9216, 4096), nn.Linear(4096, 1000))
    slots, _ = _plan(model, parse_scheme("monarch:0.05,conv=0.2"), LayerPolicy())
    rho = {slot.name: slot.kept / slot.numel for slot in slots}
    assert rho["0.weight"] == rho["3.weight"] == 1.0
    assert 0.18 < rho["1.weight"] <= 0.2 and 0.04 < rho["2.weight"] <= 0.05


def test_rank_is_at_least_eight() -> None:
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


def test_rules_override_the_scheme() -> None:
    model = mixed_network()
    small = laconic.compress(
        model, "monarch:0.2", policy={"3": "dense", "10.weight": "lowrank:0.9", "5": "subspace:0.1"}
    )
    result = layout(small)
    assert result.exempt["3.weight"] == "matches '3'" and type(small[3]) is nn.Conv2d
    assert isinstance(small[10], LowRankLinear) and isinstance(small[5], SubspaceLayer)
    assert isinstance(small[8], MonarchLinear)
    with pytest.raises(ConfigError, match="no weight matches 'conv'"):
        laconic.compress(model, "monarch:0.2", policy={"conv": "dense"})
    with pytest.raises(ConfigError, match="unknown scheme 'thin'"):
        laconic.compress(model, "monarch:0.2", policy={"3": "thin:0.1"})
    with pytest.raises(ConfigError, match="min_rank must be at least 1, got 0"):
        LayerPolicy(min_rank=0)


def test_layers_with_their_own_forward_stay_dense() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    hooked = nn.Linear(100, 100)
    hooked.register_forward_hook(lambda *_: None)
    frozen = nn.Linear(100, 100)
    frozen.weight.requires_grad_(False)
    model = nn.ModuleDict(
        {
            "odd": Odd(100, 100), "hooked": hooked, "frozen": frozen, "attention": nn.MultiheadAttention(64, 2),
            "sparse": nn.Embedding(100, 100, sparse=True), "plain": nn.Linear(100, 100), "head": nn.Linear(100, 10),
        }
    )  # fmt: skip
    result = layout(laconic.compress(model, "subspace:0.1"))
    assert [slot.name for slot in result.slots if not slot.reason] == ["plain.weight"]
    assert "does more than multiply" in result.exempt["odd.weight"] and "hooks" in result.exempt["hooked.weight"]
    assert "sparse" in result.exempt["sparse.weight"] and "frozen.weight" not in result.exempt
    assert set(result.exempt) >= {"attention.in_proj_weight", "attention.out_proj.weight"}


def test_tied_weights_are_rejected_and_shared_layers_are_replaced() -> None:
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


def test_model_may_be_a_single_layer() -> None:
    layer = nn.Linear(128, 128)
    assert type(laconic.compress(layer, "lowrank:0.2")) is nn.Linear  # it is the output layer
    small = laconic.compress(layer, "lowrank:0.2", policy=ALL)
    assert isinstance(small, LowRankLinear) and type(laconic.expand(small)) is nn.Linear


def test_wrong_arguments_raise_config_error(caplog: pytest.LogCaptureFixture) -> None:
    model = mixed_network()
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


@pytest.mark.parametrize("init", ["project", "fresh"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_expanded_model_computes_the_same(scheme: str, init: str) -> None:
    model, x = mixed_network(), images()
    before = copy.deepcopy(model.state_dict())
    small = laconic.compress(model, scheme, init=init)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    kinds = [type(module) for module in small.modules() if isinstance(module, COMPRESSED)]
    assert len(kinds) == 3
    for module in small.modules():
        if isinstance(module, SubspaceLayer):
            nn.init.normal_(module.z, std=0.05)
    dense = laconic.expand(small)
    assert [type(module) for module in dense] == [type(module) for module in model]
    assert {n: p.shape for n, p in dense.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(p.requires_grad for p in dense.parameters())
    small.eval()
    dense.eval()
    torch.testing.assert_close(dense(x), small(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(laconic.expand(dense)(x), dense(x), rtol=0, atol=0)
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
def test_monarch_handles_any_size_and_batch(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    layer = MonarchLinear.project(weight, bias, 4, 3)
    for x in (torch.randn(1, inputs), torch.randn(2, 3, inputs), torch.randn(inputs, 5).T, torch.randn(inputs)):
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, bias), rtol=1e-4, atol=1e-4)
    # Each block is the best approximation of its rank.
    rows, columns = -(-outputs // 4), -(-inputs // 4)
    block, approximation = weight[rows : 2 * rows, :columns], layer.weight[rows : 2 * rows, :columns]
    left, values, right = torch.linalg.svd(block, full_matrices=False)
    torch.testing.assert_close(approximation, left[:, :3] * values[:3] @ right[:3], rtol=1e-4, atol=1e-4)


def test_projection_of_a_representable_weight_is_exact() -> None:
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


def test_truncation_of_a_large_matrix_is_near_the_best() -> None:
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


def test_projection_with_a_large_loss_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    before = counters.counts().get("layers that lose most of a weight", 0)
    laconic.compress(nn.Linear(300, 300), "lowrank:0.1", policy=ALL, init="fresh")
    assert counters.counts().get("layers that lose most of a weight", 0) == before
    laconic.compress(nn.Linear(300, 300), "lowrank:0.1", policy=ALL)
    assert counters.counts()["layers that lose most of a weight"] == before + 1
    assert "use init='fresh'" in caplog.text


def test_same_seed_gives_the_same_weights() -> None:
    state = torch.get_rng_state()
    for scheme in SCHEMES:
        first, same, other = (
            laconic.compress(fixed_network(), scheme, init="fresh", seed=seed).state_dict() for seed in (1, 1, 2)
        )
        assert all(torch.equal(first[name], same[name]) for name in first)
        assert any(not torch.equal(first[name], other[name]) for name in first)
    torch.set_rng_state(state)
    before = torch.get_rng_state()
    laconic.compress(nn.Linear(128, 128), "lowrank:0.1", policy=ALL, init="fresh")
    torch.rand(1)
    after = torch.rand(1)
    torch.set_rng_state(before)
    nn.Linear(128, 128)
    torch.rand(1)
    assert torch.equal(torch.rand(1), after)


def fixed_network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return mixed_network()
