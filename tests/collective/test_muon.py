"""muon: which parameters get which optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laconic
from ranks import LogCapture


class Language(nn.Module):
    def __init__(self, *, tied=False, vocabulary=50):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.up = nn.Linear(16, 64)
        self.norm = nn.LayerNorm(64)
        self.down = nn.Linear(64, 16, bias=False)
        self.conv = nn.Conv1d(16, 16, 3, bias=False)
        self.head = nn.Linear(16, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def names(named):
    return [name for name, _ in named]


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_matrices_are_separated_from_embedding_head_and_others(tied):
    split = laconic.split_parameters(Language(tied=tied))
    assert names(split.matrices) == ["up.weight", "down.weight"]
    assert names(split.embeddings) == ["embedding.weight"]
    assert names(split.head) == ([] if tied else ["head.weight"])
    assert names(split.others) == ["up.bias", "norm.weight", "norm.bias", "conv.weight"]


def test_head_is_detected_by_its_size_or_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    assert names(laconic.split_parameters(model).matrices) == ["0.weight", "1.weight"]
    split = laconic.split_parameters(model, head="1")
    assert names(split.head) == ["1.weight", "1.bias"] and names(split.matrices) == ["0.weight"]
    with pytest.raises(laconic.ConfigError, match="head must name a module or parameter of the model, got 'lm_head'"):
        laconic.split_parameters(model, head="lm_head")


def test_muon_gets_the_matrices_and_adamw_the_rest(caplog):
    model = Language()
    model.up.bias.requires_grad_(False)
    with LogCapture() as captured, caplog.at_level("INFO", "laconic"):
        muon, adamw = laconic.muon(model, lr=0.1, adamw_lr=0.01, weight_decay=0.2)
    assert type(muon) is torch.optim.Muon and type(adamw) is torch.optim.AdamW
    assert {id(p) for group in muon.param_groups for p in group["params"]} == {
        id(model.up.weight),
        id(model.down.weight),
    }
    assert [group["lr"] for group in muon.param_groups] == [0.1]
    assert all(group["nesterov"] and group["weight_decay"] == 0.2 for group in muon.param_groups)
    held = {id(p) for group in adamw.param_groups for p in group["params"]}
    rest = (model.embedding.weight, model.norm.weight, model.norm.bias, model.conv.weight, model.head.weight)
    assert held == {id(p) for p in rest}
    assert adamw.param_groups[0]["betas"] == (0.9, 0.95) and adamw.param_groups[0]["lr"] == 0.01
    assert captured.has("matrices: up.weight, down.weight; embeddings: embedding.weight; head: head.weight")


def test_muon_teaches_what_to_do_without_matrices_or_without_torch_support(monkeypatch):
    with pytest.raises(laconic.ConfigError, match="no hidden matrices for Muon"):
        laconic.muon(nn.Conv1d(2, 2, 3))
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(laconic.ConfigError, match=r"from 2.9 on, and this is torch .*: upgrade torch, or use torch"):
        laconic.muon(Language())
