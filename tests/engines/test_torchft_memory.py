"""Residuals over discarded steps, changing quorums and replicas that do not take part; torchft is not needed."""

from __future__ import annotations

import pytest
import torch
from quorums import Manager, form_quorum, gradients, in_threads, take_step

import laconic
from laconic.errors import ConfigError
from laconic.torchft import attach

SPECS = ["ef|qsgd:4", "ef|topk:0.1|qsgd:4", "ef|thc:6", "ef|powersgd:2", "momentum:0.9|topk:0.1"]


def attached(count: int, spec: str) -> tuple[list[Manager], list]:
    managers = [Manager() for _ in range(count)]
    attachments = [attach(manager, spec) for manager in managers]
    form_quorum(managers)
    return managers, attachments


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def unsent(attachment) -> torch.Tensor:
    """The sum of what a replica has yet to deliver, over all values."""
    return sum((x.double().sum() for x in attachment.unsent().values()), torch.zeros((), dtype=torch.float64))


def test_sums_are_equal_on_all_replicas_and_close_to_exact():
    managers, attachments = attached(3, "ef|qsgd:8")
    xs = gradients(3, 0)
    results = take_step(managers, xs)
    for i, exact in enumerate(sum(x[i] for x in xs) for i in range(2)):
        assert all(torch.equal(results[0][i], other[i]) for other in results)
        assert (results[0][i] - exact).norm() < 0.02 * exact.norm()
    stats = attachments[0].stats()
    assert stats["committed_steps"] == 1 and 0 < stats["wire_bytes"] < 0.5 * sum(x.numel() * 4 for x in xs[0])


