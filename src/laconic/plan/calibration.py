"""Measure codecs at several sizes, a model's step, and codecs on the model's gradients.

Each figure is the median of several turns after a warm-up. With one thread the clock is the processor time of this
process, so that other processes do not count. On a GPU the clock is synchronised with the device, and encoding includes
the copy of the frame to the host.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

__all__ = ["GZIP", "SIZES", "STOCK", "codec_points", "gradient_like", "model_times", "sum_sizes", "summable"]

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
GZIP = "gzip"
"""Not a codec of laconic: zlib over the raw values at every exchange, as in jang2017."""
STOCK = (
    "none", "fp16", "bf16", "qsgd:8", "qsgd:4", "sign", "topk:0.01|qsgd:4", "adaptive:5.0|huffman", "shared:8", "thc:4",
    "ef|qsgd:4", "ef|thc:4", "ef|thc:2", "ef|sign", "ef|topk:0.05|qsgd:4", "ef|topk:0.06|sign", "ef|topk:0.1|sign",
    GZIP,
)  # fmt: skip
"""The codecs that ``laconic calibrate`` measures and ``laconic plan`` compares by default."""

ROW = 512
SLOW_S = 0.2
SUM_SAMPLE = 1 << 16
"""Values from which sizes of sums are measured; larger messages are as many times larger."""

log = logging.getLogger("laconic")

Clock = Callable[[], float]
Notify = Callable[[str], None]


def gradient_like(numel: int, seed: int = 0) -> Tensor:
    """Return values with the statistics of gradients: rows of different scale."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(-(-numel // ROW), 1, generator=generator).mul_(0.5).exp_().mul_(1e-3)
    return torch.randn(len(scales), ROW, generator=generator).mul_(scales).view(-1)[:numel].clone()


def summable(spec: str) -> bool:
    """Return whether packets of a codec can be added without decoding."""
    return spec != GZIP and family_of(parse(spec)[1]) is not None


def without_feedback(spec: str) -> str:
    """Return a spec without its error feedback, whose time does not depend on how residuals fade.

    >>> without_feedback("ef:0.9|sign"), without_feedback("ef|topk:0.1|sign"), without_feedback("sign")
    ('sign', 'topk:0.1|sign', 'sign')
    """
    first, _, rest = spec.partition("|")
    return rest if first.partition(":")[0] == "ef" else spec


def check_specs(specs: Iterable[str]) -> None:
    """Raise ``ConfigError`` for a spec that is neither a codec nor ``gzip``."""
    for spec in specs:
        if spec != GZIP:
            parse(spec)


def clock_of(device: torch.device) -> Clock:
    """Return the processor time of this process if it has one thread, else the wall clock; synchronised on a GPU."""
    if device.type != "cuda":
        return time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


def timed(operation: Callable[[], object], now: Clock, *, turns: int = 5, budget_s: float = 1.0) -> float:
    """Return the seconds of one call: the median of up to ``turns`` turns, each of many calls if they are short."""
    operation()
    begin = now()
    operation()
    once = now() - begin
    calls = max(1, min(200, int(0.002 / max(once, 1e-7))))
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < turns and (len(times) < 2 or time.perf_counter() - began < budget_s):
        begin = now()
        for _ in range(calls):
            operation()
        times.append((now() - begin) / calls)
    return statistics.median(times)


class Encoding:
    """Encodes, decodes and adds one tensor with one codec, as workers and servers do.

    Args:
        spec: The codec, with or without error feedback.
        workers: For a summable codec, the number of workers that its sum must hold.
    """

    def __init__(self, spec: str, x: Tensor, workers: int = 16, seed: int = 0) -> None:
        self.out, self._workers, self._added = torch.zeros_like(x), workers, 0
        self._encode: Callable[[], bytes | bytearray]
        self._total: Sum | None = None
        if summable(spec):
            summed = summing(parse(spec)[1].text, workers=workers)
            agreed = summed.probe(x, seed=seed)

            def encode_for_sum() -> (
                bytearray
            ):  # like a worker, which probes for the next round and encodes for this one
                summed.probe(x, seed=seed)
                packet = summed.packet(x, agreed, seed=seed)
                return wire.pack(Packet(packet.codec, packet.spec, tuple(one.cpu() for one in packet.sections)))

            if parse(spec)[0]:  # error feedback takes another pass or two
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
    specs: Iterable[str], *, sizes: Sequence[int] = SIZES, device: str = "cpu", budget_s: float = 0.5,
    notify: Notify = print,
) -> dict[str, list[Point]]:  # fmt: skip
    """Return the size and times of each codec at each number of values."""
    where = torch.device(device)
    now = clock_of(where)
    measured: dict[str, list[Point]] = {}
    samples = {numel: gradient_like(numel).to(where) for numel in sizes}
    for spec in specs:
        notify(spec)
        points: list[Point] = []
        with _left_out_on_failure(spec, where):
            for numel in sizes:
                if points and points[-1].encode_s > SLOW_S:  # its time is proportional to the values
                    break
                points.append(codec_point(spec, samples[numel], now, budget_s))
            measured[spec] = points
    return measured


@contextmanager
def _left_out_on_failure(spec: str, where: torch.device) -> Iterator[None]:
    """Log that a codec fails on a GPU, whose other codecs are worth measuring; on a CPU a failure is raised."""
    try:
        yield
    except (LaconicError, RuntimeError) as error:
        if where.type == "cpu":
            raise
        log.warning("%s is left out: on %s it fails with %s", spec, where.type, " ".join(str(error).split())[:200])


