"""Settings of the parameter-server benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace

from laconic.errors import ConfigError
from laconic.train.methods import method_options
from laconic_lab.bench.settings import BenchSettings

__all__ = ["PARTS", "ClusterSettings"]

PARTS = ("aggregation", "rounds", "load")


@dataclass(frozen=True)
class ClusterSettings(BenchSettings):
    """Settings of the parameter-server benchmark.

    Args:
        parts: Names of ``PARTS``.
        model: Model whose slots are exchanged.
        rounds: Timed rounds of each measurement.
        slow_rounds: Timed rounds where a round takes more than two seconds.
        workers: Workers of ``rounds``.
        methods: Methods of ``rounds``; the first is the baseline.
        rates: Rates of links, or ``unshaped``.
        paced: Emulate slow links by a proxy, without root.
        bundled: Exchange all tensors as one vector.
        clients: Clients of ``load``.
        processes: Processes that the clients are threads of.
        seconds: Duration of ``load``.

    >>> ClusterSettings(parts=("load",), seconds=5).command()
    'laconic bench cluster --part load --seconds 5'
    """

    NAME, REPEATED = "cluster", {"parts": "part"}

    parts: tuple[str, ...] = PARTS
    model: str = "vgg11"
    rounds: int = 9
    slow_rounds: int = 3
    workers: int = 2
    methods: tuple[str, ...] = ("1", "4", "5", "laconic")
    rates: tuple[str, ...] = ("unshaped", "1gbit", "100mbit")
    paced: bool = False
    bundled: bool = False
    clients: int = 64
    processes: int = 4
    seconds: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ConfigError(f"--part must be one of {', '.join(PARTS)}, got {part!r}")
        self.require_at_least(dict.fromkeys(("rounds", "slow_rounds", "workers", "clients", "processes"), 1))
        if not 1 <= self.seconds <= 3600:
            raise ConfigError(f"seconds must be from 1 to 3600, got {self.seconds:g}")
        for method in self.methods:
            method_options(method)  # names the valid methods

    @property
    def threads(self) -> tuple[int, int]:
        """Torch threads of the server and of a worker: one each, as in the processes of ``laconic train``."""
        return 1, 1

    def quick(self) -> ClusterSettings:
        """Return settings for a quick look: a small model, few rounds, little load."""
        return replace(
            self, model="lenet5", rounds=3, slow_rounds=2, methods=("1", "laconic"), rates=("unshaped", "100mbit"),
            clients=8, processes=2, seconds=2.0,
        )  # fmt: skip
