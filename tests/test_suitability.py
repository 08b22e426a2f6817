"""Verdicts on codecs and optimizers: which pairs are refused, which are not, and what is advised instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laconic.codecs import parse
from laconic.suitability import NAMES, VERDICTS, alternatives, moments, verdict

ADAM_LIKE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Adafactor")


def matrix():
    return [nn.Parameter(torch.ones(4, 4))]


def unknown(state_key, **options):
    """Return a stepped optimizer of an unknown class that keeps one tensor a parameter."""

    class Unheard(torch.optim.Optimizer):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter][state_key] = torch.zeros_like(parameter)

    optimizer = Unheard(matrix(), {"lr": 0.1} | options)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", ADAM_LIKE)
def test_adaptive_optimizers_of_torch_have_adams_moments(name):
    assert moments(getattr(torch.optim, name)(matrix())) == "adam"


def test_momentum_of_sgd_is_read_from_its_parameter_groups():
    assert moments(torch.optim.SGD(matrix(), lr=0.1)) == "none"
    second_group = [{"params": matrix()}, {"params": matrix(), "momentum": 0.5}]
    assert moments(torch.optim.SGD(second_group, lr=0.1)) == "momentum"


def test_optimizers_named_lion_have_momentum_and_those_named_muon_are_of_their_own_kind():
    class Lion8bit(torch.optim.Optimizer):
        pass

    class MuonWithAuxAdam(torch.optim.Optimizer):
        pass

    assert moments(Lion8bit(matrix(), {"betas": (0.9, 0.99)})) == "momentum"
    assert moments(torch.optim.Muon(matrix())) == moments(MuonWithAuxAdam(matrix(), {})) == "muon"


def test_unknown_optimizers_are_judged_by_options_and_state():
    assert moments(unknown("exp_avg_sq")) == moments(unknown("x", betas=(0.9, 0.999))) == "adam"
    assert moments(unknown("momentum_buffer")) == moments(unknown("x", momentum=0.9)) == "momentum"
    assert moments(unknown("x")) is None and verdict("ef|topk:0.01", unknown("x")) is None


@pytest.mark.parametrize("spec", ["none", "bf16", "qsgd:4", "qsgd:8", "ef|qsgd:4", "ef|thc:4", "shared:8", "union"])
@pytest.mark.parametrize("memory", ["none", "momentum", "adam"])
def test_quantizers_and_lossless_codecs_suit_every_optimizer_but_muon(spec, memory):
    assert verdict(spec, memory) is None


@pytest.mark.parametrize("spec", ["none", "bf16", "qsgd:8", "ef|thc:6", "shared:8", "union", "ef|powersgd:4"])
def test_gradients_of_six_bits_and_more_suit_muon(spec):
    assert verdict(spec, "muon") is None


@pytest.mark.parametrize("spec", ["qsgd:4", "ef|qsgd:4", "thc:4", "ef:0.5|thc:4", "ef|sign", "onebit", "terngrad"])
def test_gradients_of_few_bits_do_not_suit_muon_and_eight_bits_or_changes_are_advised(spec):
    advice = verdict(spec, torch.optim.Muon(matrix()))
    assert "does not suit Muon" in advice and "laconic.LocalSGD(" in advice and "attach 'qsgd:8'" in advice


@pytest.mark.parametrize(
    "spec, unsuited",
    [
        ("ef|topk:0.01|qsgd:4", {"momentum", "adam"}),
        ("ef|topk:0.1", {"momentum", "adam"}),
        ("ef|threshold:0.1", {"momentum", "adam"}),
        ("ef|randk:0.1", {"momentum", "adam"}),
        ("randk:0.1", {"momentum", "adam"}),
        ("topk:0.01", {"none", "momentum", "adam"}),
        ("randk:0.1,scale=false", {"none", "momentum", "adam"}),
        ("momentum:0.9|topk:0.01", {"momentum", "adam"}),
        ("momentum:0.9|qsgd:4", {"momentum", "adam"}),
        ("ef|sign", {"adam"}),
        ("sign", {"adam"}),
        ("onebit", {"adam"}),
        ("ef|powersgd:4", {"adam"}),
    ],
)
def test_sparse_and_biased_codecs_do_not_suit_moments(spec, unsuited):
    assert {memory for memory in ("none", "momentum", "adam") if verdict(spec, memory)} == unsuited
    assert verdict(spec, "muon") or "momentum" not in unsuited  # Muon has momentum


def test_advice_names_specs_that_parse_and_suit():
    sgd, adamw = torch.optim.SGD(matrix(), lr=0.1, momentum=0.8), torch.optim.AdamW(matrix())
    advice = verdict("ef|topk:0.01|qsgd:4", sgd)
    assert "LocalSGD(model, optimizer, every=1, codec='ef|topk:0.01|qsgd:4'" in advice
    assert "attach 'momentum:0.8|topk:0.01|qsgd:4'" in advice
    assert "momentum:" not in verdict("ef|topk:0.01|qsgd:4", adamw)
    assert verdict("momentum:0.9|topk:0.01", sgd).endswith("Set the optimizer's momentum to 0.")
    assert "'ef|sign:128'" in verdict("sign:128", adamw)
    assert "'ef|topk:0.01'" in verdict("topk:0.01", "none")
    parse("momentum:0.8|topk:0.01|qsgd:4")
    assert verdict("momentum:0.8|topk:0.01|qsgd:4", "none") is None


def test_alternatives_suit_the_optimizer_and_those_without_one_suit_all():
    assert {memory for _, memory in VERDICTS} == set(NAMES)
    assert not any(verdict(spec, memory) for memory in NAMES for spec in (*alternatives(memory), *alternatives()))
