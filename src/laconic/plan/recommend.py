"""Compare codecs for a training, and recommend one or none.

``recommend(PlanRequest(...))`` is what ``laconic plan`` prints, ``examples/plan.py`` shows and the report embeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from laconic.errors import ConfigError
from laconic.plan import formulas
from laconic.plan.calibration import STOCK, check_specs, codec_points, sum_sizes, summable
from laconic.plan.costs import EVENLY, Message, Network, Step, Work, step
from laconic.plan.messages import SLOT_NUMEL, Workload, message_of
from laconic.plan.profile import Profile, Transport, load
from laconic.units import show_rate

__all__ = [
    "CompressedLayers", "MeasuredRun", "PlanRequest", "Recommendation", "Row", "fitted_rate", "recommend",
]  # fmt: skip

SLOWEST, FASTEST = 1e4, 1e15
"""Bits per second between which a rate is searched."""

STEP_PARTS = ("compute_s", "encode_s", "push_s", "aggregate_s", "pull_s", "decode_s", "fixed_s", "hidden_s")

Notify = Callable[[str], None]


def _ignore(message: str) -> None:
    pass


# ------------------------------------------------------------------------------------------------------------ request


@dataclass(frozen=True)
class CompressedLayers:
    """Layers trained in a compressed space: rho of their parameters remain, and a step takes h times the dense one."""

    rho: float
    h: float

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1 or not 0 < self.h < math.inf:
            raise ConfigError(f"rho must be in (0, 1] and h finite and above 0, got {self.rho} and {self.h}")

    def message(self, dense: Message) -> Message:
        """Return the message of the compressed layers: smaller, and faster to encode, add and decode."""
        encode_s, step_s = dense.at_server
        return replace(
            dense, push=self.rho * dense.push, pull=self.rho * dense.pull, encode_s=self.rho * dense.encode_s,
            decode_s=self.rho * dense.decode_s, add_s=self.rho * dense.add_s, memory=self.rho * dense.memory,
            server_encode_s=self.rho * encode_s, server_step_s=self.rho * step_s,
        )  # fmt: skip


@dataclass(frozen=True)
class MeasuredRun:
    """A run of ``laconic train`` whose times replace those of a profile's model."""

    slots: tuple[tuple[int, int], ...]
    workers: int
    every: int
    codec: str
    iterations: int
    compute_s: float
    total_s: float

    @property
    def step_s(self) -> float:
        """Seconds of computation of one iteration."""
        return self.compute_s / self.iterations

    @property
    def measured_step_s(self) -> float:
        """Seconds of one iteration, exchange included."""
        return self.total_s / self.iterations


@dataclass(frozen=True)
class PlanRequest:
    """A training for which codecs are compared.

    Args:
        profile: Times of codecs, models and transport on a machine.
        workload: The slots that are exchanged.
        step_s: Seconds of one worker's iteration, alone on its machine.
        rate: Bits per second of each host's link.
        topology: ``ps``, ``ring`` or ``twoshot``; see ``costs``.
        servers: Number of servers, for ps.
        round_trip_s: Seconds of a round trip between two hosts.
        codecs: Specs to compare; those of the profile by default. ``none`` and ``bf16`` are always compared.
        processes: Workers on each machine, which share its cores.
        memory: Bytes that a worker has; the profile's by default.
        layers: Layers compressed in addition, under every codec but ``none`` and ``bf16``.
    """

    profile: Profile
    workload: Workload
    step_s: float
    workers: int = 2
    rate: float = 1e9
    topology: str = "ps"
    servers: int = 1
    round_trip_s: float = 0.0
    every: int = 1
    codecs: Sequence[str] | None = None
    processes: int = 1
    memory: float | None = None
    layers: CompressedLayers | None = None

    def __post_init__(self) -> None:
        if not 0 < self.step_s < math.inf:
            raise ConfigError(f"the step time must be finite and above 0, got {self.step_s:g} s")
        if self.processes < 1:
            raise ConfigError(f"processes must be at least 1, got {self.processes}")

    @classmethod
    def for_model(cls, profile: Profile, name: str, step_s: float | None = None, **options: Any) -> PlanRequest:
        """Return a request for a model of the profile, with its own step time by default."""
        if name not in profile.models:
            known = ", ".join(profile.models) or "none"
            raise ConfigError(
                f"profile {profile.name} has no model {name!r} (it has {known}): give --params and --step-time, or "
                f"measure it by `laconic calibrate --model {name} -o FILE`"
            )
        model = profile.models[name]
        return cls(profile, Workload.of_model(model), model.step_s if step_s is None else step_s, **options)

    @classmethod
    def for_params(cls, profile: Profile, params: int, step_s: float, **options: Any) -> PlanRequest:
        """Return a request for a model of which only the number of parameters is known."""
        return cls(profile, Workload.of_params(params), step_s, **options)

    @classmethod
    def for_run(cls, profile: Profile, run: MeasuredRun, **options: Any) -> PlanRequest:
        """Return a request for the model, workers and step time of a run."""
        return cls(profile, Workload(run.slots), run.step_s, workers=run.workers, every=run.every, **options)

    @property
    def work(self) -> Work:
        """The computation of a worker, which shares its machine with ``processes`` - 1 others."""
        model, machine = self.workload.model, self.profile.machine
        spare_core = self.profile.device == "cuda" or machine.get("cores", 1) > self.processes
        seconds = self.step_s * self.profile.slowdown_of(self.processes)
        return Work(seconds, self.every, model.ready if model else EVENLY, spare_core)

    @property
    def network(self) -> Network:
        """The links, and what a parameter server adds to them."""
        options: dict[str, float] = {}
        if self.topology == "ps":
            transport = self.profile.transport or default_transport()
            options = {"byte_s": transport.byte_s, "exchange_s": transport.seconds(len(self.workload.slots))}
        return Network(
            self.workers, self.rate, self.topology, self.servers, round_trip_s=self.round_trip_s, **options
        )  # fmt: skip

    def values(self) -> dict[str, Any]:
        """Return the request as ``laconic plan --json`` repeats it."""
        return {
            "params": self.workload.numel, "step_s": self.step_s, "workers": self.workers,
            "bandwidth_bit_s": self.rate, "topology": self.topology, "servers": self.servers,
            "round_trip_s": self.round_trip_s, "every": self.every, "processes": self.processes,
            "profile": self.profile.name,
            "layers": None if self.layers is None else {"rho": self.layers.rho, "h": self.layers.h},
        }  # fmt: skip


