"""The grammar: what parses, how it is written back, and what the messages say."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
import torch

import laconic
import laws
from laconic import ConfigError
from laconic.codecs import Coder, registry
from laconic.codecs import _parse as cached_parse
from laconic.codecs.cast import BF16
from laconic.kernels.sections import symbol_dtype


@pytest.mark.parametrize("text, canonical", [
    ("none", "none"), ("qsgd", "qsgd:4"), ("qsgd:4", "qsgd:4"), ("qsgd:bits=4,bucket=512", "qsgd:4"),
    ("qsgd:bucket=1024,bits=8", "qsgd:8,bucket=1024"), ("qsgd:4,512,l2", "qsgd:4,norm=l2"), ("topk:1", "topk:1.0"),
    ("topk:1e-2", "topk:0.01"), ("topk:.5,true", "topk:0.5,approx=true"),
    ("topk:0.5,approx=TRUE", "topk:0.5,approx=true"), ("topk:.5,false,64", "topk:0.5,chunk=64"),
    ("topk:0.5,chunk=0", "topk:0.5"), (" topk : 0.01 | qsgd : bits = 4 ", "topk:0.01|qsgd:4"),
    ("sign", "sign:4096"), ("terngrad:bucket=512", "terngrad:512"), ("topk:0.1|none", "topk:0.1|none"),
    ("threshold:1E-3", "threshold:0.001"), ("uniform:30", "uniform:30"), ("adaptive", "adaptive:5.0"),
    ("adaptive:5", "adaptive:5.0"),
    ("adaptive:c=5,m=4,f=0.03,integer=false,by=entropy,c0=1,zero=false,tail=0", "adaptive:5.0"),
    ("adaptive:tail=1e-2,zero=TRUE,c=3", "adaptive:3.0,zero=true,tail=0.01"),
    ("adaptive:6,6,1,true", "adaptive:6.0,m=6,f=1.0,integer=true"), ("adaptive:-0.0", "adaptive:0.0"),
    ("adaptive:5.0,c0=-0,tail=-0.0", "adaptive:5.0,c0=0.0"), ("qsgd:4|huffman", "qsgd:4|huffman:pure"),
    ("qsgd:4|rans:mode=pure", "qsgd:4|rans:pure"), ("topk:.01 | qsgd | rans : auto", "topk:0.01|qsgd:4|rans:auto"),
    ("uniform:12|deflate", "uniform:12|deflate:6"), ("uniform|zstd:level=19", "uniform:8|zstd:19"),
    ("sign|huffman:auto", "sign:4096|huffman:auto"),
])  # fmt: skip
def test_canonical_spec_is_unique(text, canonical):
    assert str(laconic.codec(text)) == canonical
    assert laconic.codec(text) == laconic.codec(canonical)
    assert laconic.encode(laws.normal(200), text) == laconic.encode(laws.normal(200), canonical)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "gzip",
            r"unknown stage 'gzip' in 'gzip'; valid stages: adaptive, bf16, bins, deflate, .*uniform, union, zstd",
        ),
        ("topkk:0.1", "unknown stage 'topkk'.*Did you mean 'topk'"),
        ("qgsd:4", "Did you mean 'qsgd'"),
        ("topk:0.1|qsdg:4", "unknown stage 'qsdg' in 'topk:0.1|qsdg:4'.*Did you mean 'qsgd'"),
        ("topk:keep=0", r"stage 'topk': keep must be in \(0, 1\], got 0"),
        ("topk:-0.1", r"keep must be in \(0, 1\], got -0.1"),
        ("topk:1.5", r"keep must be in \(0, 1\], got 1.5"),
        ("randk:0", r"stage 'randk': keep must be in \(0, 1\], got 0"),
        ("topk:nan", "stage 'topk': keep must be a finite number, got 'nan'"),
        ("topk:inf", "keep must be a finite number, got 'inf'"),
        ("topk:1e999", "keep must be a finite number"),
        ("topk:much", "keep must be a finite number, got 'much'"),
        ("topk:0.1,approx=maybe", "approx must be true or false, got 'maybe'"),
        ("qsgd:40", "stage 'qsgd': bits must be a whole number from 2 to 12, got 40"),
        ("qsgd:1", "bits must be a whole number from 2 to 12, got 1"),
        ("qsgd:4.5", "stage 'qsgd': bits must be a whole number, got '4.5'"),
        ("qsgd:4,bucket=500", "or a power of two from 128 to 65536, got 500"),
        ("qsgd:4,bucket=64", "or a power of two from 128 to 65536, got 64"),
        ("qsgd:4,bucket=131072", "got 131072"),
        ("qsgd:4,norm=l3", "norm must be one of max, l2, got 'l3'"),
        ("qsgd:4,round=up", "round must be one of stochastic, nearest, got 'up'"),
        ("uniform:0", "stage 'uniform': bits must be a whole number from 1 to 30, got 0"),
        ("uniform:31", "from 1 to 30, got 31"),
        ("adaptive:13", "stage 'adaptive': c must be from 0 to 12, got 13"),
        ("adaptive:-1", "stage 'adaptive': c must be from 0 to 12, got -1"),
        ("adaptive:5,m=0", "stage 'adaptive': m must be a whole number from 1 to 12, got 0"),
        ("adaptive:5,m=13", "from 1 to 12, got 13"),
        ("adaptive:5,m=2.5", "m must be a whole number, got '2.5'"),
        ("adaptive:5,f=0", r"stage 'adaptive': f must be in \(0, 1\], got 0"),
        ("adaptive:5,f=1.1", r"f must be in \(0, 1\], got 1.1"),
        ("adaptive:5,integer=1", "integer must be true or false, got '1'"),
        ("adaptive:5,by=hand", "stage 'adaptive': by must be one of entropy, grad, got 'hand'"),
        ("adaptive:5,c0=-1", "c0 must be from 0 to"),
        ("adaptive:5,tail=0.2", "stage 'adaptive': tail must be from 0 to 0.1, got 0.2"),
        ("adaptive:5,tail=-0.01", "tail must be from 0 to 0.1, got -0.01"),
        ("adaptive:nan", "stage 'adaptive': c must be a finite number"),
        ("adaptive:5,c1=2", "has no argument 'c1'; it takes c, m, f, integer, by, c0, zero, tail"),
        ("qsgd:4|huffman:best", "stage 'huffman': mode must be one of pure, auto, got 'best'"),
        ("qsgd:4|rans:1", "stage 'rans': mode must be one of pure, auto, got '1'"),
        ("qsgd:4|deflate:0", "stage 'deflate': level must be a whole number from 1 to 9, got 0"),
        ("qsgd:4|zstd:20", "stage 'zstd': level must be a whole number from 1 to 19, got 20"),
        ("qsgd:4|hufman", "unknown stage 'hufman'.*Did you mean 'huffman'"),
        ("huffman", "'huffman' codes the symbols of a quantizer, such as 'qsgd:4': put one before it in 'huffman'"),
        ("rans:auto", "'rans' codes the symbols of a quantizer, such as 'qsgd:4': put one before it"),
        ("deflate", "'deflate' codes the symbols of a quantizer"),
        ("zstd", "'zstd' codes the symbols of a quantizer"),
        ("ef|rans", "'rans' codes the symbols of a quantizer"),
        ("topk:0.1|huffman", r"'huffman' codes the symbols of a quantizer.*put one before it in 'topk:0.1\|huffman'"),
        ("none|huffman", r"'huffman' codes the symbols of a quantizer.*put one before it in 'none\|huffman'"),
        ("fp16|rans", r"'rans' codes the symbols of a quantizer.*put one before it in 'fp16\|rans'"),
        ("topk:0.1|bf16|rans", "'rans' codes the symbols of a quantizer"),
        ("huffman|qsgd:4", r"'huffman' codes the symbols of a quantizer.*put one before it in 'huffman\|qsgd:4'"),
        ("qsgd:4|huffman|rans", "'rans' cannot follow 'huffman', which comes last"),
        ("qsgd:4|huffman|huffman", "'huffman' cannot follow 'huffman', which comes last"),
        ("qsgd:4|huffman|topk:0.1", "'topk' cannot follow 'huffman', which comes last"),
        ("qsgd:4|rans|fp16", "'fp16' cannot follow 'rans', which comes last"),
        ("qsgd:4|rans|ef", "'ef' keeps memory around a codec: write it first"),
        ("uniform:13|huffman", r"'huffman' codes at most 4096 symbols, 'uniform' has more in 'uniform:13\|huffman'"),
        ("uniform:30|rans:auto", "'rans' codes at most 4096 symbols, 'uniform' has more"),
        ("topk:0.1|uniform:16|deflate", "'deflate' codes at most 4096 symbols, 'uniform' has more"),
        ("threshold:0", "t must be a positive number"),
        ("threshold:-1", "t must be a positive number"),
        ("sign:100", "stage 'sign': bucket must be a power of two"),
        ("qsgd:bits=4,bits=5", "argument 'bits' is given twice"),
        ("qsgd:4,bits=5", "argument 'bits' is given twice"),
        ("qsgd:bitz=4", "stage 'qsgd' has no argument 'bitz'; it takes bits, bucket, norm, round"),
        ("qsgd:name=4", "stage 'qsgd' has no argument 'name'; it takes bits, bucket, norm, round"),
        ("qsgd:bits=4,512", "positional argument '512' follows a named one"),
        ("qsgd:bucket=512,4", "positional argument '4' follows a named one"),
        ("topk:keep=0.1,true", "positional argument 'true' follows a named one"),
        ("topk:0.1,false,64,rans,3", "stage 'topk' takes keep, approx, chunk, code, got '3' as well"),
        ("topk:0.1,chunk=32", "stage 'topk': chunk must be 0 or a power of two from 64 to 65536, got 32"),
        ("topk:0.1,chunk=96", "chunk must be 0 or a power of two from 64 to 65536, got 96"),
        ("topk:0.1,chunk=131072", "chunk must be 0 or a power of two from 64 to 65536, got 131072"),
        ("topk:0.1,chunk=-64", "chunk must be 0 or a power of two from 64 to 65536, got -64"),
        ("topk:0.1,chunk=64.5", "stage 'topk': chunk must be a whole number, got '64.5'"),
        ("topk:0.1,approx=true,chunk=64", "stage 'topk': chunk must be 0 with approx=true.*got 64"),
        ("none:1", "stage 'none' takes no arguments, got '1' as well"),
        ("fp16:x=1", "stage 'fp16' has no argument 'x'; it takes no arguments"),
        ("ef:0.9,1|topk", "stage 'ef' takes decay, got '1' as well"),
        ("topk:", "stage 'topk' in 'topk:' has ':' but no argument; it takes keep, approx, chunk, code"),
        ("topk:0.1,", "topk"),
        ("", "empty stage in ''"),
        ("|qsgd:4", r"empty stage in '\|qsgd:4'"),
        ("qsgd:4|", "empty stage"),
        ("topk:0.1||qsgd:4", "empty stage"),
        (":4", "empty stage"),
        ("qsgd:4|topk:0.1", "'topk' selects and cannot follow 'qsgd', which codes"),
        ("topk:0.1|randk:0.1", "two selectors, 'topk' and 'randk'"),
        ("topk:0.1|topk:0.1", "two selectors, 'topk' and 'topk'"),
        ("qsgd:4|fp16", "'fp16' cannot follow 'qsgd'.*values are coded once"),
        ("topk:0.1|ef", "'ef' keeps memory around a codec: write it first"),
        ("topk:0.1|ef|qsgd:4", "'ef' keeps memory around a codec: write it first"),
        ("ef", "'ef' has no codec after 'ef': add one, such as 'topk:0.01'"),
        ("momentum:0.9", "has no codec after 'momentum'"),
        ("ef|ef|topk:0.1", "'ef' occurs twice"),
        ("momentum:1.0|topk", r"stage 'momentum': m must be in \[0, 1\), got 1.0"),
        ("momentum:-0.1|topk", r"m must be in \[0, 1\)"),
        ("qsgd:4" + " " * 2000, "at most 256 bytes"),
    ],
)
def test_invalid_spec_raises_config_error(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        laconic.channel(text)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError):
        laconic.encode(laws.normal(4), text)


@pytest.mark.parametrize("spec", ["ef|topk:0.01", "momentum:0.9|topk:0.01|qsgd:4", "ef|qsgd:4"])
def test_channel_stage_in_a_codec_names_laconic_channel(spec):
    name = spec.split("|")[0].split(":")[0]
    for call in (lambda: laconic.codec(spec), lambda: laconic.encode(laws.normal(9), spec)):
        with pytest.raises(ConfigError, match=rf"'{name}' in .* keeps memory.*use laconic\.channel\('{name}"):
            call()


@pytest.mark.parametrize("spec", [None, 4, b"qsgd:4", ["qsgd:4"], {"qsgd": 4}], ids=repr)
def test_spec_of_another_type_raises_config_error(spec):
    with pytest.raises(ConfigError, match="a codec spec is a string"):
        laconic.codec(spec)


def test_config_errors_are_value_errors():
    with pytest.raises(ValueError):
        laconic.codec("gzip")


def test_codec_names_exclude_coders_and_channel_stages():
    assert laconic.codec_names() == ["adaptive", "bf16", "bins", "fp16", "mean", "none", "onebit", "powersgd", "qsgd",
                                     "randk", "shared", "sign", "terngrad", "thc", "threshold", "topk", "uniform",
                                     "union"]  # fmt: skip
    assert registry.names("coder") == ["deflate", "huffman", "rans", "zstd"]


@pytest.mark.parametrize("name", registry.names("coder"))
def test_coder_without_quantizer_raises_config_error(name):
    """The most natural mistake: the line must say what to write instead."""
    with pytest.raises(ConfigError, match="the symbols of a quantizer, such as 'qsgd:4': put one before it") as caught:
        laconic.codec(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 120
    assert laws.roundtrip(laws.normal(50), f"qsgd:4|{name}").shape == (50,)


@pytest.mark.parametrize(
    "spec", [*laws.EVERY, "adaptive:1.5,m=3,f=0.5,integer=true,by=grad,c0=2.0,zero=true,tail=0.1|rans:auto"]
)
def test_canonical_spec_parses_to_itself(spec):
    text = str(laconic.codec(spec))
    assert str(laconic.codec(text)) == text and laconic.codec(text) == laconic.codec(spec)


def test_unknown_nonfinite_option_raises_config_error():
    with pytest.raises(ConfigError, match="nonfinite must be one of raise, skip, got 'ignore'"):
        laconic.encode(laws.normal(3), "none", nonfinite="ignore")
    with pytest.raises(ConfigError, match="nonfinite must be"):
        laconic.channel("ef|topk", nonfinite="zero")


@dataclass(frozen=True)
class Doubled(BF16):
    """A stage of somebody else's: bfloat16 of the double."""

    factor: int = 2

    name, example = "doubled", "doubled"
    summary = "a test stage"

    def encode(self, x, kernels, arena, seed):
        return super().encode(x * self.factor, kernels, arena, seed)


