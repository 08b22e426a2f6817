"""The laws over random chains and tensors. The fixed set of chains runs in the files of their selectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import laconic
import laws
from laconic import wire
from laconic.codecs import registry


def numbers(low, high):
    return st.floats(low, high, allow_nan=False, width=64)


buckets = st.integers(7, 16).map(lambda power: 1 << power)
truth = st.sampled_from(["true", "false"])
adaptive = st.builds(
    "adaptive:{!r},m={},f={!r},integer={},zero={},tail={!r}".format, numbers(0.0, 12.0), st.integers(1, 12),
    numbers(1e-9, 1.0), truth, truth, st.one_of(st.just(0.0), numbers(1e-9, 0.1)),
)  # fmt: skip
# What a coder can stand behind: at most 4,096 symbols.
quantizers = st.one_of(
    adaptive,
    st.builds("uniform:{}".format, st.integers(1, 12)),
    st.builds(
        "qsgd:{},bucket={},norm={},round={}".format, st.integers(2, 12), buckets, st.sampled_from(["max", "l2"]),
        st.sampled_from(["stochastic", "nearest"]),
    ),
    st.builds("terngrad:{}".format, buckets),
    st.builds("sign:{}".format, buckets),
    st.builds("onebit:bucket={}".format, buckets),
    st.builds("bins:{},bucket={}".format, st.integers(1, 4), buckets),
)  # fmt: skip
coders = st.sampled_from(["huffman", "huffman:auto", "rans", "rans:auto", "deflate", "zstd:1"])
values = st.one_of(
    st.sampled_from(["none", "fp16", "bf16"]),
    st.builds("uniform:{}".format, st.integers(13, 30)),
    quantizers,
    st.builds("{}|{}".format, quantizers, coders),
)
keeps = st.one_of(numbers(1e-9, 1.0), st.sampled_from([1.0, 0.5, 0.001, 1e-300]))
selectors = st.one_of(
    st.builds("topk:{!r},approx={}".format, keeps, truth),
    st.builds("topk:{!r},code=rans".format, keeps),
    st.builds("topk:{!r},code=context".format, keeps),
    st.builds("randk:keep={!r},scale={}".format, keeps, truth),
    st.builds("threshold:{!r}".format, numbers(1e-37, 1e37)),
)
specs = st.one_of(values, selectors, st.builds("{}|{}".format, selectors, values))


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(laws.DTYPES))
    n = draw(st.one_of(st.integers(0, 40), st.sampled_from([127, 128, 129, 255, 256, 257, 319, 321, 513, 4097])))
    exponent = draw(st.integers(-40, 37 if dtype != torch.float16 else 3))
    x = laws.normal(n, seed=draw(st.integers(0, 9))).double().clamp(-3, 3) * 10.0**exponent
    kind = draw(st.sampled_from(["as it is", "rounded", "constant", "half zero", "few"]))
    if kind == "rounded":
        x = (x / 10.0**exponent).round() * 10.0**exponent
    elif kind == "constant" and n:
        x[:] = x[0]
    elif kind == "half zero":
        x[::2] = 0
    elif kind == "few":
        x[2:] = 0
    return x.to(dtype).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)


@given(spec=specs, x=tensors(), seed=st.integers(-(2**63), 2**64 - 1))
def test_laws_hold_for_random_chains_and_tensors(spec, x, seed):
    codec = laconic.codec(spec)
    assert laconic.codec(str(codec)) == codec
    before = laws.bytes_of(x)
    frame = laconic.encode(x, spec, seed=seed)
    assert laws.bytes_of(x) == before
    assert len(frame) <= laconic.max_nbytes(spec, x)
    assert laconic.encode(x, codec, seed=seed) == frame
    assert bytes(wire.pack(codec.encode(x, seed=seed))) == frame
    y = laconic.decode(frame)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert bool(torch.isfinite(y).all())
    laws.agree(x, spec, seed)


@given(spec=specs, x=tensors(), weight=st.floats(-4, 4, width=32))
def test_accumulate_equals_decode_for_random_chains(spec, x, weight):
    codec, x = laconic.codec(spec), x.float()
    packet = codec.encode(x)
    out = torch.ones_like(x)
    codec.accumulate(packet, out, weight)
    assert torch.equal(out, 1 + codec.decode(packet) * torch.tensor(weight, dtype=torch.float32))


def test_every_codec_runs_the_laws():
    named = {stage.split(":")[0] for spec in laws.EVERY for stage in spec.split("|")}
    assert {*laconic.codec_names(), *registry.names("coder")} <= named


@pytest.mark.parametrize("name", laconic.codec_names())
def test_every_name_is_a_valid_spec(name):
    assert laws.roundtrip(laws.normal(50), name).shape == (50,)
