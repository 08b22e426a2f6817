"""Faults in channels are raised, or logged and counted: values that are not finite, shapes that change, overflow."""

from __future__ import annotations

import logging
import math

import pytest
import torch

import laconic
import laws
from laconic import InputError, NonFiniteError, Policy, wire

COMPRESS_ALL = Policy(min_numel=0, exempt_1d=False)
SPECS = pytest.mark.parametrize(
    "spec", ["ef|topk:0.1", "momentum:0.9|topk:0.1|qsgd:4", "ef|qsgd:4", "momentum:0.9|bf16"]
)


def channel(spec, **options):
    return laconic.channel(spec, policy=COMPRESS_ALL, **options)


def memory(sender):
    return {name: laws.bytes_of(value) for name, value in sender.state_dict().items()}


@SPECS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_names_its_slot_and_keeps_the_memory(spec, bad):
    sender = channel(spec)
    sender.encode("w", laws.normal(200))
    before, x = memory(sender), laws.normal(200, seed=1)
    x[17] = bad
    with pytest.raises(NonFiniteError, match=r"slot 'w'.*finite"):
        sender.encode("w", x)
    assert memory(sender) == before
    assert sender.stats.rounds == 1 and sender.stats.residual_resets == 0


@SPECS
def test_first_round_that_is_not_finite_leaves_no_memory(spec):
    sender = channel(spec)
    with pytest.raises(NonFiniteError):
        sender.encode("w", torch.full((50,), math.nan))
    assert sender.state_dict() == {}


@SPECS
def test_skip_sends_zeros_and_keeps_the_memory_and_is_logged_once(spec, caplog):
    sender = channel(spec, nonfinite="skip")
    sender.encode("w", laws.normal(200))
    before, bad = memory(sender), torch.full((200,), math.inf)
    with caplog.at_level(logging.WARNING, "laconic"):
        for _ in range(3):
            assert not bool(laconic.decode(sender.encode("w", bad)).any())
    assert memory(sender) == before
    assert sender.stats.skipped_nonfinite == 3 and sender.stats.rounds == 4
    assert caplog.text.count("is not finite") == 1


@pytest.mark.parametrize("spec", ["ef|topk:0.1", "topk:0.1"])
def test_skipped_round_has_the_same_dtype(spec):
    sender = channel(spec, nonfinite="skip")
    good = wire.unpack(sender.encode("w", laws.normal(50).bfloat16())).spec
    bad = wire.unpack(sender.encode("w", torch.full((50,), math.nan, dtype=torch.bfloat16))).spec
    assert good == bad


def test_value_beyond_float32_counts_as_not_finite():
    sender = channel("ef|topk:0.1")
    with pytest.raises(NonFiniteError, match="slot 'w'"):
        sender.encode("w", torch.full((50,), 1e300, dtype=torch.float64))
    assert sender.state_dict() == {}


def test_overflowed_residual_is_reset_and_logged(caplog):
    sender = channel("ef|topk:0.01")
    x = torch.full((200,), 3e38)
    sender.encode("w", x)
    with caplog.at_level(logging.WARNING, "laconic"), pytest.raises(NonFiniteError, match="slot 'w'"):
        sender.encode("w", x)
    assert "overflowed float32 and is reset" in caplog.text
    assert sender.stats.residual_resets == 1 and sender.residual("w") is None
    sender.encode("w", laws.normal(200))
    assert bool(torch.isfinite(sender.residual("w")).all())


@SPECS
def test_tensor_that_cannot_be_encoded_keeps_the_memory(spec):
    sender = channel(spec)
    x = laws.normal(*(1,) * 16, 40)  # 17 dimensions: one more than a frame can hold
    for _ in range(2):
        with pytest.raises(InputError, match="dimensions"):
            sender.encode("w", x)
    assert not any(bool(value.any()) for value in sender.state_dict().values())


def test_changed_shape_resets_the_residual_and_is_logged(caplog):
    sender, fresh = channel("ef|topk:0.1"), channel("ef|topk:0.1")
    sender.encode("w", laws.normal(200))
    x = laws.normal(20, 30)
    with caplog.at_level(logging.WARNING, "laconic"):
        assert sender.encode("w", x) == fresh.encode("w", x)
    assert sender.stats.residual_resets == 1
    assert "slot 'w' changed its shape from [200] to [20, 30]: its residual is reset" in caplog.text
    sender.encode("w", x)
    assert sender.stats.residual_resets == 1


def test_bytes_are_counted():
    sender = channel("ef|topk:0.1")
    frames = [sender.encode("w", laws.normal(300, seed=i)) for i in range(3)]
    assert sender.stats.bytes_in == 3 * 1200
    assert sender.stats.bytes_out == sum(len(frame) for frame in frames)
    assert sender.stats.rounds == 3
    sender.encode("half", laws.normal(300).to(torch.bfloat16))
    assert sender.stats.bytes_in == 3 * 1200 + 600  # of the input, not of the float32 sum with the residual


@pytest.mark.parametrize(
    "shape, reason", [((5000,), "is one-dimensional"), ((), "is a single number"), ((60, 60), "fewer than 4096")]
)
def test_small_tensors_are_not_compressed_which_is_logged_once(shape, reason, caplog):
    sender = laconic.channel("ef|topk:0.01|qsgd:4")
    with caplog.at_level(logging.INFO, "laconic"):
        for i in range(3):
            x = laws.normal(*shape, seed=i)
            assert laws.same_bits(laconic.decode(sender.encode("w", x)), x)
    assert list(sender.stats.exempt) == ["w"] and reason in sender.stats.exempt["w"]
    assert caplog.text.count("slot 'w' travels as 'none' instead of 'ef|topk:0.01|qsgd:4'") == 1
    assert sender.state_dict() == {}


def test_large_tensors_get_the_channels_spec():
    sender = laconic.channel("ef|topk:0.01")
    assert wire.unpack(sender.encode("w", laws.normal(64, 64))).codec == "topk:0.01"
    assert sender.stats.exempt == {}


def test_first_matching_rule_wins_over_exemptions():
    sender = laconic.channel("ef|topk:0.01", policy={"*.bias": "ef|sign", "head.*": "bf16", "*": "qsgd:4"})
    used = {
        slot: wire.unpack(sender.encode(slot, laws.normal(64, 64))).codec
        for slot in ("a.bias", "head.bias", "head.w", "x")
    }
    assert used == {"a.bias": "sign:4096", "head.bias": "sign:4096", "head.w": "bf16", "x": "qsgd:4"}
    assert set(sender.state_dict()) == {"a.bias/residual", "head.bias/residual"}
    assert "matches '*.bias'" in sender.stats.exempt["a.bias"]


def test_policy_with_an_invalid_spec_raises_config_error():
    for build in (lambda: Policy(rules={"*": "gzip"}), lambda: Policy(small="qsgd:99"), lambda: Policy(min_numel=-1)):
        with pytest.raises(laconic.ConfigError):
            build()
    with pytest.raises(laconic.ConfigError):
        laconic.channel("ef|topk", policy={"w": "nothing"})


def test_text_of_a_channel_is_canonical():
    assert str(laconic.channel("ef | topk:keep=0.010 | qsgd:bits=4")) == "ef|topk:0.01|qsgd:4"
    assert str(laconic.channel("momentum|topk")) == "momentum:0.9|topk:0.01"
