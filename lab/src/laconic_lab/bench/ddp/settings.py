"""Settings of the DDP benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace

from laconic.codecs import parse
from laconic.errors import ConfigError
from laconic_lab.bench.settings import BenchSettings

__all__ = ["SPECS", "STOCK", "DDPSettings"]

STOCK = ("ddp", "bf16", "fp16", "powersgd:1", "powersgd:2", "powersgd:4", "quantize-tensor", "quantize-channel")
"""torch's exchanges: no hook, a bf16 all-reduce, and its fp16, PowerSGD (by rank) and quantization hooks."""

SPECS = ("none", "qsgd:4", "ef|topk:0.01|qsgd:4", "ef|thc:4", "ef|shared:8", "ef|sign", "ef|powersgd:4")


@dataclass(frozen=True)
class DDPTraining(BenchSettings):
    """Settings of trainings by each exchange, which measure the time to each accuracy.

    Args:
        train: Whether to train. ``local 10 SPEC`` is then local SGD with an exchange in every tenth step.
        data, epochs: What to train on, and how long.
        batch: Examples per rank and step.
        lr: Initial learning rate; it decays along half a cosine.
        test_every: Steps between evaluations, which are not timed.
    """

    train: bool = False
    data: str = "digits"
    epochs: int = 2
    batch: int = 32
    lr: float = 0.02
    test_every: int = 100


@dataclass(frozen=True)
class DDPSettings(DDPTraining):
    """Settings of the DDP benchmark.

    Args:
        specs: Specs for ``laconic.attach``.
        stock: Names of ``STOCK``; ``ddp`` is the baseline.
        rates: Rates of links, or ``unshaped``.
        ranks: Number of single-threaded processes.
        model: Model whose parameters are exchanged.
        steps: Timed steps of each exchange.
        slow_steps: Timed steps where a step takes more than two seconds.
        limit_s: An exchange whose step takes longer counts as hung. A training run has an hour.
        paced: Use paced sockets even where root can create network namespaces.

    >>> DDPSettings(specs=("qsgd:4",), rates=("100mbit",)).command()
    'laconic bench ddp qsgd:4 --rates 100mbit'
    """

    NAME, ARGUMENTS = "ddp", "specs"

    specs: tuple[str, ...] = SPECS
    stock: tuple[str, ...] = STOCK
    rates: tuple[str, ...] = ("unshaped", "1gbit", "100mbit")
    ranks: int = 2
    model: str = "vgg11"
    steps: int = 9
    slow_steps: int = 3
    limit_s: float = 60.0
    paced: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.stock:
            if name not in STOCK:
                raise ConfigError(f"--stock must be one of {', '.join(STOCK)}, got {name!r}")
        for spec in self.specs:
            parse(spec.split(" ")[-1])
        if "ddp" not in self.stock:
            raise ConfigError("--stock must have 'ddp', which all others are compared to")
        self.require_at_least({"ranks": 2, "steps": 1, "slow_steps": 1})
        self.require_positive(["limit_s"])

    @property
    def ways(self) -> tuple[str, ...]:
        """Return all exchanges by their names in Records."""
        return (*self.stock, *(spec if spec.startswith("local ") else f"laconic {spec}" for spec in self.specs))

    def quick(self) -> DDPSettings:
        """Return settings for a quick look: a small model and few steps."""
        return replace(
            self, specs=("none", "ef|topk:0.01|qsgd:4"), stock=("ddp", "fp16"), rates=("unshaped",), model="mlp",
            steps=3, slow_steps=2,
        )  # fmt: skip
