"""The memory of an exchange between replicas as a state that is sharded like the parameters.

What a rank has yet to send of its shard is saved as a DTensor with the parameter's mesh and placements, under a name
that holds the number of the replica: ``torch.distributed.checkpoint`` saves it like the optimizer's state, and cuts it
anew for another number of shards. What has no meaning on another mesh has the mesh in its name.

| name | value |
|---|---|
| ``mesh``, ``codec``, ``steps``, ``rounds`` | replicas and shards; a hash of the codec; steps; rounds of each slot |
| ``unsent/<replica>/<slot>`` | DTensor: the residual. Where this rank owns the mean (``TwoShot``), that of the mean |
| ``rotated/<replica>.<shard> of <mesh>/<slot>`` | the residual as ``thc`` keeps it, for a resume with the same bits |
| ``start/<shard> of <mesh>/<slot>`` | where ``powersgd`` continues |
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.codecs import parse
from laconic.codecs.memory import ErrorFeedback
from laconic.collective.exchange import EXACT, Exchange
from laconic.collective.fsdp.param_groups import ShardedParameter
from laconic.collective.reductions.allreduce import Reducer
from laconic.collective.reductions.ranges import Range, cut_into_parts
from laconic.collective.reductions.shards import GATHER, SCATTER
from laconic.collective.reductions.two_shot import TwoShot
from laconic.collective.saved_state import saved_by_name, saved_count, saved_floats
from laconic.errors import ConfigError, InputError
from laconic.kernels import backend_for
from laconic.packet import TensorSpec
from laconic.policy import Policy

__all__ = ["Place", "load_memory", "require_error_feedback_only", "saved_memory"]

log = logging.getLogger("laconic")

MOST_RANKS = 1 << 20
"""The largest world that a state is taken from, so that a mesh of a damaged file does not take for ever."""


@dataclass(frozen=True)
class Place:
    """This rank's place among the replicas, and in its own."""

    replica: int
    replicas: int
    shard: int
    shards: int

    @property
    def mesh(self) -> Tensor:
        return torch.tensor([self.replicas, self.shards])

    def unsent(self, slot: str) -> str:
        return f"unsent/{self.replica}/{slot}"

    def rotated(self, slot: str) -> str:
        return f"rotated/{self.replica}.{self.shard} of {self.replicas}x{self.shards}/{slot}"

    def start(self, slot: str) -> str:
        return f"start/{self.shard} of {self.shards}/{slot}"


def require_error_feedback_only(spec: str, policy: Policy) -> None:
    """Raise ``ConfigError`` for codecs with a memory that a state cannot hold."""
    for text in (spec, policy.small, *policy.rules.values()):
        memories, _ = parse(text)
        if any(not isinstance(stage, ErrorFeedback) for stage in memories):
            raise ConfigError(f"{text!r}: with FSDP the only memory is error feedback, ef|…, so leave momentum out")


def saved_memory(exchange: Exchange, parameters: Sequence[ShardedParameter], place: Place) -> dict[str, Tensor]:
    """Return the state; what an exchange does not remember yet is zero, so that a checkpoint can be loaded into it."""
    raw, state = exchange.state_dict(), dict[str, Tensor]()
    rounds = torch.zeros(len(parameters), dtype=torch.int64)
    for index, each in enumerate(parameters):
        slot = _Slot.of(exchange, each, place)
        rounds[index] = int(raw.get(slot.key("round"), torch.tensor(0)))
        state |= slot.saved(raw)
    return state | {"mesh": place.mesh, "codec": _hash(exchange, parameters), "rounds": rounds}


def load_memory(
    exchange: Exchange, parameters: Sequence[ShardedParameter], place: Place, state: Mapping[str, Tensor]
) -> bool:
    """Continue from a state; False if residuals had to be dropped, which is logged."""
    missing = sorted({"mesh", "codec", "rounds"} - set(saved_by_name(state)))
    if missing:
        raise InputError(f"expected the result of state_dict of an attached FSDP module: {missing} is missing")
    replicas, shards = _saved_integers("mesh", state["mesh"], 2)
    if not (replicas and shards and replicas * shards <= MOST_RANKS):
        raise InputError(f"'mesh' in the saved state must be at most {MOST_RANKS} ranks, got {replicas} x {shards}")
    rounds = _saved_integers("rounds", state["rounds"], len(parameters))
    codec = saved_count("codec", state["codec"])
    saved = Place(place.replica, replicas, place.shard, shards)
    same_codec, dropped = codec == int(_hash(exchange, parameters)), []
    raw: dict[str, Tensor] = {}
    for index, each in enumerate(parameters):
        slot = _Slot.of(exchange, each, place)
        if slot.spec != EXACT and rounds[index] and slot.numel:
            raw[slot.key("round")] = torch.tensor(rounds[index])
        if same_codec and not slot.load(state, saved, raw):
            dropped.append(each.name)
    exchange.load_state_dict(raw)
    if not same_codec:
        log.warning("the state was saved with another codec or policy than %r: residuals are dropped", exchange.spec)
        return not any(key.startswith("unsent/") for key in state)
    if dropped:
        log.warning("what was saved of %s on a mesh of %d x %d has no meaning on %d x %d: it is dropped",
                    ", ".join(dropped[:3]) + (" and others" if len(dropped) > 3 else ""), replicas, shards,
                    place.replicas, place.shards)  # fmt: skip
    if replicas > place.replicas:
        log.warning("residuals of %d replicas were saved, there are %d now: those of the others are dropped",
                    replicas, place.replicas)  # fmt: skip
    return not dropped and replicas <= place.replicas


