"""Settings of the FSDP benchmark, and the ways to train that it compares."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from laconic.codecs import parse
from laconic.collective.local.outer import choose_outer
from laconic.errors import ConfigError
from laconic_lab.bench.gpt.settings import UNSHAPED, TrainingSettings, link_parts

__all__ = ["PLAIN", "FSDPSettings", "Way", "way_of"]

PLAIN = "hsdp"
WAYS = (PLAIN, "laconic ef|qsgd:4", "laconic ef|thc:4", "local 20 ef|sign")


@dataclass(frozen=True)
class Way:
    """One way to train: torch's HSDP, or shards inside nodes with laconic between them.

    Args:
        optimizer: ``adamw`` or ``muon``.
        spec: Codec of ``attach`` or of ``LocalSGD``; None for torch's HSDP.
        every: Local steps between exchanges with ``LocalSGD``; 0 exchanges gradients in every step.
        outer, fragments: Arguments of ``LocalSGD``.
        rates: Factor of the learning rates.
    """

    name: str
    optimizer: str = "adamw"
    spec: str | None = None
    every: int = 0
    outer: str = "mean"
    fragments: int = 1
    rates: float = 1.0

    @property
    def title(self) -> str:
        optimizer = "Muon" if self.optimizer == "muon" else "AdamW"
        if self.spec is None:
            return f"{optimizer}, torch's HSDP"
        how = f"LocalSGD every {self.every}, " if self.every else ""
        changed = [f"`{self.outer}`"] if self.outer != "mean" else []
        changed += [f"{self.fragments} fragments"] if self.fragments > 1 else []
        changed += [f"learning rates times {self.rates:g}"] if self.rates != 1.0 else []
        return ", ".join((f"{optimizer}, {how}`{self.spec}`", *changed))


def way_of(name: str) -> Way:
    """Return the way of a name: ``hsdp`` or ``laconic SPEC``, with ``muon`` behind it or not, or ``local STEPS SPEC``.

    Behind the last one, which trains by Muon, there may be ``optimizer=adamw``, ``outer=…``, ``fragments=…`` and
    ``rates=…``.

    >>> way_of("local 20 ef|sign").title
    'Muon, LocalSGD every 20, `ef|sign`'
    >>> way_of("local 8 ef|sign outer=mean:1.3 rates=0.7").rates
    0.7
    """
    words = name.split()
    optimizer = "muon" if words[-1:] == ["muon"] else "adamw"
    every_step = words[:-1] if optimizer == "muon" else words
    if every_step == [PLAIN]:
        return Way(name, optimizer)
    if len(every_step) == 2 and every_step[0] == "laconic":
        parse(every_step[1])
        return Way(name, optimizer, every_step[1])
    if len(words) >= 3 and words[0] == "local" and words[1].isdigit() and int(words[1]) > 0:
        parse(words[2])
        options = dict(word.partition("=")[::2] for word in words[3:])
        outer = choose_outer(options.pop("outer", "mean"), [words[2]])
        with suppress(ValueError):
            fragments, rates = int(options.pop("fragments", 1)), float(options.pop("rates", 1.0))
            optimizer = options.pop("optimizer", "muon")
            if not options and fragments >= 1 and 0 < rates < math.inf and optimizer in ("adamw", "muon"):
                return Way(name, optimizer, words[2], int(words[1]), str(outer), fragments, rates)
    raise ConfigError(
        f"--ways must be of 'hsdp', 'hsdp muon', 'laconic SPEC', 'laconic SPEC muon' and 'local STEPS SPEC', such as "
        f"'local 20 ef|sign', with or without optimizer=adamw, outer=mean:1.3, fragments=4 and rates=0.7 behind it, "
        f"got {name!r}"
    )


@dataclass(frozen=True)
class FSDPSettings(TrainingSettings):
    """Settings of the FSDP benchmark.

    Args:
        ways: As for ``way_of``; ``hsdp``, which all others are compared to, is always included.
        nodes: Replicas, each on a host of its own.
        shards: Ranks of a node, single-threaded processes, over which the model is sharded.
        links: Rates between nodes, with or without a delay (``100mbit+5ms``), or ``unshaped``.
        timed_steps: Steps over a link of a way that exchanges in every step; local SGD is timed over two exchanges. 0:
            nothing is timed.
        loss_steps: Steps of the trainings whose losses are compared; 0: none.

    >>> FSDPSettings(links=("100mbit",)).command()
    'laconic bench fsdp --links 100mbit'
    """

    NAME = "fsdp"

    ways: tuple[str, ...] = WAYS
    nodes: int = 2
    shards: int = 2
    links: tuple[str, ...] = (UNSHAPED, "100mbit")
    loss_steps: int = 200
    width: int = 256
    layers: int = 6
    heads: int = 8
    context: int = 32
    batch: int = 1
    eval_every: int = 20

    def __post_init__(self) -> None:
        if PLAIN not in self.ways:
            object.__setattr__(self, "ways", (PLAIN, *self.ways))
        for name in self.ways:
            way_of(name)
        for link in self.links:
            link_parts(link)
        self.require_at_least({"nodes": 2, "shards": 1, "timed_steps": 0, "loss_steps": 0})
        super().__post_init__()

    def quick(self) -> FSDPSettings:
        """Return settings for a quick look: a tiny model, no link and few steps."""
        return replace(
            self, ways=(PLAIN, "laconic ef|qsgd:4"), links=(UNSHAPED,), timed_steps=2, loss_steps=4, width=32,
            layers=2, heads=2, context=16, eval_every=2, eval_windows=16,
        )  # fmt: skip

    def training(self) -> dict[str, Any]:
        """Return the settings on which a training depends, besides the way."""
        left_out = {"ways", "links", "timed_steps", "limit_s", "seed"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def timed(self, way: Way) -> int:
        """Return how many steps of a way are timed after the first one."""
        return 2 * way.every if way.every else self.timed_steps
