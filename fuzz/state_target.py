"""The fuzz target of saved states: everything with ``load_state_dict`` and a memory, on a process group of one rank.

An input is a list of edits of a valid state: which holder, which place in its state, and what is put there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import bend
import laconic
from inputs import ramp
from laconic.collective.collectives import Collectives
from laconic.collective.exchange import Exchange
from laconic.collective.groups import release_group
from laconic.collective.point_to_point import PointToPoint
from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.packet import TensorSpec
from laconic.pipeline.messages import Position
from laconic.pipeline.traffic import Traffic
from laconic.pipeline.traffic import load as load_traffics
from laconic.pipeline.traffic import save as traffic_state
from laconic.torchft.memory import Counts, ReplicaMemory

POLICY = laconic.Policy(min_numel=0, exempt_1d=False)
SPECS = ("ef|thc:4", "ef|shared:8", "ef|powersgd:2", "ef|topk:0.1|qsgd:4", "momentum:0.9|topk:0.1", "ef|randk:0.3")
SHAPE = (12, 20)
EDIT = 3
"""Bytes of an edit: the place, the move, and the value."""


def _gradient(step: int) -> Tensor:
    return ramp(240).view(SHAPE).roll(step, 0)


@dataclass(frozen=True)
class Holder:
    """Something with a memory, and a step that uses it and returns what must be finite."""

    state: Callable[[], Any]
    load: Callable[[Any], object]
    step: Callable[[int], list[Tensor]]
    close: Callable[[], None] = lambda: None


def _exchange(spec: str) -> Holder:
    exchange = Exchange(spec, policy=POLICY)

    def step(number: int) -> list[Tensor]:
        x = _gradient(number)
        exchange.mean([("w", x)])
        return [x]

    return Holder(exchange.state_dict, exchange.load_state_dict, step)


def _channel() -> Holder:
    channel = laconic.channel("ef|topk:0.1|qsgd:4", policy=POLICY)

    def step(number: int) -> list[Tensor]:
        return [laconic.decode(channel.encode("w", _gradient(number), seed=number))]

    return Holder(channel.state_dict, channel.load_state_dict, step)


def _collectives() -> Holder:
    collectives = Collectives("ef|qsgd:4", policy=POLICY)

    def step(number: int) -> list[Tensor]:
        x, out = _gradient(number), torch.empty(SHAPE)
        collectives.all_reduce([("w", x)])
        collectives.reduce_scatter([("s", out, _gradient(number))])
        return [x, out]

    return Holder(collectives.state_dict, collectives.load_state_dict, step)


def _point_to_point() -> Holder:
    peer = PointToPoint("ef|topk:0.1|qsgd:4", policy=POLICY)

    def step(number: int) -> list[Tensor]:
        channel = peer._channel(0)
        peer._next_seed(0, "w")
        return [laconic.decode(channel.encode("w", _gradient(number), seed=number))]

    return Holder(peer.state_dict, peer.load_state_dict, step)


def _local(**options: Any) -> Holder:
    model = nn.Sequential(nn.Linear(20, 12), nn.BatchNorm1d(12), nn.Linear(12, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(ramp(parameter.numel()).view_as(parameter))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local = laconic.LocalSGD(model, optimizer, policy=POLICY, **options)

    def step(number: int) -> list[Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            model(_gradient(number)).square().mean().backward()
            local.step()
        return [p.detach() for p in model.parameters()]

    def close() -> None:
        local._rounds.close()
        if local.options.overlap:  # it has a process group of its own, with threads and sockets
            release_group(local.group)

    return Holder(local.state_dict, local.load_state_dict, step, close)


def _attached(sharded: bool) -> Holder:
    """Return the attachment of a DDP module, or of an FSDP2 module with replicas."""
    model = nn.Sequential(nn.Linear(20, 12), nn.Linear(12, 3))
    if sharded:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        attached = laconic.attach(model, "ef|qsgd:4", policy=POLICY, replicate=mesh["replicate"])
    else:
        model = DistributedDataParallel(model)  # type: ignore[assignment]
        attached = laconic.attach(model, "ef|qsgd:4", policy=POLICY)

    def step(number: int) -> list[Tensor]:
        model.zero_grad()
        model(_gradient(number)).square().mean().backward()
        gradients: list[Any] = [p.grad for p in model.parameters()]
        return [x.to_local() if isinstance(x, DTensor) else x for x in gradients]

    return Holder(attached.state_dict, attached.load_state_dict, step, attached.detach)


def _pipeline() -> Holder:
    traffics = [
        Traffic("qsgd:4", direction, 0, seed=0, delta=True, nonfinite="spread", error_every=0)
        for direction in ("forward", "backward")
    ]

    def step(number: int) -> list[Tensor]:
        for traffic in traffics:
            traffic.sender.message(_gradient(number), Position(0, 0))
        return []

    def state() -> dict[str, Tensor]:
        return {name: x for traffic in traffics for name, x in traffic_state(traffic).items()}

    return Holder(state, lambda saved: load_traffics(saved, traffics), step)


def _transform() -> Holder:
    """Return both ends of a stage by transform coding, with a basis, a part of the next one and second moments."""
    traffic = Traffic("klt:4", "forward", 0, seed=0, delta=False, nonfinite="spread", error_every=0)
    first, spec = Position(0, 0), TensorSpec((4, 32, 16), torch.float32)

    def step(number: int) -> list[Tensor]:
        outs = []
        for turn in range(70 if number < 2 else 1):
            sent, received = ([row[2:] for row in traffic.shared() if row[1] == end] for end in ("sender", "receiver"))
            x = ramp(2048).view(spec.shape) * (1 + (number + turn) % 7)
            message = traffic.sender.message(x, first)
            assert message is not None
            if sent == received:  # else stages raise ConfigError in the first step after they have loaded a state
                assert message.numel() == traffic.receiver.expected_nbytes(spec, first)
                outs.append(torch.empty(spec.shape))
                traffic.receiver.read(message, outs[-1], first)
        return outs

    return Holder(lambda: traffic_state(traffic), lambda saved: load_traffics(saved, [traffic]), step)


def _torchft() -> Holder:
    memory = ReplicaMemory("ef|qsgd:4", POLICY, "skip", Counts())
    memory.join(dist.group.WORLD)  # type: ignore[arg-type]

    def step(number: int) -> list[Tensor]:
        x = _gradient(number)
        memory.begin_attempt(number, [("w", x)], participates=True).mean([("w", x)])
        memory.end_attempt(committed=True)
        return [x]

    return Holder(memory.portable_state, memory.load_portable_state, step)


HOLDERS: tuple[Callable[[], Holder], ...] = (
    *(lambda spec=spec: _exchange(spec) for spec in SPECS), _channel, _collectives, _point_to_point,
    lambda: _local(codec="ef|qsgd:4", every=2), lambda: _local(codec="none", every=2, outer="nesterov"),
    lambda: _local(codec="ef|qsgd:4", every=2, fragments=2, overlap=1, outer="nesterov"), _torchft,
    lambda: _attached(False), lambda: _attached(True), _pipeline, _transform,
)  # fmt: skip


def end() -> None:
    """Forget what was made, and end the process group."""
    _saved.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@cache
def _saved(number: int) -> Any:
    """Return the state of a holder after two steps."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    holder = HOLDERS[number]()
    for step in range(2):
        holder.step(step)
    state = copy.deepcopy(holder.state())
    holder.close()
    if isinstance(state.get("anchors"), dict):  # one rank alone has no exchange under way
        anchors = [state["anchors"][name] for name in state["fragments"][0]["names"]]
        changes, starts = ([x.clone() * factor for x in anchors] for factor in (0.1, 1.0))
        names = [f"1.running_{part}" for part in ("mean", "var")]
        means, before = ({name: torch.ones(12) for name in names} for _ in range(2))
        state["in_flight"] = {"fragment": 0, "due": state["steps"] + 1, "changes": changes, "buffers": means,
                              "starts": starts, "buffer_starts": before}  # fmt: skip
    return state


