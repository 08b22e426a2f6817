"""Transform coding between stages: sizes, errors, renewed bases, other shapes, states, foreign bytes."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic import counters
from laconic.errors import ConfigError, FrameError, InputError, NonFiniteError
from laconic.packet import TensorSpec
from laconic.pipeline.ends import TransformReceiver, TransformSender, make_receiver, make_sender
from laconic.pipeline.messages import Position, Receiver, Sender
from laconic.pipeline.traffic import Traffic, load, save
from laconic.pipeline.transform import MAX_BITS, Layout, allocate, layout_of, transform_bits

SHAPE = (8, 64, 48)
SPEC = TensorSpec(SHAPE, torch.float32)
FIRST = Position(0, 0)
PERIOD = 64


def activations(seed: int, dtype: torch.dtype = torch.float32, rank: int = 6) -> torch.Tensor:
    """Return values that vary in few directions, and a little in all others."""
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(rank, SHAPE[-1], generator=generator) * torch.logspace(1, 0, rank)[:, None]
    generator.manual_seed(1000 + seed)
    weights = torch.randn(*SHAPE[:-1], rank, generator=generator)
    return (weights @ directions + 0.05 * torch.randn(SHAPE, generator=generator)).to(dtype)


def ends(spec: str, **options) -> tuple[Sender, Receiver]:
    return make_sender(spec, "forward", 0, error_every=1), make_receiver(spec, "forward", 1, **options)


def send(sender: Sender, receiver: Receiver, x: torch.Tensor, position: Position = FIRST, **options) -> torch.Tensor:
    nbytes = receiver.expected_nbytes(TensorSpec.of(x), position, **options)
    message, out = sender.message(x, position, **options), torch.empty_like(x)
    assert message is not None and message.numel() == nbytes
    receiver.read(message, out, position, **options)
    return out


def error(x: torch.Tensor, out: torch.Tensor) -> float:
    return float((x.double() - out.double()).square().sum() / x.double().square().sum())


def settled(spec: str, **options) -> tuple[Sender, Receiver]:
    sender, receiver = ends(spec, **options)
    for step in range(2 * PERIOD):
        send(sender, receiver, activations(step))
    return sender, receiver


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_few_bits_carry_values_that_vary_in_few_directions(dtype):
    sender, receiver = settled("klt:2")
    (thc_sender, thc_receiver), x = ends("thc:2"), activations(500, dtype)
    if dtype != torch.float32:  # another dtype has sizes of its own, and begins again
        for step in range(2 * PERIOD):
            send(sender, receiver, activations(step, dtype))
    out = send(sender, receiver, x)
    assert error(x, out) < 0.05 * error(x, send(thc_sender, thc_receiver, x))
    assert out.dtype == dtype and sender.stats.error == pytest.approx(error(x, out), rel=0.2)


@pytest.mark.parametrize("bits", [0.5, 1, 2, 4])
def test_messages_have_the_announced_bytes(bits):
    sender, receiver = ends(f"klt:{bits}")
    layout = layout_of(bits, SPEC)
    assert isinstance(layout, Layout) and (layout.period == PERIOD or bits < 2)
    for step in range(2 * layout.period + 2):
        before = sender.stats.bytes_sent
        send(sender, receiver, activations(step))
        if step >= 2 * layout.period:
            sent = sender.stats.bytes_sent - before - SPEC.numel * bits / 8
            assert 8 < sent < 12 + 0.021 * SPEC.numel * bits / 8


def test_basis_follows_activations_that_turn():
    sender, receiver = settled("klt:2")
    turned = torch.roll(torch.eye(SHAPE[-1]), 7, 0)
    first = send(sender, receiver, activations(0) @ turned)
    for step in range(3 * PERIOD):
        last = send(sender, receiver, activations(step) @ turned)
    assert error(activations(step) @ turned, last) < 0.2 * error(activations(0) @ turned, first)


def test_evaluation_changes_nothing():
    sender, receiver = settled("klt:2")
    x = activations(900)
    once = send(sender, receiver, x, training=False)
    assert torch.equal(once, send(sender, receiver, x, training=False))
    assert torch.equal(once, send(sender, receiver, x))


def test_shape_that_changes_begins_again_on_both_ends_and_is_counted():
    sender, receiver = settled("klt:4")
    before = counters.counts().get("transform_resets", 0)
    for step in range(2 * PERIOD + 1):
        x = activations(step)[:, :32].contiguous()
        out = send(sender, receiver, x)
    assert error(x, out) < 1e-3 and counters.counts()["transform_resets"] == before + 2


def test_tensors_without_channels_travel_as_they_are():
    sender, receiver = ends("klt:2")
    for x, reason in (
        (torch.ones(4096), "has no channels"), (torch.ones(8, 8, dtype=torch.int64), "is int64"),
        (torch.ones(2, 2), "is too small to be compressed"), (torch.ones(0, 8), "has no channels"),
    ):  # fmt: skip
        assert sender.message(x, FIRST) is None and sender.stats.exempt[reason]
        assert receiver.expected_nbytes(TensorSpec.of(x), FIRST) == reason


def test_values_that_are_not_finite_leave_the_basis_alone():
    sender, receiver = settled("klt:2", nonfinite="spread")
    bad = activations(0)
    bad[0, 0, 0] = torch.inf
    assert send(sender, receiver, bad).isnan().all() and sender.stats.nonfinite == 1
    for step in range(PERIOD):
        x = activations(step)
        out = send(sender, receiver, x)
    assert error(x, out) < 1e-2


def test_nothing_finite_in_a_whole_period_still_gives_a_basis():
    sender, receiver = ends("klt:4", nonfinite="skip")
    for _ in range(2 * PERIOD):
        assert not send(sender, receiver, torch.full(SHAPE, torch.nan)).any()
    for step in range(2 * PERIOD + 1):
        x = activations(step)
        out = send(sender, receiver, x)
    assert error(x, out) < 1e-2
    zeros = send(sender, receiver, torch.zeros(SHAPE))
    assert not zeros.any()


@pytest.mark.parametrize("after", [3, PERIOD + 5, 2 * PERIOD + 5, 3 * PERIOD])
def test_resumed_stages_send_the_same_bytes(after):
    options = {"seed": 3, "delta": False, "nonfinite": "spread", "error_every": 0}
    first, second = (Traffic("klt:2", "forward", 0, **options) for _ in range(2))
    for step in range(after):
        send(first.sender, first.receiver, activations(step))
    load(save(first), [second])
    for step in range(PERIOD + 1):
        x = activations(1000 + step)
        ours, theirs = (each.sender.message(x, FIRST) for each in (first, second))
        assert torch.equal(ours, theirs)
        for each in (first, second):
            assert each.receiver.expected_nbytes(SPEC, FIRST) == ours.numel()
            each.receiver.read(ours, torch.empty(SHAPE), FIRST)


def test_saved_states_that_cannot_be_are_refused():
    options = {"seed": 3, "delta": False, "nonfinite": "spread", "error_every": 0}
    traffic, other = (Traffic("klt:2", "forward", 0, **options) for _ in range(2))
    for step in range(2 * PERIOD + 1):
        send(traffic.sender, traffic.receiver, activations(step))
    state, where = save(traffic), "forward/sender/klt/0"
    changes = {
        f"{where}/number": torch.tensor(-1), f"{where}/layout": torch.tensor([1, 1 << 50, 1, 1, 1]),
        f"{where}/basis": torch.full_like(state[f"{where}/basis"], 255),
        f"{where}/moments": torch.full_like(state[f"{where}/moments"], torch.nan),
        f"{where}/next": torch.zeros(3, dtype=torch.uint8), "forward/sender/klt/x/number": torch.tensor(1),
    }  # fmt: skip
    for name, value in changes.items():
        with pytest.raises((InputError, NonFiniteError), match="saved state"):
            load({**state, name: value}, [other])
    with pytest.raises(InputError, match="does not belong to message"):
        load({name: x for name, x in state.items() if name != f"{where}/basis"}, [other])
    assert not isinstance(other.sender, TransformSender) or not other.sender.transforms.by_tensor


def test_lost_message_is_noticed():
    sender, receiver = ends("klt:2")
    send(sender, receiver, activations(0))
    sender.message(activations(1), FIRST)
    with pytest.raises(FrameError, match="load the state of the same step"):
        receiver.read(sender.message(activations(2), FIRST), torch.empty(SHAPE), FIRST)


@pytest.mark.parametrize("count", [1, 2 * PERIOD - 1, 2 * PERIOD + 1])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_foreign_bytes_raise_frame_error_only(count, data):
    sender, receiver = prepared(count)
    message = sender.message(activations(5), FIRST, training=data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, message.numel() - 1) | st.integers(0, 63))
        message[at] ^= data.draw(st.integers(1, 255))
    with suppress(FrameError):
        receiver.read(message, torch.empty(SHAPE), FIRST)


_prepared: dict[int, dict[str, torch.Tensor]] = {}


def prepared(count: int) -> tuple[Sender, Receiver]:
    options = {"seed": 3, "delta": False, "nonfinite": "spread", "error_every": 0}
    if count not in _prepared:
        traffic = Traffic("klt:2", "forward", 0, **options)
        for step in range(count):
            send(traffic.sender, traffic.receiver, activations(step))
        _prepared[count] = save(traffic)
    traffic = Traffic("klt:2", "forward", 0, **options)
    load(_prepared[count], [traffic])
    return traffic.sender, traffic.receiver


def test_basis_with_impossible_bits_is_refused():
    for value, text in ((255, "must not grow"), (MAX_BITS, "more than the"), (0, "must not grow")):
        sender, receiver = prepared(PERIOD)
        assert isinstance(sender, TransformSender) and isinstance(receiver, TransformReceiver)
        sender.transforms.by_tensor[0].next[:, -1] = value
        for step in range(PERIOD - 1):
            send(sender, receiver, activations(step))
        with pytest.raises(FrameError, match=text):
            send(sender, receiver, activations(PERIOD))


@pytest.mark.parametrize("bits", [0.25, 1, 3, 8])
@pytest.mark.parametrize("spectrum", ["flat", "steep", "one", "none"])
def test_bits_fit_the_message_and_fall_with_the_energy(bits, spectrum):
    layout = layout_of(bits, SPEC)
    assert isinstance(layout, Layout)
    energy = {
        "flat": torch.ones(48), "steep": torch.logspace(0, -9, 48), "one": torch.eye(48)[0], "none": torch.zeros(48),
    }[spectrum]  # fmt: skip
    allocated = allocate(energy, layout)
    assert layout.frames_nbytes(allocated) <= layout.frames and allocated[0] >= 1
    assert bool((allocated[1:] <= allocated[:-1]).all()) and int(allocated.max()) <= MAX_BITS
    if spectrum in ("flat", "steep") and bits >= 1:
        assert layout.frames_nbytes(allocated) > 0.8 * layout.frames or int(allocated.min()) == MAX_BITS


@pytest.mark.parametrize("spec", ["klt:0", "klt:9", "klt:x", "klt:nan", "klt:"])
def test_bits_out_of_range_are_refused(spec):
    with pytest.raises(ConfigError, match="bits of 'klt' must be above 0 and at most 8"):
        transform_bits(spec)


def test_differences_are_refused():
    with pytest.raises(ConfigError, match="delta"):
        make_sender("klt:2", "forward", 0, delta=True)
    assert transform_bits("klt") == 4.0 and transform_bits("thc:4") is None
