"""Evidence: what trainings by a codec gave up beside the same training without one, from Records.

``make docs`` writes evidence.json from ``results/``; ``laconic tune`` measures evidence for a model of one's own. A
codec without evidence may be fast, but its effect on such a model is unknown: ``laconic plan`` says so and does not
recommend it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError, FileError
from laconic.json_files import parse_json, read_regular_text
from laconic.plan import formulas
from laconic.plan.profile import Transport
from laconic.suitability import Moments

__all__ = [
    "FAMILIES", "MODEL_FAMILIES", "OPTIMIZERS", "Evidence", "collective_transport", "counting", "default_optimizer",
    "load_evidence", "model_error", "read_evidence", "shipped_evidence",
]  # fmt: skip

FAMILIES = ("convolutional", "recurrent", "transformer", "mlp")
OPTIMIZERS: Mapping[str, Moments] = {"sgd": "none", "momentum": "momentum", "adamw": "adam", "muon": "muon"}
"""Optimizers by name, and what they remember of earlier gradients. ``momentum`` is SGD with momentum."""

MODEL_FAMILIES = {
    "mlp": "mlp", "lenet5": "convolutional", "vgg11": "convolutional", "alexnet": "convolutional",
    "resnet50": "convolutional", "vgg11fc": "convolutional", "gpt": "transformer",
}  # fmt: skip
"""Families of the models that come with laconic."""

FORMAT = "laconic evidence"


@dataclass(frozen=True)
class Evidence:
    """Trainings by one codec, and by plain data parallelism.

    Args:
        codec: Spec of both directions.
        every: Steps between exchanges; above 1, the optimizer's changes are exchanged instead of gradients.
        fragments, overlap, outer: As of ``LocalSGD``.
        family: One of ``FAMILIES``.
        model: Name of the model.
        numel: Its parameters.
        plain_optimizer: The optimizer of plain data parallelism, one of ``OPTIMIZERS``.
        optimizer: That of the training by the codec, often the same.
        lr: Its learning rate over that of plain data parallelism.
        workers: How many there were.
        seeds: Number of trainings by the codec.
        measure: ``accuracy`` (per cent of test examples) or ``loss``.
        plain, reached: Mean of the measure over seeds.
        noise: Standard deviation of ``plain`` over seeds in the unit of ``given_up``; 0 with one seed.
        steps: Steps that the codec needed over those of plain data parallelism, the most of all seeds.
        source: Where the Records are.
    """

    codec: str
    family: str
    model: str
    numel: int
    plain_optimizer: str
    optimizer: str
    workers: int
    seeds: int
    measure: str
    plain: float
    reached: float
    noise: float = 0.0
    every: int = 1
    fragments: int = 1
    overlap: int = 0
    outer: str = "mean"
    lr: float = 1.0
    steps: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        names = {"family": FAMILIES, "plain_optimizer": tuple(OPTIMIZERS), "optimizer": tuple(OPTIMIZERS),
                 "measure": ("accuracy", "loss")}  # fmt: skip
        for name, allowed in names.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("numel", "workers", "seeds", "every", "fragments"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}")
        for name in ("plain", "reached", "noise", "lr", "steps"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} must be finite and at least 0, got {value!r}")
        if self.measure == "loss" and (not self.plain or not math.isfinite(self.given_up)):
            raise ConfigError(f"reached over plain must be finite, got {self.reached!r} over {self.plain!r}")
        for name in ("codec", "model", "outer", "source"):  # they are printed
            value = getattr(self, name)
            if not isinstance(value, str) or not value.isprintable():
                raise ConfigError(f"{name} must be printable text, got {value!r:.80}")

    @property
    def given_up(self) -> float:
        """Points of accuracy, or per cent of the loss, by which the codec is worse; negative if it is better."""
        if self.measure == "accuracy":
            return self.plain - self.reached
        return 100 * (self.reached / self.plain - 1)

    @property
    def text(self) -> str:
        """The evidence in words."""
        unit = "points of accuracy" if self.measure == "accuracy" else "% of the loss"
        lost = f"gave up {max(0.0, self.given_up):.2g} {unit}" + (f" (noise {self.noise:.2g})" if self.noise else "")
        needed = f" in {self.steps:.3g} times the steps" if self.steps != 1 else ""
        changed = f", by {self.optimizer} instead of {self.plain_optimizer}, whose own time is not counted" * (
            self.optimizer != self.plain_optimizer
        )
        changed += f", at {self.lr:.3g} times the learning rate" if self.lr != 1 else ""
        changed += f", with outer={self.outer!r}" if self.outer != "mean" else ""
        seeds = f"{self.seeds} seed{'s' * (self.seeds != 1)}"
        return f"{lost}{needed} on {self.model}, {self.workers} workers, {seeds}{changed}"

    def values(self) -> dict[str, Any]:
        return asdict(self) | {"given_up": self.given_up}


def counting(
    trainings: Sequence[Evidence], *, every: int, model: str | None, numel: int, workers: int
) -> Evidence | None:  # fmt: skip
    """Return the training that gave up most among those of one codec that count for a model; None if none does.

    A training counts for models of at most 32 times its parameters. One that exchanges changes counts for at most as
    many workers as it had: with more of them local steps give up more. If the model itself was trained, other models
    do not count.
    """

    def worst(among: Sequence[Evidence]) -> Evidence | None:
        place = formulas.worst_training(
            [one.given_up for one in among], [float(one.numel) for one in among],
            [float(one.workers) for one in among], every > 1, numel, workers,
        )  # fmt: skip
        return None if place < 0 else among[place]

    own = worst([one for one in trainings if one.model == model])
    return own if own is not None else worst(trainings)


def default_optimizer(family: str | None) -> str | None:
    """Return the usual optimizer of a family."""
    return None if family is None else "adamw" if family in ("transformer", "recurrent") else "momentum"


@cache
def _shipped() -> dict[str, Any]:
    text = resources.files("laconic.plan").joinpath("evidence.json").read_text(encoding="utf-8")
    values: dict[str, Any] = json.loads(text)
    return values


@cache
def shipped_evidence() -> tuple[Evidence, ...]:
    """Return the evidence that comes with laconic."""
    return read_evidence(_shipped(), "evidence.json")


def model_error(topology: str) -> float:
    """Return the error of the planner's speed-ups: four of five of those measured with real runs were closer."""
    return float(_shipped()["model_error"]["ps" if topology == "ps" else "ddp"])


