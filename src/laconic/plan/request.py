"""What a plan is asked: a training, its machine and its links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from laconic.errors import ConfigError
from laconic.plan.calibration import summable
from laconic.plan.costs import EVENLY, REDUCED, Message, Network, Work, bucketed
from laconic.plan.evidence import (
    FAMILIES,
    MODEL_FAMILIES,
    OPTIMIZERS,
    Evidence,
    collective_transport,
    default_optimizer,
    shipped_evidence,
)
from laconic.plan.messages import Workload
from laconic.plan.profile import Profile, Transport, load

__all__ = ["CompressedLayers", "MeasuredRun", "PlanRequest", "default_transport"]


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
        return replace(dense.part(self.rho), memory=self.rho * dense.memory)


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
    model: str | None = None

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
        topology: ``ps``, ``ring``, ``twoshot``, ``fsdp`` or ``hsdp``; see ``costs``.
        ranks: Ranks of a node, for hsdp: ``workers`` are its nodes.
        servers: Number of servers, for ps.
        round_trip_s: Seconds of a round trip between two hosts.
        codecs: Specs to compare; those of the profile by default. ``none`` and ``bf16`` are always compared.
        processes: Workers on each machine, which share its cores.
        memory: Bytes that a worker has; the profile's by default.
        layers: Layers compressed in addition, under every codec but ``none`` and ``bf16``.
        family: Family of the model, one of ``evidence.FAMILIES``: only what was trained on it is recommended.
        optimizer: One of ``evidence.OPTIMIZERS``; the family's usual one by default.
        give_up: Points of accuracy, or per cent of the loss, that a recommended codec may give up.
        evidence: Trainings by codecs; those that come with laconic by default.
        model: Name of the model, if it has one: trainings of it count more than those of its family.
        change_optimizer: Whether trainings by a codec and another optimizer count, whose own time is not known.
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
    family: str | None = None
    optimizer: str | None = None
    give_up: float = 0.0
    evidence: Sequence[Evidence] | None = None
    model: str | None = None
    ranks: int = 1
    change_optimizer: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.step_s < math.inf:
            raise ConfigError(f"the step time must be finite and above 0, got {self.step_s:g} s")
        if self.processes < 1:
            raise ConfigError(f"processes must be at least 1, got {self.processes}")
        if self.family is not None and self.family not in FAMILIES:
            raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, got {self.family!r}")
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if not 0 <= self.give_up < 100:
            raise ConfigError(f"give-up must be at least 0 % and below 100 %, got {self.give_up:g} %")

    @classmethod
    def for_model(cls, profile: Profile, name: str, step_s: float | None = None, **options: Any) -> PlanRequest:
        """Return a request for a model of the profile, with its own step time by default."""
        if name not in profile.models:
            known = ", ".join(profile.models) or "none"
            raise ConfigError(
                f"profile {profile.name} has no model {name!r} (it has {known}): give --params and --step-time"
            )
        model = profile.models[name]
        options = {**options, "family": options.get("family") or MODEL_FAMILIES.get(name), "model": name}
        return cls(profile, Workload.of_model(model), model.step_s if step_s is None else step_s, **options)

    @classmethod
    def for_params(cls, profile: Profile, params: int, step_s: float, **options: Any) -> PlanRequest:
        """Return a request for a model of which only the number of parameters is known."""
        return cls(profile, Workload.of_params(params), step_s, **options)

    @classmethod
    def for_run(cls, profile: Profile, run: MeasuredRun, **options: Any) -> PlanRequest:
        """Return a request for the model, workers and step time of a run."""
        options = {
            **options,
            "family": options.get("family") or MODEL_FAMILIES.get(run.model or ""),
            "model": run.model,
        }
        return cls(profile, Workload(run.slots), run.step_s, workers=run.workers, every=run.every, **options)

    @property
    def trained_by(self) -> str | None:
        """The optimizer: the given one, or the family's usual one."""
        return self.optimizer or default_optimizer(self.family)

    def known_trainings(self) -> list[Evidence]:
        """Return the evidence of the family and the optimizer."""
        trainings = shipped_evidence() if self.evidence is None else self.evidence
        return [
            one
            for one in trainings
            if (one.family, one.plain_optimizer) == (self.family, self.trained_by)
            and (self.change_optimizer or one.optimizer == one.plain_optimizer)
        ]

    @property
    def work(self) -> Work:
        """The computation of a worker, which shares its machine with ``processes`` - 1 others."""
        model, machine = self.workload.model, self.profile.machine
        spare_core = self.profile.device == "cuda" or machine.get("cores", 1) > self.processes
        seconds = self.step_s * self.profile.slowdown_of(self.processes)
        ready = model.ready if model else EVENLY
        if self.topology not in ("ps", "fsdp"):
            ready = bucketed(ready, self.workload.numel)
        return Work(seconds, self.every, ready, spare_core)

    @property
    def network(self) -> Network:
        """The links, and what a parameter server adds to them."""
        return self.network_of()

    def network_of(self, fragments: int = 1, codec: str = "none", every: int = 1) -> Network:
        """Return the links and the fixed times of an exchange by a codec, if fragments are exchanged in turn."""
        options: dict[str, float] = {}
        if self.topology != "ps" and (self.profile.collective or self.profile.device == "cpu"):
            transport = self.profile.collective.get(way := self._way(codec)) or collective_transport(way)
            # It was measured between two processes of a machine; more of them share its cores.
            slowdown = self.profile.slowdown_of(max(2, self.processes)) / self.profile.slowdown_of(2)
            parts = replace(self.work, every=every).exchanges if self.topology != "fsdp" else 1
            slots = -(-self.workload.compressed_slots // (fragments * parts))
            options = {"byte_s": transport.byte_s, "exchange_s": slowdown * transport.seconds(slots)}
        if self.topology == "ps":
            transport = self.profile.transport or default_transport()
            slots = -(-len(self.workload.slots) // fragments)
            options = {"byte_s": transport.byte_s, "exchange_s": transport.seconds(slots)}
        return Network(
            self.workers, self.rate, self.topology, self.servers, round_trip_s=self.round_trip_s, ranks=self.ranks,
            gathered=4.0 * self.workload.numel if self.topology == "fsdp" else 0.0, **options,
        )  # fmt: skip

    def _way(self, codec: str) -> str:
        """Return how ranks reduce what a codec sends: see ``costs``."""
        adds = self.topology in ("ring", "hsdp")
        if codec == "none" or (adds and codec in REDUCED):
            return "none"
        return "sum" if adds and summable(codec) else "twoshot"

    def values(self) -> dict[str, Any]:
        """Return the request as ``laconic plan --json`` repeats it."""
        return {
            "params": self.workload.numel, "step_s": self.step_s, "workers": self.workers,
            "bandwidth_bit_s": self.rate, "topology": self.topology, "servers": self.servers,
            "ranks": self.ranks,
            "round_trip_s": self.round_trip_s, "every": self.every, "processes": self.processes,
            "profile": self.profile.name, "family": self.family, "optimizer": self.trained_by, "give_up": self.give_up,
            "change_optimizer": self.change_optimizer,
            "layers": None if self.layers is None else {"rho": self.layers.rho, "h": self.layers.h},
        }  # fmt: skip


@lru_cache(maxsize=1)
def default_transport() -> Transport:
    """Return the transport of the shipped profile ``cpu``, for profiles without one."""
    transport = load("cpu").transport
    assert transport is not None
    return transport
