"""What a model in subspaces holds beside what is exchanged, in a server and in its workers.

Only the coordinates travel. The dense weights that they move change on both sides alike: by weight decay, and when a
subspace is renewed, after an exchange whose number says so. They are in the server's checkpoints, and whoever joins
gets them once. With returns=sum they change in the workers alone, which keep them beside what else they remember and
deposit them with their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from laconic.cluster.job import Job
from laconic.errors import ConfigError
from laconic.layers import SubspaceLayer, subspaces

__all__ = ["Residents"]


class Residents:
    """The subspaces of a model whose steps are taken by a job.

    Args:
        layers: By the name of their coordinates' slot.
        job: What was agreed.
        rate: The learning rate of an iteration.
    """

    def __init__(self, layers: Mapping[str, SubspaceLayer], job: Job, rate: Callable[[int], float]) -> None:
        self.layers, self.job, self._rate = dict(layers), job, rate

    @classmethod
    def of(cls, model: nn.Module, job: Job, rate: Callable[[int], float], *, bundled: bool = False) -> Residents | None:
        """None where nothing but what is exchanged ever changes."""
        layers = {f"{name}.z" if name else "z": layer for name, layer in subspaces(model)}
        if not layers or not (job.weight_decay or any(layer.every for layer in layers.values())):
            return None
        why = ""
        if not job.update_mode.in_rounds:
            why = f"mode {job.mode}: give mode sync"
        elif job.holds_other_weights:
            why = "what comes back as weights or changes of them with a loss: give returns=gradients, or pull=none"
        elif bundled:
            why = "bundled slots: give --layerwise"
        if why:
            raise ConfigError(
                f"subspaces that are renewed, or decay, must be the same in the server and all workers, which is not "
                f"so with {why}; or take T=0 without weight decay"
            )
        return cls(layers, job, rate)

    def only(self, slots: Mapping[str, Tensor]) -> Residents:
        """Those of one of several servers."""
        return Residents({name: layer for name, layer in self.layers.items() if name in slots}, self.job, self._rate)

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
        """Slots that the next version renews, and whose momentum is that of all: not one of a worker's own steps."""
        common = self.job.sends_gradients and self.job.every == 1
        return [name for name, layer in self.layers.items() if common and layer.due()]

    def after(self, version: int) -> list[str]:
        """Follow the exchange that made this version; slots that were renewed."""
        first, decay = (version - 1) * self.job.every, 0.0
        if self.job.weight_decay:
            rates = sum(self._rate(first + step) for step in range(self.job.every))
            decay = rates * self.job.weight_decay / (1 - self.job.momentum)
        return [name for name, layer in self.layers.items() if layer.advance(self.job.every, decay=decay)]
