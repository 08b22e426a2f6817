"""A worker's copy of the model: its parameters as slots, its optimizer, and how replies change it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from laconic import kernels
from laconic.cluster.job import Job
from laconic.cluster.protocol import Frame
from laconic.frames import decode
from laconic.optim import SGD, Schedule
from laconic.train.bundling import Layout
from laconic.train.subspace_state import SubspaceState
from laconic.train.task import Task
from laconic.wire import Buffer

__all__ = ["Replica"]

log = logging.getLogger("laconic")


class Replica:
    """The model of one worker.

    Args:
        layout: Mapping of parameters to slots; default: one slot per parameter.
    """

    def __init__(self, task: Task, job: Job, schedule: Schedule, layout: Layout | None = None) -> None:
        self.task, self.job, self.schedule = task, job, schedule
        self.parameters = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
        self.layout = layout or Layout.of(self.parameters)
        self.slots = tuple(self.layout.pack(self.parameters))
        self.optimizer = SGD(momentum=job.momentum, weight_decay=job.weight_decay)
        self.subspaces = SubspaceState.of(task.model, job, schedule, bundled=self.layout.bundled)
        self._before_local_steps: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.parameters.items()}

    def is_finite(self) -> bool:
        """Whether all parameters, and the dense weights of subspaces, are finite."""
        dense = {} if self.subspaces is None else self.subspaces.tensors()
        weights = (x.reshape(-1) for x in (*self.tensors().values(), *dense.values()))
        return all(kernels.backend_for(x).all_finite(x) for x in weights)

    @torch.no_grad()
    def set(self, weights: Mapping[str, Tensor]) -> None:
        for name, x in weights.items():
            self.parameters[name].copy_(x)

    def load(self, frames: Sequence[Frame]) -> None:
        """Replace the weights by those of a reply, one frame per slot; each is decoded as it arrives."""
        decoded = (decode(frame, device=self.task.device) for frame in frames)
        self.set(self.layout.unpack(dict(zip(self.slots, decoded, strict=True))))

    def load_snapshot(self, frames: Sequence[Frame], version: int) -> tuple[dict[str, Tensor], Sequence[Frame]]:
        """Load weights and subspaces of a server's snapshot; return the optimizer's state and the remaining frames."""
        count = len(self.slots)
        self.load(frames[:count])
        optimizer_state = dict(zip(self.slots, map(decode, frames[count : 2 * count]), strict=False))
        rest = frames[2 * count :]
        if self.subspaces is not None:
            self.subspaces.load(dict(zip(self.slots, map(decode, rest[:count]), strict=True)), version)
            rest = rest[count:]
        return optimizer_state, rest

    def upload_tensors(self) -> list[Tensor]:
        """Return the weights before local steps, then the optimizer's state and the subspaces if there are any."""
        weights = self._before_local_steps if self.job.every > 1 and self._before_local_steps else self.tensors()
        tensors = list(self.layout.pack(weights).values())
        if (self.job.every == 1 and self.job.momentum) or self.subspaces is not None:
            state = self.optimizer.state_dict() if self.job.every == 1 else {}  # momentum of local steps stays local
            tensors += [state.get(name, torch.zeros_like(x)) for name, x in zip(self.slots, list(tensors), strict=True)]
        if self.subspaces is not None:
            dense = self.subspaces.tensors()
            tensors += [dense.get(name, torch.zeros(1)) for name in self.slots]
        return tensors

    def begin_local_steps(self) -> None:
        self._before_local_steps = {name: p.detach().clone() for name, p in self.parameters.items()}

    def end_local_steps(self) -> None:
        self._before_local_steps = {}

    def local_step(self, iteration: int) -> None:
        """Apply the gradients of the last backward."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.optimizer.step(self.tensors(), gradients, lr=self.schedule(iteration))

    def local_result(self) -> dict[str, Tensor]:
        """Return the slots to push after local steps: the weights or their changes."""
        weights = self.tensors()
        if self.job.sends != "weights":
            weights = {name: x - self._before_local_steps[name] for name, x in weights.items()}
        return self.layout.pack(weights)

    @torch.no_grad()
    def undo_local_steps(self, number: int) -> None:
        """Go back to the weights before the local steps, because all workers drop this round."""
        self.set(self._before_local_steps)
        if not all(bool(torch.isfinite(x).all()) for x in self.optimizer.state_dict().values()):
            log.warning("worker %d: its momentum is not finite and is reset", number)
            self.optimizer.load_state_dict({})

    @torch.no_grad()
    def apply(self, frames: Mapping[str, Buffer], sequence: int) -> None:
        """Apply the reply of an exchange: gradients, sums or changes of the weights."""
        if self.job.reply_kind.workers_step and self.job.every == 1:
            self._step(frames, self.schedule(sequence - 1))
            return
        for name, change in self._decode(frames).items():
            weights = self.parameters[name]
            if self.job.every > 1:
                weights.copy_(self._before_local_steps[name])
            weights.add_(change)

    def _step(self, frames: Mapping[str, Buffer], rate: float) -> None:
        """Take the same optimizer step as the server."""
        slots = self.layout.pack(self.parameters)
        self.optimizer.step_frames(slots, frames, lr=rate)
        if self.layout.bundled:  # layerwise, the slots are views of the parameters
            self.set(self.layout.unpack(slots))

    def renew_subspaces(self, sequence: int) -> list[str]:
        """Renew the subspaces that are due after an exchange; return their slots, whose momentum is dropped."""
        if self.subspaces is None:
            return []
        if self.job.reply_kind.workers_step:  # otherwise the server has done this before it sent its weights
            self.optimizer.spend(self.tensors(), self.subspaces.spending(), lr=self.schedule(sequence))
        slots = self.subspaces.after(sequence)
        self.optimizer.forget(slots)
        return slots

    def _decode(self, frames: Mapping[str, Buffer]) -> dict[str, Tensor]:
        return self.layout.unpack({name: decode(frame, device=self.task.device) for name, frame in frames.items()})
