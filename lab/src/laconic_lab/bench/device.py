"""Times codecs on a GPU relative to a device copy, beside plain torch and casts to 16 bits.

Each operation is between two copies, timed by CUDA events. *encode* and *decode* include the one host
synchronisation each of them needs (non-finite or all-zero values; frame validity). *launch* is the same work without
it, as in a CUDA graph.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import Chain, codec
from laconic.codecs.packed_ints import PackedIntStage
from laconic.codecs.qsgd import QSGD
from laconic.codecs.sign import OneBit, Sign
from laconic.codecs.terngrad import TernGrad
from laconic.codecs.topk import TopK
from laconic.errors import ConfigError, WrongResultError
from laconic.frames import decode, encode
from laconic.kernels.interface import IntRounding, PackedIntSum
from laconic.kernels.sections import SUM_BLOCK, PackedIntCoding, num_buckets, packed_int_count, packed_ints_nbytes
from laconic.packet import Packet, TensorSpec
from laconic.records import Record
from laconic_lab.bench import peers
from laconic_lab.bench.checks import PARITY_NUMEL, relative_error
from laconic_lab.bench.codec_results import Progress
from laconic_lab.bench.codecs import KeptArena
from laconic_lab.bench.timing import MIN_ROUNDS, Timing, quartiles

__all__ = ["FLOORS", "SPECS", "DeviceResult", "DeviceSettings", "run_device"]

SPECS = (
    "qsgd:4", "qsgd:8", "qsgd:2", "sign", "onebit", "terngrad", "uniform:8", "shared:8", "thc:4", "thc:2",
    "topk:0.01", "topk:0.001", "topk:0.01|qsgd:4", "randk:0.01", "fp16", "bf16",
    "adaptive:5.0", "adaptive:5.0|huffman", "adaptive:5.0|rans",
)  # fmt: skip

FLOORS: dict[tuple[str, str], float] = {
    ("qsgd:4", "encode"): 1.6, ("qsgd:4", "decode"): 1.5, ("qsgd:4", "accumulate"): 0.88, ("qsgd:4", "feedback"): 0.6,
    ("qsgd:8", "encode"): 1.4, ("qsgd:8", "decode"): 1.3, ("sign", "encode"): 1.8, ("sign", "decode"): 1.7,
    ("shared:8", "sum"): 2.5, ("thc:4", "encode"): 0.7, ("thc:4", "decode"): 0.7, ("topk:0.01", "encode"): 0.5,
    ("topk:0.01", "decode"): 1.0, ("topk:0.01", "carried"): 1.2, ("adaptive:5.0|huffman", "encode"): 0.2,
    ("adaptive:5.0|huffman", "decode"): 0.3, ("adaptive:5.0|rans", "encode"): 0.2, ("adaptive:5.0|rans", "decode"): 0.3,
}  # fmt: skip
"""Goals on an H200 with 2^28 values in multiples of the copy's speed, judged by *launch* where it exists."""

SMALL_NUMEL = 1 << 20
"""4 MB: launches dominate."""

Operation = Callable[[], object]


@dataclass(frozen=True)
class DeviceSettings:
    """Settings of a GPU benchmark.

    Args:
        device: ``cuda`` or ``cuda:1``.
        seed: Seed of the data and of the codecs.
    """

    device: str = "cuda"
    numel: int = 1 << 28
    repeat: int = 21
    seed: int = 0

    def command(self, specs: Sequence[str]) -> str:
        words = ["laconic", "bench", *(() if tuple(specs) == SPECS else specs), "--device", self.device]
        for name in ("numel", "repeat", "seed"):
            if getattr(self, name) != getattr(DeviceSettings, name):
                words += [f"--{name}", str(getattr(self, name))]
        return shlex.join(words)


