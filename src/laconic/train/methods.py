"""Methods: named presets of a job's options. The flags of ``laconic train`` can set the same options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from laconic.cluster.modes import Mode
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.cluster.job import Job

__all__ = ["CUSTOM", "METHODS", "method_flags", "method_name", "method_options"]

_QSGD = "qsgd:4,norm=l2"
_SPARSE = f"topk:0.01|{_QSGD}"


def _signs_of_changes(every: int, keep: float) -> dict[str, Any]:
    """Exchange the signs of the largest changes of several local iterations; the mean of all workers is applied.

    Both directions use error feedback. The workers take local steps with full momentum: an exchange after each
    iteration that sends as little would change most weights once in hundreds of iterations.
    """
    channel = f"ef|topk:{keep:g}|sign"
    return {
        "push": channel, "pull": channel, "push_small": "ef|bf16", "pull_small": "ef|bf16", "returns": "gradients",
        "every": every, "sends": "changes", "after": "mean",
    }  # fmt: skip


METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "1": ("push gradients, pull weights, nothing compressed", {"returns": "weights"}),
    "2": ("push QSGD gradients, pull weights", {"push": _QSGD, "returns": "weights"}),
    "2w": (
        "push QSGD gradients, pull QSGD weights, which costs accuracy; kept to show it",
        {"push": _QSGD, "pull": _QSGD, "returns": "weights"},
    ),
    "3": ("push and pull gradients, nothing compressed", {"returns": "gradients"}),
    "4": ("push and pull QSGD gradients", {"push": _QSGD, "pull": _QSGD, "returns": "gradients"}),
    "5": ("push and pull gradients by Top-k, then QSGD", {"push": _SPARSE, "pull": _SPARSE, "returns": "gradients"}),
    "6": (
        "method 5's codecs every 20 iterations; the best worker's change counts",
        {"push": _SPARSE, "pull": _SPARSE, "returns": "gradients", "every": 20, "after": "best", "sends": "changes"},
    ),
    "laconic": (
        "signs of the largest changes of 4 iterations, with error feedback both ways",
        _signs_of_changes(every=4, keep=0.06),
    ),
    "laconic-min": ("the same with fewer entries, of 10 iterations", _signs_of_changes(every=10, keep=0.04)),
    "homomorphic": (
        "rotated gradients in 4 bits with error feedback; the server adds integers and never decodes",
        {"push": "ef|thc:4", "push_small": "shared:16", "returns": "sum"},
    ),
    "adaptive": (
        "weights in levels whose number follows from their entropy, Huffman-coded, averaged every 20 iterations",
        {
            "push": "adaptive:5.0,zero=true|huffman", "pull": "adaptive:5.0,zero=true|huffman", "returns": "weights",
            "every": 20, "sends": "weights",
        },
    ),
}  # fmt: skip
"""Description and options of each method: 1 to 6 are those of Kothari et al. 2021."""

CUSTOM = "custom"
"""Method name of a run whose options are those of no method."""


def method_options(name: str, mode: str = "sync") -> dict[str, Any]:
    """Return the options that a method sets.

    In modes async and bounded, workers cannot repeat the server's steps, so a method that returns gradients returns the
    change of the weights since the worker's last pull, rounded to nearest.
    """
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}: expected one of {', '.join(METHODS)}")
    options = dict(METHODS[name][1])
    if not Mode.parse(mode).in_rounds and options.get("returns") == "gradients":
        options |= {"returns": "delta", "pull": _round_to_nearest(options.get("pull", "none"))}
    return options


def _round_to_nearest(spec: str) -> str:
    """Replace stochastic rounding and l2 norms of qsgd by rounding to nearest and max norms.

    The error of a change is part of the next change. These errors vanish only if the codec's error is smaller than its
    input. The error of stochastic qsgd with l2 norms over 512 values is larger, and would grow from change to change.
    """
    stages = spec.split("|")
    return "|".join(
        f"{stage.partition(',')[0]},round=nearest" if stage.startswith("qsgd:") else stage for stage in stages
    )


def method_flags(name: str) -> list[str]:
    """Return a method's options as flags of ``laconic train``."""
    flags = []
    for option, value in method_options(name).items():
        flags += [f"--{option.replace('_', '-')}", str(value)]
    return flags


def method_name(job: Job, base: Mapping[str, Any]) -> str:
    """Return the method whose options give this job together with ``base``, or ``custom``."""
    for name in METHODS:
        try:
            if type(job)(**{**base, **method_options(name, job.mode)}) == job:
                return name
        except ConfigError:  # not every method is possible in every mode
            continue
    return CUSTOM
