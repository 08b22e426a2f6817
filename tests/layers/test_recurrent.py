"""Matrices of LSTMs and GRUs are compressed like those of other layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.layers import CompressedRecurrent, layout


class Reader(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.head = kind(96, 64, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.rnn(x)[0].mean(1))
        return y


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("scheme", ["lowrank:0.2", "monarch:0.2", "subspace:0.2", "hashed:0.2"])
def test_recurrent_layer_trains_in_few_numbers_and_expands(kind: type[nn.RNNBase], scheme: str) -> None:
    torch.manual_seed(0)
    model = laconic.compress(Reader(kind), scheme, init="fresh")
    assert isinstance(model.rnn, CompressedRecurrent) and 0.15 < layout(model).rho < 0.3
    assert {name for name in layout(model).exempt if "bias" not in name} == {"head.weight"}
    x = torch.randn(4, 7, 96)
    y = model(x)
    y.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.rnn.parameters() if p.requires_grad)
    dense = laconic.expand(model)
    assert type(dense.rnn) is kind and torch.allclose(dense(x), y, atol=1e-6)
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), y)


def test_single_matrix_of_a_recurrent_layer_can_stay_dense() -> None:
    model = laconic.compress(Reader(nn.LSTM), "lowrank:0.2", init="fresh", policy={"rnn.weight_hh*": "dense"})
    kept = {slot.name for slot in layout(model).slots if slot.reason.startswith("matches")}
    assert kept == {f"rnn.weight_hh_l{i}{suffix}" for i in (0, 1) for suffix in ("", "_reverse")}
    packed = nn.utils.rnn.pack_sequence([torch.randn(5, 96), torch.randn(3, 96)])
    out, (h, c) = model.rnn(packed)
    assert out.data.shape == (8, 128) and h.shape == c.shape == (4, 2, 64)
