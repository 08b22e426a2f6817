"""Settings of the GPT benchmark."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from laconic.errors import ConfigError
from laconic.train.models import GPT, GPTConfig, seeded
from laconic.units import parse_rate, parse_time, show_rate, show_time
from laconic_lab.bench.gpt.methods import DEFAULT, METHODS, steps_of
from laconic_lab.bench.settings import BenchSettings

__all__ = ["UNSHAPED", "GPTSettings", "TrainingSettings", "build_gpt", "link_parts", "show_link"]

UNSHAPED = "unshaped"
NO_LINK = "none"
PLAIN = "ddp"
CONFIRMED = (PLAIN, "laconic-sign", "laconic-adamw", "laconic-adamw-8")
"""Methods of which all steps are timed over one link, to confirm the times composed from some steps."""


@dataclass(frozen=True)
class TrainingSettings(BenchSettings):
    """Settings of a small GPT and its training, on windows of ``context`` bytes.

    Args:
        timed_steps: Steps over a link of a method that exchanges in every step; those with local steps are timed over
            some exchanges.
        lr, muon_lr: Largest learning rates of AdamW and Muon.
        width, layers, heads, context: Of the GPT.
        batch: Windows per rank and step.
        eval_every: Steps between evaluations, which are not timed.
        eval_windows: Held-out windows of an evaluation.
        limit_s: A method that takes longer counts as hung.
    """

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
    seed: int = 0

    def __post_init__(self) -> None:
        self.require_at_least({"batch": 1, "context": 2, "eval_every": 1, "eval_windows": 1})
        self.require_positive(("lr", "muon_lr", "limit_s"))
        if self.width % self.heads:
            raise ConfigError(f"--width must be a multiple of {self.heads} heads, got {self.width}")


@dataclass(frozen=True)
class GPTSettings(TrainingSettings):
    """Settings of the GPT benchmark.

    Args:
        ranks: Numbers of single-threaded processes.
        links: Rates with delays, such as ``100mbit+50ms``, or ``unshaped``; ``none`` alone measures losses, not times.
        methods: Names of ``METHODS``; ``ddp``, whose last loss is the goal, is always included.
        steps: Steps of each training whose steps all exchange gradients.
        stretch: Methods with local steps, which cost less, train so many times as long, with a schedule to match.
        timed_steps: As described; but over the first link, with the first number of ranks, all steps of ``CONFIRMED``
            are timed.
        paced: Use paced sockets even where root can create network namespaces.

    >>> GPTSettings(ranks=(2,), links=("100mbit+50ms",)).command()
    'laconic bench gpt --ranks 2 --links 100mbit+50ms'
    """

    NAME = "gpt"

    ranks: tuple[int, ...] = (2, 4)
    links: tuple[str, ...] = ("100mbit+50ms", "20mbit+100ms")
    methods: tuple[str, ...] = DEFAULT
    steps: int = 160
    stretch: float = 2.0
    paced: bool = False

    def __post_init__(self) -> None:
        if PLAIN not in self.methods:
            object.__setattr__(self, "methods", (PLAIN, *self.methods))
        for name in self.methods:
            if name not in METHODS:
                raise ConfigError(f"--methods must be of {', '.join(METHODS)}, got {name!r}")
        for link in self.timed_links:
            link_parts(link)
        for count in self.ranks:
            if count < 2:
                raise ConfigError(f"--ranks must be at least 2, got {count}")
        self.require_at_least({"steps": 4, "stretch": 1, "timed_steps": 1})
        super().__post_init__()

    def quick(self) -> GPTSettings:
        """Return settings for a quick look: a tiny model, two ranks and few steps."""
        return replace(
            self, ranks=(2,), links=(UNSHAPED,), methods=("ddp", "laconic-topk"), steps=20, width=32, layers=2,
            heads=2, context=16, eval_every=10, eval_windows=32,
        )  # fmt: skip

    @property
    def timed_links(self) -> tuple[str, ...]:
        """Links over which steps are timed."""
        return () if self.links == (NO_LINK,) else self.links

    def timed(self, method: str, *, everything: bool) -> int:
        """Return how many steps of a method are timed over a link: its first exchange and several more, or all."""
        one, steps = METHODS[method], steps_of(method, self.steps, self.stretch)
        if everything and method in CONFIRMED:
            return steps
        wanted = 2 + 2 * self.timed_steps if one.hook == "powersgd" else 2 + self.timed_steps
        if one.every:
            wanted = 1 + one.period * (one.fragments + (4 if one.fragments > 1 else 2))
        return min(steps, wanted)

    def training(self) -> dict[str, Any]:
        """Return the settings on which the loss by step depends, besides ranks and method."""
        left_out = {"ranks", "links", "methods", "timed_steps", "limit_s", "paced", "seed"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}


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
