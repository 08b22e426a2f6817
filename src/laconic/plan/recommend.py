"""Compare codecs for a training, and recommend one or none.

``recommend(PlanRequest(...))`` is what ``laconic plan`` prints, ``examples/plan.py`` shows and the report embeds. A
codec is recommended for the time to the same quality: trainings by it must have kept the quality of the model's family,
and the steps that they needed count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laconic.codecs import parse
from laconic.errors import ConfigError
from laconic.plan import formulas
from laconic.plan.calibration import codec_points, sum_sizes, summable
from laconic.plan.candidates import Candidate, default_labels, with_estimates
from laconic.plan.costs import Message, Step, step
from laconic.plan.evidence import OPTIMIZERS, Evidence, counting, model_error
from laconic.plan.messages import SLOT_NUMEL, Workload, message_of
from laconic.plan.profile import Profile
from laconic.plan.request import CompressedLayers, MeasuredRun, PlanRequest, default_transport
from laconic.suitability import never_advised
from laconic.units import show_rate

__all__ = [
    "CompressedLayers", "MeasuredRun", "PlanRequest", "Recommendation", "Row", "default_transport", "fitted_rate",
    "needed_memory", "recommend",
]  # fmt: skip

SLOWEST, FASTEST = 1e4, 1e15
"""Bits per second between which a rate is searched."""

STEP_PARTS = ("compute_s", "encode_s", "push_s", "aggregate_s", "pull_s", "decode_s", "fixed_s", "hidden_s")
BASELINES = ("none", "bf16")

Notify = Callable[[str], None]


def _ignore(message: str) -> None:
    pass


@dataclass(frozen=True)
class Row:
    """One candidate: its message, the time of a step, what that is worth, and what is known of its quality."""

    candidate: Candidate
    message: Message
    step: Step
    speedup_fp32: float
    speedup_bf16: float
    break_even: float | None
    """Bits per second below which the codec is faster than float32; None: nowhere; inf: everywhere."""
    memory: float
    fits: bool
    evidence: Evidence | None = None
    """The training that counts; None if there is none, or none is needed."""
    objection: str = ""
    """Why it is not recommended, however fast it is."""

    @property
    def codec(self) -> str:
        """The candidate's label: a spec, with ``local K`` before it if steps are local."""
        return self.candidate.label

    @property
    def pays(self) -> str:
        if self.break_even is None:
            return "nowhere"
        return "everywhere" if math.isinf(self.break_even) else "below break_even_bit_s"

    @property
    def steps(self) -> float:
        """Steps needed for the same quality over those of plain data parallelism."""
        return 1.0 if self.evidence is None else self.evidence.steps

    @property
    def quality_s(self) -> float:
        """Seconds of an iteration times ``steps``."""
        return self.step.total_s * self.steps

    def values(self) -> dict[str, Any]:
        limited = self.break_even is not None and math.isfinite(self.break_even)
        return {
            "codec": self.codec, "push_nbytes": self.message.push, "pull_nbytes": self.message.pull,
            "bytes_per_iteration": (self.message.push + self.message.pull) / self.step.every,
            "step_s": self.step.total_s, **{name: getattr(self.step, name) / self.step.every for name in STEP_PARTS},
            "speedup_fp32": self.speedup_fp32, "speedup_bf16": self.speedup_bf16,
            "break_even_bit_s": self.break_even if limited else None, "pays": self.pays, "memory_nbytes": self.memory,
            "fits": self.fits, "note": self.step.note, "steps_for_quality": self.steps,
            "evidence": None if self.evidence is None else self.evidence.values(), "objection": self.objection,
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

    @property
    def quality_speedup(self) -> float:
        """How many times as fast as float32 the recommended codec reaches the same quality."""
        return self.rows[0].quality_s / self.row.quality_s

    def values(self) -> dict[str, Any]:
        """Return the recommendation as ``laconic plan --json`` prints it."""
        return {
            "rows": [row.values() for row in self.rows],
            "recommendation": {
                "codec": self.codec, "reason": self.reason, "speedup_fp32": self.row.speedup_fp32,
                "speedup_bf16": self.row.speedup_bf16, "speedup_same_quality": self.quality_speedup,
                "model_error": model_error(self.request.topology),
                "evidence": None if self.row.evidence is None else self.row.evidence.values(),
            },
            "asked": self.request.values(),
        }  # fmt: skip


def recommend(request: PlanRequest, *, break_even: bool = True, notify: Notify = _ignore) -> Recommendation:
    """Compare codecs for a training, and recommend one.

    Args:
        break_even: Whether to search for the rates below which codecs pay.
        notify: Called with a line for everything that the profile lacks and that was replaced.
    """
    network = request.network
    for line in _replaced(request):
        notify(line)
    candidates = _candidates(request, notify)
    profile = _complete(request, candidates, notify)
    slowdown = profile.slowdown_of(request.processes)
    messages = {
        spec: message_of(profile, request.workload, spec, network).slower(slowdown)
        for spec in dict.fromkeys(candidate.codec for candidate in candidates)
    }
    memory = request.memory if request.memory is not None else profile.memory

    def timed(candidate: Candidate, rate: float) -> tuple[Message, Step]:
        message, work = messages[candidate.codec].part(1 / candidate.fragments), request.work
        work = replace(work, every=candidate.period, overlap=candidate.overlap)
        if candidate.local and request.workload.model is not None:  # every step ends with the optimizer's
            work = replace(work, step_s=work.step_s + slowdown * request.workload.model.apply_s)
        if request.layers is not None and candidate.label not in BASELINES:
            message = request.layers.message(message)
            work = replace(work, step_s=work.step_s * request.layers.h)
        links = replace(request.network_of(candidate.fragments, candidate.codec, candidate.every), rate=rate)
        return message, step(work, links, message)

    def pays(candidate: Candidate, rate: float) -> bool:
        return timed(candidate, rate)[1].total_s < timed(candidates[0], rate)[1].total_s

    plain_s, bf16_s = (timed(candidate, network.rate)[1].total_s for candidate in candidates[:2])
    known = request.known_trainings()
    rows = []
    for candidate in candidates:
        message, taken = timed(candidate, network.rate)
        rho = request.layers.rho if request.layers is not None and candidate.label not in BASELINES else 1.0
        shards = {"fsdp": request.workers, "hsdp": request.ranks}.get(request.topology, 1)
        needed = needed_memory(request.workload, message, rho, local=candidate.local, shards=shards)
        limit = None
        if break_even and candidate.label != "none" and network.workers > 1:
            limit = _highest_rate(lambda rate, one=candidate: pays(one, rate))  # type: ignore[misc]
        rows.append(
            Row(
                candidate, message, taken, formulas.speed_up(plain_s, taken.total_s),
                formulas.speed_up(bf16_s, taken.total_s), limit, needed, memory is None or needed <= memory,
                *_quality(request, candidate, known),
            )
        )  # fmt: skip
    asked = [row for row in rows if request.codecs is None or row.codec in ("none", *request.codecs)]
    codec, reason = _chosen(asked, request, memory)
    return Recommendation(request, rows, codec, reason)


def _replaced(request: PlanRequest) -> Iterator[str]:
    """Yield a line for each measurement that the profile lacks or that is doubtful, and what is used instead."""
    profile, again = request.profile, "Measure it on this machine by `laconic calibrate`"
    if request.topology == "ps" and profile.transport is None:
        yield f"profile {profile.name} has no transport: that of the shipped profile cpu is used. {again}"
    if request.topology != "ps" and not profile.collective:
        used = (
            "those of two ranks by gloo on two cores are used"
            if profile.device == "cpu"
            else "their exchanges take the time of links and codecs alone, which is too short"
        )
        yield f"profile {profile.name} has no times of ranks: {used}. {again}"
    if request.processes > 1 and not profile.slowdown:
        shared = "cores" if profile.device == "cpu" else "GPU"
        yield (
            f"profile {profile.name} has no slowdown of processes: {request.processes} of them are taken to share the "
            f"{shared} evenly" + (f". {again}" if profile.device == "cpu" else "")
        )
    if profile.load is not None and profile.load.busy:
        yield f"profile {profile.name} was measured on a busy machine, so its times may be too long: calibrate again"


def needed_memory(
    workload: Workload, message: Message, rho: float = 1.0, *, local: bool = False, shards: int = 1
) -> float:  # fmt: skip
    """Return the bytes of a worker: parameters, gradients and momentum in float32, and those of the message.

    With local steps a worker keeps the global model, too. Shards divide all but the message.
    """
    return (16.0 if local else 12.0) * workload.numel * rho / shards + message.memory


# -------------------------------------------------------------------------------------------------------------- quality


def _quality(request: PlanRequest, candidate: Candidate, known: Sequence[Evidence]) -> tuple[Evidence | None, str]:
    """Return the training that counts for a candidate, and what speaks against recommending it."""
    if candidate.is_lossless:
        return None, ""
    optimizer = request.trained_by
    if request.topology == "fsdp" and (candidate.local or not _is_stateless(candidate.codec)):
        return None, "keeps memory, for which sharded ranks have no place"
    if candidate.every == 1:
        never = never_advised(candidate.codec, None if optimizer is None else OPTIMIZERS[optimizer])
        if never is not None:
            return None, never
    if request.layers is not None:
        return None, "no evidence with compressed layers"
    trained = [one for one in known if candidate.was_trained(one)]
    counted = counting(
        trained, every=candidate.every, model=request.model, numel=request.workload.numel, workers=request.workers
    )
    if counted is None:
        return None, _missing(request, candidate, trained)
    if not formulas.keeps_quality(counted.given_up, counted.noise, request.give_up):
        return counted, counted.text
    return counted, ""


def _is_stateless(spec: str) -> bool:
    """Return whether a codec remembers nothing between steps, as the reduce-scatter of sharded ranks requires."""
    stages, chain = parse(spec)
    return not stages and all(stage.name != "powersgd" for stage in chain.stages)


def _missing(request: PlanRequest, candidate: Candidate, trained: Sequence[Evidence]) -> str:
    """Return why no training counts for a candidate."""
    most = max((one.workers for one in trained), default=0)
    if candidate.every > 1 and 0 < most < request.workers:
        return f"no evidence with more than {most} workers"
    return "no evidence" + (" at this size" if trained else "")


def _chosen(rows: Sequence[Row], request: PlanRequest, memory: float | None) -> tuple[str, str]:
    """Return the codec to use and the reason. The first row is ``none``."""
    if request.workers == 1:
        return "none", "one worker has no one to exchange with"
    plain = rows[0]
    place = formulas.fastest([row.quality_s for row in rows], [row.fits and not row.objection for row in rows])
    if place < 0:
        return "none", f"model, gradient and momentum alone do not fit into {_gigabytes(memory)}"
    best, error = rows[place], model_error(request.topology)
    besides = _besides(rows, best, request)
    gain = plain.quality_s / best.quality_s
    if best is plain or not formulas.exceeds_error(plain.quality_s, best.quality_s, error):
        share = 1 - plain.step.compute_s / plain.step.exchange_s
        if best is plain:
            why = f"nothing that {_trained(request)} is faster at {show_rate(request.rate)}"
        else:
            why = (
                f"{best.codec}, the fastest that {_trained(request)}, gains {100 * (gain - 1):.1f} %, and such "
                f"predictions may be {100 * max(0.05, error):.0f} % off"
            )
        return "none", f"{why}: exchanging float32 takes {100 * share:.0f} % of a step{besides}"
    exact = "" if best.evidence is None else f". It {best.evidence.text}"
    sooner = "" if best.steps == 1 else f", and reaches its quality {gain:.2f} times as soon"
    return best.codec, (
        f"{best.speedup_fp32:.2f} times as fast as float32 and {best.speedup_bf16:.2f} times as fast as "
        f"bfloat16{sooner}: it pushes {_fewer(plain, best):.3g} times fewer bytes, and encoding and decoding take "
        f"{1e3 * (best.message.encode_s + best.message.decode_s):.3g} ms{exact}{besides}"
    )


def _trained(request: PlanRequest) -> str:
    """Return the condition on a recommended codec, in words."""
    if request.family is None:
        return "is lossless (without --family no other codec has evidence)"
    within = f"within {request.give_up:g} % of" if request.give_up else "as well as"
    return f"trained a {request.family} model by {request.trained_by} {within} float32"


def _fewer(plain: Row, best: Row) -> float:
    """Return how many times fewer bytes a step pushes."""
    return (plain.message.push / plain.step.every) / (best.message.push / best.step.every)


def _besides(rows: Sequence[Row], best: Row, request: PlanRequest) -> str:
    """Return which faster codecs are not recommended, and why: one for memory, one for quality."""
    faster = sorted((row for row in rows if row.quality_s < best.quality_s), key=lambda row: row.quality_s)
    large = next((row for row in faster if not row.fits and not row.objection), None)
    text = "" if large is None else f"; {large.codec} would be faster, but needs {_gigabytes(large.memory)}"
    known = next((row for row in faster if row.evidence is not None and row.objection), None)
    worse = known or next((row for row in faster if row.objection), None)
    if worse is not None:
        gain = rows[0].quality_s / worse.quality_s
        text += f"; {worse.codec} would be {gain:.2f} times as fast as float32, but {_but(worse.objection)}"
        if known is not None and known.evidence is not None:
            needed = math.ceil(10 * known.evidence.given_up) / 10
            text += f" (--give-up {max(needed, 0.1):g}% allows it)"
    return text


def _but(objection: str) -> str:
    return f"there is {objection} of its quality" if objection == "no evidence" else (
        f"there is {objection}" if objection.startswith("no evidence") else f"it {objection}"
    )  # fmt: skip


def _gigabytes(nbytes: float | None) -> str:
    return "no memory" if nbytes is None else f"{nbytes / 1e9:.3g} GB"


# ---------------------------------------------------------------------------------------------------------------- rates


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


def _candidates(request: PlanRequest, notify: Notify) -> list[Candidate]:
    """Return what is compared: ``none`` and ``bf16`` first, then the given or the default codecs."""
    labels = request.codecs
    if labels is None:
        labels = default_labels(request.profile, request.known_trainings(), local=request.every == 1)
    candidates = [Candidate.parse(label, request.every) for label in dict.fromkeys([*BASELINES, *labels])]
    if request.codecs is not None:
        return candidates
    usable = []
    for candidate in candidates:
        try:
            if summable(candidate.codec):  # a sum may not hold so many workers
                sum_sizes(candidate.codec, SLOT_NUMEL, request.workers, ring=request.network.adds_packets)
            usable.append(candidate)
        except ConfigError as error:
            notify(f"{candidate.label} is left out: {error}")
    specs = [candidate.codec for candidate in usable]
    has = with_estimates(request.profile, specs).codecs
    lacking = [one for one in usable if one.label not in BASELINES and one.codec not in has]
    if lacking:
        names = ", ".join(one.label for one in lacking[:4]) + (f" and {len(lacking) - 4} more" * (len(lacking) > 4))
        notify(
            f"left out, although trained, because profile {request.profile.name} does not have their times: {names}. "
            "Give --codec, or measure a profile by `laconic calibrate`"
        )
    return [one for one in usable if one not in lacking]


def _complete(request: PlanRequest, candidates: Sequence[Candidate], notify: Notify) -> Profile:
    """Return the profile with the codecs that it lacks: estimated, or measured on this machine."""
    specs = list(dict.fromkeys(candidate.codec for candidate in candidates))
    profile = with_estimates(request.profile, specs)
    missing = [spec for spec in specs if spec not in profile.codecs]
    if not missing:
        return profile
    notify(f"profile {profile.name} does not have {', '.join(missing)}: measured now, on this machine's CPU")
    measured = codec_points(missing, sizes=(1 << 14, 1 << 20), notify=_ignore)
    return replace(profile, codecs={**profile.codecs, **measured})
