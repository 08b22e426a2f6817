"""``ef:decay``: a = decay * residual + x; send C(a); residual = a - sent, on every path that keeps residuals.

A round with decay must equal a round of plain ``ef`` whose residual was multiplied beforehand, bit for bit.
"""

from __future__ import annotations

import math

import pytest
import torch

import laconic
import laws
from laconic import ConfigError, NonFiniteError, kernels, wire
from laconic.aggregate import homomorphic
from laconic.cluster.job import Job
from laconic.codecs import parse
from laconic.codecs.memory import ErrorFeedback, residual_decay
from laconic.train.methods import method_options
from laconic.train.push_encoder import PushEncoder
from laconic.train.reports import Times

COMPRESS_ALL = laconic.Policy(min_numel=0, exempt_1d=False)
CODECS = ("topk:0.05", "topk:0.05|qsgd:4", "sign", "qsgd:4", "bf16")
SUMS = ("thc:2", "shared:4", "randk:0.3|thc:4", "randk:0.3", "powersgd:2", "union")


def channel(spec):
    return laconic.channel(spec, policy=COMPRESS_ALL)


def decayed(state, decay):
    """Return a state whose residuals are multiplied, with one rounding to float32."""
    factor = torch.tensor(decay, dtype=torch.float32)
    return {key: x * factor if key.endswith("/residual") else x for key, x in state.items()}


def test_canonical_spec_has_the_decay_only_if_it_is_not_1():
    for text, canonical in (
        ("ef|sign", "ef"),
        ("ef:1|sign", "ef"),
        ("ef:decay=1.0|sign", "ef"),
        ("ef:.95|sign", "ef:0.95"),
    ):
        assert str(channel(text)) == f"{canonical}|sign:4096"
    assert ErrorFeedback() == ErrorFeedback(1) and residual_decay(parse("ef:0.5|sign")[0]) == 0.5
    assert residual_decay(parse("momentum:0.9|sign")[0]) == residual_decay(()) == 1.0


@pytest.mark.parametrize("decay", ["0", "-0.5", "1.01", "nan", "much"])
def test_decay_outside_of_0_to_1_raises_config_error(decay):
    with pytest.raises(ConfigError, match=r"stage 'ef': decay must be (in \(0, 1\]|a finite number), got"):
        channel(f"ef:{decay}|sign")


@pytest.mark.parametrize("backend", ["cpu", "reference"])  # the reference fuses residual + x with qsgd
@pytest.mark.parametrize("codec", CODECS)
def test_rounds_follow_the_recursion(codec, backend):
    sender, e = channel(f"ef:0.9|{codec}"), torch.zeros(50, 40)
    with kernels.use_backend(backend):
        for i in range(5):
            x = laws.normal(50, 40, seed=i)
            a = e * torch.tensor(0.9) + x
            frame = sender.encode("w", x, seed=i)
            assert frame == laconic.encode(a, codec, seed=i)
            e = a.clone()
            laconic.codec(codec).accumulate(wire.unpack(frame), e, -1.0)
            assert laws.same_bits(sender.residual("w"), e)
    assert bool(e.any())


def test_a_value_that_is_never_sent_fades():
    plain, fading = channel("ef|topk:0.5"), channel("ef:0.5|topk:0.5")
    for _ in range(4):
        for sender in (plain, fading):
            sender.encode("w", torch.tensor([1.0, 100.0]))
    assert plain.residual("w").tolist() == [4.0, 0.0]
    assert fading.residual("w").tolist() == [1 + 0.5 + 0.25 + 0.125, 0.0]


def test_decay_applies_to_the_residual_of_momentum():
    spec, plain = channel("ef:0.9|momentum:0.5|topk:0.1"), channel("momentum:0.5|topk:0.1")
    for i in range(4):
        plain.load_state_dict(decayed(spec.state_dict(), 0.9))
        x = laws.normal(300, seed=i)
        assert spec.encode("w", x) == plain.encode("w", x)
        assert all(laws.same_bits(v, plain.state_dict()[k]) for k, v in spec.state_dict().items())


