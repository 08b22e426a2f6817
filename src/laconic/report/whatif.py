"""What the page's sliders need: the planner's profiles and constants, so that the browser computes what Python does.

The formulas themselves are ``laconic.plan``'s, written again in ``assets/model.js``; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.codecs import parse
from laconic.errors import ConfigError
from laconic.plan.advice import GAIN, SLOT
from laconic.plan.calibration import GZIP, sum_sizes, summable
from laconic.plan.costs import EVENLY
from laconic.plan.jang2017 import ALEXNET, ALEXNET_EPOCHS, WORKERS
from laconic.plan.jang2017 import GZIP as PAPER_GZIP
from laconic.plan.profile import Profile, load, shipped
from laconic.policy import Policy
from laconic.units import GOODPUT

__all__ = ["CROWDS", "settings"]

CROWDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 48, 64, 96, 128, 192, 256)
"""Workers that the slider knows: of sums the bytes depend on how many there are."""
SAMPLE = 1 << 16
"""Values that bytes of sums are taken from; a larger message is as many times larger."""

PAPER = {
    "name": "AlexNet of jang2017", "workers": WORKERS, "rate": 8 * ALEXNET.bandwidth, "rho": 0.2, "h": 1.0,
    "step_s": ALEXNET.step_s, "nbytes": ALEXNET.nbytes, "every": ALEXNET.every,
}  # fmt: skip


def settings(presets: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """All that the what-if part needs.

    Args:
        presets: Where it can begin beside the paper's AlexNet, which comes first.
    """
    begin = {key: PAPER[key] for key in ("rate", "rho", "h")}
    return {
        "presets": [PAPER, *({**begin, **one} for one in presets)],
        "workers": CROWDS,
        "iterations": ALEXNET_EPOCHS,
        "gzip": {"nbytes": ALEXNET.nbytes, "rho": PAPER_GZIP.rho, "compress_s": PAPER_GZIP.compress_s,
                 "decompress_s": PAPER_GZIP.decompress_s},
        "fixed": {"gain": GAIN, "slot": SLOT, "goodput": GOODPUT, "minNumel": Policy().min_numel, "ready": EVENLY},
        "profiles": {name: _profile(load(name)) for name in shipped()},
    }  # fmt: skip


def _profile(profile: Profile) -> dict[str, Any]:
    transport = {key: profile.transport.get(key, 0.0) for key in ("exchange_s", "byte_s", "slot_s")}
    return {
        "codecs": {spec: _codec(profile, spec) for spec in profile.codecs},
        "memory": profile.memory,
        "transport": transport,
        "spare": profile.device == "cuda" or profile.machine.get("cores", 1) > 1,
    }


def _codec(profile: Profile, spec: str) -> dict[str, Any]:
    points = sorted(profile.codecs[spec], key=lambda one: one.numel)
    found: dict[str, Any] = {
        "points": [[one.numel, one.nbytes, one.encode_s, one.decode_s, one.add_s] for one in points],
        "remembers": spec != GZIP and parse(spec)[0] != (),
    }
    if spec != GZIP and summable(spec):
        found["sums"] = {str(workers): sizes for workers in CROWDS if (sizes := _sizes(spec, workers))}
    return found


def _sizes(spec: str, workers: int) -> list[float] | None:
    """Bytes a value, there and back; None where so many workers do not fit."""
    try:
        push, pull = sum_sizes(spec, SAMPLE, workers)
    except ConfigError:
        return None
    return [push / SAMPLE, pull / SAMPLE]
