"""Configuration of a run, shared by its servers, workers and launcher; ``laconic.watch.folder`` lists its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.cluster.connection import partition
from laconic.cluster.job import Job, require_fields
from laconic.errors import ConfigError, FileError
from laconic.json_files import read_json
from laconic.layers import INITS, parse_scheme
from laconic.optim import Schedule
from laconic.train.bundling import Layout
from laconic.train.data_shards import Shards
from laconic.train.subspace_state import SubspaceState
from laconic.train.task import Task, build_task
from laconic.watch.folder import (
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    RECORDS,
    REPORTS,
    SERVER,
    SUMMARY,
    WORKERS,
    server_file,
    write_atomically,
)

__all__ = [
    "CHECKPOINTS", "CONFIG", "EVENTS", "RECORDS", "REPORTS", "SERVER", "SUMMARY", "WORKERS", "Config", "server_file",
    "trainable", "whole_exchanges", "write_atomically",
]  # fmt: skip


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def whole_exchanges(iterations: int, job: Job) -> int:
    """Round a number of iterations up to whole exchanges."""
    return -(-iterations // job.every) * job.every


@dataclass(frozen=True)
class Config:
    """Configuration of a run. Two synchronous runs with equal configurations end with equal weights.

    Args:
        data_dir: Folder of the data set; None for embedded data or the folder of the environment variable.
        script: ``file.py:function`` that builds the task instead of model and data.
        method: Name of the method that set the job's options.
        warmup: Iterations until the full learning rate.
        holdout: Fraction of the training examples that are held out.
        servers: Number of servers that share the parameters.
        bundled: Whether parameters are exchanged as one vector instead of one by one.
        layers: Scheme of compressed layers; None leaves them dense.
        layers_init: Initial weights of compressed layers: ``fresh`` or ``project``.
        job: Options that server and workers agree on.
    """

    model: str = "mlp"
    data: str = "digits"
    data_dir: str | None = None
    script: str | None = None
    batch: int = 64
    iterations: int = 200
    method: str = "1"
    schedule: str = "constant"
    warmup: int = 0
    holdout: float = 0.05
    servers: int = 1
    bundled: bool = False
    layers: str | None = None
    layers_init: str = "fresh"
    job: Job = field(default_factory=Job)

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.iterations % self.job.every:
            raise ConfigError(
                f"iterations must be a multiple of every ({self.job.every}), at least one; got {self.iterations}"
            )
        if self.servers < 1:
            raise ConfigError(f"servers must be an integer of at least 1, got {self.servers}")
        if self.servers > 1 and self.job.update_mode.staleness_bound:
            raise ConfigError("mode bounded needs servers=1: several servers cannot agree on the staleness")
        if self.bundled and self.job.optimizer == "muon":
            raise ConfigError("optimizer=muon needs matrices: leave --bundled out")
        if self.layers is not None:
            parse_scheme(self.layers)
        if self.layers_init not in INITS:
            raise ConfigError(f"layers_init must be {' or '.join(INITS)}, got {self.layers_init!r}")

    def task(self) -> Task:
        folder = Path(self.data_dir) if self.data_dir else None
        return build_task(
            self.model, self.data, data_dir=folder, seed=self.job.seed, holdout=self.holdout, script=self.script,
            layers=self.layers, layers_init=self.layers_init,
        )  # fmt: skip

    def resolved(self, task: Task, *, epochs: int | None = None, iterations: int | None = None) -> Config:
        """Return the configuration with as many iterations as requested (default: three epochs), in whole exchanges.

        The data shards and the subspace state are built once, so that a wrong configuration raises an error here and
        not in every process.
        """
        shards = Shards(task.num_train, self.job.workers, self.batch, self.job.seed)
        if iterations is None:
            iterations = (3 if epochs is None else epochs) * shards.iterations_per_epoch
        if iterations < 1:
            raise ConfigError(f"expected at least one iteration, got {iterations}")
        resolved = replace(self, iterations=whole_exchanges(iterations, self.job))
        resolved.subspace_state(task)
        return resolved

    def subspace_state(self, task: Task) -> SubspaceState | None:
        """Return the state of the task's subspace layers that is not exchanged, or None."""
        state = SubspaceState.of(task.model, self.job, self.rates(), bundled=self.bundled)
        if state is not None and self.job.optimizer != "sgd":
            raise ConfigError(f"layers with a subspace need optimizer=sgd, got {self.job.optimizer}")
        return state

    def restore(self, task: Task, slots: Mapping[str, Tensor], resident: Mapping[str, Tensor], exchanges: int) -> None:
        """Load the weights after that many exchanges into the task's model."""
        parameters = trainable(task.model)
        with torch.no_grad():
            for name, x in self.layout(parameters).unpack(slots).items():
                parameters[name].copy_(x)
        subspaces = self.subspace_state(task)
        if subspaces is not None:
            subspaces.load(resident, exchanges)

    def layout(self, parameters: Mapping[str, Tensor]) -> Layout:
        return Layout.of(parameters, bundled=self.bundled, pieces=self.servers)

    def parts(self, parameters: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the slots of each server."""
        return partition(self.layout(parameters).pack(parameters), self.servers)

    def rates(self) -> Schedule:
        return Schedule(self.job.lr, self.schedule, warmup=self.warmup, iterations=self.iterations)

    @property
    def exchanges(self) -> int:
        return self.iterations // self.job.every

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Config:
        require_fields(cls, values, "a configuration")
        return cls(**{**values, "job": Job.from_json(values["job"])})

    def save(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir / CONFIG, json.dumps(self.to_json(), indent=2))

    @classmethod
    def load(cls, run_dir: Path) -> Config:
        try:
            return cls.from_json(read_json(run_dir / CONFIG))
        except (FileNotFoundError, NotADirectoryError):
            raise FileError(f"{run_dir} is not a run folder: it has no {CONFIG}") from None
        except FileError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FileError(f"{run_dir / CONFIG} does not hold a configuration: {error}") from None
