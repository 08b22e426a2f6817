"""What studies that train GPTs on text share: the settings of an experiment, and a loop that trains each once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from laconic.errors import ConfigError
from laconic.records import Record
from laconic_lab.bench.corpus import Corpus
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.study import seeds_option
from laconic_lab.studies.trainer import Progress

__all__ = ["TextTraining", "run_key", "select", "text_options", "train_each"]


@dataclass(frozen=True, kw_only=True)
class TextTraining:
    """Steps and learning rates of a training.

    Args:
        steps: Steps of the optimizer.
        warmup: Steps over which the learning rate grows.
        lr: Largest learning rate.
        final: Last learning rate over the largest one; in between half a cosine wave.
    """

    steps: int = 2000
    warmup: int = 100
    lr: float = 1e-3
    final: float = 0.1

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress)))


class TextSetting(Protocol):
    """A frozen dataclass that describes one training; a ``TextTraining``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def method(self) -> str: ...

    @property
    def steps(self) -> int: ...

    @property
    def warmup(self) -> int: ...

    def values(self) -> dict[str, Any]: ...


SettingT = TypeVar("SettingT", bound=TextSetting)


def text_options(given: Mapping[str, Any], lists: Sequence[str] = ("models", "methods")) -> dict[str, Any]:
    """Translate options of the command line into arguments of ``run``.

    Args:
        lists: Options whose values are separated by commas.
    """
    return {
        **{name: given[name].split(",") if given[name] else None for name in lists},
        "seeds": seeds_option(given),
        "iterations": given["iterations"],
    }


def select(
    settings: Iterable[SettingT], sizes: Sequence[str] | None = None, methods: Sequence[str] | None = None
) -> list[SettingT]:
    """Return the settings of an experiment, each once.

    Args:
        sizes: Train models of these sizes instead.
        methods: Only methods with one of these names, or whose names contain a text that is no method's name.
    """
    chosen = list(dict.fromkeys(settings))
    if sizes is not None:
        chosen = [replace(setting, size=size) for size in sizes for setting in chosen]
    if methods is not None:
        names = {setting.method for setting in chosen}
        wanted = {name for text in methods for name in ({text} & names or names) if text in name}
        chosen = [setting for setting in chosen if setting.method in wanted]
        if not chosen:
            raise ConfigError(f"no method of this part matches {', '.join(methods)}")
    return chosen


def run_key(setting: TextSetting, experiment: str, seed: int, corpus: str) -> str:
    """Return the key of a run; it is equal for equal work, also if fields are added later."""
    changed = {
        each.name: getattr(setting, each.name)
        for each in fields(setting)
        if getattr(setting, each.name) != each.default
    }
    return json.dumps([experiment, seed, corpus[:16], changed], sort_keys=True)


def train_each(
    train: Callable[[SettingT, int, Callable[[int], None]], dict[str, Any]], settings: Iterable[SettingT],
    seeds: Iterable[int], log: RecordLog, *, kind: str, experiment: str, corpus: Corpus, known: dict[str, Any],
    iterations: int | None = None, progress: Progress | None = None, deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Train each setting with each seed, unless the log has its Record, and return all Records.

    Args:
        train: Trains a setting with a seed, reports the number of each step, and returns what was measured.
        kind: Kind of the Records.
        known: Values of all Records, beside the setting's.
        iterations: Steps of each run instead of the setting's.
        deadline: When to end although trainings are left; one that was begun is finished.
    """
    deadline = deadline or Deadline()
    if iterations is not None:
        settings = [replace(each, steps=iterations, warmup=min(each.warmup, iterations // 4)) for each in settings]
    settings = list(settings)
    units = [(each, seed, run_key(each, experiment, seed, corpus.digest)) for seed in seeds for each in settings]
    total, done = sum(setting.steps for setting, _, _ in units), 0
    for setting, seed, key in units:
        if key not in log:
            deadline.check()

            def report(step: int, done: int = done, name: str = setting.method) -> None:
                if progress is not None:
                    progress(name, done + step, total)

            measured = train(setting, seed, report)
            identity = {"key": key, "part": experiment, "seed": seed, "corpus": corpus.digest}
            log.add(Record(kind, identity | known | setting.values() | measured, seed=seed))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        done += setting.steps
    return [log.records[key] for _, _, key in units]
