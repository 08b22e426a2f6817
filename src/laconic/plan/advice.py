"""Codecs side by side, and which of them to take, if any."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laconic.codecs import parse
from laconic.errors import ConfigError
from laconic.plan.calibration import GZIP, STOCK, codec_points, sum_sizes, summable
from laconic.plan.costs import Message, Network, Step, Work, step
from laconic.plan.profile import ModelTimes, Point, Profile
from laconic.policy import Policy
from laconic.units import show_rate

__all__ = ["FLOATS", "GAIN", "Advice", "Layers", "Load", "Row", "advise", "break_even", "message_of", "parse_memory"]

FLOATS = ("none", "fp16", "bf16")
"""What every engine adds up by itself."""

GAIN = 1.05
"""A codec is worth its loss when it is at least that many times as fast as sending float32 as it is."""

SLOT = 1 << 22
"""A model of which only the number of parameters is known is taken to consist of tensors of this size."""

SLOWEST, FASTEST = 1e4, 1e15
"""Bits per second between which a break-even is looked for."""


@dataclass(frozen=True)
class Load:
    """What is exchanged: slots by their values and dimensions, and the model that they are of, if it was measured."""

    slots: tuple[tuple[int, int], ...]
    model: ModelTimes | None = None

    @classmethod
    def of_params(cls, params: int) -> Load:
        if not isinstance(params, int) or isinstance(params, bool) or params < 1:
            raise ConfigError(f"a model has at least one parameter, got {params!r}")
        whole, rest = divmod(params, SLOT)
        return cls(((SLOT, 2),) * whole + (((rest, 2),) if rest else ()))

    @classmethod
    def of_model(cls, model: ModelTimes) -> Load:
        return cls(model.layout(), model)

    @property
    def numel(self) -> int:
        return sum(numel for numel, _ in self.slots)


@dataclass(frozen=True)
class Layers:
    """A model trained in a compressed space: rho of its numbers are left, and a step takes h of the dense one's."""

    rho: float
    h: float

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1 or not 0 < self.h < math.inf:
            raise ConfigError(f"rho must be in (0, 1] and h a finite number above 0, got {self.rho} and {self.h}")


@dataclass(frozen=True)
class Row:
    """One codec."""

    codec: str
    message: Message
    step: Step
    speedup_fp32: float
    speedup_bf16: float
    break_even: float | None
    """Bits per second below which it is faster than float32 as it is; None: nowhere; inf: everywhere."""
    memory: float
    fits: bool

    def values(self) -> dict[str, Any]:
        parts = {name: getattr(self.step, name) / self.step.every for name in PARTS}
        even = self.break_even
        return {
            "codec": self.codec,
            "push_nbytes": self.message.push,
            "pull_nbytes": self.message.pull,
            "bytes_per_iteration": (self.message.push + self.message.pull) / self.step.every,
            "step_s": self.step.total_s,
            **parts,
            "speedup_fp32": self.speedup_fp32,
            "speedup_bf16": self.speedup_bf16,
            "break_even_bit_s": None if even is None or math.isinf(even) else even,
            "pays": "nowhere" if even is None else "everywhere" if math.isinf(even) else "below break_even_bit_s",
            "memory_nbytes": self.memory,
            "fits": self.fits,
            "note": self.step.note,
        }


PARTS = ("compute_s", "encode_s", "push_s", "aggregate_s", "pull_s", "decode_s", "fixed_s", "hidden_s")


@dataclass(frozen=True)
class Advice:
    """All rows, and the one to take."""

    rows: Sequence[Row]
    codec: str
    reason: str

    @property
    def row(self) -> Row:
        return next(row for row in self.rows if row.codec == self.codec)

    def values(self) -> dict[str, Any]:
        chosen = self.row
        return {
            "rows": [row.values() for row in self.rows],
            "recommendation": {
                "codec": self.codec,
                "reason": self.reason,
                "speedup_fp32": chosen.speedup_fp32,
                "speedup_bf16": chosen.speedup_bf16,
            },
        }