class DeviceWatch:
    """Times operations in turns with a copy of ``payload`` between any two, by CUDA events."""

    def __init__(self, payload: Tensor) -> None:
        self.source, self.target = payload, torch.empty_like(payload)
        self.on_device = payload.is_cuda
        self.copies: list[float] = []

    def _mark(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) * 1e-3 if self.on_device else end - begin

    def wait(self) -> None:
        if self.on_device:
            torch.cuda.synchronize(self.source.device)

    def measure(self, operations: Mapping[str, Operation], repeat: int) -> dict[str, Timing]:
        """Run each operation ``repeat`` times (at least three) after three warm-up runs."""
        for operation in operations.values():
            for _ in range(3 if self.on_device else 1):
                operation()
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in operations}
        for _ in range(max(repeat, MIN_ROUNDS)):
            self.wait()
            marks = [self._mark()]
            for operation in (self._copy, *(each for op in operations.values() for each in (op, self._copy))):
                operation()
                marks.append(self._mark())
            self.wait()
            spans = [self._between(*ends) for ends in pairwise(marks)]
            self.copies += spans[::2]
            for place, name in enumerate(operations):
                runs[name].append((spans[2 * place + 1], (spans[2 * place] + spans[2 * place + 2]) / 2))
        return {
            name: Timing(tuple(run for run, _ in timed), tuple(copy for _, copy in timed))
            for name, timed in runs.items()
        }

    def _copy(self) -> None:
        self.target.copy_(self.source)

    def per_call(self, operation: Operation, *, calls: int = 50, batches: int = 5) -> float:
        """Return the host seconds of one call of a short operation, launched repeatedly."""
        seconds = []
        for batch in range(batches + 1):
            self.wait()
            begin = time.perf_counter()
            for _ in range(calls):
                operation()
            self.wait()
            if batch:  # the first call compiles
                seconds.append((time.perf_counter() - begin) / calls)
        return quartiles(tuple(seconds))[1]


@dataclass(frozen=True)
class DeviceResult:
    """Measurements of one codec; ``plain`` is the same method in torch on the same device."""

    spec: str
    numel: int
    nbytes: int
    error: float
    timings: dict[str, Timing]
    plain: dict[str, Timing]
    small_us: dict[str, float]

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.numel

    def judged(self, way: str) -> Timing | None:
        """Return the timing that a goal is compared with."""
        return self.timings.get(f"{way}_launch") or self.timings.get(way)

    def floor(self, way: str) -> float | None:
        return FLOORS.get((self.spec, way))

    def speed_up(self, way: str) -> float | None:
        """Return the speed-up over plain torch."""
        ours, plain = self.judged(way), self.plain.get(way)
        return None if ours is None or plain is None else plain.median / ours.median

    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "spec": self.spec, "numel": self.numel, "nbytes": self.nbytes, "bits_per_value": self.bits,
            "relative_squared_error": self.error, "small_numel": SMALL_NUMEL,
        }  # fmt: skip
        for name, timing in self.timings.items():
            values |= timing.values(name)
            values[f"{name}_floor_x_copy"] = self.floor(name.removesuffix("_launch"))
        for name, timing in self.plain.items():
            values |= timing.values(f"plain_{name}")
            values[f"{name}_x_plain_torch"] = self.speed_up(name)
        values |= {f"small_{name}_us": value for name, value in self.small_us.items()}
        return {name.replace("x_memcpy", "x_copy"): value for name, value in values.items()}