def collective_transport(way: str) -> Transport:
    """Return the time of an exchange of two ranks by gloo that neither codec nor link explains.

    Args:
        way: ``none`` for torch's all-reduce, ``sum`` for packets added by it, ``twoshot``.
    """
    return Transport(**_shipped()["collective"][way])


def read_evidence(values: Any, where: str) -> tuple[Evidence, ...]:
    """Return the evidence of a JSON object of ``laconic tune`` or of the shipped file."""
    if not isinstance(values, dict) or values.get("format") != FORMAT or not isinstance(values.get("trainings"), list):
        raise FileError(f"{where} has no evidence: write it by `laconic tune SCRIPT -o FILE`")
    names = {one.name for one in fields(Evidence)}
    try:
        return tuple(Evidence(**{k: v for k, v in one.items() if k in names}) for one in values["trainings"])
    except (TypeError, AttributeError, ConfigError) as error:
        raise FileError(f"{where} has incomplete evidence: {error}") from None


def load_evidence(path: Path) -> tuple[Evidence, ...]:
    """Return the evidence of a file of ``laconic tune``."""
    try:
        values = parse_json(read_regular_text(path))
    except OSError as error:
        raise FileError(f"cannot read the evidence {path}: {error.strerror}") from None
    except ValueError:
        values = None
    return read_evidence(values, str(path))
