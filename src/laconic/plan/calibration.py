"""What this machine does: codecs at several sizes, a model's step and its own gradients, and how processes share cores.

Each figure is the median of several turns after one that does not count: of the processor's time where there is one
thread, so that others on the machine do not count. On a device the device's time is taken, and frames are made for the
wire: what is encoded there is copied to the host.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from laconic import wire
from laconic.aggregate.homomorphic import Contributor, Sum, summing
from laconic.aggregate.homomorphic.families import family_of
from laconic.channels import Channel
from laconic.codecs import parse
from laconic.errors import ConfigError, LaconicError, NonFiniteError
from laconic.frames import open_packet
from laconic.optim import SGD
from laconic.packet import Packet, TensorSpec
from laconic.plan.profile import ModelTimes, Point
from laconic.policy import Policy

__all__ = [
    "GZIP",
    "SIZES",
    "STOCK",
    "codec_points",
    "crowd_factors",
    "gradient_like",
    "model_times",
    "sum_sizes",
    "summable",
    "together",
    "turns",
]

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
GZIP = "gzip"
"""No codec of laconic: raw values through zlib at every exchange, as jang2017 had it."""
STOCK = (
    "none", "fp16", "bf16", "qsgd:8", "qsgd:4", "qsgd:2", "sign", "topk:0.01|qsgd:4", "topk:0.001|qsgd:4",
    "adaptive:5.0|huffman", "adaptive:5.0|rans", "shared:8", "thc:4", GZIP,
)  # fmt: skip
"""What ``laconic plan`` compares when no codec is named."""

ROW = 512
SLOW_S = 0.2

log = logging.getLogger("laconic")

Clock = Callable[[], float]
Tell = Callable[[str], None]


def gradient_like(numel: int, seed: int = 0) -> Tensor:
    """Values as gradients have them: rows that differ in scale."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(-(-numel // ROW), 1, generator=generator).mul_(0.5).exp_().mul_(1e-3)
    return torch.randn(len(scales), ROW, generator=generator).mul_(scales).view(-1)[:numel].clone()


def summable(spec: str) -> bool:
    """Whether packets of a codec are added while compressed."""
    return not _gzip(spec) and family_of(parse(spec)[1]) is not None


def _gzip(spec: str) -> bool:
    return spec == GZIP


def clock_of(device: torch.device) -> Clock:
    """With one thread the processor's time, which others on the machine do not add to; else the wall clock."""
    if device.type != "cuda":
        return time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


def timed(operation: Callable[[], object], now: Clock, *, turns: int = 5, budget_s: float = 1.0) -> float:
    """Seconds of one call: the median of a few, fewer when they take long; short ones are timed many at a time."""
    operation()
    begin = now()
    operation()
    once = now() - begin
    calls = max(1, min(200, int(0.002 / max(once, 1e-7))))
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < turns and (len(found) < 2 or time.perf_counter() - began < budget_s):
        begin = now()
        for _ in range(calls):
            operation()
        found.append((now() - begin) / calls)
    return statistics.median(found)


class Encoding:
    """One codec, as a worker and a server use it, on one tensor.

    Args:
        spec: A codec, with or without memory.
        x: What is encoded.
        workers: Of a codec whose packets are added: its sum has room for as many.
        seed: Of what is random.
    """

    def __init__(self, spec: str, x: Tensor, workers: int = 16, seed: int = 0) -> None:
        self.out, self._workers, self._added = torch.zeros_like(x), workers, 0
        self._encode: Callable[[], bytes | bytearray]
        self._total: Sum | None = None
        if summable(spec):
            one = summing(parse(spec)[1].text, workers=workers)
            agreed = one.probe(x, seed=seed)

            def encode_for_sum() -> bytearray:  # as a worker does it: it looks for the next scales, and takes the last
                one.probe(x, seed=seed)
                made = one.packet(x, agreed, seed=seed)
                return wire.pack(Packet(made.codec, made.spec, tuple(section.cpu() for section in made.sections)))

            if parse(spec)[0]:  # with error feedback, which takes another pass or two
                contributor = Contributor(spec, workers=workers, worker=0)

                def encode_for_sum() -> bytearray:
                    contributor.probe("x", x, seed=seed)
                    return bytearray(contributor.encode("x", agreed, seed=seed))

            self._encode, self._total = encode_for_sum, Sum()
        else:
            channel = Channel(spec, policy=Policy(min_numel=0, exempt_1d=False))
            self._encode = lambda: channel.encode("x", x, seed=seed)
        self.frame = bytes(self._encode())

    def encode(self) -> object:
        return self._encode()

    def decode(self) -> None:
        packet, chain = open_packet(self.frame)
        chain.decode(packet.to(self.out.device), out=self.out)

    def add(self) -> None:
        if self._total is not None:
            if self._added == self._workers:
                self._total, self._added = Sum(), 0
            self._total.add(self.frame)
            self._added += 1
            return
        packet, chain = open_packet(self.frame)
        chain.accumulate(packet.to(self.out.device), self.out, 0.5)


