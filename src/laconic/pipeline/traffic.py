"""Traffic: what one stage sends and receives in one direction, and its state in checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import InputError, NonFiniteError
from laconic.packet import TensorSpec
from laconic.pipeline.ends import TransformReceiver, Transforms, TransformSender, make_receiver, make_sender
from laconic.pipeline.messages import Copies, Copy, Direction, Position, Sample, WireStats
from laconic.pipeline.transform import NAME, Role, Transform

__all__ = ["Arrival", "Traffic", "load", "save"]

_TENSOR = re.compile("0|[1-9][0-9]{0,8}")


class Arrival(NamedTuple):
    """A tensor under way: the buffer of its message (None: it travels as it is), and the work to wait for, if ours."""

    position: Position
    message: Tensor | None
    out: Tensor
    work: dist.Work | None


class Traffic:
    """What one stage sends and receives in one direction; ``compress`` describes the arguments."""

    def __init__(
        self, spec: str, direction: Direction, stage: int, *, seed: int, delta: bool, nonfinite: str, error_every: int
    ) -> None:
        self.direction, self.stats = direction, WireStats()
        self.sender = make_sender(
            spec, direction, stage, seed=seed, delta=delta, error_every=error_every, stats=self.stats
        )
        self.receiver = make_receiver(spec, direction, stage, nonfinite=nonfinite, delta=delta, stats=self.stats)
        self.arriving: dict[int, list[Arrival]] = {}
        """By micro-batch: the tensors under way."""
        self.shapes: dict[int, TensorSpec] = {}
        """By tensor: what the receiver's buffers were made for."""

    def ends(self) -> tuple[tuple[str, Copies | None], ...]:
        return ("sender", self.sender.copies), ("receiver", self.receiver.copies)

    def transforms(self) -> Iterator[tuple[Role, Transforms]]:
        """Yield the ends that have a basis."""
        if isinstance(self.sender, TransformSender):
            yield "sender", self.sender.transforms
        if isinstance(self.receiver, TransformReceiver):
            yield "receiver", self.receiver.transforms

    def shared(self) -> list[list[Any]]:
        """Return, for each tensor coded by ``klt``, what this end has in common with the one on another stage."""
        return [
            [self.direction, role, *transform.shared()]
            for role, transforms in self.transforms()
            for transform in transforms.by_tensor.values()
        ]


def save(traffic: Traffic) -> dict[str, Tensor]:
    """Return the state: ``forward/sent``, and ``forward/sender/0/name`` with ``…/updates`` for each copy."""
    rows = [[*position, count] for position, count in sorted(traffic.sender.sent.items())]
    state = {f"{traffic.direction}/sent": torch.tensor(rows, dtype=torch.int64).view(-1, 3)}
    for end, copies in traffic.ends():
        for (tensor, sample), copy in () if copies is None else copies.by_sample.items():
            name = f"{traffic.direction}/{end}/{tensor}/{_name(sample)}"
            state[name] = copy.values.clone()
            state[f"{name}/updates"] = torch.tensor(copy.updates)
    for role, transforms in traffic.transforms():
        for tensor, transform in transforms.by_tensor.items():
            prefix = f"{_prefix(traffic, role)}{tensor}"
            state |= {f"{prefix}/{name}": x for name, x in transform.save().items()}
    return state


