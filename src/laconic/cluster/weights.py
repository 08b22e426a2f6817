"""What the server holds, and what an update does to it: parameters, optimizer, and what workers are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.channels import Channel
from laconic.cluster.homomorphic.server import UNUSABLE, pack_scales
from laconic.cluster.job import Job, Slots
from laconic.frames import decode
from laconic.wire import Buffer

__all__ = ["RENEWED", "Optimizer", "Resident", "Weights"]

RENEWED = "its directions were drawn anew, and along the new ones it would mean something else"
"""Why memories of slots end with what belongs to these."""


class Optimizer(Protocol):
    """Changes parameters in place by a gradient; deterministic, with a state that can be saved."""

    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, lr: float) -> None: ...
    def step_frames(self, parameters: Mapping[str, Tensor], frames: Mapping[str, Buffer], *, lr: float) -> None: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...
    def forget(self, slots: Iterable[str]) -> None: ...
    def spend(self, parameters: Mapping[str, Tensor], slots: Iterable[str], *, lr: float) -> None: ...


class Resident(Protocol):
    """What belongs to slots and is not exchanged: all who hold it change it alike, by what they were told."""

    def bind(self, parameters: Mapping[str, Tensor]) -> None:
        """Have these tensors for the slots' values."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """By slot; not all slots have one."""
        ...

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Be where the exchange of that number begins."""
        ...

    def spending(self) -> list[str]:
        """Slots that this update renews, and whose momentum is that of all."""
        ...

    def after(self, version: int) -> list[str]:
        """Follow an update, by which the version became this; slots whose momentum means nothing any more."""
        ...


class Weights:
    """The parameters of a job and all that changes with them. Whoever calls has the lock.

    Args:
        job: What was agreed.
        parameters: Float32 tensors by name; changed in place.
        optimizer: Takes the steps.
        rate: The learning rate of an update, by its number.
        resident: What belongs to slots and is not exchanged.
    """

    def __init__(
        self,
        job: Job,
        parameters: Mapping[str, Tensor],
        optimizer: Optimizer,
        rate: Callable[[int], float],
        resident: Resident | None = None,
    ) -> None:
        self.job = job
        self.slots = Slots.of(parameters)
        self.parameters = {name: x.detach().to(torch.float32).contiguous() for name, x in parameters.items()}
        self.version = 0
        """Updates applied so far; in a synchronous job also the number of the round."""
        self._optimizer, self._rate, self._resident = optimizer, rate, resident
        if resident is not None:
            resident.bind(self.parameters)
        self._channel = job.pull_channel()
        self._held = self.copy() if job.holds_other_weights else {}
        """What all workers of a synchronous job hold, where it is not the parameters."""
        self.deposited = 0
        """With returns=sum: the version that the parameters are of, which is not always the newest."""
        self._scales: dict[str, Tensor] = {}
        """The same: what the integers of the next round are on, as bits."""

    def copy(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.parameters.items()}

    @property
    def resident(self) -> dict[str, Tensor]:
        return {} if self._resident is None else self._resident.tensors()

    @property
    def like(self) -> list[Tensor]:
        return list(self.parameters.values())

    # ------------------------------------------------------------------------------------------------------- updates

    def update(self, combined: Mapping[str, Tensor]) -> Iterator[bytes]:
        """One synchronous update: the frames that tell all workers of it, slot by slot, to be sent as they come."""
        if self.job.returns == "gradients":
            # Server and workers take the same step, so it is what was decoded that counts, not what was meant.
            frames = []
            for i, (name, x) in enumerate(combined.items()):
                frames.append(self._encode(i, name, x))
                yield frames[-1]
            self.follow(frames)
            return
        self.step(combined)
        for i, (name, weights) in enumerate(self.parameters.items()):
            if self.job.returns == "delta":
                yield self._change(i, name, self._held, self._channel)
                continue
            frame = self._encode(i, name, weights)
            if self._held:
                self._held[name].copy_(decode(frame, device=weights.device))
            yield frame

    def follow(self, frames: Sequence[bytes]) -> None:
        """Take the step that these frames tell workers to take."""
        told = dict(zip(self.parameters, frames, strict=True))
        if self.job.sends == "gradients":
            self._optimizer.step_frames(self.parameters, told, lr=self._rate(self.version))
            self._spend(told)
            return
        self.step({name: decode(frame, device=self.parameters[name].device) for name, frame in told.items()})

    def step(self, update: Mapping[str, Tensor], *, missed: int = 0) -> None:
        """A gradient goes through the optimizer; changes of weights are added, weights take the place of weights."""
        if self.job.sends == "gradients":
            iteration = self.version if self.job.mode == "sync" else self.version // self.job.workers
            rate = self._rate(iteration)
            self._optimizer.step(self.parameters, update, lr=rate / (1 + missed) if self.job.discount else rate)
            self._spend(update)
            return
        # Without rounds there is no mean of all workers' changes: each counts for its part of one.
        part = 1 if self.job.mode == "sync" else self.job.workers
        for name, x in update.items():
            if self.job.sends == "changes":
                self.parameters[name].add_(x, alpha=1 / part)
            else:
                self.parameters[name].copy_(x)

    def _spend(self, updated: Iterable[str]) -> None:
        """What momentum still means of slots that this update renews; before anybody is told of the update."""
        if self._resident is not None:
            spending = set(updated).intersection(self._resident.spending())
            self._optimizer.spend(self.parameters, spending, lr=self._rate(self.version + 1))

    def settle(self) -> None:
        """After an update, once the version says so: what is not exchanged follows it."""
        if self._resident is None or self.job.returns == "sum":  # workers hold all of it, and deposit it
            return
        renewed = self._resident.after(self.version)
        self._optimizer.forget(renewed)
        self._channel.forget(renewed, RENEWED)

    def tell(self, held: dict[str, Tensor], channel: Channel) -> tuple[bytes, ...]:
        """The weights, or how they differ from what one worker holds, which then holds more of them."""
        if self.job.returns == "delta":
            return tuple(self._change(i, name, held, channel) for i, name in enumerate(self.parameters))
        return tuple(self._encode(i, name, x) for i, (name, x) in enumerate(self.parameters.items()))

    def _change(self, slot: int, name: str, held: dict[str, Tensor], channel: Channel) -> bytes:
        x = self.parameters[name]
        frame = channel.encode(name, x - held[name], seed=self._seed(slot))
        held[name].add_(decode(frame, device=x.device))
        return frame

    def _encode(self, slot: int, name: str, x: Tensor) -> bytes:
        return self._channel.encode(name, x, seed=self._seed(slot))

    def _seed(self, slot: int) -> int:
        return (self.job.seed * 0x9E3779B1 + self.version) * len(self.slots) + slot

    # ------------------------------------------------------------------------------------- where workers hold them

    def agree(self, scales: Iterable[Tensor | None]) -> None:
        """What a round has agreed on; None leaves a slot's as they were."""
        for name, bits in zip(self.parameters, scales, strict=True):
            if bits is not None:
                self._scales[name] = bits

    @property
    def deposits(self) -> list[list[Tensor]]:
        """What a deposit may be like: the weights; the optimizer's memory; what else belongs to slots, with both."""
        like = self.like
        if self._resident is None:
            return [like, [*like, *like]]
        return [[*like, *like, *self.resident_or_nothing]]

    @property
    def resident_or_nothing(self) -> list[Tensor]:
        """One tensor for each slot."""
        held = self.resident
        return [held.get(name, torch.zeros(1)) for name in self.parameters]

    def deposit(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Take over what a worker holds, as in ``deposits``."""
        count = len(self.slots)
        for mine, x in zip(self.parameters.values(), tensors, strict=False):
            mine.copy_(x)
        if len(tensors) > count:
            self._optimizer.load_state_dict(dict(zip(self.parameters, tensors[count : 2 * count], strict=True)))
        if self._resident is not None:
            self._resident.load(dict(zip(self.parameters, tensors[2 * count :], strict=True)), version)
        self.deposited = version

    def scale_frames(self) -> list[bytes]:
        """Scales for a worker that must go on where the others do; unusable ones where there are none yet."""
        return [
            bytes(pack_scales(self._scales.get(how.name, torch.full((how.num_scales,), UNUSABLE, dtype=torch.int32))))
            for how in self.job.slot_sums(self.parameters)
        ]

    # --------------------------------------------------------------------------------------------------------- state

    def snapshot(self) -> list[Tensor]:
        """What a worker must hold to be where the others are; where workers take the steps, the optimizer's memory,
        too: a second tensor for every slot. Where there is more that belongs to slots, that is a third.
        """
        tensors = list((self._held or self.parameters).values())
        if self.job.returns in ("gradients", "sum") or self._resident is not None:
            memory = self._optimizer.state_dict()
            tensors += [memory.get(name, torch.zeros_like(x)) for name, x in self.parameters.items()]
        if self._resident is not None:
            tensors += self.resident_or_nothing
        return tensors

    def state(self) -> dict[str, Tensor]:
        """Everything that must survive."""
        tensors = {f"parameter/{name}": x for name, x in self.copy().items()}
        tensors |= {f"optimizer/{name}": x for name, x in self._optimizer.state_dict().items()}
        tensors |= {f"channel/{name}": x for name, x in self._channel.state_dict().items()}
        tensors |= {f"resident/{name}": x.clone() for name, x in self.resident.items()}
        tensors |= {f"scales/{name}": x.clone() for name, x in self._scales.items()}
        return tensors | {f"held/{name}": x.clone() for name, x in self._held.items()}

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        parts: dict[str, dict[str, Tensor]] = {
            part: {} for part in ("parameter", "optimizer", "channel", "held", "resident", "scales")
        }
        for key, x in tensors.items():
            part, _, name = key.partition("/")
            parts[part][name] = x
        for mine, part in ((self.parameters, "parameter"), (self._held, "held")):
            for name, x in parts[part].items():
                mine[name].copy_(x)
        self._optimizer.load_state_dict(parts["optimizer"])
        self._channel.load_state_dict(parts["channel"])
        self._scales = {name: x.clone() for name, x in parts["scales"].items()}
        self.version = self.deposited = int(meta["version"])
        if self._resident is not None:
            self._resident.load(parts["resident"], self.version)
