"""Neighbours: stages that exchange messages compare their settings before the first one.

A message of another codec has another size, which backends report obscurely or not at all. Settings go through the
store of the default process group, so that no message of the schedule changes its place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining.stage import _PipelineStageBase

from laconic.errors import ConfigError

__all__ = ["Neighbours"]

_calls: Counter[str] = Counter()
"""Calls for the same stage of the same ranks, which distinguish pipelines that are built one after the other."""


class Neighbours:
    """Publishes the settings of one stage and reads those of the stages before and after it.

    Args:
        settings: What must be equal, by name.
    """

    def __init__(self, stage: _PipelineStageBase, settings: Mapping[str, str], timeout_s: float) -> None:
        self.stage, self.settings, self.timeout_s = stage, dict(settings), timeout_s
        group = stage.group
        ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
        pipeline = f"laconic.pipeline/{','.join(map(str, ranks))}/{stage.num_stages}"
        self._number = _calls[f"{pipeline}/{stage.stage_index}"]
        _calls[f"{pipeline}/{stage.stage_index}"] += 1
        self._prefix = f"{pipeline}/{self._number}"
        self._store = distributed_c10d._get_default_store()
        self._store.set(f"{self._prefix}/{stage.stage_index}", json.dumps(self.settings))

    def compare(self) -> None:
        """Raise ``ConfigError`` unless the neighbours on other ranks have the same settings."""
        stage = self.stage
        for other in (stage.stage_index - 1, stage.stage_index + 1):
            if not 0 <= other < stage.num_stages or stage.stage_index_to_group_rank[other] == stage.group_rank:
                continue
            theirs = json.loads(self._settings_of(other))
            differ = [name for name in self.settings if theirs.get(name) != self.settings[name]]
            if differ:
                shown = "; ".join(f"{name}: {self.settings[name]!r} and {theirs.get(name)!r}" for name in differ)
                raise ConfigError(
                    f"stages {stage.stage_index} and {other} call laconic.pipeline.compress with different arguments "
                    f"({shown}): use the same on all stages"
                )

    def _settings_of(self, other: int) -> bytes:
        key = f"{self._prefix}/{other}"
        try:
            self._store.wait([key], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:  # of the store: the key did not appear in time
            raise ConfigError(
                f"stage {self.stage.stage_index} is compressed, but stage {other} has not called "
                f"laconic.pipeline.compress within {self.timeout_s:g} s: call it for every stage, on all ranks"
            ) from error
        return self._store.get(key)