def codec_points(
    specs: Iterable[str],
    *,
    sizes: Sequence[int] = SIZES,
    device: str = "cpu",
    budget_s: float = 0.5,
    tell: Tell = print,
) -> dict[str, list[Point]]:
    """Each codec at each size."""
    where = torch.device(device)
    now = clock_of(where)
    found: dict[str, list[Point]] = {}
    samples = {numel: gradient_like(numel).to(where) for numel in sizes}
    for spec in specs:
        tell(spec)
        points: list[Point] = []
        try:
            for numel in sizes:
                if points and points[-1].encode_s > SLOW_S:  # it goes by value: a larger tensor would tell nothing new
                    break
                points.append(codec_point(spec, samples[numel], now, budget_s))
        except (LaconicError, RuntimeError) as error:
            if where.type == "cpu":
                raise
            log.warning("%s is left out: on %s it ends with %s", spec, device, " ".join(str(error).split())[:200])
            continue
        found[spec] = points
    return found


def codec_point(spec: str, x: Tensor, now: Clock = time.perf_counter, budget_s: float = 0.5) -> Point:
    if _gzip(spec):
        return _gzip_point(x, now)
    one = Encoding(spec, x)
    budget = budget_s / 3
    return Point(
        x.numel(),
        len(one.frame),
        timed(one.encode, now, budget_s=budget),
        timed(one.decode, now, budget_s=budget),
        timed(one.add, now, budget_s=budget),
    )


def _gzip_point(x: Tensor, now: Clock, level: int = 6) -> Point:
    """Raw values through zlib, as the paper did it: of at most 2^18 of them, since it goes by value."""
    import zlib

    raw = bytes(x[: 1 << 18].cpu().numpy())
    share = x.numel() * 4 / len(raw)
    small = zlib.compress(raw, level)
    encode = timed(lambda: zlib.compress(raw, level), now, turns=2, budget_s=0.1)
    decode = timed(lambda: zlib.decompress(small), now, turns=2, budget_s=0.1)
    return Point(x.numel(), len(small) * share, encode * share, decode * share, decode * share)


@lru_cache(maxsize=512)
def sum_sizes(spec: str, numel: int, workers: int, *, ring: bool = False) -> tuple[float, float]:
    """Bytes of a message of a summable codec, and of the sum of all workers', for so many values."""
    sample = gradient_like(min(numel, 1 << 16))
    codec = parse(spec)[1].text
    one = summing(codec, workers=workers, ring=ring)
    agreed = one.probe(sample)
    frame = one.encode(sample, agreed)
    share = numel / sample.numel()
    probes = 4 * agreed.numel() if one.by == "max" else 0
    if ring or workers == 1:
        return (len(frame) + probes) * share, (len(frame) + probes) * share
    total = Sum()
    for _ in range(min(workers, 64)):  # its width goes by the number of workers, not by what they send
        total.add(frame)
    nbytes = len(total.finish())
    return (len(frame) + probes) * share, (nbytes + probes) * share


# ---------------------------------------------------------------------------------------------------------- a model


