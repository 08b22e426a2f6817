"""Codecs: the grammar, a file per method, and the chain that joins them.

To add one: copy the file that is closest, add its class to ``registry.OURS``, and run the laws (CONTRIBUTING.md).
"""

from __future__ import annotations

from functools import lru_cache

from laconic.codecs import registry, spec
from laconic.codecs.base import ChannelStage, Codec, Coder, Quantizer, Selector, Stage, ValueStage
from laconic.codecs.chain import Chain, split
from laconic.errors import ConfigError

__all__ = [
    "Chain",
    "ChannelStage",
    "Codec",
    "Coder",
    "Quantizer",
    "Selector",
    "Stage",
    "ValueStage",
    "codec",
    "codec_names",
    "parse",
]


def parse(text: str) -> tuple[tuple[ChannelStage, ...], Chain]:
    """The channel stages of a spec and the codec behind them."""
    if not isinstance(text, str):
        raise ConfigError(f"a codec spec is a string such as 'topk:0.01|qsgd:4', got {type(text).__name__}")
    return _parse(text)


@lru_cache(maxsize=512)
def _parse(text: str) -> tuple[tuple[ChannelStage, ...], Chain]:
    memories, chain = split(spec.parse(text), text)
    return tuple(memories), chain


def codec(text: str) -> Chain:
    """The codec of a spec such as ``topk:0.01|qsgd:4``. It keeps no state; ``str()`` of it is canonical."""
    memories, chain = parse(text)
    if memories:
        raise ConfigError(
            f"{memories[0].name!r} in {text!r} keeps memory between rounds: use laconic.channel({text!r}), "
            f"or drop it for a codec without memory"
        )
    return chain


def codec_names() -> list[str]:
    """Names of all codecs, each a valid spec as it stands."""
    return registry.names("cast", "quantizer", "selector")
