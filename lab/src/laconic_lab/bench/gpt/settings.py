"""Settings of the GPT benchmark."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from laconic.errors import ConfigError
from laconic.train.models import GPT, GPTConfig, seeded
from laconic.units import parse_rate, parse_time, show_rate, show_time
from laconic_lab.bench.gpt.methods import DEFAULT, METHODS, steps_of

__all__ = ["UNSHAPED", "GPTSettings", "build_gpt", "link_parts", "show_link"]

UNSHAPED = "unshaped"
PLAIN = "ddp"
CONFIRMED = (PLAIN, "laconic-sign", "laconic-adamw", "laconic-adamw-8")
"""Methods of which all steps are timed over one link, to confirm the times composed from some steps."""


@dataclass(frozen=True)
class GPTSettings:
    """Settings of the GPT benchmark.

    Args:
        ranks: Numbers of single-threaded processes.
        links: Rates with delays, such as ``100mbit+50ms``, or ``unshaped``.
        methods: Names of ``METHODS``; ``ddp``, whose last loss is the goal, is always included.
        steps: Steps of each training whose steps all exchange gradients.
        stretch: Methods with local steps, which cost less, train so many times as long, with a schedule to match.
        timed_steps: Steps over a link of a method that exchanges in every step; local SGD is timed over several
            exchanges. Over the first link, with the first number of ranks, all steps of ``CONFIRMED`` are timed.
        lr: AdamW's largest learning rate, in all methods.
        muon_lr: Muon's.
        width, layers, heads, context: Of the GPT.
        batch: Windows of ``context`` bytes per rank and step.
        eval_every: Steps between evaluations, which are not timed.
        eval_windows: Held-out windows of an evaluation.
        limit_s: A method that takes longer counts as hung.
        paced: Use paced sockets even where root can create network namespaces.

    >>> GPTSettings(ranks=(2,), links=("100mbit+50ms",)).command()
    'laconic bench gpt --ranks 2 --links 100mbit+50ms'
    """

    ranks: tuple[int, ...] = (2, 4)
    links: tuple[str, ...] = ("100mbit+50ms", "20mbit+100ms")
    methods: tuple[str, ...] = DEFAULT
    steps: int = 160
    stretch: float = 2.0
    timed_steps: int = 4
    lr: float = 1e-3
    muon_lr: float = 0.02
    width: int = 192
    layers: int = 8
    heads: int = 6
    context: int = 64
    batch: int = 2
    eval_every: int = 16
    eval_windows: int = 128
    limit_s: float = 3600.0
    paced: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if PLAIN not in self.methods:
            object.__setattr__(self, "methods", (PLAIN, *self.methods))
        for name in self.methods:
            if name not in METHODS:
                raise ConfigError(f"--methods must be of {', '.join(METHODS)}, got {name!r}")
        for link in self.links:
            link_parts(link)
        for count in self.ranks:
            if count < 2:
                raise ConfigError(f"--ranks must be at least 2, got {count}")
        lowest = {"steps": 4, "timed_steps": 1, "batch": 1, "context": 2, "eval_every": 1, "eval_windows": 1}
        if not self.stretch >= 1:
            raise ConfigError(f"--stretch must be at least 1, got {self.stretch:g}")
        check_numbers(self, lowest)

    def quick(self) -> GPTSettings:
        """Return settings for a quick look: a tiny model, two ranks and few steps."""
        return replace(
            self, ranks=(2,), links=(UNSHAPED,), methods=("ddp", "laconic-topk"), steps=20, width=32, layers=2,
            heads=2, context=16, eval_every=10, eval_windows=32,
        )  # fmt: skip

    def timed(self, method: str, *, everything: bool) -> int:
        """Return how many steps of a method are timed over a link: its first exchange and several more, or all."""
        one, steps = METHODS[method], steps_of(method, self.steps, self.stretch)
        if everything and method in CONFIRMED:
            return steps
        wanted = 2 + 2 * self.timed_steps if one.hook == "powersgd" else 2 + self.timed_steps
        if one.every:
            wanted = 1 + one.period * (1 + (4 if one.fragments > 1 else 2))
        return min(steps, wanted)

    def training(self) -> dict[str, Any]:
        """Return the settings on which the loss by step depends, besides ranks and method."""
        left_out = {"ranks", "links", "methods", "timed_steps", "limit_s", "paced", "seed"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def command(self) -> str:
        """Return the command line of this run."""
        words = ["laconic", "bench", "gpt"]
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                words.append("--" + one.name.replace("_", "-"))
                if not isinstance(value, bool):
                    words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
        return shlex.join(words)


def link_parts(link: str) -> tuple[str | None, str]:
    """Return the rate and the delay of a link.

    >>> link_parts("100mbit+50ms"), link_parts("20mbit"), link_parts("unshaped")
    (('100mbit', '50ms'), ('20mbit', '0'), (None, '0'))
    """
    if link == UNSHAPED:
        return None, "0"
    rate, _, delay = link.partition("+")
    parse_rate(rate)
    parse_time(delay or "0")
    return rate, delay or "0"


def show_link(link: str) -> str:
    """Format a link: ``100 Mbit/s + 50 ms``."""
    rate, delay = link_parts(link)
    if rate is None:
        return UNSHAPED
    return show_rate(parse_rate(rate)) + ("" if delay == "0" else f" + {show_time(parse_time(delay))}")


def build_gpt(options: dict[str, Any]) -> GPT:
    """Build the GPT with weights drawn from the seed."""
    names = ("context", "width", "layers", "heads")
    with seeded(int(options["seed"])):
        return GPT(GPTConfig(**{name: int(options[name]) for name in names}))


def check_numbers(settings: Any, lowest: dict[str, int]) -> None:
    """Raise unless the fields of a benchmark's settings are possible: numbers, learning rates and width."""
    for name, low in lowest.items():
        if getattr(settings, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(settings, name)}")
    for name in ("lr", "muon_lr", "limit_s"):
        if not getattr(settings, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be > 0, got {getattr(settings, name):g}")
    if settings.width % settings.heads:
        raise ConfigError(f"--width must be a multiple of {settings.heads} heads, got {settings.width}")
