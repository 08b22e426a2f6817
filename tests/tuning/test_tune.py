"""Short trainings of a model by several candidates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.errors import ConfigError, FileError
from laconic.plan.candidates import Candidate
from laconic.plan.evidence import load_evidence
from laconic.policy import Policy
from laconic.tuning import SimulatedExchange, Tuning, tune
from laconic.tuning.search import family_of_model, optimizer_name
from laconic.tuning.training import Batches, Training


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return examples whose class is the largest of four sums."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
    return x, x.view(16, 4, 16).sum(2).argmax(1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.2)


def tuned(**options: Any) -> Tuning:
    return tune(model(), batch, sgd, **{"steps": 24, "candidates": ["qsgd:8"], **options})


def test_destructive_codec_is_found_out_and_a_gentle_one_kept() -> None:
    result = tuned(candidates=["qsgd:8", "topk:0.002", "local 4 ef|qsgd:4"], steps=40, rate=1e4, give_up=2.0)
    plain = result.outcomes["none"].loss
    assert result.outcomes["topk:0.002"].loss > 1.2 * plain > result.outcomes["qsgd:8"].loss
    assert result.codec == "local 4 ef|qsgd:4" and "laconic.LocalSGD(model, optimizer, every=4" in result.code
    rows = {row.codec: row for row in result.recommendation.rows}
    assert rows["topk:0.002"].objection and rows["qsgd:8"].evidence is not None
    assert result.outcomes["local 4 ef|qsgd:4"].nbytes < result.outcomes["qsgd:8"].nbytes / 4
    assert result.outcomes["topk:0.002"].error > 0.5 > result.outcomes["qsgd:8"].error > 0


def test_training_without_a_codec_is_plain_data_parallelism() -> None:
    """Two simulated workers with float32 equal one with the mean of their gradients."""
    start, reference = model(), model()
    training = Training(
        start, sgd, Batches(batch), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), held_out=[batch(99)],
        workers=2, steps=8, seed=0,
    )  # fmt: skip
    optimizer = sgd(reference)
    for step in range(8):
        optimizer.zero_grad()
        for worker in range(2):
            x, y = batch(2 * step + worker)
            (nn.functional.cross_entropy(reference(x), y) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    x, y = batch(99)
    expected = float(nn.functional.cross_entropy(reference(x), y).detach())
    assert training.run(Candidate("none")).loss == pytest.approx(expected, rel=1e-5)
    # One local step of plain SGD and a mean of the changes is the same.
    assert training.run(Candidate.parse("local 1 none")).loss == pytest.approx(expected, rel=1e-5)
    assert torch.equal(start[0].weight, model()[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("spec", ["none", "ef|thc:4", "qsgd:8", "ef|powersgd:4"])
def test_exchange_returns_the_mean_and_reports_its_error(spec: str) -> None:
    exchange = SimulatedExchange(spec, 3, Policy(min_numel=0))
    xs = [torch.randn(64, 64, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    total = sum(exchange.mean("w", xs, seed) for seed in range(10)) / 10
    exact = sum(xs) / 3
    limit = {"none": 1e-10, "qsgd:8": 1e-3, "ef|thc:4": 0.02, "ef|powersgd:4": 0.9}[spec]
    assert float((total - exact).square().sum() / exact.square().sum()) <= limit  # type: ignore[union-attr]
    assert exchange.nbytes > 0 and (exchange.slots["w"].mean_error > 0) == (spec != "none")


def test_interrupted_tuning_goes_on_from_its_file(tmp_path: Path) -> None:
    path, seen = tmp_path / "mine.json", []

    def interrupt(label: str, done: int, total: int) -> None:
        seen.append(label)
        if label == "qsgd:8":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(path=path, notify=interrupt)
    assert {one["label"] for one in json.loads(path.read_text())["outcomes"]} == {"none", "none, other order"}
    seen.clear()
    result = tuned(path=path, notify=lambda label, done, total: seen.append(label))
    assert set(seen) == {"qsgd:8", "done"} and result.outcomes.keys() == tuned().outcomes.keys()
    assert [one.codec for one in load_evidence(path)] == ["qsgd:8"]
    with pytest.raises(FileError, match="holds trainings of other settings"):
        tuned(path=path, steps=25)


def test_growing_residuals_get_a_rule_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.tuning.search.FRAGILE", 0.0)
    result = tuned(candidates=["ef|qsgd:2"], rate=1e5, give_up=90.0)
    assert result.codec == "ef|qsgd:2" and "ef|qsgd:2, by layer" in result.outcomes
    by_layer, whole = result.outcomes["ef|qsgd:2, by layer"], result.outcomes["ef|qsgd:2"]
    assert by_layer.slots["0.weight"]["codec"] == "qsgd:8" and by_layer.error < whole.error
    assert ("rules=" in result.code) == (by_layer.loss <= whole.loss)


def test_diverging_candidate_is_reported_and_not_recommended() -> None:
    wild = tune(
        model(), batch, sgd, steps=24, candidates=["momentum:0.999|topk:0.5"], rate=1e5, give_up=50.0,
        loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]) * 20,
    )  # fmt: skip
    outcome = wild.outcomes["momentum:0.999|topk:0.5"]
    assert wild.codec == "none" and (not math.isfinite(outcome.loss) or outcome.loss > wild.outcomes["none"].loss)


def test_family_and_optimizer_are_recognised() -> None:
    assert family_of_model(nn.TransformerEncoderLayer(8, 2)) == "transformer" and family_of_model(model()) == "mlp"
    assert family_of_model(nn.LSTM(4, 4)) == "recurrent" and family_of_model(nn.Conv2d(1, 1, 3)) == "convolutional"
    module = nn.Linear(4, 4)
    assert optimizer_name([torch.optim.AdamW(module.parameters())]) == "adamw"
    assert optimizer_name([torch.optim.SGD(module.parameters(), 0.1)]) == "sgd"
    assert optimizer_name([torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)]) == "momentum"
    assert optimizer_name(laconic.muon(nn.Sequential(module, nn.Linear(4, 4)))) == "muon"


@pytest.mark.parametrize("options, message", [
    ({"workers": 1}, "workers must be at least 2"), ({"steps": 3}, "steps must be at least 8"),
    ({"candidates": ["gzip"]}, "do not change what is learned"), ({"candidates": ["nix"]}, "unknown stage"),
])  # fmt: skip
def test_invalid_argument_raises_config_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tuned(**options)
