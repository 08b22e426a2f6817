"""Transform coding between stages: sizes, errors, renewed bases, evaluation, other shapes, states, foreign bytes."""

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
from laconic.pipeline.transform import MAX_BITS, MAX_PERIOD, MAX_WIDTH, Layout, allocate, layout_of, transform_bits

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


OPTIONS = {"seed": 3, "delta": False, "nonfinite": "spread", "error_every": 0}


def traffic_of(spec: str = "klt:2") -> Traffic:
    return Traffic(spec, "forward", 0, **OPTIONS)


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


def test_evaluation_of_another_batch_leaves_the_basis():
    sender, receiver = settled("klt:2")
    other = activations(900)[:3].contiguous()
    before = counters.counts().get("transform_untrained", 0)
    assert error(other, send(sender, receiver, other, training=False)) < 1e-3  # by the first codec
    assert counters.counts()["transform_untrained"] == before + 1
    assert sender.transforms.by_tensor[0].number == receiver.transforms.by_tensor[0].number == 2 * PERIOD
    (thc_sender, thc_receiver), x = ends("thc:2"), activations(901)
    assert error(x, send(sender, receiver, x)) < 0.05 * error(x, send(thc_sender, thc_receiver, x))


def test_evaluation_before_training_adds_nothing_to_the_state_and_is_counted():
    traffic, x = traffic_of(), activations(0)
    before, events = set(save(traffic)), counters.counts().get("transform_untrained", 0)
    for _ in range(3):  # as in every step of a schedule without loss_fn
        send(traffic.sender, traffic.receiver, x, training=False)
    assert set(save(traffic)) == before and counters.counts()["transform_untrained"] == events + 3
    send(traffic.sender, traffic.receiver, x)
    send(traffic.sender, traffic.receiver, x, training=False)
    assert counters.counts()["transform_untrained"] == events + 3