def state_seeds() -> list[bytes]:
    return [bytes([number]) for number in range(len(HOLDERS))]


def bend_state(data: bytes, rng: Any, scramble: bend.Scramble, room: int) -> bytes:
    """Change the holder or an edit, or add one."""
    data = data or b"\0"
    edits = [data[i : i + EDIT] for i in range(1, len(data), EDIT)]
    move = rng.randrange(8)
    if move == 0:
        return bytes([rng.randrange(len(HOLDERS))]) + data[1:]
    if move == 1 and edits:
        edits.pop(rng.randrange(len(edits)))
    elif move == 2 and edits:
        at = rng.randrange(len(edits))
        edits[at] = scramble(edits[at], EDIT)
    elif len(edits) < 8:
        edits.append(rng.randbytes(EDIT))
    return data[:1] + b"".join(edits)


def _places(value: Any, above: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """Yield each container with the key of one of its values, from the outside in."""
    if above is not None:
        yield above, key
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in list(items):
        yield from _places(item, value, name)


NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 2**62, 2**63, 2**70, 0.5, -0.5, 1e300, float("inf"), float("nan"), None, True, "text", b"\0", [],
    {}, [1], {"a": 1}, (), ["weight"], 1j,
)  # fmt: skip


def _tensors(like: Tensor) -> list[Any]:
    if like.layout is not torch.strided or like.is_meta or like.is_complex():  # edited before
        return list(NUMBERS)
    like = like.to_local() if isinstance(like, DTensor) else like
    floats = like.float() if like.is_floating_point() else like.double()
    return [
        torch.full(like.shape, float("nan")), torch.full(like.shape, float("inf")),
        torch.full(like.shape, 1e300, dtype=torch.float64), torch.full(like.shape, 3e38), torch.full(like.shape, -1e38),
        torch.zeros(like.shape), torch.full(like.shape, -1, dtype=torch.int64), floats.double(), floats.half(),
        like.reshape(-1)[:-1], like.reshape(-1), torch.cat([like.reshape(-1)] * 2), like.unsqueeze(0),
        like.new_zeros(()), like.new_zeros((0,)), like.new_zeros((0, 2**40)), floats.to(torch.complex64),
        torch.ones(like.shape) > 0,
        torch.full(like.shape, 2**62), floats.expand(2, *like.shape), floats.to("meta"), floats.to_sparse(),
        torch.tensor([2**62, 2**62]), torch.tensor([0, 0]), torch.tensor([1, 1]), torch.tensor(-(2**63)), *NUMBERS,
    ]  # fmt: skip


