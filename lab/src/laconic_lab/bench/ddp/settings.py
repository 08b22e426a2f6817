"""What a run of the DDP bench shall measure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace

from laconic.codecs import parse
from laconic.errors import ConfigError

__all__ = ["SPECS", "STOCK", "DDPSettings"]

STOCK = ("ddp", "bf16", "fp16", "powersgd:1", "powersgd:2", "powersgd:4", "quantize-tensor", "quantize-channel")
"""What torch has: no hook; a bf16 all-reduce; its fp16, PowerSGD (by rank) and quantization hooks."""

SPECS = ("none", "qsgd:4", "ef|topk:0.01|qsgd:4", "ef|thc:4", "ef|shared:8", "ef|sign", "ef|powersgd:4")


@dataclass(frozen=True)
class DDPSettings:
    """Args:
    specs: Of ``laconic.attach``.
    stock: Of ``STOCK``; ``ddp`` is what all are compared to.
    rates: Of links; ``unshaped`` is one, too.
    ranks: Processes, of one thread each.
    model: Whose parameters are exchanged.
    steps: Steps that count, of each way.
    slow_steps: The same where a step takes more than two seconds.
    limit_s: A way that takes longer for a step has hung. (A training run has an hour.)
    train: Train the model instead, by each way, and see how long each accuracy takes. ``local 10 SPEC`` is then a
        way, too: local SGD with an exchange in every tenth step.
    data: To train with.
    epochs: Of it.
    batch: Examples of a rank in a step.
    lr: Learning rate at the beginning; it falls along half a cosine.
    test_every: Steps between tests, while which the clock stands still.
    paced: Slow links by slow sockets, as happens anyway where root cannot make network namespaces.
    seed: Of gradients.

    >>> DDPSettings(specs=("qsgd:4",), rates=("100mbit",)).command()
    'laconic bench ddp qsgd:4 --rates 100mbit'
    """

    specs: tuple[str, ...] = SPECS
    stock: tuple[str, ...] = STOCK
    rates: tuple[str, ...] = ("unshaped", "1gbit", "100mbit")
    ranks: int = 2
    model: str = "vgg11"
    steps: int = 9
    slow_steps: int = 3
    limit_s: float = 60.0
    train: bool = False
    data: str = "digits"
    epochs: int = 2
    batch: int = 32
    lr: float = 0.02
    test_every: int = 100
    paced: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.stock:
            if name not in STOCK:
                raise ConfigError(f"--stock takes {', '.join(STOCK)}, got {name!r}")
        for spec in self.specs:
            parse(spec.split(" ")[-1])
        if "ddp" not in self.stock:
            raise ConfigError("--stock must have 'ddp', which all others are compared to")
        for name, low in (("ranks", 2), ("steps", 1), ("slow_steps", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name.replace('_', '-')} must be at least {low}, got {getattr(self, name)}")
        if not self.limit_s > 0:
            raise ConfigError(f"limit-s must be above 0, got {self.limit_s:g}")

    @property
    def ways(self) -> tuple[str, ...]:
        """All of them, by the names that Records have."""
        return (*self.stock, *(spec if spec.startswith("local ") else f"laconic {spec}" for spec in self.specs))

    def quick(self) -> DDPSettings:
        """A look: a small model, few steps."""
        return replace(
            self, specs=("none", "ef|topk:0.01|qsgd:4"), stock=("ddp", "fp16"), rates=("unshaped",), model="mlp",
            steps=3, slow_steps=2,
        )  # fmt: skip

    def command(self) -> str:
        """What to type for the same again."""
        words = ["laconic", "bench", "ddp"]
        if self.specs != SPECS:
            words += self.specs
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            if value != one.default:
                words.append("--" + one.name.replace("_", "-"))
                if not isinstance(value, bool):
                    words.append(",".join(value) if isinstance(value, tuple) else str(value))
        return shlex.join(words)
