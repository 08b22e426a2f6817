"""Codecs: the grammar of specs, a file per method, and the chain that joins the stages.

To add a codec, follow docs/adding-a-codec.md.
"""

from __future__ import annotations

from functools import lru_cache

from laconic.codecs import registry, spec
from laconic.codecs.base import ChannelStage, Codec, Coder, Quantizer, Selector, Stage, ValueStage
from laconic.codecs.chain import Chain, assemble
from laconic.errors import ConfigError

__all__ = [
    "Chain", "ChannelStage", "Codec", "Coder", "Quantizer", "Selector", "Stage", "ValueStage", "codec", "codec_names",
    "parse",
]  # fmt: skip


def parse(text: str) -> tuple[tuple[ChannelStage, ...], Chain]:
    """Return the channel stages of a spec and the codec after them."""
    if not isinstance(text, str):
        raise ConfigError(f"a codec spec is a string such as 'topk:0.01|qsgd:4', got {type(text).__name__}")
    return _parse(text)


@lru_cache(maxsize=512)
def _parse(text: str) -> tuple[tuple[ChannelStage, ...], Chain]:
    channel_stages, chain = assemble(spec.parse(text), text)
    return tuple(channel_stages), chain


def codec(text: str) -> Chain:
    """Return the codec of a spec such as ``topk:0.01|qsgd:4``. It has no state; its ``str()`` is the canonical spec."""
    return without_memory(text, f": use laconic.channel({text!r}), or drop it for a codec without memory")


def without_memory(text: str, advice: str) -> Chain:
    """Return the codec of a spec; a channel stage in it raises ``ConfigError``, which ends in ``advice``.

    ``{codec}`` in the advice stands for the spec without channel stages.
    """
    channel_stages, chain = parse(text)
    if channel_stages:
        stage, advice = channel_stages[0].name, advice.format(codec=chain.text)
        raise ConfigError(f"{stage!r} in {text!r} keeps memory between rounds{advice}")
    return chain


def codec_names() -> list[str]:
    """Return the names of all codecs; each is a valid spec."""
    return registry.names("cast", "quantizer", "selector")
