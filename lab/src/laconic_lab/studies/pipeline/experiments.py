"""The settings of each experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from laconic_lab.studies.pipeline.settings import FRESH, REPEATED, Setting
from laconic_lab.studies.text_runs import select

__all__ = ["EXPERIMENTS", "TIMES", "settings_of"]

TIMES = "times"
BITS = (8, 4, 3, 2)


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


_SETTINGS: dict[str, Callable[[], Iterator[Setting]]] = {
    "bits": bits, "directions": directions, "samples": samples, "bottleneck": bottleneck,
}  # fmt: skip
EXPERIMENTS = (*_SETTINGS, TIMES)


def settings_of(
    experiment: str, sizes: Sequence[str] | None = None, methods: Sequence[str] | None = None
) -> list[Setting]:
    """Return the settings of an experiment, for these sizes and methods with one of these texts in their names."""
    return select(_SETTINGS[experiment](), sizes, methods)
