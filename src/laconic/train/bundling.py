"""How a model's parameters become slots: one each, or bundled into a few large ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Slots of a model's parameters.

    Layer by layer each parameter is a slot of its own: its codec sees one kind of numbers, and it leaves as soon as
    backward has made it. Bundled, all are one vector, cut into as many slots as there are servers: fewer frames, one
    choice of the largest values over all layers, and nothing leaves before backward ends.

    Args:
        shapes: The parameters' shapes by name.
        bundled: Whether they travel as one.
        pieces: Slots of a bundle.
    """

    shapes: Mapping[str, torch.Size]
    bundled: bool = False
    pieces: int = 1

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], *, bundled: bool = False, pieces: int = 1) -> Layout:
        return cls({name: x.shape for name, x in parameters.items()}, bundled, pieces)

    def pack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Slots from tensors of the parameters' shapes; views where each is its own."""
        if not self.bundled:
            return {name: tensors[name].detach() for name in self.shapes}
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in self.shapes])
        # Two dimensions: a policy takes vectors for biases, and leaves them as they are.
        return {f"bundle {i}": piece.reshape(1, -1) for i, piece in enumerate(flat.tensor_split(self.pieces))}

    def unpack(self, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The reverse; slots may come in any order."""
        if not self.bundled:
            return {name: slots[name] for name in self.shapes}
        flat = torch.cat([slots[f"bundle {i}"].reshape(-1) for i in range(self.pieces)])
        parts = torch.split(flat, [shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
