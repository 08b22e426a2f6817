"""The settings of each experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from laconic_lab.studies.pipeline.settings import FRESH, REPEATED, Setting
from laconic_lab.studies.text_runs import select

__all__ = ["EXPERIMENTS", "LARGE", "SEEDS", "TIMES", "TRANSFORM", "settings_of"]

TIMES, LARGE, TRANSFORM = "times", "large", "transform"
BITS = (8, 4, 3, 2)
SEEDS = {LARGE: (0, 1, 2), TRANSFORM: (0, 1, 2)}
"""Seeds of an experiment whose claims have intervals; others have one."""
_LARGE: dict[str, Any] = {
    "size": "7m", "steps": 1500, "warmup": 100, "lr": 1e-3, "micro_batches": 1, "windows": 16, "pool": 128,
}  # fmt: skip
"""Fixed before any of its runs. All windows of a step cross a boundary in one message, because a GPU computes them
together four times as fast; a codec works on blocks of a message, so its size matters for headers alone. Repeated
samples are seen about 12 times."""


def both_ways(stages: int, codec: str, **changes: object) -> Setting:
    return replace(Setting(stages, codec, codec), **changes)  # type: ignore[arg-type]


def bits() -> Iterator[Setting]:
    """Yield codecs of 16 to 2 bits both ways, with a rotation (thc) and without (qsgd)."""
    for stages in (2, 4):
        for codec in ("none", "bf16", *(f"{name}:{count}" for count in BITS for name in ("thc", "qsgd"))):
            yield both_ways(stages, codec)


def directions() -> Iterator[Setting]:
    """Yield one direction compressed, and roundings and buckets."""
    for forward, backward in (
        ("thc:4", "none"), ("none", "thc:4"), ("thc:4", "thc:4,round=stochastic"), ("thc:5", "thc:3"),
        ("thc:6", "thc:2"),
    ):  # fmt: skip
        yield Setting(4, forward, backward)
    for codec in ("thc:2", "qsgd:2", "thc:3", "qsgd:3"):
        yield Setting(2, codec, "none")
        yield Setting(2, "none", codec)
    for forward, backward in (("thc:2", "thc:4"), ("thc:2", "qsgd:4"), ("thc:3", "qsgd:3"), ("thc:4", "qsgd:4")):
        yield Setting(2, forward, backward)
    for codec in ("thc:2,round=stochastic", "qsgd:4,bucket=128", "shared:4", "sign"):
        yield both_ways(2, codec)


def samples() -> Iterator[Setting]:
    """Yield differences, for samples that are seen again and for those that are not."""
    for kind in (REPEATED, FRESH):
        if kind == REPEATED:
            yield Setting(2, samples=kind)
        for codec in ("thc:2", "qsgd:2"):
            for delta in (False, True):
                yield Setting(2, codec, "thc:4", delta=delta, samples=kind)


def bottleneck() -> Iterator[Setting]:
    """Yield trained projections between stages: to an eighth, 64 times fewer bytes by 4 bits, and to a sixteenth."""
    yield Setting(2)
    for part, codec in ((8, "none"), (8, "thc:4"), (16, "thc:4")):
        for reads_tokens in (True, False):
            yield both_ways(2, codec, bottleneck=part, reads_tokens=reads_tokens)


def transform() -> Iterator[Setting]:
    """Yield transform coding beside the same bits spread over all directions, in a longer training.

    With ``klt:3.8`` a whole training, its first messages by eight bits included, sends an eighth of the bytes.
    """
    for codec in ("none", "klt:2", "thc:4", "klt:4", "klt:3.8", "klt:1", "thc:2"):
        for stages in (4, 2):
            yield both_ways(stages, codec, steps=900)


def large() -> Iterator[Setting]:
    """Yield what the goals are about, with a larger GPT, more steps and three seeds; the goals' settings first."""
    for forward, backward in (
        ("none", "none"), ("klt:3.6", "klt:3.6"), ("klt:2", "klt:2"), ("klt:1", "klt:1"), ("thc:4", "thc:4"),
        ("thc:6", "thc:2"), ("thc:3", "thc:3"), ("thc:2", "thc:2"),
        ("thc:8", "thc:8"), ("qsgd:4", "qsgd:4"), ("thc:5", "thc:3"),
    ):  # fmt: skip
        for stages in (4, 2):
            yield Setting(stages, forward, backward, **_LARGE)
    for part in (8, 16):
        for reads_tokens in (True, False):
            yield both_ways(2, "thc:4", bottleneck=part, reads_tokens=reads_tokens, **_LARGE)
    yield Setting(2, samples=REPEATED, **_LARGE)
    for kind in (REPEATED, FRESH):
        for delta in (False, True):
            yield Setting(2, "thc:2", "thc:4", delta=delta, samples=kind, **_LARGE)


_SETTINGS: dict[str, Callable[[], Iterator[Setting]]] = {
    "bits": bits, "directions": directions, "samples": samples, "bottleneck": bottleneck, TRANSFORM: transform,
    LARGE: large,
}  # fmt: skip
EXPERIMENTS = (*_SETTINGS, TIMES)


def settings_of(
    experiment: str, sizes: Sequence[str] | None = None, methods: Sequence[str] | None = None
) -> list[Setting]:
    """Return the settings of an experiment, for these sizes and methods with one of these texts in their names."""
    return select(_SETTINGS[experiment](), sizes, methods)
