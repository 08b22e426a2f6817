"""Mapping of a model's parameters to slots: one slot per parameter, or bundled into one per server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Slots of a model's parameters.

    Layerwise, each parameter is a slot: a codec sees the values of one layer, and a gradient is sent as soon as
    backward has computed it. Bundled, all parameters are one vector that is split into one slot per server: fewer
    frames, top-k over all layers, and nothing is sent before backward has ended.

    Args:
        pieces: Number of slots of a bundle.
    """

    shapes: Mapping[str, torch.Size]
    bundled: bool = False
    pieces: int = 1

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], *, bundled: bool = False, pieces: int = 1) -> Layout:
        return cls({name: x.shape for name, x in parameters.items()}, bundled, pieces)

    def pack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the slots of tensors with the parameters' shapes; layerwise they are views."""
        if not self.bundled:
            return {name: tensors[name].detach() for name in self.shapes}
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in self.shapes])
        # Two dimensions: a policy exempts vectors, as they are usually biases.
        return {f"bundle {i}": piece.reshape(1, -1) for i, piece in enumerate(flat.tensor_split(self.pieces))}

    def unpack(self, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo ``pack``; slots may have any order."""
        if not self.bundled:
            return {name: slots[name] for name in self.shapes}
        flat = torch.cat([slots[f"bundle {i}"].reshape(-1) for i in range(self.pieces)])
        parts = torch.split(flat, [shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