def test_messages_do_not_depend_on_autocast():
    plain, cast = traffic_of(), traffic_of()
    for step in range(2 * PERIOD + 1):
        x = activations(step)
        out = send(plain.sender, plain.receiver, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            same = send(cast.sender, cast.receiver, x)
    assert torch.equal(out, same) and out.dtype == same.dtype
    assert torch.equal(plain.sender.message(x, FIRST), cast.sender.message(x, FIRST))


def test_decoded_values_beyond_float16_saturate_and_are_counted():
    largest = torch.finfo(torch.float16).max
    sender, receiver = ends("klt:1")
    before = counters.counts().get("saturated", 0)
    for step in range(2 * layout_of(1.0, SPEC).period + 1):
        x = (torch.sign(activations(step)) * largest).half()
        out = send(sender, receiver, x)
        assert bool(out.isfinite().all())
    assert counters.counts()["saturated"] > before


def test_matrix_of_one_channel_is_coded():
    sender, receiver = ends("klt:4")
    for step in range(2 * PERIOD + 1):
        x = torch.randn(4096, 1, generator=torch.Generator().manual_seed(step))
        out = send(sender, receiver, x)
    assert receiver.transforms.by_tensor[0].basis is not None and error(x, out) < 0.05


def test_basis_that_cannot_be_computed_is_the_one_before_and_is_counted(monkeypatch):
    def fail(moments: torch.Tensor) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    computed = torch.linalg.eigh
    sender, receiver = ends("klt:4")
    before = counters.counts().get("transform_failures", 0)
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    for step in range(2 * PERIOD + 1):
        x = activations(step)
        out = send(sender, receiver, x)
    assert counters.counts()["transform_failures"] == before + 2
    assert torch.equal(receiver.transforms.by_tensor[0].basis.vectors, torch.eye(SHAPE[-1]))
    assert error(x, out) < 0.05
    monkeypatch.setattr(torch.linalg, "eigh", computed)
    for step in range(PERIOD, 3 * PERIOD):
        x = activations(step)
        out = send(sender, receiver, x)
    assert error(x, out) < 1e-3


@pytest.mark.parametrize("first", [3, PERIOD + 7])
def test_shape_that_changes_early_or_again_keeps_both_ends_in_step(first):
    sender, receiver = ends("klt:2")
    for step in range(first):
        send(sender, receiver, activations(step))
    for step in range(2 * PERIOD + 1):
        send(sender, receiver, activations(step)[:5].contiguous())
    send(sender, receiver, activations(0))


@pytest.mark.parametrize("ahead", [2, PERIOD + 6])
def test_receives_are_posted_before_earlier_messages_are_read(ahead):
    """As LoopedBFS does, which posts the receives of all micro-batches first."""
    sender, receiver = ends("klt:2")
    for shape in ((8, 64, 48), (5, 64, 48)):
        spec = TensorSpec(shape, torch.float32)
        for start in range(0, 2 * PERIOD + ahead, ahead):
            sizes = [receiver.expected_nbytes(spec, Position(number, 0)) for number in range(ahead)]
            for number, nbytes in enumerate(sizes):
                x, position = activations(start + number)[: shape[0]].contiguous(), Position(number, 0)
                message = sender.message(x, position)
                assert message.numel() == nbytes
                receiver.read(message, torch.empty_like(x), position)


def test_wide_tensors_and_those_with_few_tokens_travel_as_they_are():
    sender, receiver = ends("klt:2")
    for shape, reason in (
        ((32, 25088), f"has more than {MAX_WIDTH} channels"),
        ((2, 8192), f"needs more than {MAX_PERIOD} messages for a basis"),
    ):
        spec = TensorSpec(shape, torch.float32)
        assert sender.message(torch.zeros(shape), FIRST) is None and sender.stats.exempt[reason] == 1
        assert receiver.expected_nbytes(spec, FIRST) == reason
    assert isinstance(layout_of(2.0, TensorSpec((2048, MAX_WIDTH), torch.float32)), Layout)


def test_names_of_codecs_tell_all_bits_apart():
    names = [make_sender(spec, "forward", 0).text for spec in ("klt:2", "klt:0.50000001", "klt:0.50000002", "klt")]
    assert names == ["klt:2", "klt:0.50000001", "klt:0.50000002", "klt:4"]


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
    first, second = traffic_of(), traffic_of()
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


SENT, RECEIVED = "forward/sender/klt/0", "forward/receiver/klt/0"
HOSTILE = {
    "negative number": (SENT, "number", lambda x: torch.tensor(-1)),
    "number of another message": (SENT, "number", lambda x: torch.tensor(PERIOD)),
    "more than was sent": (SENT, "number", lambda x: x + PERIOD),
    "sparse number": (SENT, "number", lambda x: torch.tensor([1]).to_sparse()),
    "huge sizes": (SENT, "layout", lambda x: torch.tensor([1 << 50, 48, 1])),
    "too wide": (SENT, "layout", lambda x: torch.tensor([512, 25088, 512 * 25088 // 4])),
    "sparse sizes": (SENT, "layout", lambda x: x.to_sparse()),
    "basis of 255s": (SENT, "basis", lambda x: torch.full_like(x, 255)),
    "basis of long vectors": (SENT, "basis", lambda x: x.clone().index_fill_(1, torch.tensor([1]), 0x7B)),
    "received basis of 255s": (RECEIVED, "basis", lambda x: torch.full_like(x, 255)),
    "no basis": (SENT, "basis", None),
    "next of another shape": (SENT, "next", lambda x: torch.zeros(3, dtype=torch.uint8)),
    "sparse next": (SENT, "next", lambda x: x.to_sparse()),
    "meta next": (SENT, "next", lambda x: x.to("meta")),
    "next of 255s": (SENT, "next", lambda x: torch.full_like(x, 255)),
    "no next": (SENT, "next", None),
    "received next of 255s": (RECEIVED, "next", lambda x: torch.full_like(x, 255)),
    "more of the next than has travelled": (
        RECEIVED,
        "next",
        lambda x: x.clone().index_fill_(0, torch.tensor([47]), 1),
    ),
    "bits of the next that grow": (RECEIVED, "next", lambda x: x.clone().index_fill_(0, torch.tensor([0]), 0)),
    "sparse moments": (SENT, "moments", lambda x: x.to_sparse()),
    "moments that are not finite": (SENT, "moments", lambda x: torch.full_like(x, torch.nan)),
    "huge moments": (SENT, "moments", lambda x: torch.full_like(x, 1e308)),
    "no moments": (SENT, "moments", None),
    "moments of a receiver": (RECEIVED, "moments", lambda x: torch.zeros(48, 48, dtype=torch.float64)),
    "no tensor": ("forward/sender/klt/x", "number", lambda x: torch.tensor(1)),
    "the same tensor twice": ("forward/sender/klt/00", "number", lambda x: torch.tensor(1)),
    "a name of 5000 digits": ("forward/sender/klt/" + "9" * 5000, "number", lambda x: torch.tensor(1)),
    "unknown part": (SENT, "other", lambda x: torch.tensor(1)),
    "text": (SENT, "next", lambda x: "text"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_saved_states_that_cannot_be_are_refused_and_change_nothing(case):
    (where, field, change), state = HOSTILE[case], prepared_state(2 * PERIOD + 40)
    name = f"{where}/{field}"
    hostile = {key: x for key, x in state.items() if key != name}
    if change is not None:
        hostile[name] = change(state.get(name))
    other = traffic_of()
    load(state, [other])
    with pytest.raises((InputError, NonFiniteError), match="saved state"):
        load(hostile, [other])
    after = save(other)
    assert after.keys() == state.keys() and all(torch.equal(after[key], x) for key, x in state.items())


def test_state_without_its_senders_part_is_refused():
    state = prepared_state(2 * PERIOD + 40)
    with pytest.raises(InputError, match=r"has sent 0 messages, 'forward/sent' counts 168"):
        load({name: x for name, x in state.items() if not name.startswith(SENT)}, [traffic_of()])
    other_codec = {"forward/sent": state["forward/sent"]}
    load(other_codec, [traffic_of()])  # klt begins where another codec was used before


def test_loaded_tensors_are_copies_without_gradients_in_the_order_of_their_shape():
    state = prepared_state(2 * PERIOD + 40)
    moments = state[f"{SENT}/moments"].clone().requires_grad_()
    strided = {name: x.T.contiguous().T if x.dim() == 2 and x.dtype == torch.uint8 else x for name, x in state.items()}
    first, second = traffic_of(), traffic_of()
    load(state, [first])
    load({**strided, f"{SENT}/moments": moments}, [second])
    for step in range(PERIOD):
        x = activations(step)
        assert torch.equal(send(first.sender, first.receiver, x), send(second.sender, second.receiver, x))


def test_ends_of_one_tensor_share_what_stages_compare():
    for count in (1, PERIOD, PERIOD + 5, 2 * PERIOD, 2 * PERIOD + 40):
        sender, receiver = prepared(count)
        ours, theirs = sender.transforms.by_tensor[0], receiver.transforms.by_tensor[0]
        assert ours.shared() == theirs.shared() and ours.shared()[3] == count
    ours.next[0, 0] ^= 1
    assert ours.shared() != theirs.shared()


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


def prepared_state(count: int) -> dict[str, torch.Tensor]:
    """Return the state of a stage that has sent and received so many messages."""
    if count not in _prepared:
        traffic = traffic_of()
        for step in range(count):
            send(traffic.sender, traffic.receiver, activations(step))
        _prepared[count] = save(traffic)
    return _prepared[count]


def prepared(count: int) -> tuple[Sender, Receiver]:
    traffic = traffic_of()
    load(prepared_state(count), [traffic])
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
