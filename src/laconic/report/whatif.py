"""Data for the sliders of the page: sizes and times of messages for every model size that the page offers.

The page combines them by the formulas that ``javascript`` translates from ``laconic.plan.formulas``, so it predicts
what ``laconic plan --params N --step-time S`` does with one parameter server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from laconic.errors import ConfigError
from laconic.plan.calibration import GZIP, summable
from laconic.plan.candidates import Candidate, default_labels, with_estimates
from laconic.plan.costs import EVENLY, Network, Work
from laconic.plan.evidence import FAMILIES, OPTIMIZERS, Evidence, default_optimizer, model_error, shipped_evidence
from laconic.plan.jang2017 import ALEXNET, ALEXNET_EPOCHS, WORKERS
from laconic.plan.jang2017 import GZIP as PAPER_GZIP
from laconic.plan.messages import Workload, message_of
from laconic.plan.profile import Profile, load, shipped
from laconic.plan.recommend import PlanRequest, default_transport, needed_memory
from laconic.suitability import never_advised
from laconic.units import GOODPUT

__all__ = ["KNOBS", "settings"]


def _rising(low: float, high: float, steps: Sequence[float] = (1, 1.5, 2, 3, 5, 7)) -> list[float]:
    """Return round values between two limits: ``steps`` times a power of ten."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [float(f"{step * 10.0**decade:.3g}") for decade in decades for step in steps]
    return [value for value in values if low <= value <= high]


KNOBS: dict[str, list[float]] = {
    "workers": [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 48, 64, 96, 128, 192, 256], "rate": _rising(1e7, 1e11),
    "rho": _rising(0.001, 1), "h": _rising(0.05, 5, (1, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)),
    "step_s": _rising(0.001, 10), "nbytes": _rising(1e6, 4e9),
    "every": [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 200, 400, 500, 1000],
}  # fmt: skip
"""The values of each slider. Presets add their own workers and sizes."""

PAPER = {
    "name": "AlexNet of jang2017", "workers": WORKERS, "rate": 8 * ALEXNET.bandwidth, "rho": 0.2, "h": 1.0,
    "step_s": ALEXNET.step_s, "nbytes": ALEXNET.nbytes, "every": ALEXNET.every,
}  # fmt: skip


def settings(presets: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return everything that the what-if part of the page needs.

    Args:
        presets: Settings to start from besides the paper's AlexNet, which comes first.
    """
    start = {key: PAPER[key] for key in ("rate", "rho", "h")}
    listed = [PAPER, *({**start, **preset} for preset in presets)]
    knobs = {name: sorted({*values, *(preset[name] for preset in listed)}) for name, values in KNOBS.items()}
    profiles = {name: _profile(name, tuple(knobs["workers"]), tuple(knobs["nbytes"])) for name in shipped()}
    return {
        "presets": listed,
        "knobs": knobs,
        "iterations": ALEXNET_EPOCHS,
        "gzip": {"rho": PAPER_GZIP.rho, "compress_byte_s": PAPER_GZIP.compress_s / ALEXNET.nbytes,
                 "decompress_byte_s": PAPER_GZIP.decompress_s / ALEXNET.nbytes},
        "goodput": GOODPUT,
        "ready": [time for time, _ in EVENLY],
        "shares": Work(0.0).shares,
        "profiles": profiles,
        "model_error": model_error("ps"),
        "families": {family: default_optimizer(family) for family in FAMILIES},
        "optimizers": list(OPTIMIZERS),
        "trainings": _trainings(),
    }  # fmt: skip


@lru_cache(maxsize=8)
def _profile(name: str, workers: tuple[int, ...], sizes: tuple[float, ...]) -> dict[str, Any]:
    """Return the messages of a profile's codecs for each size of the model, and for sums each number of workers."""
    own = load(name)
    labels = dict.fromkeys(["none", "bf16", *default_labels(own, _same_optimizer(), local=True)])
    candidates = [Candidate.parse(label) for label in labels]
    profile = with_estimates(own, [candidate.codec for candidate in candidates])
    workloads = [Workload.of_params(round(nbytes / 4)) for nbytes in sizes]
    transport = profile.transport or default_transport()
    request = PlanRequest(profile, workloads[0], 1.0)
    return {
        "spare_core": request.work.spare_core,
        "memory": profile.memory,
        "byte_s": transport.byte_s,
        "fixed_s": {
            fragments: [transport.seconds(-(-len(workload.slots) // fragments)) for workload in workloads]
            for fragments in sorted({candidate.fragments for candidate in candidates})
        },
        "codecs": {
            candidate.label: _codec(profile, candidate, workers, workloads)
            | {"own": candidate.label in ("none", "bf16", *own.codecs)}
            for candidate in candidates
            if candidate.codec in profile.codecs
        },
    }  # fmt: skip


def _codec(
    profile: Profile, candidate: Candidate, workers: Sequence[int], workloads: Sequence[Workload]
) -> dict[str, Any]:
    """Return the seconds of a codec by size, and its bytes by workers and size; a sum may not fit all workers."""
    is_sum = summable(candidate.codec)
    times: list[list[float]] = []
    nbytes: dict[str, list[list[float]]] = {}
    for count in workers if is_sum else workers[:1]:
        try:
            messages = [
                message_of(profile, workload, candidate.codec, Network(count, 1e9)).part(1 / candidate.fragments)
                for workload in workloads
            ]
        except ConfigError:
            continue
        times = [_shortened(one.encode_s, one.decode_s, one.add_s) for one in messages]
        nbytes[str(count) if is_sum else "any"] = [
            _shortened(message.push, message.pull, needed_memory(workload, message, local=candidate.local))
            for workload, message in zip(workloads, messages, strict=True)
        ]
    return {
        "summable": is_sum, "times": times, "nbytes": nbytes, "local": candidate.local, "every": candidate.every,
        "fragments": candidate.fragments, "overlap": candidate.overlap, "lossless": candidate.is_lossless,
        "never": {} if candidate.local else {
            optimizer: never_advised(candidate.codec, memory) if candidate.codec != GZIP else None
            for optimizer, memory in OPTIMIZERS.items()
        },
    }  # fmt: skip


def _shortened(*values: float) -> list[float]:
    """Return values to twelve digits: the page embeds thousands of them."""
    return [float(f"{value:.12g}") for value in values]


def _same_optimizer() -> list[Evidence]:
    """Return the trainings by the optimizer that they are compared with."""
    return [one for one in shipped_evidence() if one.optimizer == one.plain_optimizer]


def _trainings() -> list[dict[str, Any]]:
    """Return the evidence as the page reads it: by family, optimizer, codec and steps between exchanges."""
    ways: dict[tuple[str, str, str, int], list[Evidence]] = {}
    for one in _same_optimizer():
        ways.setdefault((one.family, one.plain_optimizer, one.codec, one.every), []).append(one)
    return [
        {
            "family": family, "optimizer": optimizer, "codec": codec, "every": every,
            "labels": sorted({Candidate.of(one).label for one in trainings}),
            "given_up": [one.given_up for one in trainings], "noise": [one.noise for one in trainings],
            "steps": [one.steps for one in trainings], "numels": [one.numel for one in trainings],
            "workers": [one.workers for one in trainings], "text": [one.text for one in trainings],
        }
        for (family, optimizer, codec, every), trainings in ways.items()
    ]  # fmt: skip
