"""State of subspace layers that is not exchanged: their dense weights, in the server and in all workers.

Only the coordinates are exchanged. The dense weights change equally on both sides: by weight decay, and when a subspace
is renewed, which the number of the exchange decides. They are part of the server's checkpoints, and a joining worker
downloads them once. With returns=sum only the workers have them; they save them and upload them with their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from laconic.cluster.job import Job
from laconic.errors import ConfigError
from laconic.layers import SubspaceLayer, subspaces

__all__ = ["SubspaceState"]


class SubspaceState:
    """The subspace layers of a model.

    Args:
        layers: Layers by the slot of their coordinates.
    """

    def __init__(self, layers: Mapping[str, SubspaceLayer], job: Job, rate: Callable[[int], float]) -> None:
        self.layers, self.job, self._rate = dict(layers), job, rate

    @classmethod
    def of(
        cls, model: nn.Module, job: Job, rate: Callable[[int], float], *, bundled: bool = False
    ) -> SubspaceState | None:
        """Return the state, or None if the dense weights never change."""
        layers = {f"{name}.z" if name else "z": layer for name, layer in subspaces(model)}
        if not layers or not (job.weight_decay or any(layer.every for layer in layers.values())):
            return None
        reason = ""
        if not job.update_mode.in_rounds:
            reason = f"mode {job.mode}: give mode sync"
        elif job.holds_other_weights:
            reason = "a lossy reply of weights or changes: give returns=gradients, or pull=none"
        elif bundled:
            reason = "bundled slots: give --layerwise"
        if reason:
            raise ConfigError(
                f"subspaces that are renewed or decay must be equal in the server and all workers, which is impossible "
                f"with {reason}; or use T=0 without weight decay"
            )
        return cls(layers, job, rate)

    def only(self, slots: Mapping[str, Tensor]) -> SubspaceState:
        """Return the state of one of several servers."""
        return SubspaceState(
            {name: layer for name, layer in self.layers.items() if name in slots}, self.job, self._rate
        )

    def bind(self, parameters: Mapping[str, Tensor]) -> None:
        for name, layer in self.layers.items():
            layer.z.data = parameters[name]

    def tensors(self) -> dict[str, Tensor]:
        return {name: layer.origin.detach() for name, layer in self.layers.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        for name, layer in self.layers.items():
            layer.origin.copy_(tensors[name])
            layer.go_to(version * self.job.every)

    def spending(self) -> list[str]:
        """Return the slots that the next version renews and whose momentum is common to all workers."""
        common = self.job.sends_gradients and self.job.every == 1
        return [name for name, layer in self.layers.items() if common and layer.due()]

    def after(self, version: int) -> list[str]:
        """Apply weight decay and renewal of the exchange that made this version; return the renewed slots."""
        first, decay = (version - 1) * self.job.every, 0.0
        if self.job.weight_decay:
            rates = sum(self._rate(first + step) for step in range(self.job.every))
            decay = rates * self.job.weight_decay / (1 - self.job.momentum)
        return [name for name, layer in self.layers.items() if layer.advance(self.job.every, decay=decay)]
