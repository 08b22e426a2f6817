"""LSTMs and GRUs whose matrices are trained in a compressed space."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RECURRENT", "CompressedRecurrent", "as_linear"]

RECURRENT: tuple[type[nn.RNNBase], ...] = (nn.LSTM, nn.GRU)
"""Subclasses may do anything in forward, so they are not included."""


def as_linear(weight: Tensor) -> nn.Linear:
    """Return a Linear without bias that has this matrix, which schemes know how to compress."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    return linear


class CompressedRecurrent(nn.Module):
    """An LSTM or GRU some of whose matrices are those of compressed layers.

    A step computes the matrices once and calls torch's own kernels with them: the time of a sequence hardly changes,
    and what is trained, sent and stored is compressed.

    Args:
        layer: The dense LSTM or GRU; what is not replaced is shared with it.
        matrices: Compressed layers by the name of the matrix, such as ``weight_hh_l0``.
    """

    def __init__(self, layer: nn.RNNBase, matrices: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.settings = {name: getattr(layer, name) for name in SETTINGS} | {"proj_size": layer.proj_size}
        self.kind = type(layer)
        self.matrices = nn.ModuleDict(matrices)
        kept = {name: p for name, p in layer.named_parameters(recurse=False) if name not in matrices}
        self.rest = nn.ParameterDict(kept)
        self._order = tuple(layer._flat_weights_names)
        # Not a submodule: it has no parameters of its own, and is only called.
        object.__setattr__(self, "_empty", self._build(device="meta"))

    def _build(self, **where: Any) -> nn.RNNBase:
        settings = dict(self.settings)
        if self.kind is not nn.LSTM:
            settings.pop("proj_size")
        return self.kind(**settings, **where)

    def weights(self) -> list[Tensor]:
        """Return all tensors in torch's order."""
        computed: dict[str, Any] = {name: layer.weight for name, layer in self.matrices.items()}
        return [computed[name] if name in computed else self.rest[name] for name in self._order]

    def forward(self, x: Any, hx: Any = None) -> Any:
        called: nn.RNNBase = copy.copy(self._empty)  # type: ignore[assignment]  # threads may call this layer at once
        called.training = self.training
        called._flat_weights = self.weights()  # type: ignore[assignment]
        return called(x, hx)

    @torch.no_grad()
    def dense(self) -> nn.Module:
        """Return a plain LSTM or GRU that computes the same."""
        weights = self.weights()
        layer = self._build(device=weights[0].device, dtype=weights[0].dtype)
        for name, weight in zip(self._order, weights, strict=True):
            getattr(layer, name).copy_(weight)
        return layer

    def extra_repr(self) -> str:
        sizes = f"{self.settings['input_size']}, {self.settings['hidden_size']}, layers={self.settings['num_layers']}"
        return f"{self.kind.__name__}, {sizes}"


SETTINGS = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