def model_times(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    specs: Iterable[str] = (),
    *,
    device: str = "cpu",
    turns: int = 5,
    warm_up: int = 2,
    tell: Tell = lambda what: None,
) -> ModelTimes:
    """A step of a model (forward and backward), when its gradients are ready, and what codecs make of them."""
    where = torch.device(device)
    model, now = model.to(where), clock_of(where)
    inputs, targets = (x.to(where) for x in batch)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    came: list[tuple[str, float]] = []

    def ready(name: str) -> Callable[[Tensor], None]:
        return lambda _: came.append((name, now()))

    def step() -> float:
        model.zero_grad(set_to_none=True)
        begin = now()
        loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        return now() - begin

    tell("step")
    for _ in range(warm_up):
        step()
    seconds = statistics.median(step() for _ in range(turns))
    hooks = [p.register_post_accumulate_grad_hook(ready(name)) for name, p in parameters.items()]  # type: ignore[no-untyped-call]
    came.clear()
    begin = now()
    whole = step()
    for hook in hooks:
        hook.remove()
    order = [(name, (at - begin) / whole) for name, at in came if name in parameters]
    numels = [parameters[name].numel() for name, _ in order]
    total, done, curve = sum(numels), 0, []
    for (_, at), numel in zip(order, numels, strict=True):
        done += numel
        curve.append((round(min(1.0, at), 4), done / total))
    gradients = {name: _gradient(parameters[name]) for name, _ in order}
    messages = {}
    for spec in specs:
        if _gzip(spec):
            continue
        tell(spec)
        messages[spec] = message_times(spec, gradients, now)
    sgd, weights = SGD(momentum=0.9), {name: p.detach().clone() for name, p in parameters.items()}
    apply_s = timed(lambda: sgd.step(weights, gradients, lr=1e-9), now)
    dims = tuple(len(parameters[name].shape) for name, _ in order)
    return ModelTimes(tuple(numels), len(inputs), seconds, _rising(curve), messages, dims, apply_s)


def _gradient(parameter: Tensor) -> Tensor:
    found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
    if not bool(torch.isfinite(found).all()):
        raise NonFiniteError("the model's gradient is not finite: nothing can be measured with it")
    return found


def _rising(curve: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    found, latest = [], 0.0
    for at, share in curve:
        latest = max(latest, at)
        found.append((latest, share))
    if found:
        found[-1] = (found[-1][0], 1.0)
    return tuple(found)


def message_times(spec: str, gradients: Mapping[str, Tensor], now: Clock) -> dict[str, float]:
    """All slots of a model through a codec; those that the policy exempts go uncompressed."""
    policy, small = Policy(), "shared:16" if summable(spec) else "none"
    made = []
    for name, x in gradients.items():
        chosen = spec if not policy.choose(name, TensorSpec.of(x), spec).reason else small
        made.append(Encoding(chosen, x))

    def encode() -> None:
        for one in made:
            one.encode()

    def decode() -> None:
        for one in made:
            one.decode()

    def add() -> None:
        for one in made:
            one.add()

    return {
        "push": float(sum(len(one.frame) for one in made)),
        "encode_s": timed(encode, now),
        "decode_s": timed(decode, now),
        "add_s": timed(add, now),
    }


# ------------------------------------------------------------------------------------------------- processes together

_SPIN = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
a = torch.randn(384, 384); x = torch.randn(1 << 20); y = torch.empty_like(x)
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
end, turns, began = time.perf_counter() + float(sys.argv[2]), 0, time.process_time()
while time.perf_counter() < end:
    a @ a; torch.mul(x, 1.0001, out=y); turns += 1
print((time.process_time() - began) / turns)
"""


def crowd_factors(counts: Sequence[int], *, threads: int = 1, seconds: float = 1.0) -> dict[int, float]:
    """How many times as long the same work takes while n processes do it at once, over one alone.

    What they take from each other in caches and memory is measured, by the processors' time; where there are more of
    them than cores, they take turns.
    """
    argv = ["-c", _SPIN, str(threads), str(seconds)]
    alone = statistics.fmean(together(1, argv, threads=threads))
    return {
        n: max(1.0, statistics.fmean(together(n, argv, threads=threads)) / alone) * turns(n, threads)
        for n in counts
        if n > 1
    }


def turns(processes: int, threads: int = 1) -> float:
    """How many processes there are for each core, at least one."""
    return max(1.0, processes * threads / (os.cpu_count() or 1))


def together(count: int, argv: Sequence[str], *, threads: int = 1) -> list[float]:
    """Run so many Python processes at once; the number that each prints.

    Each prints a line when it is ready, waits for a line, and then does what is to be measured.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    processes = [
        subprocess.Popen(
            [sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(count)
    ]
    try:
        for one in processes:
            assert one.stdout is not None
            if one.stdout.readline().strip() != "ready":
                raise LaconicError("a process that should compute did not start; what it said is above")
        for one in processes:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        found = []
        for one in processes:
            assert one.stdout is not None
            found.append(float(one.stdout.readline() or 0))
    finally:
        for one in processes:
            one.kill()
            one.communicate()
    if not all(found):
        raise LaconicError("a process that should compute ended early; what it said is above")
    return found


def check_device(device: str) -> torch.device:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here: take --device cpu")
    return torch.device(device)