def codec_point(spec: str, x: Tensor, now: Clock = time.perf_counter, budget_s: float = 0.5) -> Point:
    if spec == GZIP:
        return _gzip_point(x, now)
    encoding = Encoding(spec, x)
    calls = (encoding.encode, encoding.decode, encoding.add)
    return Point(x.numel(), len(encoding.frame), *(timed(call, now, budget_s=budget_s / 3) for call in calls))


def _gzip_point(x: Tensor, now: Clock, level: int = 6) -> Point:
    """Return the times of zlib over raw values, measured on at most 2^18 of them: they are proportional to the size."""
    import zlib

    raw = bytes(x[: 1 << 18].cpu().numpy())
    share = x.numel() * 4 / len(raw)
    compressed = zlib.compress(raw, level)
    encode = timed(lambda: zlib.compress(raw, level), now, turns=2, budget_s=0.1)
    decode = timed(lambda: zlib.decompress(compressed), now, turns=2, budget_s=0.1)
    return Point(x.numel(), len(compressed) * share, encode * share, decode * share, decode * share)


def sum_sizes(spec: str, numel: int, workers: int, *, ring: bool = False) -> tuple[float, float]:
    """Return the bytes of one message of a summable codec and of the sum of all workers, for so many values."""
    sample = min(numel, SUM_SAMPLE)
    push, pull = _sample_sum_sizes(spec, sample, workers, ring)
    return push * numel / sample, pull * numel / sample


@lru_cache(maxsize=512)
def _sample_sum_sizes(spec: str, numel: int, workers: int, ring: bool) -> tuple[int, int]:
    sample = gradient_like(numel)
    summed = summing(parse(spec)[1].text, workers=workers, ring=ring)
    agreed = summed.probe(sample)
    frame = summed.encode(sample, agreed)
    probe_nbytes = 4 * agreed.numel() if summed.by == "max" else 0
    push = len(frame) + probe_nbytes
    if ring or workers == 1:
        return push, push
    total = Sum()
    for _ in range(workers):  # the sum gets wider with the number of summands
        total.add(frame)
    return push, len(total.finish()) + probe_nbytes


# --------------------------------------------------------------------------------------------------------------- models


def model_times(
    model: nn.Module, batch: tuple[Tensor, Tensor], loss: Callable[[Tensor, Tensor], Tensor], specs: Iterable[str] = (),
    *, device: str = "cpu", turns: int = 5, warm_up: int = 2, notify: Notify = lambda message: None,
) -> ModelTimes:  # fmt: skip
    """Measure a step (forward and backward), when its gradients are ready, and codecs on these gradients."""
    where = torch.device(device)
    model, now = model.to(where), clock_of(where)
    inputs, targets = (x.to(where) for x in batch)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    arrivals: list[tuple[str, float]] = []

    def record_arrival(name: str) -> Callable[[Tensor], None]:
        return lambda _: arrivals.append((name, now()))

    def step() -> float:
        model.zero_grad(set_to_none=True)
        begin = now()
        loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        return now() - begin

    notify("step")
    for _ in range(warm_up):
        step()
    seconds = statistics.median(step() for _ in range(turns))
    hooks = [
        p.register_post_accumulate_grad_hook(record_arrival(name))  # type: ignore[no-untyped-call]
        for name, p in parameters.items()
    ]
    begin = now()
    whole = step()
    for hook in hooks:
        hook.remove()
    names = [name for name, _ in arrivals]
    numels = [parameters[name].numel() for name in names]
    gradients = {name: _gradient(parameters[name]) for name in names}
    messages = {}
    for spec in specs:
        if spec != GZIP:
            notify(spec)
            with _left_out_on_failure(spec, where):
                messages[spec] = message_times(spec, gradients, now)
    sgd, weights = SGD(momentum=0.9), {name: p.detach().clone() for name, p in parameters.items()}
    apply_s = timed(lambda: sgd.step(weights, gradients, lr=1e-9), now)
    ready = _ready([(time - begin) / whole for _, time in arrivals], numels)
    dims = tuple(parameters[name].dim() for name in names)
    return ModelTimes(tuple(numels), len(inputs), seconds, ready, messages, dims, apply_s)


def _gradient(parameter: Tensor) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
    if not bool(torch.isfinite(gradient).all()):
        raise NonFiniteError("the model's gradient is not finite: codecs cannot be measured on it")
    return gradient


def _ready(times: Sequence[float], numels: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """Return the share of the gradient that is ready at each time; both rise, up to a share of 1."""
    total, done, latest, curve = sum(numels), 0, 0.0, []
    for time_share, numel in zip(times, numels, strict=True):
        latest, done = max(latest, round(min(1.0, time_share), 4)), done + numel
        curve.append((latest, done / total))
    return tuple(curve)


def message_times(spec: str, gradients: Mapping[str, Tensor], now: Clock) -> dict[str, float]:
    """Measure a codec on all slots of a model; slots that the policy exempts are sent uncompressed."""
    policy, small = Policy(), "shared:16" if summable(spec) else "none"
    encodings = [
        Encoding(small if policy.choose(name, TensorSpec.of(x), spec).reason else spec, x)
        for name, x in gradients.items()
    ]

    def all_slots(call: Callable[[Encoding], object]) -> float:
        return timed(lambda: [call(encoding) for encoding in encodings], now)

    return {
        "push": float(sum(len(encoding.frame) for encoding in encodings)),
        "encode_s": all_slots(Encoding.encode),
        "decode_s": all_slots(Encoding.decode),
        "add_s": all_slots(Encoding.add),
    }


def check_device(device: str) -> torch.device:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device must be cpu: there is no CUDA device")
    return torch.device(device)
