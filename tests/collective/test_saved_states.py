"""Saved states from files of others: what would spoil every later step is refused, and nothing is half loaded."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.aggregate.homomorphic import Contributor
from laconic.collective.exchange import Exchange
from laconic.collective.reductions.allreduce import Reducer
from laconic.errors import InputError, NonFiniteError

POLICY = laconic.Policy(min_numel=0, exempt_1d=False)
SPECS = ("ef|thc:4", "ef|shared:8", "ef|powersgd:2", "ef|topk:0.1|qsgd:4", "momentum:0.9|topk:0.1", "ef|randk:0.3")


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(spec: str) -> Exchange:
    exchange = Exchange(spec, policy=POLICY)
    for step in range(2):
        exchange.mean([("w", gradient(step))])
    return exchange


def gradient(seed: int) -> torch.Tensor:
    return torch.randn(24, 40, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", SPECS)
def test_residual_beyond_float32_is_refused_and_changes_nothing(spec):
    exchange = trained(spec)
    state = exchange.state_dict()
    for key in (key for key in state if key.endswith(("/residual", "/velocity"))):
        bad = dict(state) | {key: torch.full_like(state[key], 1e300, dtype=torch.float64)}
        other = {name: x for name, x in bad.items() if name.endswith("/round")} | {key: bad[key]}
        for hostile in (bad, other):
            with pytest.raises((NonFiniteError, InputError)):
                exchange.load_state_dict(hostile)
            after = exchange.state_dict()
            assert after.keys() == state.keys() and all(after[name].equal(state[name]) for name in state)
    x = gradient(9)
    exchange.mean([("w", x)])
    assert x.isfinite().all()


@pytest.mark.parametrize("spec", ["ef|thc:4", "ef|shared:8", "ef|powersgd:2", "ef|randk:0.3"])
@pytest.mark.parametrize("size", [3e38, 1e38])
def test_huge_finite_residual_costs_at_most_one_step(spec, size, caplog):
    exchange = trained(spec)
    state = exchange.state_dict()
    exchange.load_state_dict({k: torch.full_like(x, size) if k.endswith("/residual") else x for k, x in state.items()})
    results = []
    for step in range(4):
        x = gradient(step)
        exchange.mean([("w", x)])
        results.append(bool(x.isfinite().all()))
    assert all(results[1:]), results
    assert results[0] or (exchange.residual_resets == 1 and "overflowed float32 and is reset" in caplog.text)


def test_residual_stays_if_the_gradient_itself_is_not_finite():
    contributor = Contributor("ef|thc:4", workers=1)
    contributor.encode("w", contributor.summing.agree([contributor.probe("w", gradient(0))]))
    before = contributor.residual("w").clone()
    contributor.probe("w", torch.full((24, 40), float("inf")))
    contributor.skip("w")
    assert contributor.residual("w").equal(before) and contributor.stats.residual_resets == 0


@pytest.mark.parametrize("start", [torch.full((2, 40), 2.0), torch.full((2, 40), float("nan")), torch.zeros(80)])
def test_start_of_a_power_iteration_is_checked(start):
    exchange = trained("ef|powersgd:2")
    state = exchange.state_dict()
    assert state["ef|powersgd:2//w/start"].abs().max() == 1.0
    with pytest.raises(InputError, match="w/start"):
        exchange.load_state_dict(state | {"ef|powersgd:2//w/start": start})


@pytest.mark.parametrize("spec", ["ef|thc:4", "ef|topk:0.1|qsgd:4"])
@pytest.mark.parametrize("bad", [torch.tensor(-1), torch.tensor(0.5), torch.tensor([1, 2]), torch.tensor(True), "many"])
def test_round_must_be_one_count(spec, bad):
    exchange = trained(spec)
    state = exchange.state_dict()
    with pytest.raises(InputError, match="w/round"):
        exchange.load_state_dict(state | {f"{spec}//w/round": bad})
    assert int(exchange.state_dict()[f"{spec}//w/round"]) == 2


@pytest.mark.parametrize("bad", [
    torch.tensor([-1.0]), torch.tensor([float("nan")]), torch.tensor([1e300], dtype=torch.float64), torch.tensor(1.0),
    torch.tensor([3.4028234663852886e38]), torch.tensor([1]),
])  # fmt: skip
def test_carried_scales_are_checked(bad):
    reducer = Reducer("ef|shared:8", carry=True)
    reducer.reduce("w", gradient(0))
    state = reducer.state_dict()
    with pytest.raises(InputError, match="w/scales"):
        reducer.load_state_dict(state | {"w/scales": bad})
    assert reducer.state_dict()["w/scales"].equal(state["w/scales"])


def test_carried_scales_of_another_shape_are_agreed_on_anew():
    reducer = Reducer("ef|shared:8", carry=True)
    reducer.load_state_dict({"w/scales": torch.ones(7)})
    x = gradient(0)
    assert torch.allclose(reducer.reduce("w", x), x, atol=0.05)


def test_carried_scales_are_left_out_without_carry(caplog):
    carrying, plain = Reducer("ef|shared:8", carry=True), Reducer("ef|shared:8")
    carrying.reduce("w", gradient(0))
    plain.load_state_dict(carrying.state_dict())
    assert "w/scales" not in plain.state_dict() and "saved scales are left out" in caplog.text


def test_unknown_key_of_a_two_shot_state_is_refused():
    exchange = trained("ef|topk:0.1|qsgd:4")
    with pytest.raises(InputError, match="sideways"):
        exchange.load_state_dict({"ef|topk:0.1|qsgd:4//sideways/w/residual": torch.zeros(3)})


def test_channel_refuses_a_residual_beyond_float32():
    channel = laconic.channel("ef|topk:0.1", policy=POLICY)
    channel.encode("w", gradient(0))
    state = copy.deepcopy(channel.state_dict())
    with pytest.raises(NonFiniteError, match=r"'w/residual' .* float32"):
        channel.load_state_dict({"w/residual": torch.full((24, 40), -1e200, dtype=torch.float64)})
    assert channel.state_dict()["w/residual"].equal(state["w/residual"])


def test_counts_of_local_sgd_continue():
    def new():
        model = torch.nn.Linear(40, 30)
        return model, laconic.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), codec="ef|qsgd:4", every=2)

    model, local = new()
    for _ in range(4):
        model(torch.randn(4, 40)).sum().backward()
        local.step()
    _, resumed = new()
    resumed.load_state_dict(local.state_dict())
    names = ("steps", "exchanges", "rounds", "values", "wire_bytes", "encode_s")
    assert all(resumed.stats()[name] == local.stats()[name] for name in names) and local.stats()["exchanges"] == 2
    old = {key: value for key, value in local.state_dict().items() if key not in ("counts", "exchanges")}
    new()[1].load_state_dict(old)  # of an earlier version


@pytest.mark.parametrize("change", [
    {"steps": -1}, {"counts": torch.tensor([-1.0], dtype=torch.float64)}, {"counts": torch.ones(2)},
    {"world": torch.tensor([0.0, 1.0])}, {"exchange": {"ef|qsgd:4//w/round": torch.tensor(0.5)}},
    {"anchors": {"weight": torch.full((30, 40), 1e300, dtype=torch.float64), "bias": torch.zeros(30)}},
])  # fmt: skip
def test_invalid_state_of_local_sgd_changes_nothing(change):
    model = torch.nn.Linear(40, 30)
    local = laconic.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), codec="ef|qsgd:4", every=2)
    model(torch.randn(4, 40)).sum().backward()
    local.step()
    before = copy.deepcopy(local.state_dict())
    changed = dict(change)
    if "exchange" in change:
        changed["exchange"] = {**before["exchange"], **change["exchange"]}
    with pytest.raises(InputError):
        local.load_state_dict({**before, **changed})
    after = local.state_dict()
    assert after["steps"] == before["steps"] == 1
    assert all(after["anchors"][name].equal(x) for name, x in before["anchors"].items())
    local.load_state_dict(before)


BAD_LOCAL_STATES = {
    "momentum": lambda s: s["outer"]["state"]["weight"].update(momentum_buffer=torch.full((30, 40), float("nan"))),
    "momentum of another shape": lambda s: s["outer"]["state"]["weight"].update(momentum_buffer=torch.zeros(3)),
    "rate": lambda s: s["outer"]["settings"][0][0].update(lr=float("nan")),
    "change": lambda s: s["in_flight"]["changes"].__setitem__(0, torch.full((30, 40), float("inf"))),
    "number of changes": lambda s: s["in_flight"]["changes"].pop(),
    "fragment": lambda s: s["in_flight"].update(fragment=7),
    "buffer": lambda s: s["in_flight"]["buffers"].update(unknown=torch.zeros(3)),
    "names": lambda s: s["fragments"][0].update(names=[1, "weight"]),
    "step": lambda s: s["fragments"][0].update(exchanged_at=float("inf")),
    "key": lambda s: s["exchange"].update({7: torch.zeros(3)}),
}


@pytest.mark.parametrize("change", BAD_LOCAL_STATES.values(), ids=list(BAD_LOCAL_STATES))
def test_invalid_memory_of_the_outer_optimizer_or_of_an_exchange_under_way_changes_nothing(change):
    model = torch.nn.Linear(40, 30)
    local = laconic.LocalSGD(
        model, torch.optim.SGD(model.parameters(), lr=0.1), codec="ef|qsgd:4", every=2, outer="nesterov", overlap=1
    )
    for _ in range(4):
        model(torch.randn(4, 40)).sum().backward()
        local.step()
    before = copy.deepcopy(local.state_dict())
    before["in_flight"] = {  # which one rank alone does not have
        "fragment": 0, "due": 5, "changes": [torch.zeros(30, 40), torch.zeros(30)], "buffers": {}, "starts": [],
        "buffer_starts": {},
    }  # fmt: skip
    local.load_state_dict(before)
    hostile = copy.deepcopy(before)
    change(hostile)
    with pytest.raises(InputError):
        local.load_state_dict(hostile)
    after = local.state_dict()
    assert after["in_flight"] is not None and after["steps"] == 4
    assert all(after["anchors"][name].equal(x) for name, x in before["anchors"].items())
    momentum = [state["outer"]["state"]["weight"]["momentum_buffer"] for state in (before, after)]
    assert momentum[0].equal(momentum[1])
    local.load_state_dict(before)


def test_mesh_of_a_sharded_state_is_bounded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Linear(40, 30)
    fully_shard(model, mesh=mesh["shard"])
    attached = laconic.attach(model, "ef|qsgd:4", policy=POLICY, replicate=mesh["replicate"])
    model(torch.randn(4, 40)).sum().backward()
    state = attached.state_dict()
    for bad in (torch.tensor([1, 2**62]), torch.tensor([0, 1]), torch.tensor([1.0, 1.0]), torch.tensor(1)):
        with pytest.raises(InputError, match="'mesh'"):
            attached.load_state_dict(state | {"mesh": bad, "steps": torch.tensor(9)})
    with pytest.raises(InputError, match="'rounds'"):
        attached.load_state_dict(state | {"rounds": torch.tensor([-1, 1])})
    assert int(attached.state_dict()["steps"]) == 1
    attached.load_state_dict(state | {"mesh": torch.tensor([1, 2**20])})  # in bounded time
    attached.detach()


def test_invalid_state_of_a_torchft_replica_is_refused_when_it_is_loaded():
    from laconic.torchft.memory import Counts, ReplicaMemory

    memory = ReplicaMemory("ef|qsgd:4", POLICY, "skip", Counts())
    for bad in (
        3.5,
        torch.full((4,), 1e300, dtype=torch.float64),
        torch.zeros(3).to_sparse(),
        torch.zeros(3).to("meta"),
    ):
        with pytest.raises(InputError):
            memory.load_portable_state({"ef|qsgd:4//there/w/residual": bad})
    assert memory.portable_state() == {}
    memory.load_portable_state({f"ef|qsgd:4//{way}/w/residual": torch.full((960,), 3e38) for way in ("there", "back")})
    memory.join(dist.group.WORLD)
    x = gradient(0)
    memory.begin_attempt(0, [("w", x)], participates=True).mean([("w", x)])  # their sum overflows: it is dropped
    assert x.isfinite().all() and memory.counts.residual_resets == 1
