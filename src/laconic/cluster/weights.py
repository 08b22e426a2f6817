"""The server's weights: parameters, optimizer, pull channel, and what an update does to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic import kernels
from laconic.channels import Channel
from laconic.cluster.homomorphic.server import UNUSABLE, pack_scales
from laconic.cluster.job import Job, Slots
from laconic.errors import FileError, NonFiniteError
from laconic.frames import decode
from laconic.wire import Buffer

__all__ = ["SUBSPACE_RENEWED", "Optimizer", "Resident", "Weights"]

PORTION = 1 << 20
"""Bytes of parameters from which an update continues slot by slot: with fewer the fixed costs of a step dominate."""
SUBSPACE_RENEWED = "its subspace was drawn anew, and the residual belongs to the old one"
"""Why a channel drops residuals when a slot's subspace is renewed."""


class Optimizer(Protocol):
    """Changes parameters in place by a gradient; deterministic, with a state that can be saved."""

    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, lr: float) -> None: ...
    def step_frames(self, parameters: Mapping[str, Tensor], frames: Mapping[str, Buffer], *, lr: float) -> None: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...
    def state_shapes(self, parameters: Mapping[str, Tensor]) -> Mapping[str, torch.Size]: ...
    def moments(self) -> Mapping[str, Tensor]: ...
    def forget(self, slots: Iterable[str]) -> None: ...
    def spend(self, parameters: Mapping[str, Tensor], slots: Iterable[str], *, lr: float) -> None: ...


