"""The settings of each experiment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from laconic_lab.studies.oland2015.settings import BASELINE, Quantizer, Setting
from laconic_lab.studies.oland2015.trials import Unit

__all__ = ["EXPERIMENTS", "TRAINED", "settings_of", "units_of"]

TRAINED = ("headline", "fixed", "grid", "entropy", "map", "collapse", "beyond", "gradients")
EXPERIMENTS = (*TRAINED, "buckets", "coding")

UNIT_RUNS = 250
"""Runs of a Record; independent of memory, so that a study can continue on another machine."""

FIXED_BITS = range(2, 31)
CEILING = 10
FLOORS_UNDER_CEILING = range(2, 11)
FLOORS_AT_FOUR = range(2, 9)

LEARNING_RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
L1_WEIGHTS = (3e-6, 1.1e-5, 2e-5, 5e-5, 1e-4, 2e-4)
STRONG_L1 = 1e-4
DECAYS = (0.95, 0.98, 0.99, 1.0)
BATCHES = (50, 100, 250)
GRADIENT_FLOORS = range(5, 9)


def c(floor: float, **fields: object) -> Quantizer:
    return Quantizer("adaptive", c=floor, **fields)  # type: ignore[arg-type]


HEADLINE = (BASELINE, c(5), c(6))
ZERO = c(5, zero=True)
FIX = c(4, zero=True, tail=0.001)
"""Remedy for the collapse: zero is a level, and a thousandth of the weights is sent apart in float32."""


GRADIENT_CODECS = (
    BASELINE, c(5), c(3), c(2), c(3, zero=True), c(2, zero=True), c(2, zero=True, tail=0.001)
)  # fmt: skip


def settings_of(experiment: str, default: Setting) -> Iterator[Setting]:
    """Yield the settings of an experiment around the default hyper-parameters."""
    if experiment == "headline":
        yield from (replace(default, quantizer=q) for q in HEADLINE)
    elif experiment == "fixed":
        yield replace(default, quantizer=BASELINE)
        yield from (replace(default, quantizer=Quantizer("uniform", bits=bits)) for bits in FIXED_BITS)
    elif experiment == "grid":
        yield replace(default, quantizer=BASELINE)
        for floor in FLOORS_UNDER_CEILING:
            m = CEILING - floor
            # Nothing left to adapt: ten bits for every layer.
            yield replace(default, quantizer=c(floor, m=m) if m else Quantizer("uniform", bits=CEILING))
        # c = 6 is on both lines.
        yield from (replace(default, quantizer=c(floor)) for floor in FLOORS_AT_FOUR if floor != CEILING - 4)
    elif experiment == "entropy":
        yield replace(default, quantizer=BASELINE)
    elif experiment == "map":
        yield from (replace(point, quantizer=q) for point in (*plane(default), *lines(default)) for q in HEADLINE)
    elif experiment == "collapse":
        yield replace(default, l1=STRONG_L1, quantizer=BASELINE)
    elif experiment == "beyond":
        yield from (replace(point, quantizer=q) for point in plane(default) for q in (ZERO, FIX))
        yield from (replace(default, quantizer=c(floor, by="grad")) for floor in GRADIENT_FLOORS)
    elif experiment == "gradients":
        # Half the learning rate: with the full one some runs saturate at the start with every codec.
        sender = replace(default, lr=default.lr / 2, l1=0.0, sends="gradients")
        yield from (replace(sender, quantizer=q) for q in GRADIENT_CODECS)
    else:
        raise AssertionError(experiment)


def plane(default: Setting) -> Iterator[Setting]:
    """Yield a grid of learning rates and l1 weights."""
    for lr in LEARNING_RATES:
        for l1 in L1_WEIGHTS:
            yield replace(default, lr=lr, l1=l1)


def lines(default: Setting) -> Iterator[Setting]:
    """Yield other values of decay, mini-batch and pixels."""
    yield from (replace(default, decay=decay) for decay in DECAYS if decay != default.decay)
    yield from (replace(default, batch=batch) for batch in BATCHES if batch != default.batch)
    yield replace(default, pixels="centred" if default.pixels == "unit" else "unit")


def units_of(experiment: str, settings: Sequence[Setting], runs: int) -> list[Unit]:
    return [
        Unit(experiment, setting, first, min(UNIT_RUNS, runs - first))
        for setting in settings
        for first in range(0, runs, UNIT_RUNS)
    ]