def test_none_gives_the_bits_of_the_plain_sum():
    managers, attachments = attached(3, "none")
    xs = gradients(3, 0)
    plain = [Manager() for _ in range(3)]
    form_quorum(plain)
    for ours, theirs in zip(take_step(managers, xs), take_step(plain, xs), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert attachments[0].stats()["uncompressed"] == {"the codec is none": 2}


@pytest.mark.parametrize("spec", SPECS)
def test_discarded_step_leaves_no_trace(spec):
    managers, attachments = attached(2, spec)
    undisturbed, _ = attached(2, spec)
    for step in range(2):
        take_step(managers, gradients(2, step))
        take_step(undisturbed, gradients(2, step))
    before = [attachment.state_dict() for attachment in attachments]
    assert all(before)
    for manager in managers:
        manager.healthy = False
    take_step(managers, gradients(2, 77))
    form_quorum(managers)
    for attachment, state in zip(attachments, before, strict=True):
        assert same(attachment.state_dict(), state)
    for ours, theirs in zip(
        take_step(managers, gradients(2, 2)), take_step(undisturbed, gradients(2, 2)), strict=True
    ):  # fmt: skip
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert [each.stats()["discarded_steps"] for each in attachments] == [1, 1]


@pytest.mark.parametrize("spec", [pytest.param("ef|topk:0.1|qsgd:4", marks=pytest.mark.slow), "ef|thc:6"])
def test_step_that_others_committed_keeps_the_residuals_of_what_was_sent(spec):
    managers, attachments = attached(2, spec)
    take_step(managers, gradients(2, 0))
    managers[1].healthy = False  # replica 1 fails after all its frames have arrived at replica 0
    take_step(managers, gradients(2, 1))
    assert [manager.step for manager in managers] == [2, 1]
    sent = attachments[1]._memory.exchange.copy_memory()
    managers[1].step = 2  # torchft heals it
    form_quorum(managers)
    xs = [x.clone() for x in gradients(1, 2)[0]]
    managers[1].participates = False
    take_step(managers, [gradients(1, 3)[0], xs])
    stats = attachments[1].stats()
    assert (stats["steps_committed_by_others"], stats["discarded_steps"]) == (1, 0)
    kept = attachments[1]._memory.exchange.copy_memory()
    for key, slots in sent.items():
        if "back" not in key:  # as an owner it went on to deliver means
            for slot, memory in slots.items():
                assert torch.allclose(kept[key][slot].residual, memory.residual, rtol=1e-5, atol=1e-6), (key, slot)


@pytest.mark.parametrize(
    "spec", ["ef|qsgd:4", "ef|topk:0.1|qsgd:4", "ef|thc:6", pytest.param("ef|powersgd:2", marks=pytest.mark.slow)]
)
def test_nothing_is_lost_over_changing_quorums(spec):
    """Inputs of committed steps = delivered sums + residuals, summed over all values, through random events."""
    managers, attachments = attached(3, spec)
    members, generator = [0, 1, 2], torch.Generator().manual_seed(1)
    owed = {i: torch.zeros((), dtype=torch.float64) for i in range(3)}
    for round_number in range(14):
        event = int(torch.randint(4, (), generator=generator))
        if event == 0:  # the quorum changes
            members = [[0, 1, 2], [0, 1], [1, 2], [2, 0, 1]][int(torch.randint(4, (), generator=generator))]
            newest = max(managers[i].step for i in members)
            for i in members:
                managers[i].step = newest
            form_quorum([managers[i] for i in members])
        discard = event == 1
        for i in members:
            managers[i].healthy = not discard
        xs = gradients(len(members), 100 + round_number)
        results = take_step([managers[i] for i in members], xs)
        if discard:
            form_quorum([managers[i] for i in members])
            for i in members:
                assert torch.allclose(unsent(attachments[i]), owed[i], rtol=1e-4, atol=1e-3)
            continue
        inputs = sum(x.double().sum() for each in xs for x in each)
        delivered = sum(x.double().sum() for x in results[0])
        before = sum(owed[i] for i in members)
        for i in members:
            owed[i] = unsent(attachments[i])
        if event == 0:  # what was kept of a mean counts for the number of replicas of now
            continue
        after = sum(owed[i] for i in members)
        scale = sum(x.double().abs().sum() for each in xs for x in each)
        assert abs(before + inputs - delivered - after) < 1e-5 * scale


def test_residuals_of_whole_slots_survive_another_number_of_replicas():
    managers, attachments = attached(3, "ef|topk:0.1|qsgd:4")
    for step in range(3):
        take_step(managers, gradients(3, step))
    states = [attachment.state_dict() for attachment in attachments]
    form_quorum(managers[:2])
    for attachment in attachments[:2]:
        attachment._memory._follow_quorum()
    for attachment, before in zip(attachments[:2], states, strict=False):
        after = attachment.state_dict()
        for slot in {key.split("/")[3] for key in before}:
            whole = [
                sum(
                    state.get(f"{attachment.spec}//{direction}/{slot}/residual", 0) * factor
                    for direction, factor in (("there", 1), ("back", 2))
                )
                for state in (before, after)
            ]
            assert torch.allclose(*whole, rtol=1e-6, atol=1e-6)
            assert whole[0].abs().sum() > 0
        assert attachment.stats()["residual_carries"] == 1


@pytest.mark.parametrize("spec", SPECS)
def test_replica_that_does_not_take_part_keeps_its_residuals_and_adds_nothing(spec):
    managers, attachments = attached(2, spec)
    for step in range(2):
        take_step(managers, gradients(2, step))
    before = attachments[1]._memory.exchange.copy_memory()
    managers[1].participates = False
    results = take_step(managers, gradients(2, 2))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    after = attachments[1]._memory.exchange.copy_memory()
    for key, slots in before.items():
        for slot, memory in slots.items() if key[1] != "back" else ():
            assert memory.residual is None or torch.equal(memory.residual, after[key][slot].residual), (key, slot)
    assert attachments[1].stats()["nonparticipating_steps"] == 1


def test_lost_replica_fails_the_step_and_residuals_are_put_back():
    managers, attachments = attached(2, "ef|topk:0.1|qsgd:4")
    take_step(managers, gradients(2, 0))
    before = attachments[0].state_dict()
    managers[1]._pg._inner.group = None  # closes its connections, as the end of its process does
    managers[0].reduce(*gradients(1, 1)[0])
    assert managers[0].step == 1
    assert same(attachments[0].state_dict(), before)
    form_quorum(managers[:1])
    alone = gradients(1, 2)[0]
    assert all(torch.equal(x, y) for x, y in zip(managers[0].reduce(*alone), alone, strict=True))
    assert attachments[0].stats()["uncompressed"]["the quorum has one replica"] == 2
    assert managers[0].step == 2


def with_newcomer() -> tuple[list[Manager], list]:
    """Return two replicas after three steps, and a third one that has joined in the step of the others."""
    managers, attachments = attached(2, "ef|powersgd:2")
    for step in range(3):
        take_step(managers, gradients(2, step))
    newcomer = Manager()
    attachments.append(attach(newcomer, "ef|powersgd:2"))
    newcomer.step = managers[0].step
    return [*managers, newcomer], attachments


def test_healed_replica_continues_with_the_common_memory():
    managers, attachments = with_newcomer()
    managers[2].state["laconic"][0](managers[0].state["laconic"][1]())  # before the step, as with a synchronous quorum
    form_quorum(managers)
    results = take_step(managers, gradients(3, 3))
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))
    starts = [
        {key: x for key, x in each.state_dict().items() if key.endswith("/start")} for each in attachments
    ]  # fmt: skip
    assert starts[0] and same(starts[0], starts[1]) and same(starts[0], starts[2])


