"""Methods: presets of a job's options, nothing more. Each can be spelled out by flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laconic.errors import ConfigError

__all__ = ["METHODS", "method_flags", "method_options"]

_QSGD = "qsgd:4,norm=l2"
_SPARSE = f"topk:0.01|{_QSGD}"


def _signs_of_changes(every: int, keep: float) -> dict[str, Any]:
    """Of what several iterations changed, the mean of all workers.

    Both directions remember what they left out. Steps are taken where the gradients are, with all of the momentum: an
    exchange after each iteration that sends as little moves most weights once in hundreds of iterations.
    """
    channel = f"ef|topk:{keep:g}|sign"
    return {
        "push": channel,
        "pull": channel,
        "push_small": "ef|bf16",
        "pull_small": "ef|bf16",
        "returns": "gradients",
        "every": every,
        "sends": "changes",
        "after": "mean",
    }


METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "1": ("push gradients, pull weights, nothing compressed", {"returns": "weights"}),
    "2": ("push QSGD gradients, pull weights", {"push": _QSGD, "returns": "weights"}),
    "2w": (
        "push QSGD gradients, pull QSGD weights: does not converge, kept to show it",
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
        "weights in as many levels as they ask for, Huffman-coded and averaged every 20 iterations",
        {
            "push": "adaptive:5.0,zero=true|huffman",
            "pull": "adaptive:5.0,zero=true|huffman",
            "returns": "weights",
            "every": 20,
            "sends": "weights",
        },
    ),
}
"""Name, what it does, and the options it sets: 1 to 6 are those of Kothari et al. 2021, the others ours."""


def method_options(name: str, mode: str = "sync") -> dict[str, Any]:
    """The options that a method sets.

    Without rounds there is no step that all take together: what would be its gradient is then the change of the
    weights since the worker last asked, rounded to nearest.
    """
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}: expected one of {', '.join(METHODS)}")
    options = dict(METHODS[name][1])
    if mode != "sync" and options.get("returns") == "gradients":
        options |= {"returns": "delta", "pull": _nearest(options.get("pull", "none"))}
    return options


def _nearest(spec: str) -> str:
    """The codec, rounding to the nearest level of the largest value.

    What a change leaves out is in the next one. That comes to an end only if the codec's error is smaller than what it
    is given; QSGD's, unbiased and with l2 norms over 512 values, is larger, and grows from change to change.
    """
    stages = spec.split("|")
    return "|".join(f"{one.partition(',')[0]},round=nearest" if one.startswith("qsgd:") else one for one in stages)


def method_flags(name: str) -> list[str]:
    """The same as flags of ``laconic train``."""
    flags = []
    for option, value in method_options(name).items():
        flags += [f"--{option.replace('_', '-')}", str(value)]
    return flags