@lru_cache(maxsize=1)
def default_transport() -> Transport:
    """Return the transport of the shipped profile ``cpu``, for profiles without one."""
    transport = load("cpu").transport
    assert transport is not None
    return transport


# ----------------------------------------------------------------------------------------------------- recommendation


@dataclass(frozen=True)
class Row:
    """One codec: its message, the time of a step, and what that is worth."""

    codec: str
    message: Message
    step: Step
    speedup_fp32: float
    speedup_bf16: float
    break_even: float | None
    """Bits per second below which the codec is faster than float32; None: nowhere; inf: everywhere."""
    memory: float
    fits: bool

    @property
    def pays(self) -> str:
        if self.break_even is None:
            return "nowhere"
        return "everywhere" if math.isinf(self.break_even) else "below break_even_bit_s"

    def values(self) -> dict[str, Any]:
        limited = self.break_even is not None and math.isfinite(self.break_even)
        return {
            "codec": self.codec, "push_nbytes": self.message.push, "pull_nbytes": self.message.pull,
            "bytes_per_iteration": (self.message.push + self.message.pull) / self.step.every,
            "step_s": self.step.total_s, **{name: getattr(self.step, name) / self.step.every for name in STEP_PARTS},
            "speedup_fp32": self.speedup_fp32, "speedup_bf16": self.speedup_bf16,
            "break_even_bit_s": self.break_even if limited else None, "pays": self.pays, "memory_nbytes": self.memory,
            "fits": self.fits, "note": self.step.note,
        }  # fmt: skip


@dataclass(frozen=True)
class Recommendation:
    """All codecs that were compared, and the one to use."""

    request: PlanRequest
    rows: Sequence[Row]
    codec: str
    reason: str

    @property
    def row(self) -> Row:
        """The row of the recommended codec."""
        return next(row for row in self.rows if row.codec == self.codec)

    def values(self) -> dict[str, Any]:
        """Return the recommendation as ``laconic plan --json`` prints it."""
        return {
            "rows": [row.values() for row in self.rows],
            "recommendation": {
                "codec": self.codec,
                "reason": self.reason,
                "speedup_fp32": self.row.speedup_fp32,
                "speedup_bf16": self.row.speedup_bf16,
            },
            "asked": self.request.values(),
        }


def recommend(request: PlanRequest, *, break_even: bool = True, notify: Notify = _ignore) -> Recommendation:
    """Compare codecs for a training, and recommend one.

    Args:
        break_even: Whether to search for the rates below which codecs pay.
        notify: Called with a line for everything that the profile lacks and that was replaced.
    """
    network, work = request.network, request.work
    if request.topology == "ps" and request.profile.transport is None:
        notify(
            f"profile {request.profile.name} has no transport: that of the shipped profile cpu is used. Measure it on "
            "this machine by `laconic calibrate`"
        )
    candidates = list(request.codecs) if request.codecs is not None else _stock(request, notify)
    specs = list(dict.fromkeys(["none", "bf16", *candidates]))
    check_specs(specs)
    profile = _complete(request.profile, specs, notify)
    slowdown = profile.slowdown_of(request.processes)
    messages = {spec: message_of(profile, request.workload, spec, network).slower(slowdown) for spec in specs}
    memory = request.memory if request.memory is not None else profile.memory

    def timed(spec: str, network: Network) -> tuple[Message, Step]:
        message = messages[spec]
        if request.layers is None or spec in ("none", "bf16"):
            return message, step(work, network, message)
        message = request.layers.message(message)
        return message, step(replace(work, step_s=work.step_s * request.layers.h), network, message)

    def pays(spec: str, rate: float) -> bool:
        at = replace(network, rate=rate, server_rate=None)
        return timed(spec, at)[1].total_s < timed("none", at)[1].total_s

    baseline = {spec: timed(spec, network)[1].total_s for spec in ("none", "bf16")}
    rows = []
    for spec in specs:
        message, taken = timed(spec, network)
        rho = request.layers.rho if request.layers is not None and spec not in ("none", "bf16") else 1.0
        needed = needed_memory(request.workload, message, rho)
        limit = None
        if break_even and spec != "none" and network.workers > 1:
            limit = _highest_rate(lambda rate, spec=spec: pays(spec, rate))  # type: ignore[misc]
        rows.append(
            Row(
                spec, message, taken, formulas.speed_up(baseline["none"], taken.total_s),
                formulas.speed_up(baseline["bf16"], taken.total_s), limit, needed, memory is None or needed <= memory,
            )
        )  # fmt: skip
    codec, reason = _chosen([row for row in rows if row.codec in ("none", *candidates)], network, memory)
    return Recommendation(request, rows, codec, reason)


