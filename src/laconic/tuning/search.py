"""Train a model by several candidates, and say which to use: a table, a line to paste, and evidence for the planner."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import ConfigError, FileError
from laconic.fsync import os_error_as_file_error
from laconic.json_files import parse_json, read_regular_text
from laconic.plan.calibration import GZIP, clock_of, message_times
from laconic.plan.candidates import Candidate
from laconic.plan.costs import EVENLY
from laconic.plan.evidence import FORMAT, OPTIMIZERS, Evidence
from laconic.plan.messages import Workload
from laconic.plan.profile import ModelTimes, Profile, load
from laconic.plan.recommend import PlanRequest, Recommendation, recommend
from laconic.policy import Policy
from laconic.suitability import moments
from laconic.tuning.training import Batches, Loss, Outcome, Training, trainable

__all__ = ["CANDIDATES", "Tuning", "family_of_model", "optimizer_name", "tune"]

CANDIDATES = (
    "bf16", "qsgd:8", "qsgd:4", "ef|qsgd:4", "ef|thc:4", "ef|sign", "ef|topk:0.05|qsgd:4", "local 8 ef|qsgd:4",
    "local 8 ef|sign", "local 32 ef|sign",
)  # fmt: skip
"""What ``tune`` tries by default."""
PLAIN, AGAIN = "none", "none, other order"
FRAGILE = 1.5
"""Growth of a residual between the middle and the end of the training above which a slot gets ``SAFE`` instead."""
SAFE = "qsgd:8"
FEWEST_STEPS = 8

Notify = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tuning:
    """What ``tune`` found.

    Args:
        outcomes: By label; ``none`` is plain data parallelism, ``none, other order`` the same on reordered batches.
        rules: Slots that should get another codec than the recommended one.
        recommendation: Of the planner, with this evidence.
        settings: Of the trainings.
    """

    outcomes: Mapping[str, Outcome]
    evidence: Sequence[Evidence]
    rules: Mapping[str, str]
    recommendation: Recommendation
    settings: Mapping[str, Any]

    @property
    def codec(self) -> str:
        """The label of the recommended candidate, or ``none``."""
        return self.recommendation.codec

    @property
    def shown(self) -> Outcome:
        """The outcome whose layers are shown: the recommended one, or that of the smallest loss by a codec."""
        tried = [one for label, one in self.outcomes.items() if label not in (PLAIN, AGAIN)]
        return self.outcomes[self.codec] if self.codec != PLAIN else min(tried, key=lambda one: one.loss)

    @property
    def code(self) -> str:
        """Lines of Python that use the recommendation."""
        if self.codec == PLAIN:
            return "# plain data parallelism: " + self.recommendation.reason
        candidate, policy = self.recommendation.row.candidate, ""
        if self.rules:
            policy = f", policy=laconic.Policy(rules={dict(self.rules)!r})"
        if candidate.local:
            arguments = f"every={candidate.every}, codec={candidate.codec!r}{policy}"
            return f"local = laconic.LocalSGD(model, optimizer, {arguments})"
        return f"laconic.attach(ddp, {candidate.codec!r}{policy})"

    def values(self) -> dict[str, Any]:
        """Return everything as ``laconic tune --json`` prints it and ``laconic plan --evidence`` reads it."""
        return {
            "format": FORMAT, "settings": dict(self.settings),
            "outcomes": [outcome.values() for outcome in self.outcomes.values()],
            "trainings": [one.values() for one in self.evidence], "rules": dict(self.rules), "code": self.code,
            "plan": self.recommendation.values(),
        }  # fmt: skip


def tune(
    model: nn.Module, batches: Callable[[int], Any] | Iterable[Any], optimizer: Any, *, loss: Loss | None = None,
    held_out: Sequence[Any] | None = None, candidates: Sequence[str] | None = None, workers: int = 2, steps: int = 200,
    seed: int = 0, family: str | None = None, give_up: float = 0.0, rate: float = 1e8, round_trip_s: float = 0.0,
    topology: str = "twoshot", profile: str | Profile = "cpu", path: Path | str | None = None, name: str = "yours",
    notify: Notify = lambda label, done, total: None,
) -> Tuning:  # fmt: skip
    """Train copies of a model for a few hundred steps by several candidates, and recommend one or none.

    All of them start from the model as it is and see the same batches. The workers are simulated in this process, one
    after the other; their frames are real. A short training shows what ruins a model; a candidate that is close after
    a few hundred steps may still end apart from plain data parallelism.

    Args:
        model: The model to train. It is copied and left as it is.
        batches: A function of a number that returns a batch, or batches, which are repeated if there are too few.
        optimizer: The model's optimizer, or a function that makes one (or several) for a model.
        loss: Function of model and batch; by default cross-entropy of ``model(batch[0])`` and ``batch[1]``.
        held_out: Batches on which trainings are compared; by default by their loss over the last fifth of the steps.
        candidates: Specs and ``local K SPEC``; ``CANDIDATES`` by default.
        workers: Simulated workers; the plan is for as many.
        steps: Steps of each training.
        family: Family of the model, found out by its layers by default.
        give_up: Per cent of the loss that a recommended candidate may give up.
        rate, round_trip_s, topology, profile: The network and machine of the plan; see ``PlanRequest``.
        path: File to which each finished training is written at once, and from which an interrupted call goes on.
        name: Name of the model in evidence.
        notify: Called with the label, the finished steps and the steps of all trainings.

    >>> import torch
    >>> data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> batches = [(data[i : i + 8], (data[i : i + 8, 0] > 0).long()) for i in range(0, 64, 8)]
    >>> found = tune(torch.nn.Linear(8, 2), batches, lambda m: torch.optim.SGD(m.parameters(), 0.1),
    ...              candidates=["qsgd:8"], steps=10)
    >>> sorted(found.outcomes)
    ['none', 'none, other order', 'qsgd:8']
    """
    if workers < 2:
        raise ConfigError(f"workers must be at least 2, got {workers}")
    if steps < FEWEST_STEPS:
        raise ConfigError(f"steps must be at least {FEWEST_STEPS}, got {steps}")
    chosen = [Candidate.parse(label) for label in dict.fromkeys(candidates or CANDIDATES)]
    if any(one.codec == GZIP or one.fragments > 1 or one.overlap for one in chosen):
        raise ConfigError("gzip, fragments and overlap do not change what is learned: leave them out of the candidates")
    training = Training(
        model, optimizer, Batches(batches), loss or _cross_entropy, held_out=held_out, workers=workers, steps=steps,
        seed=seed,
    )  # fmt: skip
    trained_by = optimizer_name(training.copy()[1])
    settings = {
        "model": name, "numel": sum(p.numel() for p in trainable(model).values()), "workers": workers, "steps": steps,
        "seed": seed, "family": family or family_of_model(model), "optimizer": trained_by, "give_up": give_up,
        "held_out": held_out is not None,
    }  # fmt: skip
    kept = Kept(None if path is None else Path(path), settings)
    wanted = [(PLAIN, Candidate(PLAIN), 0), (AGAIN, Candidate(PLAIN), 1), *((one.label, one, 0) for one in chosen)]
    total = steps * (len(wanted) + 1)
    for place, (label, candidate, order) in enumerate(wanted):
        if label not in kept.outcomes:
            report = partial(_forward, notify, label, steps * place, total)
            kept.add(replace(training.run(candidate, order=order, notify=report), label=label))
    outcomes = dict(kept.outcomes)
    evidence = [_evidence(outcomes, one, settings) for one in chosen if math.isfinite(outcomes[one.label].loss)]
    recommendation = _plan(
        training, chosen, outcomes, evidence, settings, rate=rate, round_trip_s=round_trip_s, topology=topology,
        profile=load(profile) if isinstance(profile, str) else profile,
    )  # fmt: skip
    rules = _rules(recommendation, outcomes)
    if rules:  # tried before it is advised
        candidate = recommendation.row.candidate
        label = f"{candidate.label}, by layer"
        if label not in kept.outcomes:
            report = partial(_forward, notify, label, total - steps, total)
            tried = training.run(candidate, policy=Policy(rules=rules), notify=report)
            kept.add(replace(tried, label=label))
        outcomes[label] = kept.outcomes[label]
        if outcomes[label].loss > outcomes[candidate.label].loss:
            rules = {}
    notify("done", total, total)
    tuned = Tuning(outcomes, evidence, rules, recommendation, settings)
    kept.finish(tuned)
    return tuned


def _forward(notify: Notify, label: str, before: int, total: int, step: int) -> None:
    notify(label, before + step, total)


def family_of_model(model: nn.Module) -> str:
    """Return the family of a model by its layers: attention first, then recurrent layers, then convolutions."""
    modules = list(model.modules())
    names = " ".join(name.lower() for name, _ in model.named_modules())
    if any(isinstance(one, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for one in modules) or "attn" in names:
        return "transformer"
    if "attention" in names:
        return "transformer"
    if any(isinstance(one, (nn.RNNBase, nn.RNNCellBase)) for one in modules):
        return "recurrent"
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return "convolutional" if any(isinstance(one, convolutions) for one in modules) else "mlp"


def optimizer_name(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return the name in ``OPTIMIZERS``; an unknown optimizer counts as adamw, which tolerates least."""
    memories = [moments(one) for one in optimizers]
    for wanted in ("muon", "adam", None, "momentum", "none"):
        if wanted in memories:
            return next((name for name, memory in OPTIMIZERS.items() if memory == wanted), "adamw")
    return "adamw"


