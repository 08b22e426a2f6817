"""Times codecs and their alternatives: end to end, kernel alone, accumulation, and small tensors.

Codecs with an entropy coder are timed on several kinds of data, with one and two threads, beside stock coders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from laconic.aggregate.homomorphic import Sum, Summing
from laconic.codecs import Chain, codec
from laconic.codecs.packed_ints import PackedIntStage
from laconic.errors import WrongResultError
from laconic.frames import decode, encode, encode_into, max_nbytes, open_packet
from laconic.kernels import cpu
from laconic.packet import TensorSpec
from laconic_lab.bench import checks, coders, peers
from laconic_lab.bench.codec_results import (
    GAUSSIAN,
    SMALL_NUMEL,
    SPECS,
    CodecResult,
    PeerResult,
    Progress,
    Report,
    Settings,
)
from laconic_lab.bench.coders import Rate
from laconic_lab.bench.peers import Peer
from laconic_lab.bench.samples import SAMPLES, gradient_like
from laconic_lab.bench.timing import Stopwatch, Timing, per_call

__all__ = ["KeptArena", "gradient_like", "run"]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    specs: Sequence[str] = SPECS, settings: Settings | None = None, *, with_peers: bool = True,
    progress: Progress | None = None,
) -> Report:  # fmt: skip
    """Check and time codecs, then the alternatives to each.

    Args:
        specs: Codecs without channel stages (``ef`` costs one addition more than its codec).
        with_peers: Whether to time the alternatives, which take most of the time.
    """
    settings = settings or Settings()
    chains = {spec: codec(spec) for spec in specs}  # an invalid spec raises before any work
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
    """An arena in preallocated memory, so that only the kernel is timed."""

    def __init__(self, chain: Chain, spec: TensorSpec, device: torch.device | None = None) -> None:
        size = sum(nbytes + 16 for nbytes in chain.max_section_nbytes(spec))
        self.buffer = torch.zeros(size, dtype=torch.uint8, device=device)
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
    # Gaussian data, on which goals are judged, gets all rounds; other data shows the effect of skew.
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
    """Return the operations to time; end to end and kernel alternate, so that their difference is meaningful."""
    frame = buffer[:nbytes].clone()
    packet, _ = open_packet(frame)
    arena = KeptArena(chain, TensorSpec.of(x))
    out, total, blob = torch.empty_like(x), torch.zeros_like(x), encode(x, chain, seed=seed)

    def encode_kernel() -> None:
        arena.end = 0
        chain.encode(x, seed=seed, arena=arena)

    return _sums(chain, x) | {
        "encode": lambda: encode_into(x, chain, buffer, seed=seed), "encode_kernel": encode_kernel,
        "decode": lambda: decode(frame, out=out), "decode_kernel": lambda: chain.decode(packet, out=out),
        "accumulate": lambda: chain.accumulate(packet, total, 0.5), "encode_bytes": lambda: encode(x, chain, seed=seed),
        "decode_bytes": lambda: decode(blob),
    }  # fmt: skip


def _sums(chain: Chain, x: Tensor) -> dict[str, Callable[[], object]]:
    """Return the operations of a summable codec: adding packed words, and adding frames as a server does."""
    if not isinstance(chain.values, PackedIntStage) or chain.selector is not None:
        return {}
    ring = Summing(chain, 1, ring=True)
    words = ring.packet(x, ring.probe(x)).sections[-1]
    total, server = words.clone(), Summing(chain, 16)
    packet, added = server.packet(x, server.probe(x)), Sum()
    added.add(packet)

    def collect() -> None:
        if added.count == 16:  # a sum accepts no more summands
            added.clear()
        added.add(packet)

    return {"sum": lambda: cpu.packed_int_add(words, total), "collect": collect}


def _time_peers(spec: str, chain: Chain, x: Tensor, watch: Stopwatch, settings: Settings) -> list[PeerResult]:
    """Time the alternatives to a codec."""
    return [
        _time_peer(peer, spec, x, watch, settings, _small_peer(peer.name, chain, settings))
        for peer in peers.peers_of(chain, settings.numel)
    ]


def _time_coders(
    spec: str, chain: Chain, data: str, x: Tensor, watch: Stopwatch, settings: Settings
) -> list[PeerResult]:
    """Time stock coders on the symbols of this codec."""
    symbols = coders.symbols(chain, x, settings.seed)
    results = []
    for peer in coders.coder_peers(symbols.dtype, symbols.numel()):
        result = _time_peer(peer, spec, symbols, watch, settings)
        rate = Rate(result.numel, coders.entropy(symbols[: result.numel]), result.nbytes)
        results.append(replace(result, data=data, rate=rate))
    return results


def _time_peer(
    peer: Peer, of: str | None, x: Tensor, watch: Stopwatch, settings: Settings,
    small: tuple[float | None, float | None] = (None, None),
) -> PeerResult:  # fmt: skip
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
    # Alternatives are slow and steady: a third of the rounds suffices.
    timings = watch.measure(operations, max(1, settings.repeat // 3), share=part.numel() / x.numel())
    return PeerResult(peer.name, of, part.numel(), peers.message_nbytes(message), error, peer.note, timings, *small)


def _small_peer(name: str, chain: Chain, settings: Settings) -> tuple[float | None, float | None]:
    """Return the µs of encode and decode of an alternative for 1,000 values."""
    x = gradient_like(SMALL_NUMEL, settings.seed)
    peer = next(peer for peer in peers.peers_of(chain, SMALL_NUMEL) if peer.name == name)
    message, unpeel = peer.encode(x), peer.decode
    return (
        1e6 * per_call(lambda: peer.encode(x)),
        None if unpeel is None else 1e6 * per_call(lambda: unpeel(message)),
    )