def needed_memory(workload: Workload, message: Message, rho: float = 1.0) -> float:
    """Return the bytes of a worker: parameters, gradients and momentum in float32, and those of the message."""
    return 12.0 * workload.numel * rho + message.memory


def _chosen(rows: Sequence[Row], network: Network, memory: float | None) -> tuple[str, str]:
    """Return the codec to use and the reason. The first row is ``none``."""
    if network.workers == 1:
        return "none", "one worker has no one to exchange with"
    place = formulas.fastest([row.step.total_s for row in rows], [row.fits for row in rows])
    if place < 0:
        return "none", f"model, gradient and momentum alone do not fit into {_gigabytes(memory)}"
    plain, best = rows[0], rows[place]
    faster = [row for row in rows if not row.fits and row.step.total_s < best.step.total_s]
    besides = f"; {faster[0].codec} would be faster, but needs {_gigabytes(faster[0].memory)}" if faster else ""
    if best.codec == "none" or not formulas.worth_its_loss(plain.step.total_s, best.step.total_s):
        share = 1 - plain.step.compute_s / plain.step.exchange_s
        if best.codec == "none":
            why = f"no codec is faster at {show_rate(network.rate)}"
        else:
            why = f"{best.codec}, the fastest, gains {100 * (best.speedup_fp32 - 1):.1f} %, which is not worth its loss"
        return "none", f"{why}: exchanging float32 takes {100 * share:.0f} % of a step{besides}"
    return best.codec, (
        f"{best.speedup_fp32:.2f} times as fast as float32 and {best.speedup_bf16:.2f} times as fast as bfloat16: it "
        f"pushes {plain.message.push / best.message.push:.3g} times fewer bytes, and encoding and decoding take "
        f"{1e3 * (best.message.encode_s + best.message.decode_s):.3g} ms{besides}"
    )


def _gigabytes(nbytes: float | None) -> str:
    return "no memory" if nbytes is None else f"{nbytes / 1e9:.3g} GB"


def _highest_rate(holds: Callable[[float], bool]) -> float | None:
    """Return the rate up to which a condition holds: None for nowhere, inf for everywhere."""
    if not holds(SLOWEST):
        return None
    if holds(FASTEST):
        return math.inf
    low, high = math.log(SLOWEST), math.log(FASTEST)
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(math.exp(middle)) else (low, middle)
    return math.exp(low)


def fitted_rate(request: PlanRequest, codec: str, measured_step_s: float) -> float | None:
    """Return the rate at which the planner predicts a measured iteration; None if any rate is fast enough.

    Args:
        request: The training that was measured; its own rate does not matter.
        codec: The codec of the measured run.
        measured_step_s: Seconds of an iteration of that run.
    """

    def slower(rate: float) -> bool:
        rows = recommend(replace(request, rate=rate, codecs=[codec]), break_even=False).rows
        return next(row for row in rows if row.codec == codec).step.total_s > measured_step_s

    rate = _highest_rate(slower)
    return SLOWEST if rate is None else None if math.isinf(rate) else rate


# ------------------------------------------------------------------------------------------------- codecs of a profile


def _stock(request: PlanRequest, notify: Notify) -> list[str]:
    """Return the codecs of the profile, without sums that cannot hold so many workers."""
    specs = []
    for spec in request.profile.codecs or STOCK:
        try:
            if summable(spec):
                sum_sizes(spec, SLOT_NUMEL, request.workers, ring=request.topology == "ring")
            specs.append(spec)
        except ConfigError as error:
            notify(f"{spec} is left out: {error}")
    return specs


def _complete(profile: Profile, specs: Sequence[str], notify: Notify) -> Profile:
    """Return the profile with the codecs that it lacks, measured on this machine."""
    missing = [spec for spec in specs if spec not in profile.codecs]
    if not missing:
        return profile
    notify(f"profile {profile.name} does not have {', '.join(missing)}: measured now, on this machine's CPU")
    measured = codec_points(missing, sizes=(1 << 14, 1 << 20), notify=_ignore)
    return replace(profile, codecs={**profile.codecs, **measured})