def edited(state: Any, edits: bytes) -> Any:
    """Return a copy of a state with its edits."""
    state = copy.deepcopy(state)
    for i in range(0, len(edits) - EDIT + 1, EDIT):
        places = list(_places(state))
        if not places:
            break
        (above, key), move, value = places[edits[i] % len(places)], edits[i + 1] % 8, edits[i + 2]
        old = above[key]
        if move == 0:
            del above[key]
        elif move == 1 and isinstance(above, dict):
            above[(f"{key}x", "", "a//b", "a/residual", "9/w/residual", 7, "w/round")[value % 7]] = old
        elif move == 2 and isinstance(above, list):
            above.append(copy.deepcopy(old))
        else:
            others = _tensors(old) if isinstance(old, Tensor) else NUMBERS
            above[key] = copy.deepcopy(others[value % len(others)])  # later edits may change it
    return state


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def largest(state: Any) -> float:
    """Return the largest number in a state of LocalSGD, which holds a model: a huge one ruins it, as any model."""
    if not isinstance(state, dict) or "anchors" not in state:
        return 0.0
    kept = [state.get(part) for part in ("anchors", "outer", "in_flight", "exchange")]
    magnitudes = [0.0]
    for above, key in (place for part in kept for place in _places([part])):
        x = above[key]
        if isinstance(x, Tensor) and x.numel() and not x.is_meta:
            magnitudes.append(float(x.to_dense().abs().max()))
        elif isinstance(x, int | float):
            magnitudes.append(abs(x))
    return max(magnitudes)


def check_state(data: bytes) -> bool:
    """A state is loaded, and all steps but one are finite; or it is refused and nothing has changed."""
    number = data[0] % len(HOLDERS) if data else 0
    saved = _saved(number)
    holder = HOLDERS[number]()
    try:
        return _loads(holder, saved, edited(saved, data[1:]))
    finally:
        holder.close()


def _loads(holder: Holder, saved: Any, hostile: Any) -> bool:
    holder.load(saved)
    before = copy.deepcopy(holder.state())
    try:
        holder.load(hostile)
    except (InputError, ConfigError):
        assert _same(holder.state(), before), "a refused state has changed something"
        return False
    results: list[Tensor] = []
    dropped = 0
    for step in range(4):
        try:
            results = holder.step(10 + step)
        except NonFiniteError:  # a residual that is added overflows, and is reset
            dropped += 1
    finite = dropped <= 1 and all(bool(x.isfinite().all()) for x in results)
    assert finite or largest(hostile) > 1e6, "a loaded state spoils later steps"
    return True