def _cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    outputs, targets = model(batch[0]), batch[1]
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _evidence(outcomes: Mapping[str, Outcome], candidate: Candidate, settings: Mapping[str, Any]) -> Evidence:
    plain, again = outcomes[PLAIN].loss, outcomes[AGAIN].loss
    if not math.isfinite(plain):
        raise ConfigError("the model diverges without any codec: lower the learning rate")
    noise = 100 * abs(again - plain) / math.sqrt(2) / plain if math.isfinite(again) else 0.0
    return Evidence(
        candidate.codec, settings["family"], settings["model"], settings["numel"], settings["optimizer"],
        settings["optimizer"], settings["workers"], 1, "loss", plain, outcomes[candidate.label].loss, noise,
        candidate.every, source="laconic tune",
    )  # fmt: skip


def _plan(
    training: Training, chosen: Sequence[Candidate], outcomes: Mapping[str, Outcome], evidence: Sequence[Evidence],
    settings: Mapping[str, Any], *, profile: Profile, **network: Any,
) -> Recommendation:  # fmt: skip
    """Return the plan for the model: codecs timed on its gradients, its step as long as in the plain training."""
    gradients = training._gradients([training.copy()], 0)[0][0]
    device = next(iter(gradients.values())).device
    specs = dict.fromkeys(["none", "bf16", *(one.codec for one in chosen)])
    with torch.no_grad():
        messages = {spec: message_times(spec, gradients, clock_of(device)) for spec in specs}
    step_s = outcomes[PLAIN].compute_s
    times = ModelTimes(
        tuple(x.numel() for x in gradients.values()), 1, step_s, EVENLY, messages,
        tuple(x.dim() for x in gradients.values()),
    )  # fmt: skip
    own = replace(profile, models={settings["model"]: times}, memory=None)
    request = PlanRequest(
        own, Workload.of_model(times), step_s, workers=settings["workers"], codecs=[one.label for one in chosen],
        family=settings["family"], optimizer=settings["optimizer"], give_up=settings["give_up"], evidence=evidence,
        model=settings["model"], **network,
    )  # fmt: skip
    return recommend(request, break_even=False)


