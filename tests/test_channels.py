"""Channels: error feedback, momentum and saved states."""

from __future__ import annotations

import logging
import math

import pytest
import torch

import laconic
import laws
from laconic import InputError, NonFiniteError, Policy

COMPRESS_ALL = Policy(min_numel=0, exempt_1d=False)


def channel(spec, **options):
    return laconic.channel(spec, policy=COMPRESS_ALL, **options)


def gradients(rounds, *shape):
    return [laws.normal(*shape, seed=100 + i) for i in range(rounds)]


@pytest.mark.parametrize(
    "spec",
    ["topk:0.05", "topk:0.05|qsgd:4", "topk:0.1,approx=true", "randk:0.1", "randk:0.25|bf16", "threshold:2.0", "sign",
     "onebit", "bins:2", "topk:0.1|bins:2", "uniform:2", "qsgd:4", "qsgd:3,round=nearest", "bf16", "fp16", "none"],
)  # fmt: skip
def test_sent_values_and_residual_add_up_to_the_inputs(spec):
    sender, total, sent = channel(f"ef|{spec}"), torch.zeros(50, 40).double(), torch.zeros(50, 40).double()
    for i, x in enumerate(gradients(12, 50, 40)):
        total += x.double()
        sent += laconic.decode(sender.encode("w", x, seed=i)).double()
    residual = sender.residual("w").double()
    torch.testing.assert_close(sent + residual, total, rtol=0, atol=2e-5)
    assert float(residual.norm()) > 0 or spec == "none"


def test_residual_stays_bounded():
    sender, norms = channel("ef|topk:0.05|qsgd:4"), []
    for i, x in enumerate(gradients(200, 400)):
        sender.encode("w", x, seed=i)
        norms.append(float(sender.residual("w").norm()))
    assert max(norms[100:]) < 1.5 * max(norms[50:100])


def test_slots_do_not_share_memory():
    shared, alone = channel("ef|topk:0.1"), channel("ef|topk:0.1")
    for i, x in enumerate(gradients(4, 100)):
        shared.encode("other", -3 * x, seed=i)
        assert shared.encode("w", x, seed=i) == alone.encode("w", x, seed=i)
    assert shared.residual("unknown") is None


def test_input_is_not_modified():
    sender = channel("momentum:0.9|topk:0.1")
    for x in gradients(3, 100):
        before = laws.bytes_of(x)
        sender.encode("w", x)
        assert laws.bytes_of(x) == before


def test_channel_without_memory_equals_the_codec():
    x = laws.normal(30, 30)
    sender = channel("topk:0.1|qsgd:4")
    assert sender.encode("w", x, seed=4) == laconic.encode(x, "topk:0.1|qsgd:4", seed=4)
    assert sender.residual("w") is None and sender.state_dict() == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_memory_is_float32_for_any_input_dtype(dtype):
    sender = channel("ef|topk:0.1")
    for x in gradients(3, 100):
        assert laconic.decode(sender.encode("w", x.to(dtype))).shape == (100,)
    assert sender.residual("w").dtype == torch.float32


def test_strided_inputs_give_the_same_frames():
    a, b = channel("ef|topk:0.1"), channel("ef|topk:0.1")
    for x in gradients(3, 20, 30):
        assert a.encode("w", x.t()) == b.encode("w", x.t().contiguous())


@pytest.mark.parametrize("spec", ["ef|topk:0.1", "momentum:0.9|topk:0.1", "topk:0.1"])
def test_integer_tensor_raises_an_error_that_names_the_slot(spec):
    with pytest.raises(InputError, match=r"slot 'w'.*int64"):
        channel(spec).encode("w", torch.arange(100))


def test_codec_that_may_expand_the_error_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "laconic"):
        channel("ef|terngrad")
    assert "the residual can grow" in caplog.text
    caplog.clear()
    channel("ef|topk:0.1|qsgd:4")
    assert caplog.text == ""


@pytest.mark.parametrize("spec", ["none", "qsgd:4", "ef|topk:0.1"])
@pytest.mark.parametrize(
    "x",
    [laws.normal(8, 600), torch.zeros(8, 600), laws.normal(600, 8).t(), laws.normal(4800).double(), torch.zeros(0, 3)],
    ids=["matrix", "zeros", "strided", "float64", "empty"],
)
def test_parts_of_a_frame_make_up_the_frame(spec, x):
    in_parts, whole = laconic.channel(spec), laconic.channel(spec)
    for seed in range(2):
        assert b"".join(in_parts.encode_parts("w", x, seed=seed)) == whole.encode("w", x, seed=seed)
    assert in_parts.stats == whole.stats


