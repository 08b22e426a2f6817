"""measure: rho by counting, h by timing; unreliable times raise an error."""

from __future__ import annotations

import copy
import os
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import laconic
from laconic.errors import ConfigError, InputError, WrongResultError
from laconic.layers import LayerPolicy, Timings, timings

ALL = LayerPolicy(output=True)
ROOT = Path(__file__).resolve().parents[2]


def pair(width: int = 256, scheme: str = "lowrank:0.1") -> tuple[nn.Module, nn.Module]:
    model = nn.Linear(width, width)
    return model, laconic.compress(model, scheme, policy=ALL, init="fresh")


def test_rho_is_counted_and_models_are_not_modified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.layers.step_time.MAX_VARIATION", 1e9)
    model, small = pair()
    before = copy.deepcopy([*model.state_dict().values(), *small.state_dict().values()])
    rho, h = laconic.measure(model, small, torch.randn(8, 256), repeat=3)
    assert rho == (12 * 512 + 256) / (256 * 256 + 256) and h > 0
    after = [*model.state_dict().values(), *small.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    for batch in ((torch.randn(8, 256), torch.randint(256, (8,))), (torch.randn(8, 256), torch.randn(8, 256))):
        assert laconic.measure(model, small, batch, repeat=3)[0] == rho
    assert laconic.measure(model, small, batch, loss=F.l1_loss, repeat=3)[0] == rho


def test_h_is_the_ratio_of_the_fastest_steps() -> None:
    steady = Timings((1.0, 1.2, 4.0, 1.1), (0.5, 0.7, 0.6, 0.5), 0.1, "cpu")
    assert steady.h == 0.5 and steady.h_median == pytest.approx(0.55 / 1.15)
    assert steady.variation == pytest.approx(0.1083, abs=1e-3)  # of 0.5, 0.5, 0.6, over their mean
    assert steady.values()["turns"] == 4
    busy = Timings((1.0, 1.5, 2.0, 4.0), (1.0, 1.0, 1.0, 1.0), 0.1, "cpu")
    assert busy.variation == pytest.approx(1 / 3)


def test_varying_step_times_raise_wrong_result_error(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 1.0, 2.0, 2.0, 5.0, 5.0, 6.0, 6.0, 11.0, 11.0, 12.0])
    monkeypatch.setattr("laconic.layers.step_time._clock", lambda _: ("cpu", lambda: next(times)))
    model, small = pair(64)
    with pytest.raises(WrongResultError, match="step times vary by 67 %, more than 20 %, over 3 steps"):
        laconic.measure(model, small, torch.randn(2, 64), repeat=3)


def test_wrong_arguments_raise() -> None:
    model, small = pair(64)
    with pytest.raises(ConfigError, match="repeat must be at least 3, got 2"):
        timings(model, small, torch.randn(2, 64), repeat=2)
    with pytest.raises(InputError, match="batch must be a tensor of inputs, or inputs and targets"):
        timings(model, small, "images")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the models are on cpu and meta"):
        timings(model, copy.deepcopy(small).to("meta"), torch.randn(2, 64))
    with pytest.raises(ConfigError, match="a step can be a graph on a CUDA device only, the models are on cpu"):
        timings(model, small, torch.randn(2, 64), graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["monarch:0.1", "lowrank:0.1"])
def test_wide_layer_in_one_launch_is_faster_than_the_dense_one_on_a_gpu(scheme: str) -> None:
    model, small = (each.cuda() for each in pair(4096, scheme))
    result = timings(model, small, torch.randn(256, 4096), graph=True)
    assert result.graph and result.h < 1, result


@pytest.mark.slow
@pytest.mark.parametrize("scheme, limit", [
    ("monarch:0.2", 0.25), ("monarch:0.1", 0.12), ("lowrank:0.2", 0.25), ("lowrank:0.1", 0.12), ("subspace:0.1", 1.15),
])  # fmt: skip
def test_h_of_wide_layers(scheme: str, limit: float) -> None:
    model, small = pair(4096, scheme)
    result = min((timings(model, small, torch.randn(64, 4096), repeat=9) for _ in range(3)), key=lambda t: t.h)
    assert result.h <= limit, result


@pytest.mark.slow
def test_h_of_alexnet() -> None:
    from laconic.train import build_model

    model = build_model("alexnet", seed=0)
    small = laconic.compress(model, "monarch:0.05,conv=0.2", init="fresh")
    batch = torch.randn(16, 3, 224, 224), torch.randint(1000, (16,))
    result = timings(model, small, batch, repeat=3)
    assert result.h <= 0.45 and result.rho < 0.12, result


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_accuracy_in_a_subspace_of_a_tenth_is_within_half_a_point() -> None:
    if "LACONIC_DATA" not in os.environ:
        pytest.skip("no MNIST (set LACONIC_DATA)")
    train = runpy.run_path(str(ROOT / "examples" / "compressed_layers.py"))["train"]
    dense, small = ([train("mnist", scheme, seed)[0] for seed in range(3)] for scheme in (None, "subspace:0.1"))
    print(f"dense {dense}, subspace:0.1 {small}")
    assert sum(small) / 3 > sum(dense) / 3 - 0.5
    assert min(dense) > 97
