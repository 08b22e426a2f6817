"""Time codecs: encode and decode end to end, the kernel alone, accumulation, and small tensors; peers beside them.

Codecs with an entropy coder are timed on data of several shapes, with one thread and two, and beside stock coders.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laconic.aggregate.homomorphic import Sum, Summing
from laconic.codecs import Chain, codec
from laconic.codecs.packed_ints import PackedIntStage
from laconic.errors import ConfigError, WrongResultError
from laconic.frames import decode, encode, encode_into, max_nbytes, open_packet
from laconic.kernels import cpu
from laconic.packet import TensorSpec
from laconic.records import Record
from laconic_lab.bench import checks, coders, peers
from laconic_lab.bench.coders import Rate
from laconic_lab.bench.peers import Peer
from laconic_lab.bench.samples import SAMPLES, gradient_like
from laconic_lab.bench.timing import Stopwatch, Timing, per_call, quartiles

__all__ = [
    "FLOORS",
    "SETS",
    "SPECS",
    "CodecResult",
    "KeptArena",
    "PeerResult",
    "Report",
    "Settings",
    "gradient_like",
    "run",
]

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
"""Codecs with an entropy coder. Those of one quantizer stand together: they share the stock coders beside them."""

SETS = {"codecs": CODECS, "coders": CODERS}
SPECS = (*CODECS, *CODERS)

FLOORS: dict[str, tuple[float | None, float | None]] = {
    "qsgd:4": (1.3, 1.3),
    "qsgd:8": (1.1, 1.2),
    "qsgd:2": (1.25, 1.2),
    "sign": (1.9, 1.9),
    "shared:8": (1.2, 1.3),
    "thc:4": (0.25, 0.3),
    "topk:0.01": (0.65, 1.7),
    "topk:0.001": (0.8, None),
    "topk:0.01|qsgd:4": (0.6, 1.5),
    "adaptive:5.0|huffman": (0.2, 0.45),
    "adaptive:5.0|rans": (0.18, 0.28),
}
"""Targets of encode and decode, in multiples of memcpy's speed: one thread, 25 M gaussian values."""

SUM_FLOORS = {"shared:8": 4.5}
"""The same for adding packed words."""

SMALL_NUMEL = 1000
GAUSSIAN = "gaussian"
JUDGED_NUMEL = 4_000_000
"""Floors say nothing about tensors that a cache holds: below this many values none is judged."""

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, the steps done and the steps in all."""


@dataclass(frozen=True)
class Settings:
    """What to run.

    Args:
        numel: Values of the tensor.
        repeat: Rounds per measurement.
        threads: Threads for codecs and torch; memcpy has one in any case.
        seed: Of the data and of the codecs.
        data: What codecs with an entropy coder are timed on; the others do not care and get gaussian values.
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
            raise ConfigError(f"data must be of {', '.join(SAMPLES)}, got {', '.join(self.data) or 'nothing'}")

    def command(self, specs: Sequence[str]) -> str:
        """The command line that runs this."""
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
        """Whether the floors speak about such a run."""
        return self.threads == 1 and self.numel >= JUDGED_NUMEL


@dataclass(frozen=True)
class CodecResult:
    """One codec. ``timings`` by name, see ``_operations``; small ones are µs for 1,000 values, each way.

    ``rate`` is what its entropy coder did, if it has one.
    """

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
        if self.data != GAUSSIAN:
            return None, None
        return next((floor for spec, floor in FLOORS.items() if codec(spec).text == self.codec), (None, None))

    def overhead(self, way: str) -> float:
        """What end to end costs over the bare kernel, in percent of the kernel."""
        return 100 * (self.timings[way].median / self.timings[f"{way}_kernel"].median - 1)

    def scaling(self, way: str) -> float | None:
        """Times as fast with two threads as with one; None where that was not measured."""
        two = self.timings.get(f"{way}_2_threads")
        return None if two is None else two.speed / self.timings[way].speed

    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "spec": self.spec, "codec": self.codec, "data": self.data, "numel": self.numel, "nbytes": self.nbytes,
            "bits_per_value": self.bits, "relative_squared_error": self.error,
            "encode_overhead_percent": self.overhead("encode"), "decode_overhead_percent": self.overhead("decode"),
            "small_encode_us": self.small_encode_us, "small_decode_us": self.small_decode_us,
        }  # fmt: skip
        found["encode_floor_x_memcpy"], found["decode_floor_x_memcpy"] = self.floors
        if self.rate is not None:
            found |= self.rate.values()
            found |= {f"{way}_scaling_2_threads": self.scaling(way) for way in ("encode", "decode")}
        if "sum" in self.timings:
            found["sum_floor_x_memcpy"] = SUM_FLOORS.get(self.codec)
        for name, timing in self.timings.items():
            found |= timing.values(name)
        return found


