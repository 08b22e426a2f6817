"""Settings and results of the codec benchmark."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from laconic.codecs import codec
from laconic.errors import ConfigError
from laconic.records import Record
from laconic_lab.bench.coders import Rate
from laconic_lab.bench.samples import SAMPLES
from laconic_lab.bench.timing import Timing, quartiles

CODECS = (
    "qsgd:4", "qsgd:8", "qsgd:2", "sign", "onebit", "terngrad", "uniform:8",
    "shared:8", "thc:4", "thc:2",
    "topk:0.01", "topk:0.001", "topk:0.1", "topk:0.01|qsgd:4", "randk:0.01", "threshold",
    "fp16", "bf16", "none",
)  # fmt: skip

CODERS = (
    "adaptive:5.0|huffman", "adaptive:5.0|rans", "adaptive:6.0|huffman",
    "uniform:8|huffman", "uniform:8|rans", "uniform:10|huffman",
)  # fmt: skip
"""Codecs with an entropy coder, grouped by quantizer because a group shares its stock coders."""

SETS = {"codecs": CODECS, "coders": CODERS}
SPECS = (*CODECS, *CODERS)

FLOORS: dict[str, tuple[float | None, float | None]] = {
    "qsgd:4": (1.3, 1.3), "qsgd:8": (1.1, 1.2), "qsgd:2": (1.25, 1.2), "sign": (1.9, 1.9), "shared:8": (1.2, 1.3),
    "terngrad": (None, 1.0), "uniform:8": (1.0, 1.0), "thc:4": (0.25, 0.3), "topk:0.01": (0.65, 1.7),
    "topk:0.001": (0.8, None), "topk:0.1": (1.0, 1.0), "topk:0.01|qsgd:4": (0.6, 1.5), "randk:0.01": (1.0, 1.0),
    "threshold": (1.0, 1.0), "adaptive:5.0|huffman": (0.3, 0.5), "adaptive:5.0|rans": (0.18, 0.28),
}  # fmt: skip
"""Goals for encode and decode in multiples of memcpy's speed, for one thread and 25 M gaussian values."""

SMALL_LIMIT_US = 20.0
"""Goal for encode and for decode of 1,000 values, of every codec."""

SUM_FLOORS = {"shared:8": 4.5}
"""Goals for adding packed words."""

SMALL_NUMEL = 1000
GAUSSIAN = "gaussian"
JUDGED_NUMEL = 4_000_000
"""Goals apply from this many values on; smaller tensors fit into a cache."""

Progress = Callable[[str, int, int], None]
"""Called with the name of the current step, the steps done and their total."""