@pytest.mark.parametrize("spec", ["ef:0.9|topk:0.1", "ef:0.9|qsgd:4", "ef:0.9|momentum:0.9|topk:0.1"])
def test_value_that_is_not_finite_leaves_the_residual_without_decay(spec):
    raising, skipping = channel(spec), laconic.channel(spec, policy=COMPRESS_ALL, nonfinite="skip")
    bad = torch.full((200,), math.nan)
    for sender in (raising, skipping):
        sender.encode("w", laws.normal(200))
    before = laws.bytes_of(raising.residual("w"))
    with pytest.raises(NonFiniteError):
        raising.encode("w", bad)
    skipping.encode("w", bad)
    assert laws.bytes_of(raising.residual("w")) == laws.bytes_of(skipping.residual("w")) == before


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("codec", SUMS)
def test_contributions_to_sums_follow_the_recursion(codec, ring):
    workers, shape = 2, (60, 50)
    senders, plain = (
        [laconic.Contributor(f"{ef}|{codec}", workers=workers, worker=i, ring=ring) for i in range(workers)]
        for ef in ("ef:0.9", "ef")
    )
    for step in range(4):
        xs = [laws.normal(*shape, seed=50 * step + i) for i in range(workers)]
        for sender, other in zip(senders, plain, strict=True):
            other.load_state_dict(decayed(sender.state_dict(), 0.9))
        probes, expected = (
            [s.probe("w", x, seed=step) for s, x in zip(group, xs, strict=True)] for group in (senders, plain)
        )
        assert all(laws.same_bits(a, b) for a, b in zip(probes, expected, strict=True))
        agreed = senders[0].summing.agree(probes)
        frames = [sender.encode("w", agreed, seed=step) for sender in senders]
        assert frames == [sender.encode("w", agreed, seed=step) for sender in plain]
        for sender, other in zip(senders, plain, strict=True):
            assert laws.same_bits(sender.residual("w"), other.residual("w"))
        if not ring:
            total = wire.unpack(homomorphic.add(*frames))
            for sender in (*senders, *plain):
                sender.received("w", total)


@pytest.mark.parametrize("codec", ["thc:2", "shared:4", "powersgd:2"])
def test_dropped_rounds_restore_the_residual_from_before(codec):
    sender = laconic.Contributor(f"ef:0.9|{codec}", workers=1)
    x, y = laws.normal(40, 30), laws.normal(40, 30, seed=1)
    sender.encode("w", sender.probe("w", x))
    before = laws.bytes_of(sender.residual("w"))
    sender.probe("w", y / 0)
    sender.skip("w")
    assert laws.bytes_of(sender.residual("w")) == before
    frame = sender.encode("w", sender.probe("w", y))
    sender.undo("w")
    assert laws.bytes_of(sender.residual("w")) == before
    assert sender.encode("w", sender.probe("w", y)) == frame


@pytest.mark.parametrize("method, push", [("laconic", "ef:0.5|topk:0.1|sign"), ("homomorphic", "ef:0.5|thc:4")])
def test_pushes_of_a_job_follow_the_recursion(method, push):
    slots = {"w": torch.zeros(70, 90)}
    jobs = [Job(workers=1, **{**method_options(method), "push": spec}) for spec in (push, push.replace("ef:0.5", "ef"))]
    encoder, plain = (PushEncoder(job, 0, slots, Times()) for job in jobs)
    memory, other = ((e.channel if e.summing is None else e.summing) for e in (encoder, plain))
    for sequence in range(3):
        other.load_state_dict({**other.state_dict(), **decayed(memory.state_dict(), 0.5)})
        x = laws.normal(70, 90, seed=sequence)
        frames = []
        for each in (encoder, plain):
            if each.must_agree:
                probe = each.summing.probe("w", x, seed=sequence)
                frames.append(bytes(each.summing.encode_on("w", probe, probe, seed=sequence)))
                each.summing._scales["w"] = probe
            else:
                frames.append(bytes(each._encode("w", x, sequence)))
        assert frames[0] == frames[1]