def run_device(
    specs: Sequence[str] = SPECS, settings: DeviceSettings | None = None, *, progress: Progress | None = None
) -> tuple[list[DeviceResult], list[Record]]:
    """Check and time codecs on a device; return the results and their Records."""
    settings = settings or DeviceSettings()
    chains = {spec: codec(spec) for spec in specs}
    device = torch.device(settings.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {settings.device}: torch sees no CUDA device here")
    generator = torch.Generator(device).manual_seed(settings.seed)
    x = torch.randn(settings.numel, generator=generator, device=device) * 1e-3
    watch = DeviceWatch(x)
    shared = {"command": settings.command(specs), "device": settings.device, "numel": settings.numel,
              "repeat": settings.repeat}  # fmt: skip
    if progress is not None:
        progress("copies and casts", 0, 1 + len(chains))
    yardsticks = _yardsticks(x, watch, settings)
    results = []
    for done, (spec, chain) in enumerate(chains.items(), 1):
        if progress is not None:
            progress(spec, done, 1 + len(chains))
        results.append(_time_codec(spec, chain, x, watch, settings))
    copy = quartiles(tuple(watch.copies))
    machine: dict[str, Any] = {
        "copy_s": copy[1],
        "copy_payload_gb_per_s": 4 * settings.numel / copy[1] / 1e9,
        "copy_payload_quartiles_gb_per_s": [4 * settings.numel / copy[i] / 1e9 for i in (2, 0)],
        "launch_floor_us": 1e6 * watch.per_call(lambda: watch.target[:1].copy_(x[:1])),
    }
    for name, timing in yardsticks.items():
        machine |= {key.replace("x_memcpy", "x_copy"): value for key, value in timing.values(name).items()}
    records = [Record("bench.device", shared | machine, settings.seed)]
    records += [Record("bench.device.codec", shared | result.values(), settings.seed) for result in results]
    return results, records


def _yardsticks(x: Tensor, watch: DeviceWatch, settings: DeviceSettings) -> dict[str, Timing]:
    halves = {name: torch.empty_like(x, dtype=dtype) for name, dtype in
              (("fp16", torch.float16), ("bf16", torch.bfloat16))}  # fmt: skip
    operations: dict[str, Operation] = {}
    for name, half in halves.items():
        operations[f"cast_to_{name}"] = lambda half=half: half.copy_(x)  # type: ignore[misc]
        operations[f"cast_from_{name}"] = lambda half=half: watch.target.copy_(half)  # type: ignore[misc]
    return watch.measure(operations, settings.repeat)


def _check(chain: Chain, x: Tensor, seed: int) -> None:
    """Raise ``WrongResultError`` unless device and CPU give the same bytes and decode to the same bits."""
    part = x[:PARITY_NUMEL]
    frame = encode(part.cpu(), chain, seed=seed)
    if encode(part, chain, seed=seed) != frame:
        raise WrongResultError(f"{chain}: the device's bytes differ from the CPU's")
    there = chain.decode(chain.encode(part, seed=seed), out=torch.empty_like(part))
    if not torch.equal(there.cpu().view(torch.int32), decode(frame).view(torch.int32)):
        raise WrongResultError(f"{chain}: the device decodes other values than the CPU")


def _time_codec(spec: str, chain: Chain, x: Tensor, watch: DeviceWatch, settings: DeviceSettings) -> DeviceResult:
    seed = settings.seed
    _check(chain, x, seed)
    packet = chain.encode(x, seed=seed)
    out = torch.empty_like(x)
    error = _error(x, chain.decode(packet, out=out))
    operations = _operations(chain, x, packet, out, seed)
    timings = watch.measure(operations, settings.repeat)
    plain: dict[str, Timing] = {}
    with torch.device(x.device), peers.quiet():
        peer = next((each for each in peers.peers_of(chain, x.numel()) if each.name == peers.PLAIN), None)
        if peer is not None and not (
            isinstance(chain.values, PackedIntStage) and chain.values.rotation_seed is not None
        ):
            message, unpeel = peer.encode(x), peer.decode
            assert unpeel is not None
            plain = watch.measure(
                {"encode": lambda: peer.encode(x), "decode": lambda: unpeel(message)}, max(3, settings.repeat // 3)
            )
    small = x[:SMALL_NUMEL]
    small_operations = _operations(chain, small, chain.encode(small, seed=seed), out[: small.numel()], seed)
    small_us = {name: 1e6 * watch.per_call(operation) for name, operation in small_operations.items()}
    nbytes = sum(section.numel() for section in packet.sections)
    return DeviceResult(spec, x.numel(), nbytes, error, timings, plain, small_us)


def _error(x: Tensor, y: Tensor) -> float:
    """Compute the relative error in parts, because float64 copies of everything would take too much memory."""
    part = min(x.numel(), 1 << 24)
    return relative_error(x[:part], y[:part])


def _operations(chain: Chain, x: Tensor, packet: Packet, out: Tensor, seed: int) -> dict[str, Operation]:
    arena, total = KeptArena(chain, TensorSpec.of(x), x.device), torch.zeros_like(x)

    def encode_again() -> None:
        arena.end = 0
        chain.encode(x, seed=seed, arena=arena)

    operations: dict[str, Operation] = {
        "encode": encode_again,
        "decode": lambda: chain.decode(packet, out=out),
        "accumulate": lambda: chain.accumulate(packet, total, 0.5),
    }
    if chain.coder is None and chain.selector is None:
        operations |= _launches(chain, x, packet, out, total, seed)
    if isinstance(chain.selector, TopK) and not chain.selector.chunk and chain.values is None:
        operations["carried"] = _carried(x, packet, chain)
    return operations


def _launches(chain: Chain, x: Tensor, packet: Packet, out: Tensor, total: Tensor, seed: int) -> dict[str, Operation]:
    """Return the fixed-size kernels as operations, with error feedback and sums."""
    from laconic.kernels.triton import packed_int_sums, packed_ints, qsgd, sign, ternary

    stage, sections = chain.values, tuple(section.clone() for section in packet.sections)
    residual = torch.zeros_like(x)
    if isinstance(stage, QSGD):
        norms, packed = sections
        how: dict[str, Any] = {"bits": stage.bits, "bucket": stage.bucket}
        arguments: dict[str, Any] = {"coding": stage.coding, "seed": seed, "norms": norms, "packed": packed}
        return {
            "encode_launch": lambda: qsgd.qsgd_encode(x, **arguments),
            "feedback": lambda: qsgd.qsgd_feedback(x, residual, **arguments),
            "decode_launch": lambda: qsgd.qsgd_decode(*packet.sections, **how, out=out, weight=None),
            "accumulate_launch": lambda: qsgd.qsgd_decode(*packet.sections, **how, out=total, weight=0.5),
        }
    if isinstance(stage, (Sign, OneBit, TernGrad)):
        first, packed = sections
        pair: dict[str, tuple[Callable[..., object], Callable[..., object], dict[str, Any]]] = {
            "sign": (sign.sign_encode, sign.sign_decode, {"scales": first}),
            "onebit": (sign.onebit_encode, sign.onebit_decode, {"means": first}),
            "terngrad": (ternary.ternary_encode, ternary.ternary_decode, {"norms": first, "seed": seed}),
        }
        write, read, named = pair[stage.name]
        bucket = stage.bucket
        return {
            "encode_launch": lambda: write(x, bucket=bucket, packed=packed, **named),
            "decode_launch": lambda: read(*packet.sections, bucket=bucket, out=out, weight=None),
            "accumulate_launch": lambda: read(*packet.sections, bucket=bucket, out=total, weight=0.5),
        }
    if isinstance(stage, PackedIntStage):
        _, clips, packed = sections
        head, rotation_seed = stage.header(1, ring=False), stage.rotation_seed
        factor, rounding_seed = stage.clip_factor(head.levels, 1), seed if stage.stochastic else None
        rounding = IntRounding(factor, rotation_seed, rounding_seed)
        sent = PackedIntSum(packet.sections[2], packet.sections[1], head.coding, head.total)
        words = PackedIntCoding(head.levels, max(8, head.width), False)
        nbytes = packed_ints_nbytes(packed_int_count(x.numel(), rotation_seed is not None), words)
        ring = torch.zeros(nbytes, dtype=torch.uint8, device=x.device)
        other = torch.ones_like(ring)
        scale = torch.empty(num_buckets(x.numel(), SUM_BLOCK), device=x.device)
        return {
            "encode_launch": lambda: packed_ints.packed_int_encode(
                x, head.coding, rounding, feedback=False, clips=clips, out=packed
            ),
            "decode_launch": lambda: packed_ints.packed_int_decode(
                sent, rotation_seed=rotation_seed, out=out, weight=None
            ),
            "scales": lambda: scale.copy_(packed_ints.block_scales(x, rotation_seed is not None)),
            "sum": lambda: packed_int_sums.packed_int_add(other, ring),
        }  # fmt: skip
    return {}


def _carried(x: Tensor, packet: Packet, chain: Chain) -> Operation:
    """Return the operation of top-k with the threshold of an earlier step: one pass."""
    from laconic.kernels.triton import selectors

    values = packet.sections[-1].clone().view(torch.float32)
    limit = int((values.view(torch.int32) & 0x7FFFFFFF).min())
    return lambda: selectors.above(x, limit)