def test_values_sent_unchanged_are_a_part_without_a_copy():
    x = laws.normal(8, 600)
    *_, payload = laconic.channel("none").encode_parts("w", x)
    assert torch.frombuffer(payload, dtype=torch.uint8).data_ptr() == x.data_ptr()
    x[3, 5] = math.inf
    with pytest.raises(NonFiniteError, match="slot 'w'"):
        laconic.channel("none").encode_parts("w", x)


def dgc(rounds, keep, m, nesterov=False):
    """Yield sent values, velocity and residual of Deep Gradient Compression: momentum correction, factor masking."""
    u, v = torch.zeros_like(rounds[0]), torch.zeros_like(rounds[0])
    k = max(1, round(keep * u.numel()))
    for g in rounds:
        u = m * u + g
        v = v + (m * u + g if nesterov else u)
        top = torch.sort(v.abs().view(-1), descending=True, stable=True).indices[:k]
        sent = torch.zeros_like(v)
        sent.view(-1)[top] = v.view(-1)[top]
        v, u = v - sent, u.clone()
        u.view(-1)[top] = 0
        yield sent, u, v


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("m", [0.0, 0.5, 0.9])
def test_momentum_equals_deep_gradient_compression(m, nesterov):
    rounds = gradients(15, 20, 25)
    sender = channel(f"momentum:{m},nesterov={str(nesterov).lower()}|topk:0.05")
    for i, (sent, u, v) in enumerate(dgc(rounds, 0.05, m, nesterov)):
        decoded = laconic.decode(sender.encode("w", rounds[i]))
        torch.testing.assert_close(decoded, sent, rtol=1e-6, atol=1e-6)
        state = sender.state_dict()
        torch.testing.assert_close(state["w/velocity"], u, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state["w/residual"], v, rtol=1e-6, atol=1e-6)


def test_momentum_zero_equals_error_feedback():
    a, b = channel("momentum:0.0|topk:0.1"), channel("ef|topk:0.1")
    for x in gradients(6, 300):
        assert a.encode("w", x) == b.encode("w", x)


def test_error_feedback_before_momentum_changes_nothing():
    a, b = channel("momentum:0.9|topk:0.1"), channel("ef|momentum:0.9|topk:0.1")
    for x in gradients(6, 300):
        assert a.encode("w", x) == b.encode("w", x)


def test_momentum_of_a_dense_codec_keeps_its_velocity():
    sender = channel("momentum:0.5|bf16")
    x = torch.ones(10)
    total = sum(laconic.decode(sender.encode("w", x)) for _ in range(3))
    torch.testing.assert_close(total, torch.full((10,), 1 + 1.5 + 1.75))


@pytest.mark.parametrize("spec", ["ef|topk:0.05|qsgd:4", "momentum:0.9|topk:0.05|qsgd:4", "ef|sign"])
def test_restored_channel_continues_bit_for_bit(spec, tmp_path):
    rounds = gradients(10, 30, 20)
    whole, first, second = channel(spec), channel(spec), channel(spec)
    slots = ("layer.0/weight", "b", "")
    expected = [whole.encode(slot, x, seed=i) for i, x in enumerate(rounds) for slot in slots]
    frames = [first.encode(slot, x, seed=i) for i, x in enumerate(rounds[:5]) for slot in slots]
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    frames += [second.encode(slot, x, seed=5 + i) for i, x in enumerate(rounds[5:]) for slot in slots]
    assert frames == expected


def test_state_dict_is_a_copy():
    sender = channel("ef|topk:0.1")
    sender.encode("w", laws.normal(100))
    state = sender.state_dict()
    before = laws.bytes_of(state["w/residual"])
    sender.encode("w", laws.normal(100, seed=1))
    assert laws.bytes_of(state["w/residual"]) == before
    sender.load_state_dict(state)
    sender.encode("w", laws.normal(100, seed=1))
    assert laws.bytes_of(state["w/residual"]) == before


@pytest.mark.parametrize("state, error", [
    ({"w": torch.zeros(3)}, InputError), ({"w/other": torch.zeros(3)}, InputError),
    ({"w/residual": torch.zeros(3, dtype=torch.int64)}, InputError), ({"w/residual": [0.0]}, InputError),
    ({"w/velocity": torch.zeros(3)}, InputError),
    ({"w/residual": torch.zeros(3), "w/velocity": torch.zeros(4)}, InputError),
    ({"w/residual": torch.tensor([float("nan")])}, NonFiniteError),
], ids=str)  # fmt: skip
def test_invalid_state_raises_and_changes_nothing(state, error):
    sender = channel("ef|topk:0.1")
    sender.encode("v", laws.normal(100))
    before = laws.bytes_of(sender.residual("v"))
    with pytest.raises(error):
        sender.load_state_dict({"good/residual": torch.zeros(5), **state})
    assert list(sender.state_dict()) == ["v/residual"]
    assert laws.bytes_of(sender.residual("v")) == before
