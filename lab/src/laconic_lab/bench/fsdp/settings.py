"""Settings of the FSDP benchmark, and the ways to train that it compares."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from laconic.codecs import parse
from laconic.errors import ConfigError
from laconic_lab.bench.gpt.settings import UNSHAPED, check_numbers, link_parts

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
    """

    name: str
    optimizer: str = "adamw"
    spec: str | None = None
    every: int = 0

    @property
    def title(self) -> str:
        optimizer = "Muon" if self.optimizer == "muon" else "AdamW"
        if self.spec is None:
            return f"{optimizer}, torch's HSDP"
        how = f"LocalSGD every {self.every}, " if self.every else ""
        return f"{optimizer}, {how}`{self.spec}`"


def way_of(name: str) -> Way:
    """Return the way of a name: ``hsdp`` or ``laconic SPEC``, with ``muon`` behind it or not, or ``local STEPS SPEC``.

    >>> way_of("local 20 ef|sign").title
    'Muon, LocalSGD every 20, `ef|sign`'
    """
    words = name.split()
    optimizer = "muon" if words[-1:] == ["muon"] else "adamw"
    every_step = words[:-1] if optimizer == "muon" else words
    if every_step == [PLAIN]:
        return Way(name, optimizer)
    if len(every_step) == 2 and every_step[0] == "laconic":
        parse(every_step[1])
        return Way(name, optimizer, every_step[1])
    if len(words) == 3 and words[0] == "local" and words[1].isdigit() and int(words[1]) > 0:
        parse(words[2])
        return Way(name, "muon", words[2], int(words[1]))
    raise ConfigError(
        f"--ways must be of 'hsdp', 'hsdp muon', 'laconic SPEC', 'laconic SPEC muon' and 'local STEPS SPEC', such as "
        f"'local 20 ef|sign', got {name!r}"
    )


@dataclass(frozen=True)
class FSDPSettings:
    """Settings of the FSDP benchmark.

    Args:
        ways: As for ``way_of``; ``hsdp``, which all others are compared to, is always included.
        nodes: Replicas, each on a host of its own.
        shards: Ranks of a node, single-threaded processes, over which the model is sharded.
        links: Rates between nodes, with or without a delay (``100mbit+5ms``), or ``unshaped``.
        timed_steps: Steps over a link of a way that exchanges in every step; local SGD is timed over two exchanges. 0:
            nothing is timed.
        loss_steps: Steps of the trainings whose losses are compared; 0: none.
        lr, muon_lr: Largest learning rates.
        width, layers, heads, context: Of the GPT.
        batch: Windows of ``context`` bytes per rank and step.
        eval_every: Steps between evaluations.
        eval_windows: Held-out windows of an evaluation.
        limit_s: A way that takes longer counts as hung.

    >>> FSDPSettings(links=("100mbit",)).command()
    'laconic bench fsdp --links 100mbit'
    """

    ways: tuple[str, ...] = WAYS
    nodes: int = 2
    shards: int = 2
    links: tuple[str, ...] = (UNSHAPED, "100mbit")
    timed_steps: int = 4
    loss_steps: int = 200
    lr: float = 1e-3
    muon_lr: float = 0.02
    width: int = 256
    layers: int = 6
    heads: int = 8
    context: int = 32
    batch: int = 1
    eval_every: int = 20
    eval_windows: int = 128
    limit_s: float = 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if PLAIN not in self.ways:
            object.__setattr__(self, "ways", (PLAIN, *self.ways))
        for name in self.ways:
            way_of(name)
        for link in self.links:
            link_parts(link)
        lowest = {
            "nodes": 2, "shards": 1, "timed_steps": 0, "loss_steps": 0, "batch": 1, "context": 2, "eval_every": 1,
            "eval_windows": 1,
        }  # fmt: skip
        check_numbers(self, lowest)

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

    def command(self) -> str:
        """Return the command line of this run."""
        words = ["laconic", "bench", "fsdp"]
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                words += [
                    "--" + one.name.replace("_", "-"),
                    ",".join(value) if isinstance(value, tuple) else str(value),
                ]
        return shlex.join(words)