def test_replica_healed_after_the_exchange_of_its_first_step_agrees_with_the_others():
    """With an asynchronous quorum torchft loads the state in should_commit, when the exchange is over."""
    managers, _ = with_newcomer()
    newcomer = managers[2]
    newcomer.participates = False
    state = managers[0].state["laconic"][1]()
    commit = newcomer.should_commit
    newcomer.should_commit = lambda: (newcomer.state["laconic"][0](state), commit())[1]
    form_quorum(managers)
    take_step(managers, gradients(3, 3))
    newcomer.participates, newcomer.should_commit = True, commit
    for step in range(4, 6):
        results = take_step(managers, gradients(3, step))
        assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))


def test_checkpoint_restores_residuals_for_another_number_of_replicas():
    managers, attachments = attached(3, "ef|topk:0.1|qsgd:4")
    for step in range(2):
        take_step(managers, gradients(3, step))
    saved = [attachment.state_dict() for attachment in attachments]
    again = [Manager() for _ in range(2)]
    restored = [attach(manager, "ef|topk:0.1|qsgd:4") for manager in again]
    for attachment, state in zip(restored, saved, strict=False):
        attachment.load_state_dict(state)
        assert same(attachment.state_dict(), state)
    form_quorum(again)
    xs = gradients(2, 5)
    results = take_step(again, xs)
    inputs = sum(x.double().sum() for each in xs for x in each)
    owed_before = sum(unsent_state(state, 2) for state in saved[:2])
    owed_after = sum(unsent(attachment) for attachment in restored)
    delivered = sum(x.double().sum() for x in results[0])
    assert abs(owed_before + inputs - delivered - owed_after) < 1e-2
    assert not same(restored[0].state_dict(), saved[0])


def unsent_state(state: dict, replicas: int) -> torch.Tensor:
    residuals = ((key, x.double().sum()) for key, x in state.items() if key.endswith("/residual"))
    return sum(x * (replicas if "//back/" in key else 1) for key, x in residuals)


def test_replicas_with_different_codecs_are_told():
    managers = [Manager(), Manager()]
    attachments = [attach(manager, spec) for manager, spec in zip(managers, ("qsgd:4", "qsgd:8"), strict=True)]
    form_quorum(managers)
    errors = []
    for manager in managers:
        manager.report_error = lambda error, m=manager: (errors.append(str(error)), setattr(m, "error", error))
    take_step(managers, gradients(2, 0))
    assert [manager.step for manager in managers] == [0, 0] and any("different arguments" in each for each in errors)
    with pytest.raises(ConfigError, match="has codec 'qsgd:4', the one it is healed from 'qsgd:8'"):
        managers[0].state["laconic"][0](managers[1].state["laconic"][1]())
    assert attachments[0].stats()["committed_steps"] == 0


def test_same_slot_twice_in_a_step_is_summed_in_turn():
    managers, _ = attached(2, "ef|topk:0.5")
    layout = [[("w", torch.Size((64, 96)))]]
    for manager in managers:
        manager._pg._names._buckets = layout
    xs = [[x[0].view(-1), x[0].view(-1)] for x in gradients(2, 0)]
    first, second = take_step(managers, xs)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(first[0], first[1])  # the second sum has the residual of the first


def test_sums_that_are_not_of_floats_are_exact_and_counted():
    managers, attachments = attached(2, "qsgd:4")
    counts = [[torch.tensor([1, 2])], [torch.tensor([3, 4])]]
    assert [x[0].tolist() for x in take_step(managers, counts)] == [[4, 6], [4, 6]]
    parameters = [[torch.nn.Parameter(torch.ones(80, 80)) * 2] for _ in range(2)]
    assert all(torch.equal(x[0], torch.full((80, 80), 4.0)) for x in take_step(managers, parameters))
    assert attachments[0].stats()["uncompressed"] == {
        "not a sum of float tensors": 1, "parameters, not gradients or changes": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda manager: attach(object(), "qsgd:4"), "expected a torchft.Manager, got object"),
        (lambda manager: attach(manager, "qsgd:40"), "qsgd"),
        (lambda manager: (attach(manager, "qsgd:4"), attach(manager, "qsgd:4")), "attached already"),
        (lambda manager: attach(manager, "qsgd:4", names=torch.nn.Linear(2, 2)), "got Linear"),
        (lambda manager: (setattr(manager, "_quorum_id", 3), attach(manager, "qsgd:4")), "before the first step"),
        (lambda manager: attach(manager, "qsgd:4", nonfinite="no"), "nonfinite must be one of"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    with pytest.raises(laconic.ConfigError, match=message):
        change(Manager())


def test_other_backends_are_refused():
    manager = Manager()
    manager._pg.getBackendName = lambda: "torchft-nccl"
    with pytest.raises(ConfigError, match="pg=ProcessGroupGloo"):
        attach(manager, "qsgd:4")
    assert in_threads([lambda: 1]) == [1]