def _rules(recommendation: Recommendation, outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Return the slots whose residuals still grow at the end, with a codec that keeps more of them."""
    if recommendation.codec == PLAIN:
        return {}
    slots = outcomes[recommendation.codec].slots
    return {name: SAFE for name, slot in slots.items() if slot["growth"] > FRAGILE}


class Kept:
    """Finished trainings in a file, for a call that goes on after an interruption."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path, self._settings = path, dict(settings)
        self.outcomes: dict[str, Outcome] = {}
        if path is None or not path.exists():
            return
        try:
            values = parse_json(read_regular_text(path))
        except (OSError, ValueError) as error:
            raise FileError(f"cannot read the trainings of {path}: {error}") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT or "outcomes" not in values:
            raise FileError(f"{path} is not a file of laconic tune: give another, or delete it")
        ignored = ("give_up",)
        saved, outcomes = values.get("settings"), values["outcomes"]
        if not isinstance(saved, dict) or not isinstance(outcomes, list):
            raise FileError(f"{path} is not a file of laconic tune: give another, or delete it")
        before = {key: value for key, value in saved.items() if key not in ignored}
        if before != {key: value for key, value in self._settings.items() if key not in ignored}:
            raise FileError(
                f"{path} holds trainings of other settings, {ascii(before)[:300]}: give another file, or delete it"
            )
        try:
            self.outcomes = {one["label"]: Outcome.of(one) for one in outcomes}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FileError(f"{path} has a damaged outcome: {error}; delete the file") from None

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.label] = outcome
        self._write({"trainings": [], "outcomes": [one.values() for one in self.outcomes.values()]})

    def finish(self, tuned: Tuning) -> None:
        self._write({**tuned.values(), "outcomes": [one.values() for one in self.outcomes.values()]})

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._path is not None:
            text = json.dumps({"format": FORMAT, "settings": self._settings, **values}, indent=1) + "\n"
            with os_error_as_file_error(f"write {self._path}"):
                part = self._path.with_name(self._path.name + ".part")
                part.write_text(text, encoding="utf-8")
                part.replace(self._path)