def advise(
    load: Load,
    work: Work,
    network: Network,
    profile: Profile,
    codecs: Iterable[str] | None = None,
    *,
    processes: int = 1,
    memory: float | None = None,
    layers: Layers | None = None,
    limits: bool = True,
    tell: Callable[[str], None] = lambda what: None,
) -> Advice:
    """Compare codecs for a training, and recommend one.

    Args:
        load: What is exchanged.
        work: A step of one worker, alone on its machine.
        network: Between them.
        profile: What codecs take.
        codecs: By default those of the profile. ``none`` and ``bf16`` stand beside them as yardsticks.
        processes: Workers on one machine, which share its cores.
        memory: Bytes that a worker has; the profile's by default.
        layers: Compress the model's layers, too, under every codec but ``none`` and ``bf16``, the yardsticks.
        limits: Whether to look for the rates below which codecs pay.
        tell: Told what had to be measured here and now because the profile does not have it.
    """
    asked = list(codecs) if codecs is not None else _stock(profile, network, tell)
    wanted = list(dict.fromkeys(["none", "bf16", *asked]))
    for spec in wanted:
        if spec != GZIP:
            parse(spec)
    profile = _with(profile, wanted, tell)
    if processes < 1:
        raise ConfigError(f"processes must be at least 1, got {processes}")
    factor = profile.slowdown(processes)
    work = replace(work, step_s=work.step_s * factor)
    room = memory if memory is not None else profile.memory

    messages = {spec: message_of(profile, load, spec, network).slower(factor) for spec in wanted}

    def priced(spec: str, at: Network, layered: bool = True) -> tuple[Message, Step]:
        one, on = messages[spec], work
        if layers is not None and layered:
            one, on = _layered(one, layers), replace(work, step_s=work.step_s * layers.h)
        return one, step(on, at, one)

    base = {spec: priced(spec, network, layered=False)[1].total_s for spec in ("none", "bf16")}
    rows = []
    for spec in wanted:
        layered = spec not in ("none", "bf16")
        message, taken = priced(spec, network, layered)
        needed = 12.0 * load.numel * (layers.rho if layers is not None and layered else 1.0) + message.memory
        rows.append(
            Row(
                spec,
                message,
                taken,
                base["none"] / taken.total_s if taken.total_s else 1.0,
                base["bf16"] / taken.total_s if taken.total_s else 1.0,
                None
                if spec == "none" or not limits
                else break_even(
                    network,
                    lambda at, s=spec, d=layered: priced(s, at, d)[1].total_s,  # type: ignore[misc]
                    lambda at: priced("none", at, False)[1].total_s,
                ),
                needed,
                room is None or needed <= room,
            )
        )
    return _chosen(rows, ["none", *asked], network, room)


def _chosen(rows: Sequence[Row], asked: Sequence[str], network: Network, room: float | None) -> Advice:
    plain = next(row for row in rows if row.codec == "none")
    if network.workers == 1:
        return Advice(rows, "none", "one worker has nobody to exchange with")
    fitting = [row for row in rows if row.fits and row.codec in asked]
    if not fitting:
        return Advice(rows, "none", f"not even the model with its gradient and momentum fits into {_size(room)}")
    best = min(fitting, key=lambda row: row.step.total_s)
    too_large = [row for row in rows if not row.fits and row.codec in asked and row.step.total_s < best.step.total_s]
    besides = f"; {too_large[0].codec} would be faster, but needs {_size(too_large[0].memory)}" if too_large else ""
    if best.speedup_fp32 < GAIN or best.codec == "none":
        share = 1 - plain.step.compute_s / plain.step.exchange_s if plain.step.exchange_s else 0.0
        if best.codec == "none":
            why = f"no codec is faster at {show_rate(network.rate)}"
        else:
            why = f"{best.codec}, the fastest, gains {100 * (best.speedup_fp32 - 1):.1f} %, which is not worth its loss"
        return Advice(rows, "none", f"{why}: exchanging float32 takes {100 * share:.0f} % of a step{besides}")
    smaller = plain.message.push / best.message.push
    return Advice(
        rows,
        best.codec,
        f"{best.speedup_fp32:.2f} times as fast as float32 and {best.speedup_bf16:.2f} times as bfloat16: "
        f"pushes {smaller:.3g} times fewer bytes, and making and reading them takes "
        f"{1e3 * (best.message.encode_s + best.message.decode_s):.3g} ms{besides}",
    )


def break_even(network: Network, codec: Callable[[Network], float], plain: Callable[[Network], float]) -> float | None:
    """The rate below which a codec is faster than none: None nowhere, inf everywhere."""

    def gains(rate: float) -> bool:
        at = replace(network, rate=rate, server_rate=None)
        return codec(at) < plain(at)

    if network.workers == 1 or not gains(SLOWEST):
        return None
    if gains(FASTEST):
        return math.inf
    low, high = math.log(SLOWEST), math.log(FASTEST)
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if gains(math.exp(middle)) else (low, middle)
    return math.exp(low)