@dataclass(frozen=True)
class Reversed(Coder):
    """A coder of somebody else's: symbols as bytes, the last one first."""

    name, example = "reversed", "qsgd:4|reversed"
    summary = "a test coder"

    def max_nbytes(self, n, alphabet):
        return 2 * n

    def encode(self, symbols, kernels, arena):
        made = symbols.materialize(kernels).flip(0).contiguous().view(torch.uint8)
        section = arena.take(made.numel())
        section.copy_(made)
        return section

    def decode(self, section, n, alphabet, kernels):
        symbols = section.clone().view(symbol_dtype(alphabet))
        if symbols.numel() != n or int(symbols.max()) >= alphabet:
            raise laconic.FrameError("these are no reversed symbols")
        return symbols.flip(0).contiguous()


def not_a_stage():
    """Something that a package may offer by mistake."""


@pytest.fixture
def offered(monkeypatch):
    """Stages that other packages offer; ours are found as if for the first time, and forgotten afterwards."""
    specs = []
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [e for e in specs if e.group == group])
    caches = (registry.stages, cached_parse)

    def offer(**values):
        specs.extend(EntryPoint(name, value, "laconic.codecs") for name, value in values.items())
        for cache in caches:
            cache.cache_clear()

    yield offer
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


def test_value_stage_of_another_package_works_in_chains(offered):
    offered(doubled="test_spec:Doubled")
    assert "doubled" in laconic.codec_names()
    assert str(laconic.codec("topk:0.5|doubled:3")) == "topk:0.5|doubled:3"
    x = torch.tensor([1.0, -4.0, 0.5, 3.0])
    assert laws.roundtrip(x, "doubled").tolist() == [2.0, -8.0, 1.0, 6.0]
    assert laws.roundtrip(x, "topk:0.5|doubled").tolist() == [0.0, -8.0, 0.0, 6.0]