@dataclass(frozen=True)
class PeerResult:
    """One alternative; ``of`` is the spec it stands beside, None when it suits no codec in particular.

    A stock coder has a ``rate``; what it calls values are symbols.
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
        found: dict[str, Any] = {
            "name": self.name, "of": self.of, "data": self.data, "numel": self.numel, "nbytes": self.nbytes,
            "bits_per_value": self.bits, "relative_squared_error": self.error, "note": self.note,
            "small_encode_us": self.small_encode_us, "small_decode_us": self.small_decode_us,
        }  # fmt: skip
        if self.rate is not None:
            found |= self.rate.values()
        for name, timing in self.timings.items():
            found |= timing.values(name)
        return found


@dataclass(frozen=True)
class Report:
    """A whole run. ``ceilings`` are passes that only read or only write: what this machine's memory allows.

    ``notes`` say what was left out.
    """

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
        """How steady the machine was: ratios to a memcpy that varied much deserve less trust."""
        first, _, third = quartiles(self.memcpy.seconds)
        return 4 * self.settings.numel / third / 1e9, 4 * self.settings.numel / first / 1e9

    def machine_values(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "memcpy_s": self.memcpy.median,
            "memcpy_gb_per_s": self.memcpy_gb_per_s,
            "memcpy_quartiles_gb_per_s": list(self.memcpy_quartiles_gb_per_s),
        }
        for name, timing in self.ceilings.items():
            found |= timing.values(name)
        return found

    def records(self) -> list[Record]:
        settings, seed = self.settings, self.settings.seed
        shared = {
            "command": settings.command(self.specs), "numel": settings.numel,
            "threads": settings.threads, "repeat": settings.repeat,
        }  # fmt: skip
        found = [Record("bench.machine", shared | self.machine_values(), seed)]
        found += [Record("bench.codec", shared | result.values(), seed) for result in self.codecs]
        found += [Record("bench.peer", shared | result.values(), seed) for result in self.peers]
        return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    specs: Sequence[str] = SPECS,
    settings: Settings | None = None,
    *,
    with_peers: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Check and time codecs, then what one would use instead of each.

    Args:
        specs: Codecs without memory (no ``ef``: its cost is the codec's and one addition).
        settings: Sizes and counts.
        with_peers: Time the alternatives, too. They take most of the time.
        progress: Called before each step.
    """
    settings = settings or Settings()
    chains = {spec: codec(spec) for spec in specs}  # a wrong spec is told before the work
    jobs = [
        (data, spec, chain)
        for data in SAMPLES
        for spec, chain in chains.items()
        if data in (settings.data if chain.coder is not None else (GAUSSIAN,))
    ]
    lossless = with_peers and any(chain.coder is None for chain in chains.values())
    codec_results: list[CodecResult] = []
    peer_results: list[PeerResult] = []

    def tell(what: str, done: int) -> None:
        if progress is not None:
            progress(what, done, 1 + len(jobs) + lossless)

    with _threads(settings.threads), peers.quiet():
        tell("memory", 0)
        made, x = GAUSSIAN, gradient_like(settings.numel, settings.seed)
        watch = Stopwatch(x)
        ceilings = _ceilings(x, watch, settings)
        seen: set[tuple[str, str]] = set()
        for done, (data, spec, chain) in enumerate(jobs, 1):
            tell(spec if data == GAUSSIAN else f"{spec}, {data}", done)
            if data != made:
                made, x = data, SAMPLES[data](settings.numel, settings.seed)
            codec_results.append(_time_codec(spec, chain, data, x, watch, settings))
            if not with_peers:
                continue
            if chain.coder is None:
                peer_results += _time_peers(spec, chain, x, watch, settings)
            elif (symbols := (data, coders.uncoded(chain).text)) not in seen:
                seen.add(symbols)
                peer_results += _time_coders(spec, chain, data, x, watch, settings)
        if lossless:
            tell("zlib, zstd", 1 + len(jobs))
            peer_results += [_time_peer(peer, None, watch.source, watch, settings) for peer in peers.general(x.numel())]
        tell("done", 1 + len(jobs) + lossless)
    memcpy = Timing(tuple(watch.copies), tuple(watch.copies))
    notes = coders.missing() if with_peers and any(chain.coder is not None for chain in chains.values()) else ()
    return Report(settings, tuple(specs), memcpy, ceilings, tuple(codec_results), tuple(peer_results), tuple(notes))