@dataclass(frozen=True)
class Settings:
    """Settings of a codec benchmark.

    Args:
        threads: Threads for codecs and torch; memcpy always uses one.
        seed: Seed of the data and of the codecs.
        data: Data for codecs with an entropy coder; the speed of others does not depend on it.
    """

    numel: int = 25_000_000
    repeat: int = 9
    threads: int = 1
    seed: int = 0
    data: tuple[str, ...] = tuple(SAMPLES)

    def __post_init__(self) -> None:
        for name, low in (("numel", SMALL_NUMEL), ("repeat", 1), ("threads", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not self.data or any(name not in SAMPLES for name in self.data):
            raise ConfigError(f"data must be among {', '.join(SAMPLES)}, got {', '.join(self.data) or 'nothing'}")

    def command(self, specs: Sequence[str]) -> str:
        """Return the command line of this run."""
        known: dict[Sequence[str], list[str]] = {named: ["--only", name] for name, named in SETS.items()}
        known[SPECS] = []
        words = ["laconic", "bench", *known.get(tuple(specs), specs)]
        for name, default in (("numel", 25_000_000), ("repeat", 9), ("threads", 1), ("seed", 0)):
            if getattr(self, name) != default:
                words += [f"--{name}", str(getattr(self, name))]
        if self.data != tuple(SAMPLES):
            words += [word for name in self.data for word in ("--data", name)]
        return shlex.join(words)

    def judges(self) -> bool:
        """Whether the goals apply to such a run."""
        return self.threads == 1 and self.numel >= JUDGED_NUMEL


def floors_of(text: str) -> tuple[float | None, float | None]:
    """Return the goals for encode and decode of a codec, by its canonical spec; None where there is none."""
    return next((floor for spec, floor in FLOORS.items() if codec(spec).text == text), (None, None))


@dataclass(frozen=True)
class CodecResult:
    """Measurements of one codec: timings by operation, µs for 1,000 values, and its coder's rate, if any."""

    spec: str
    codec: str
    numel: int
    nbytes: int
    error: float
    timings: dict[str, Timing]
    small_encode_us: float
    small_decode_us: float
    data: str = GAUSSIAN
    rate: Rate | None = None

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.numel

    @property
    def floors(self) -> tuple[float | None, float | None]:
        return floors_of(self.codec) if self.data == GAUSSIAN else (None, None)

    def overhead(self, way: str) -> float:
        """Return the excess of end to end over the bare kernel, in percent of the kernel."""
        return 100 * (self.timings[way].median / self.timings[f"{way}_kernel"].median - 1)

    def scaling(self, way: str) -> float | None:
        """Return the speed-up of two threads over one; None where it was not measured."""
        two = self.timings.get(f"{way}_2_threads")
        return None if two is None else two.speed / self.timings[way].speed

    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "spec": self.spec, "codec": self.codec, "data": self.data, "numel": self.numel, "nbytes": self.nbytes,
            "bits_per_value": self.bits, "relative_squared_error": self.error,
            "encode_overhead_percent": self.overhead("encode"), "decode_overhead_percent": self.overhead("decode"),
            "small_encode_us": self.small_encode_us, "small_decode_us": self.small_decode_us,
        }  # fmt: skip
        values["encode_floor_x_memcpy"], values["decode_floor_x_memcpy"] = self.floors
        if self.rate is not None:
            values |= self.rate.values()
            values |= {f"{way}_scaling_2_threads": self.scaling(way) for way in ("encode", "decode")}
        if "sum" in self.timings:
            values["sum_floor_x_memcpy"] = SUM_FLOORS.get(self.codec)
        for name, timing in self.timings.items():
            values |= timing.values(name)
        return values


@dataclass(frozen=True)
class PeerResult:
    """Measurements of one alternative; ``of`` is the spec it is compared with, None for general-purpose tools.

    A stock coder has a ``rate`` and works on symbols instead of values.
    """

    name: str
    of: str | None
    numel: int
    nbytes: int
    error: float | None
    note: str
    timings: dict[str, Timing]
    small_encode_us: float | None
    small_decode_us: float | None
    data: str = GAUSSIAN
    rate: Rate | None = None

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.numel

    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "name": self.name, "of": self.of, "data": self.data, "numel": self.numel, "nbytes": self.nbytes,
            "bits_per_value": self.bits, "relative_squared_error": self.error, "note": self.note,
            "small_encode_us": self.small_encode_us, "small_decode_us": self.small_decode_us,
        }  # fmt: skip
        if self.rate is not None:
            values |= self.rate.values()
        for name, timing in self.timings.items():
            values |= timing.values(name)
        return values


@dataclass(frozen=True)
class Report:
    """A whole run. ``ceilings`` are read-only and write-only passes; ``notes`` say what was left out."""

    settings: Settings
    specs: tuple[str, ...]
    memcpy: Timing
    ceilings: dict[str, Timing] = field(default_factory=dict)
    codecs: tuple[CodecResult, ...] = ()
    peers: tuple[PeerResult, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def memcpy_gb_per_s(self) -> float:
        return 4 * self.settings.numel / self.memcpy.median / 1e9

    @property
    def memcpy_quartiles_gb_per_s(self) -> tuple[float, float]:
        """Quartiles of memcpy's speed: the wider they are, the less the ratios can be trusted."""
        first, _, third = quartiles(self.memcpy.seconds)
        return 4 * self.settings.numel / third / 1e9, 4 * self.settings.numel / first / 1e9

    def machine_values(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "memcpy_s": self.memcpy.median,
            "memcpy_gb_per_s": self.memcpy_gb_per_s,
            "memcpy_quartiles_gb_per_s": list(self.memcpy_quartiles_gb_per_s),
        }
        for name, timing in self.ceilings.items():
            values |= timing.values(name)
        return values

    def records(self) -> list[Record]:
        settings, seed = self.settings, self.settings.seed
        shared = {
            "command": settings.command(self.specs), "numel": settings.numel,
            "threads": settings.threads, "repeat": settings.repeat,
        }  # fmt: skip
        records = [Record("bench.machine", shared | self.machine_values(), seed)]
        records += [Record("bench.codec", shared | result.values(), seed) for result in self.codecs]
        records += [Record("bench.peer", shared | result.values(), seed) for result in self.peers]
        return records