def load(state: Mapping[str, Tensor], traffics: Sequence[Traffic]) -> None:
    """Replace the state of both directions by a saved one; an invalid state changes nothing."""
    sent: list[Counter[Position]] = []
    loaded: list[tuple[Copies, dict[tuple[int, Sample], Copy]]] = []
    bases: list[tuple[Transforms, dict[int, Transform]]] = []
    known: set[str] = set()
    if not all(isinstance(name, str) for name in state):
        raise InputError("expected the result of StageCompression.state_dict, a mapping from names")
    for traffic in traffics:
        rows = state.get(f"{traffic.direction}/sent", torch.empty(0, 3, dtype=torch.int64))
        known.add(f"{traffic.direction}/sent")
        if not _is_counts(rows) or rows.dim() != 2 or rows.shape[1] != 3:
            raise InputError(f"'{traffic.direction}/sent' must be an int64 matrix of 3 columns, without negative ones")
        sent.append(Counter({Position(batch, tensor): count for batch, tensor, count in rows.tolist()}))
        for end, copies in traffic.ends():
            prefix = f"{traffic.direction}/{end}/"
            names = [name for name in state if name.startswith(prefix) and f"{name}/updates" in state]
            if copies is None:
                continue
            loaded.append((copies, {_key(name.removeprefix(prefix)): _copy(state, name) for name in names}))
            known.update(names, (f"{name}/updates" for name in names))
        for role, transforms in traffic.transforms():
            names = [name for name in state if name.startswith(_prefix(traffic, role))]
            by_tensor = _transforms(state, _prefix(traffic, role), names, role)
            if role == "sender" and any(f"/{NAME}/" in name for name in state):  # else a state of another codec
                _require_all_sent(traffic, by_tensor, sent[-1])
            bases.append((transforms, by_tensor))
            known.update(names)
    foreign = sorted(set(state) - known)
    if foreign:
        raise InputError(f"unknown name {foreign[0]!r} in the state: it is not that of a stage with these arguments")
    for traffic, counts in zip(traffics, sent, strict=True):
        traffic.sender.sent = counts
    for copies, by_sample in loaded:
        copies.by_sample = by_sample
    for transforms, by_tensor in bases:
        transforms.by_tensor = by_tensor
    for traffic in traffics:
        if isinstance(traffic.receiver, TransformReceiver):
            traffic.receiver.count_posted()


def _prefix(traffic: Traffic, role: Role) -> str:
    return f"{traffic.direction}/{role}/{NAME}/"


def _transforms(state: Mapping[str, Tensor], prefix: str, names: Sequence[str], role: Role) -> dict[int, Transform]:
    fields: dict[int, dict[str, Tensor]] = {}
    for name in names:
        tensor, _, field = name.removeprefix(prefix).partition("/")
        if not _TENSOR.fullmatch(tensor) or field not in Transform.SAVED:
            raise InputError(f"{name!r:.200} in the saved state does not name a tensor of a stage")
        fields.setdefault(int(tensor), {})[field] = state[name]
    return {tensor: Transform.load(saved, f"{prefix}{tensor}", role) for tensor, saved in fields.items()}


def _require_all_sent(traffic: Traffic, by_tensor: Mapping[int, Transform], sent: Counter[Position]) -> None:
    """Raise ``InputError`` unless the transforms of a sender are those of the tensors that it has sent."""
    totals: Counter[int] = Counter()
    for position, count in sent.items():
        totals[position.tensor] += count
    for tensor in sorted(set(totals) | set(by_tensor)):
        number = by_tensor[tensor].number if tensor in by_tensor else 0
        if not 0 < number <= totals[tensor]:
            raise InputError(
                f"'{_prefix(traffic, 'sender')}{tensor}' in the saved state has sent {number} messages, "
                f"'{traffic.direction}/sent' counts {totals[tensor]}"
            )


def _copy(state: Mapping[str, Tensor], name: str) -> Copy:
    saved, updates = state[name], state[f"{name}/updates"]
    if not isinstance(saved, Tensor) or not saved.is_floating_point() or not _has_values(saved):
        raise InputError(f"{name!r} in the saved state must be a dense float tensor")
    if not _is_counts(updates) or updates.numel() != 1:
        raise InputError(f"'{name}/updates' in the saved state must be one whole number from 0 on")
    values = saved.detach().to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise NonFiniteError(f"{name!r} in the saved state must be finite in float32")
    return Copy(values.clone().contiguous(), int(updates))


def _has_values(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_meta


def _is_counts(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.int64 and _has_values(x) and not bool((x < 0).any())


def _name(sample: Sample) -> str:
    if isinstance(sample, Position):
        return f"micro-batch {sample.micro_batch}"
    return f"number {sample}" if isinstance(sample, int) else f"text {sample}"


def _key(name: str) -> tuple[int, Sample]:
    tensor, _, sample = name.partition("/")
    kind, _, value = sample.partition(" ")
    try:
        index = int(tensor)
        if kind == "text":
            return index, value
        return index, Position(int(value), index) if kind == "micro-batch" else int(value)
    except ValueError:
        raise InputError(f"{name!r} in the saved state does not name a tensor and a sample") from None