def _ceilings(x: Tensor, watch: Stopwatch, settings: Settings) -> dict[str, Timing]:
    y = torch.empty_like(x)
    return watch.measure(
        {"read": lambda: cpu.all_finite(x), "read_torch": lambda: torch.aminmax(x), "write": y.zero_},
        settings.repeat,
    )


class KeptArena:
    """Sections in memory that stays: what a kernel needs and nothing around it."""

    def __init__(self, chain: Chain, spec: TensorSpec, device: torch.device | None = None) -> None:
        room = sum(nbytes + 16 for nbytes in chain.max_section_nbytes(spec))
        self.buffer = torch.zeros(room, dtype=torch.uint8, device=device)
        self.end = 0

    def take(self, nbytes: int) -> Tensor:
        begin = -(-self.end // 16) * 16
        self.end = begin + nbytes
        return self.buffer[begin : self.end]

    def trim(self, section: Tensor, nbytes: int) -> Tensor:
        self.end -= section.numel() - nbytes
        return section[:nbytes]


def _time_codec(spec: str, chain: Chain, data: str, x: Tensor, watch: Stopwatch, settings: Settings) -> CodecResult:
    seed = settings.seed
    error = checks.check(chain, x, seed=seed)
    buffer = torch.zeros(max_nbytes(chain, x), dtype=torch.uint8)
    nbytes = encode_into(x, chain, buffer, seed=seed)
    operations = _operations(chain, x, buffer, nbytes, seed)
    rate = coders.measure(chain, x, seed) if chain.coder is not None else None
    if rate is not None and settings.threads == 1 and (os.cpu_count() or 1) > 1:
        operations |= {f"{way}_2_threads": _with_threads(2, operations[way]) for way in ("encode", "decode")}
    # What floors and the other codecs are compared on gets all rounds; the rest shows what skew does.
    timings = watch.measure(operations, settings.repeat if data == GAUSSIAN else max(1, settings.repeat // 3))
    small = gradient_like(SMALL_NUMEL, seed)
    small_buffer = torch.zeros(max_nbytes(chain, small), dtype=torch.uint8)
    small_frame = small_buffer[: encode_into(small, chain, small_buffer, seed=seed)]
    out = torch.empty_like(small)
    return CodecResult(
        spec, chain.text, x.numel(), nbytes, error, timings,
        1e6 * per_call(lambda: encode_into(small, chain, small_buffer, seed=seed)),
        1e6 * per_call(lambda: decode(small_frame, out=out)),
        data, rate,
    )  # fmt: skip


def _with_threads(count: int, operation: Callable[[], object]) -> Callable[[], None]:
    def run_it() -> None:
        with _threads(count):
            operation()

    return run_it


def _operations(chain: Chain, x: Tensor, buffer: Tensor, nbytes: int, seed: int) -> dict[str, Callable[[], object]]:
    """What is timed. End to end and kernel stand side by side, so that their difference means something."""
    frame = buffer[:nbytes].clone()
    packet, _ = open_packet(frame)
    arena = KeptArena(chain, TensorSpec.of(x))
    out, total, blob = torch.empty_like(x), torch.zeros_like(x), encode(x, chain, seed=seed)

    def encode_kernel() -> None:
        arena.end = 0
        chain.encode(x, seed=seed, arena=arena)

    return _sums(chain, x) | {
        "encode": lambda: encode_into(x, chain, buffer, seed=seed),
        "encode_kernel": encode_kernel,
        "decode": lambda: decode(frame, out=out),
        "decode_kernel": lambda: chain.decode(packet, out=out),
        "accumulate": lambda: chain.accumulate(packet, total, 0.5),
        "encode_bytes": lambda: encode(x, chain, seed=seed),
        "decode_bytes": lambda: decode(blob),
    }


def _sums(chain: Chain, x: Tensor) -> dict[str, Callable[[], object]]:
    """Of a codec whose packets can be added: words of lanes onto words, as on a ring; and at a server."""
    if not isinstance(chain.values, PackedIntStage) or chain.selector is not None:
        return {}
    ring = Summing(chain, 1, ring=True)
    words = ring.packet(x, ring.probe(x)).sections[-1]
    total, server = words.clone(), Summing(chain, 16)
    packet, added = server.packet(x, server.probe(x)), Sum()
    added.add(packet)

    def collect() -> None:
        if added.count == 16:  # a sum takes no more
            added.clear()
        added.add(packet)

    return {"sum": lambda: cpu.packed_int_add(words, total), "collect": collect}


def _time_peers(spec: str, chain: Chain, x: Tensor, watch: Stopwatch, settings: Settings) -> list[PeerResult]:
    """What one would use instead of a codec."""
    return [
        _time_peer(peer, spec, x, watch, settings, _small_peer(peer.name, chain, settings))
        for peer in peers.peers_of(chain, settings.numel)
    ]


def _time_coders(
    spec: str, chain: Chain, data: str, x: Tensor, watch: Stopwatch, settings: Settings
) -> list[PeerResult]:
    """Stock coders on the symbols that this codec's coder gets."""
    symbols = coders.symbols(chain, x, settings.seed)
    found = []
    for peer in coders.coder_peers(symbols.dtype, symbols.numel()):
        result = _time_peer(peer, spec, symbols, watch, settings)
        rate = Rate(result.numel, coders.entropy(symbols[: result.numel]), result.nbytes)
        found.append(replace(result, data=data, rate=rate))
    return found


def _time_peer(
    peer: Peer,
    of: str | None,
    x: Tensor,
    watch: Stopwatch,
    settings: Settings,
    small: tuple[float | None, float | None] = (None, None),
) -> PeerResult:
    part = x[: peer.numel].to(peer.dtype or x.dtype)
    message = peer.encode(part)
    error = None
    operations: dict[str, Callable[[], object]] = {"encode": lambda: peer.encode(part)}
    if peer.decode is not None:
        unpeel = peer.decode
        error = checks.relative_error(part, unpeel(message))
        if not error <= peer.max_error:
            raise WrongResultError(
                f"{peer.name} beside {of}: relative squared error {error:g}, expected at most {peer.max_error:g}"
            )
        operations["decode"] = lambda: unpeel(message)
    # Peers are slow and steady: a third of the rounds tells enough.
    timings = watch.measure(operations, max(1, settings.repeat // 3), share=part.numel() / x.numel())
    return PeerResult(peer.name, of, part.numel(), peers.message_nbytes(message), error, peer.note, timings, *small)


def _small_peer(name: str, chain: Chain, settings: Settings) -> tuple[float | None, float | None]:
    """µs each way of the peer of that name for 1,000 values."""
    x = gradient_like(SMALL_NUMEL, settings.seed)
    peer = next(peer for peer in peers.peers_of(chain, SMALL_NUMEL) if peer.name == name)
    message, unpeel = peer.encode(x), peer.decode
    return (
        1e6 * per_call(lambda: peer.encode(x)),
        None if unpeel is None else 1e6 * per_call(lambda: unpeel(message)),
    )