def _saved_integers(key: str, x: object, count: int) -> list[int]:
    if not isinstance(x, Tensor) or x.dtype != torch.int64 or x.shape != (count,) or x.is_meta or bool((x < 0).any()):
        raise InputError(f"{key!r} in the saved state must be {count} whole numbers from 0 on")
    values: list[int] = x.tolist()
    return values


def _hash(exchange: Exchange, parameters: Sequence[ShardedParameter]) -> Tensor:
    """Return a number that identifies the codecs of all parameters."""
    text = repr([(each.name, _spec_of(exchange, each)) for each in parameters])
    return torch.tensor(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little"))


def _spec_of(exchange: Exchange, parameter: ShardedParameter) -> str:
    return exchange.choice(parameter.name, parameter.parameter).spec


@dataclass(frozen=True)
class _Slot:
    """One parameter's memory: of a codec without memory it is empty."""

    parameter: ShardedParameter
    spec: str
    place: Place

    @staticmethod
    def of(exchange: Exchange, parameter: ShardedParameter, place: Place) -> _Slot:
        spec = _spec_of(exchange, parameter)
        reduction = exchange.reduction(spec)
        if isinstance(reduction, TwoShot) and parse(spec)[0]:
            return _TwoShotSlot(parameter, spec, place)
        if isinstance(reduction, Reducer):
            return _SumSlot(parameter, spec, place, reduction)
        return _Slot(parameter, spec, place)

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def numel(self) -> int:
        return self.parameter.shard_shape.numel()

    def key(self, part: str, piece: str | None = None) -> str:
        """Return a key of ``Exchange.state_dict``."""
        return f"{self.spec}//{piece or self.name}/{part}"

    def saved(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the slot's part of the state."""
        return {}

    def load(self, state: Mapping[str, Tensor], saved: Place, raw: dict[str, Tensor]) -> bool:
        """Write the slot's part of the state into that of an exchange; False if something must be dropped."""
        return True

    def _as_dtensor(self, flat: Tensor) -> Tensor:
        like: Any = self.parameter.parameter
        local = flat.view(self.parameter.shard_shape).to(like.device)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _unsent(self, state: Mapping[str, Tensor]) -> Tensor | None:
        """Return the saved residual of this rank's shard, flat; None if it is missing or zero."""
        x: Any = state.get(self.place.unsent(self.name))
        if x is None:
            return None
        local: Tensor = x.to_local() if isinstance(x, DTensor) else x
        saved_floats(self.place.unsent(self.name), local)
        if local.shape != self.parameter.shard_shape:
            raise InputError(
                f"{self.place.unsent(self.name)!r} has the shape {list(local.shape)} on this rank, expected "
                f"{list(self.parameter.shard_shape)}: load it by torch.distributed.checkpoint, which cuts it anew"
            )
        return local.reshape(-1).clone() if bool(local.any()) else None


class _TwoShotSlot(_Slot):
    """Residuals by range: of what this rank sends to the owner, and of the mean where it is the owner itself."""

    def _ranges(self) -> Iterator[tuple[Range, str]]:
        for piece in _ranges(self.numel, self.place.replicas, self.name):
            direction = GATHER if piece.owner == self.place.replica else SCATTER
            yield piece, self.key("residual", f"{direction}/{piece.name}")

    def saved(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = torch.zeros(self.numel)
        for piece, key in self._ranges():
            if key in raw:
                whole[piece.begin : piece.end] = raw[key].reshape(-1)
        return {self.place.unsent(self.name): self._as_dtensor(whole)}

    def load(self, state: Mapping[str, Tensor], saved: Place, raw: dict[str, Tensor]) -> bool:
        whole = self._unsent(state)
        if whole is None:
            return True
        moved = saved != self.place
        if moved and not self._in_units_of_senders(whole, saved):
            return False
        for piece, key in self._ranges():
            part = whole[piece.begin : piece.end]
            raw[key] = part / self.place.replicas if moved and piece.owner == self.place.replica else part
        return True

    def _in_units_of_senders(self, whole: Tensor, saved: Place) -> bool:
        """Multiply residuals of means by the number of ranks, as when ranks join; False if they cannot be found."""
        spec = self.parameter.whole
        like: Any = self.parameter.parameter
        if self.parameter.shard_dim or tuple(like.shape) != spec.shape:  # not cut by rows, or also by other meshes
            return False
        row = spec.numel // max(1, spec.shape[0])
        first = -(-spec.shape[0] // self.place.shards) * self.place.shard * row
        rows = -(-spec.shape[0] // saved.shards)
        for shard in range(min(saved.shards, spec.shape[0])):  # the others are empty
            begin = min(shard * rows, spec.shape[0]) * row
            numel = min((shard + 1) * rows, spec.shape[0]) * row - begin
            for piece in _ranges(numel, saved.replicas, self.name):
                if piece.owner == saved.replica:
                    low = max(begin + piece.begin - first, 0)
                    whole[low : max(begin + piece.end - first, low)] *= self.place.replicas
        return True


def _ranges(numel: int, ranks: int, name: str) -> Iterator[Range]:
    for part in cut_into_parts([(name, numel)], numel, ranks):
        yield from part


@dataclass(frozen=True)
class _SumSlot(_Slot):
    """The residual of a summable codec, which ``thc`` keeps rotated, and the start of ``powersgd``."""

    reducer: Reducer

    def _sizes(self) -> list[tuple[str, int, int]]:
        """Return name, number of values and number of kept values of each piece."""
        pieces = self.reducer.pieces(self.name, self.numel)
        return [(piece, end - begin, self.reducer.contributor.kept_numel(end - begin)) for piece, begin, end in pieces]

    def saved(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state, sizes = dict[str, Tensor](), self._sizes()
        if self.reducer.contributor.feedback:
            found = [raw.get(self.key("residual", piece), torch.zeros(n)) for piece, _, n in sizes]
            kept = [x.reshape(-1).to(torch.float32) for x in found]
            if self._rotated:
                state[self.place.rotated(self.name)] = torch.cat(kept) if kept else torch.zeros(0)
            whole = self.reducer.residual(self.name, self.numel)
            state[self.place.unsent(self.name)] = self._as_dtensor(torch.zeros(self.numel) if whole is None else whole)
        shape = self.reducer.contributor.start_shape(self._spec)
        if shape is not None and self.numel:
            state[self.place.start(self.name)] = raw.get(self.key("start"), torch.zeros(shape))
        return state

    @property
    def _spec(self) -> TensorSpec:
        return TensorSpec(tuple(self.parameter.shard_shape), torch.float32)

    @property
    def _rotated(self) -> bool:
        return self.reducer.contributor.rotation_seed is not None

    def load(self, state: Mapping[str, Tensor], saved: Place, raw: dict[str, Tensor]) -> bool:
        start, unsent = state.get(self.place.start(self.name)), self._unsent(state)
        if start is not None and bool(saved_floats(self.place.start(self.name), start).any()):
            raw[self.key("start")] = start
        if unsent is not None and self.numel:
            rotated = state.get(self.place.rotated(self.name)) if saved == self.place else None
            if rotated is not None and saved_floats("rotated", rotated).shape != (sum(n for *_, n in self._sizes()),):
                raise InputError(f"{self.place.rotated(self.name)!r} in the saved state has another size")
            for (piece, _, _), part in zip(self._sizes(), self._kept(unsent, rotated), strict=True):
                raw[self.key("residual", piece)] = part
        return saved.shards == self.place.shards or self.reducer.contributor.start_shape(self._spec) is None

    def _kept(self, unsent: Tensor, rotated: Tensor | None) -> Iterator[Tensor]:
        """Yield residuals as the codec keeps them, by piece."""
        seed, sizes = self.reducer.contributor.rotation_seed, self._sizes()
        if seed is not None and rotated is not None:
            yield from torch.split(rotated, [kept for *_, kept in sizes])
            return
        for part, (_, _, kept) in zip(torch.split(unsent, [numel for _, numel, _ in sizes]), sizes, strict=True):
            if seed is None:
                yield part
            else:
                buffer = torch.empty(kept, device=part.device)
                backend_for(part).rotate(part, seed, None, buffer)
                yield buffer