def test_coder_of_another_package_works_after_every_quantizer(offered):
    offered(reversed="test_spec:Reversed")
    assert "reversed" not in laconic.codec_names()
    x = laws.normal(700)
    for quantizer in ("qsgd:4", "uniform:10", "terngrad", "adaptive:5.0", "topk:0.5|sign"):
        assert laws.same_bits(laws.roundtrip(x, f"{quantizer}|reversed"), laws.roundtrip(x, quantizer))
    out, wanted = torch.ones(700), torch.ones(700)
    for spec, to in (("adaptive:5.0|reversed", out), ("adaptive:5.0", wanted)):
        codec = laconic.codec(spec)
        codec.accumulate(codec.encode(x), to, 0.3)
    assert laws.same_bits(out, wanted)
    with pytest.raises(ConfigError, match="'reversed' codes the symbols of a quantizer"):
        laconic.codec("fp16|reversed")


def test_frame_of_a_removed_stage_raises_frame_error(offered, monkeypatch):
    offered(doubled="test_spec:Doubled")
    frame = laconic.encode(laws.normal(5), "doubled")
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [])
    offered()
    with pytest.raises(laconic.FrameError, match=r"codec that this laconic cannot read.*unknown stage 'doubled'"):
        laconic.decode(frame)


@pytest.mark.parametrize("value", ["test_spec:Missing", "no_such_module_of_ours:Stage", "test_spec:not_a_stage"])
def test_broken_plugin_is_skipped_with_a_warning(offered, caplog, value):
    with caplog.at_level(logging.WARNING, "laconic"):
        offered(broken=value, doubled="test_spec:Doubled")
        assert "doubled" in laconic.codec_names()
        assert "broken" not in laconic.codec_names()
        assert laws.roundtrip(laws.normal(9), "qsgd:4").shape == (9,)
    assert "'broken'" in caplog.text and value in caplog.text


def test_plugin_cannot_replace_a_built_in_stage(offered, caplog):
    with caplog.at_level(logging.WARNING, "laconic"):
        offered(qsgd="test_spec:Doubled")
        assert type(laconic.codec("qsgd:4").values).__name__ == "QSGD"
    assert "the name is taken" in caplog.text


def test_plugin_registered_under_another_name_is_ignored(offered):
    """Frames carry ``stage.name``, so a stage must be registered under it."""
    offered(alias="test_spec:Doubled")
    assert "alias" not in laconic.codec_names()