class Resident(Protocol):
    """Tensors of slots that are not exchanged: server and workers change them alike after each update."""

    def bind(self, parameters: Mapping[str, Tensor]) -> None:
        """Use these tensors as the slots' values."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by slot; not all slots have one."""
        ...

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Restore the state before the exchange of that number."""
        ...

    def spending(self) -> list[str]:
        """Return the slots that this update renews and whose momentum all workers share."""
        ...

    def after(self, version: int) -> list[str]:
        """Follow an update to this version; return the slots whose momentum must be dropped."""
        ...


Tensors = Mapping[str, Tensor]
Rate = Callable[[int], float]


class Weights:
    """The parameters of a job and all that changes with them. Callers hold the lock.

    Args:
        job, parameters, optimizer, learning_rate, resident: See ``Core``.
    """

    def __init__(
        self, job: Job, parameters: Tensors, optimizer: Optimizer, learning_rate: Rate, resident: Resident | None
    ) -> None:
        self.job = job
        self.slots = Slots.of(parameters)
        self.parameters = {name: x.detach().to(torch.float32).contiguous() for name, x in parameters.items()}
        self.portions = self._portions()
        """Numbers and names of the slots that are updated together."""
        self.version = 0
        """Updates applied; in a synchronous job also the number of the current exchange."""
        self.updated_at = 0.0
        """When the last update was made, on ``time.monotonic``'s clock."""
        self._optimizer, self._learning_rate, self._resident = optimizer, learning_rate, resident
        if resident is not None:
            resident.bind(self.parameters)
        self.channel = job.pull_channel()
        self.held = self.copy() if job.holds_other_weights else {}
        """The weights that all workers of a synchronous job hold, where they are not the server's."""
        self.uploaded_version = 0
        """With returns=sum: the version of the parameters, which may be older than ``version``."""
        self._scales: dict[str, Tensor] = {}
        """With returns=sum: the bits of the scales for the next round."""

    def copy(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.parameters.items()}

    def _portions(self) -> list[list[tuple[int, str]]]:
        portions, nbytes = [list[tuple[int, str]]()], 0
        for slot, (name, x) in enumerate(self.parameters.items()):
            if nbytes >= PORTION:
                portions.append([])
                nbytes = 0
            portions[-1].append((slot, name))
            nbytes += x.nbytes
        return portions

    @property
    def resident(self) -> dict[str, Tensor]:
        return {} if self._resident is None else self._resident.tensors()

    @property
    def like(self) -> list[Tensor]:
        return list(self.parameters.values())

    def step(self, update: Mapping[str, Tensor], *, staleness: int = 0) -> None:
        """Apply pushed values: gradients by the optimizer, changes by addition, weights by replacement."""
        if self.job.sends_gradients:
            rate = self._learning_rate(self.version // self.job.updates_per_exchange)
            self._optimizer.step(self.parameters, update, lr=rate / (1 + staleness) if self.job.discount else rate)
            self._spend_momentum(update)
            return
        # Without rounds there is no mean of all workers' changes: each counts for its share of one.
        share = 1 / self.job.updates_per_exchange
        for name, x in update.items():
            if self.job.sends == "changes":
                self.parameters[name].add_(x, alpha=share)
            else:
                self.parameters[name].copy_(x)

    def step_frames(self, frames: Mapping[str, bytes]) -> None:
        """Take the step that these frames make workers take."""
        if self.job.sends_gradients:
            self._optimizer.step_frames(self.parameters, frames, lr=self._learning_rate(self.version))
            self._spend_momentum(frames)
            return
        self.step({name: decode(frame, device=self.parameters[name].device) for name, frame in frames.items()})

    def _spend_momentum(self, updated: Iterable[str]) -> None:
        """Apply the remaining momentum of slots that this update renews, before the reply is made."""
        if self._resident is not None:
            renewed = set(updated).intersection(self._resident.spending())
            self._optimizer.spend(self.parameters, renewed, lr=self._learning_rate(self.version + 1))

    def complete_update(self, *, encoded: bool = False) -> None:
        """Make the next version of updated weights; raise ``NonFiniteError`` before it exists if they overflowed.

        Args:
            encoded: All parameters were encoded after the update, which raises if they are not finite.
        """
        if self.job.reply_kind.server_has_weights:  # otherwise workers upload them
            self._follow_update(self.version + 1)
            self._require_finite(but_parameters=encoded and self._resident is None)
        self.version += 1
        self.updated_at = time.monotonic()

    def _follow_update(self, version: int) -> None:
        """Let the resident tensors follow the update to a version."""
        if self._resident is not None:
            renewed = self._resident.after(version)
            self._optimizer.forget(renewed)
            self.channel.forget(renewed, SUBSPACE_RENEWED)

    def _require_finite(self, *, but_parameters: bool) -> None:
        for tensors in ({} if but_parameters else self.parameters, self.held, self.resident, self._optimizer.moments()):
            for name, x in tensors.items():
                if not _is_finite(x):
                    raise NonFiniteError(f"slot {name!r}: expected finite values, got a NaN or an infinity")

    def encode_difference(self, slot: int, name: str, held: dict[str, Tensor], channel: Channel) -> bytes:
        """Encode how a slot differs from the weights that a worker holds, and add it to these."""
        x = self.parameters[name]
        frame = channel.encode(name, x - held[name], seed=self._rounding_seed(slot))
        held[name].add_(decode(frame, device=x.device))
        return frame

    def encode_slot(self, slot: int, name: str, x: Tensor) -> bytes:
        return self.channel.encode(name, x, seed=self._rounding_seed(slot))

    def encode_parts(self, slot: int, name: str, x: Tensor) -> Sequence[memoryview]:
        """Return a frame in parts, which are valid until the next slot is encoded and while ``x`` does not change."""
        return self.channel.encode_parts(name, x, seed=self._rounding_seed(slot))

    def _rounding_seed(self, slot: int) -> int:
        return (self.job.seed * 0x9E3779B1 + self.version) * len(self.slots) + slot

    def set_scales(self, scales: Iterable[Tensor | None]) -> None:
        """Keep the scales of a round; None leaves a slot's scales unchanged."""
        for name, bits in zip(self.parameters, scales, strict=True):
            if bits is not None:
                self._scales[name] = bits

    @property
    def upload_layouts(self) -> list[list[Tensor]]:
        """Return what an upload may hold: the weights; the optimizer's state, too; with residents all three."""
        like = self.like
        if self._resident is None:
            return [like, [*like, *like]]
        return [[*like, *like, *self._resident_or_placeholder]]

    @property
    def _resident_or_placeholder(self) -> list[Tensor]:
        """Return one tensor for each slot."""
        resident = self.resident
        return [resident.get(name, torch.zeros(1)) for name in self.parameters]

    def same_upload(self, tensors: Sequence[Tensor]) -> bool:
        """Whether an upload has the weights that are here, bit for bit."""
        return all(torch.equal(mine, x) for mine, x in zip(self.parameters.values(), tensors, strict=False))

    def load_upload(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Take over a worker's weights, laid out as in ``upload_layouts``."""
        count = len(self.slots)
        for mine, x in zip(self.parameters.values(), tensors, strict=False):
            mine.copy_(x)
        if len(tensors) > count:
            self._optimizer.load_state_dict(dict(zip(self.parameters, tensors[count : 2 * count], strict=True)))
        if self._resident is not None:
            self._resident.load(dict(zip(self.parameters, tensors[2 * count :], strict=True)), version)
        self.uploaded_version = version

    def scale_frames(self) -> list[bytes]:
        """Return a frame of scales per slot for a worker that joins; ``UNUSABLE`` where there are none yet."""
        return [
            bytes(pack_scales(self._scales.get(how.name, torch.full((how.num_scales,), UNUSABLE, dtype=torch.int32))))
            for how in self.job.slot_sums(self.parameters)
        ]

    def snapshot(self) -> list[Tensor]:
        """Return the tensors that a worker needs to continue: one per slot, or several, kind after kind.

        First the weights; then the optimizer's state, where workers run the optimizer; then the resident tensors.
        """
        tensors = list((self.held or self.parameters).values())
        if self.job.reply_kind.workers_step or self._resident is not None:
            state = self._optimizer.state_dict()
            tensors += [state.get(name, torch.zeros_like(x)) for name, x in self.parameters.items()]
        if self._resident is not None:
            tensors += self._resident_or_placeholder
        return tensors

    def state(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint."""
        tensors = {f"parameter/{name}": x for name, x in self.copy().items()}
        tensors |= {f"optimizer/{name}": x for name, x in self._optimizer.state_dict().items()}
        tensors |= {f"channel/{name}": x for name, x in self.channel.state_dict().items()}
        tensors |= {f"resident/{name}": x.clone() for name, x in self.resident.items()}
        tensors |= {f"scales/{name}": x.clone() for name, x in self._scales.items()}
        return tensors | {f"held/{name}": x.clone() for name, x in self.held.items()}

    def _check_parts(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise ``FileError`` unless a checkpoint has every parameter, and tensors of their names and shapes only."""
        for part, mine in (("parameter", self.parameters), ("held", self.held)):
            missing = [name for name in mine if name not in parts[part]]
            if missing:
                raise FileError(f"the checkpoint has no {part} {missing[0]!r} ({len(missing)} are missing)")
        known: dict[str, Mapping[str, torch.Size]] = {
            "parameter": {name: x.shape for name, x in self.parameters.items()},
            "optimizer": self._optimizer.state_shapes(self.parameters),
            "held": {name: x.shape for name, x in self.held.items()},
        }
        for part, saved in parts.items():
            if part in known:
                for name, x in saved.items():
                    if known[part].get(name) != x.shape:
                        raise FileError(f"the checkpoint holds {part} {name!r} of {list(x.shape)}, which is not ours")
                    if not _is_finite(x.to(torch.float32)):  # as it is loaded
                        raise FileError(f"the checkpoint holds {part} {name!r} with values that are not finite")
            elif part not in ("channel", "resident", "scales"):
                raise FileError(f"the checkpoint holds tensors of an unknown kind, {part!r}")
        self._check_scales(parts["scales"])
        resident = self.resident
        for name, x in resident.items():
            saved_x = parts["resident"].get(name)
            if saved_x is None or saved_x.shape != x.shape or not _is_finite(saved_x.to(torch.float32)):
                raise FileError(f"the checkpoint must hold finite tensors of {list(x.shape)} as resident {name!r}")

    def _check_scales(self, scales: Mapping[str, Tensor]) -> None:
        """Raise ``FileError`` unless these are the bits of scales that workers could have agreed on."""
        counts: dict[str, int] = {}
        if not self.job.reply_kind.server_has_weights:
            counts = {how.name: how.num_scales for how in self.job.slot_sums(self.parameters)}
        for name, bits in scales.items():
            if name not in counts or bits.dtype != torch.int32 or bits.shape != (counts[name],):
                raise FileError(
                    f"the checkpoint holds scales {name!r} of {bits.dtype} and {list(bits.shape)}, which are not ours"
                )
            if bits.numel() and not 0 <= int(bits.min()) <= int(bits.max()) <= UNUSABLE:
                raise FileError(f"the checkpoint holds scales {name!r} that are negative or not finite")

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore a checkpoint; ``FileError`` if tensors are missing or have other shapes. An error changes nothing."""
        parts: dict[str, dict[str, Tensor]] = {
            part: {} for part in ("parameter", "optimizer", "channel", "held", "resident", "scales")
        }
        for key, x in tensors.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = x
        self._check_parts(parts)
        version = int(meta["version"])
        self.channel.load_state_dict(parts["channel"])  # an invalid state changes nothing: all else is checked
        for mine, part in ((self.parameters, "parameter"), (self.held, "held")):
            for name, x in parts[part].items():
                mine[name].copy_(x)
        self._optimizer.load_state_dict(parts["optimizer"])
        self._scales = {name: x.clone() for name, x in parts["scales"].items()}
        self.version = self.uploaded_version = version
        if self._resident is not None:
            self._resident.load(parts["resident"], self.version)


def _is_finite(x: Tensor) -> bool:
    return kernels.backend_for(x).all_finite(x.reshape(-1))
