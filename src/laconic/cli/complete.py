"""Shell completion of names.

A shell starts the command for every Tab, so nothing here imports torch: the names are constants, and a test compares
them with the packages that define them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

__all__ = [
    "DATA", "METHODS", "MODELS", "MODES", "OPTIMIZERS", "SCHEMES", "STAGES", "model_option", "one_of", "spec_option",
    "specs",
]  # fmt: skip

STAGES = (
    "adaptive", "bf16", "bins", "deflate", "ef", "fp16", "huffman", "mean", "momentum", "none", "onebit", "powersgd",
    "qsgd", "randk", "rans", "shared", "sign", "terngrad", "thc", "threshold", "topk", "uniform", "union", "zstd",
)  # fmt: skip
METHODS = ("1", "2", "2w", "3", "4", "5", "6", "laconic", "laconic-min", "homomorphic", "adaptive")
MODELS = ("mlp", "lenet5", "vgg11", "alexnet", "resnet50", "vgg11fc", "gpt")
DATA = ("digits", "mnist", "cifar10", "text")
MODES = ("sync", "async", "bounded:")
OPTIMIZERS = ("sgd", "adamw", "muon")
SCHEMES = ("monarch:", "lowrank:", "subspace:", "hashed:")

Complete = Callable[[str], list[str]]


def one_of(*names: str) -> Complete:
    """Return a completion function for a list of names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def specs(incomplete: str) -> list[str]:
    """Complete the last stage of a spec.

    >>> specs("topk:0.01|qs"), specs("te")
    (['topk:0.01|qsgd'], ['terngrad'])
    """
    before, bar, last = incomplete.rpartition("|")
    return [before + bar + name for name in STAGES if name.startswith(last)]


def model_option(text: str, **settings: Any) -> Any:
    """Return a typer option for the name of a model."""
    return typer.Option(metavar="NAME", help=text, autocompletion=one_of(*MODELS), **settings)


def spec_option(text: str, show_default: str, **settings: Any) -> Any:
    """Return a typer option for codec specs."""
    return typer.Option(metavar="SPEC", help=text, show_default=show_default, autocompletion=specs, **settings)