# ------------------------------------------------------------------------------------------------------------ messages


def message_of(profile: Profile, load: Load, spec: str, network: Network) -> Message:
    """What a codec makes of a load, by the profile."""
    engine_adds = network.topology == "ring" and spec in FLOATS
    adds = spec != GZIP and summable(spec)
    measured = load.model.messages.get(spec) if load.model is not None else None
    if measured is not None:
        push, seconds = measured["push"], (measured["encode_s"], measured["decode_s"], measured["add_s"])
    else:
        points = [profile.point(_for_slot(spec, numel, dims), numel) for numel, dims in load.slots]
        push = sum(one.nbytes for one in points)
        seconds = (sum(p.encode_s for p in points), sum(p.decode_s for p in points), sum(p.add_s for p in points))
    pull = push
    if adds:
        push, pull = _sum_bytes(spec, load, network)
    if spec == "none" and network.topology != "ps":  # the engine takes the tensors as they are
        engine_adds, seconds = True, (0.0, 0.0, 0.0)
    encode_s, decode_s, add_s = seconds
    apply_s = load.model.apply_s if load.model is not None else 0.0
    return Message(
        spec,
        push,
        pull,
        encode_s,
        decode_s + apply_s,
        add_s,
        summable=adds or engine_adds,
        memory=push + pull + 4.0 * load.numel * (1 + (parse(spec)[0] != () if spec != GZIP else 0)),
    )


def _sum_bytes(spec: str, load: Load, network: Network) -> tuple[float, float]:
    """Of large slots by the codec, of small ones in 16 bits, as the method ``homomorphic`` has it."""
    ring = network.topology == "ring"
    large = sum(numel for numel, dims in load.slots if not _exempt(numel, dims))
    small = load.numel - large
    push, pull = sum_sizes(spec, large, network.workers, ring=ring) if large else (0.0, 0.0)
    return push + (2.0 + 4 / 1024) * small, pull + (4.0 + 4 / 1024) * small


def _exempt(numel: int, dims: int) -> bool:
    policy = Policy()
    return dims <= 1 or numel < policy.min_numel


def _for_slot(spec: str, numel: int, dims: int) -> str:
    return "none" if spec != GZIP and _exempt(numel, dims) else spec


def _layered(one: Message, layers: Layers) -> Message:
    """A model of fewer numbers has smaller messages, which take less time."""
    rho, (encode_s, step_s) = layers.rho, one.at_server
    return replace(
        one, push=rho * one.push, pull=rho * one.pull, encode_s=rho * one.encode_s, decode_s=rho * one.decode_s,
        add_s=rho * one.add_s, memory=rho * one.memory, server_encode_s=rho * encode_s, server_step_s=rho * step_s,
    )  # fmt: skip


def _stock(profile: Profile, network: Network, tell: Callable[[str], None]) -> list[str]:
    """Those of the profile, but for sums that cannot hold so many workers."""
    found = []
    for spec in profile.codecs or STOCK:
        try:
            if summable(spec):
                sum_sizes(spec, SLOT, network.workers, ring=network.topology == "ring")
        except ConfigError as error:
            tell(f"{spec} is left out: {error}")
            continue
        found.append(spec)
    return found


def _with(profile: Profile, specs: Sequence[str], tell: Callable[[str], None]) -> Profile:
    """The profile with what it does not have measured here."""
    missing = [spec for spec in specs if spec not in profile.codecs]
    if not missing:
        return profile
    tell(f"profile {profile.name} does not have {', '.join(missing)}: measured here and now, on this machine's CPU")
    found: Mapping[str, Sequence[Point]] = codec_points(missing, sizes=(1 << 14, 1 << 20), tell=lambda what: None)
    return replace(profile, codecs={**profile.codecs, **found})


# --------------------------------------------------------------------------------------------------------------- units

_SIZES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_memory(text: str) -> float:
    """Bytes.

    >>> parse_memory("16GiB")
    17179869184.0
    """
    word = text.strip().lower()
    digits = word.rstrip("abcdefghijklmnopqrstuvwxyz").strip()
    unit = word[len(digits) :].strip() or "b"
    try:
        value = float(digits)
    except ValueError:
        value = -1.0
    if unit not in _SIZES or not 0 < value < math.inf:
        raise ConfigError(f"memory is a number and one of {', '.join(_SIZES)}, such as 16gib; got {text!r}")
    return value * _SIZES[unit]


def _size(nbytes: float | None) -> str:
    return "no memory" if nbytes is None else f"{nbytes / 1e9:.3g} GB"
