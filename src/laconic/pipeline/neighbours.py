"""Neighbours: stages that exchange messages compare their settings before the first one, and states they have loaded.

A message of another codec, or by ``klt`` of another step, has another size, which backends report obscurely or not at
all: gloo ends the process. Settings and states go through the store of the default process group, so that no message of
the schedule changes its place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining.stage import _PipelineStageBase

from laconic.errors import ConfigError

__all__ = ["Neighbours"]

_calls: Counter[str] = Counter()
"""Calls for the same stage of the same ranks, which distinguish pipelines that are built one after the other."""


class Neighbours:
    """Publishes the settings of one stage, and the states it loads, and compares them with those of other stages.

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
        self._loads = 0
        self._compared_settings = self._compared_all = False
        self._store = distributed_c10d._get_default_store()
        self._store.set(f"{self._prefix}/{stage.stage_index}", json.dumps(self.settings))

    def loaded(self, shared: Sequence[Sequence[Any]]) -> None:
        """Publish what a loaded state holds; the next step compares it with the states of the other stages.

        Args:
            shared: The results of ``Traffic.shared`` of this stage.
        """
        self._loads += 1
        self._compared_all = False
        self._store.set(self._loaded_key(self.stage.stage_index, self._loads), json.dumps(shared))

    def compare(self) -> None:
        """Raise ``ConfigError`` unless settings and loaded states fit together; later calls return at once."""
        if self._compared_all:
            return
        if not self._compared_settings:
            self._compare_settings()
            self._compared_settings = True
        self._compare_loaded()
        self._compared_all = True

    def _compare_settings(self) -> None:
        stage = self.stage
        for other in (stage.stage_index - 1, stage.stage_index + 1):
            if not 0 <= other < stage.num_stages or stage.stage_index_to_group_rank[other] == stage.group_rank:
                continue
            theirs = json.loads(
                self._wait(
                    f"{self._prefix}/{other}",
                    f"stage {stage.stage_index} is compressed, but stage {other} has not called "
                    f"laconic.pipeline.compress within {self.timeout_s:g} s: call it for every stage, on all ranks",
                )
            )
            differ = [name for name in self.settings if theirs.get(name) != self.settings[name]]
            if differ:
                shown = "; ".join(f"{name}: {self.settings[name]!r} and {theirs.get(name)!r}" for name in differ)
                raise ConfigError(
                    f"stages {stage.stage_index} and {other} call laconic.pipeline.compress with different arguments "
                    f"({shown}): use the same on all stages"
                )

    def _compare_loaded(self) -> None:
        """Compare the states of all stages: a tensor may skip stages."""
        here, ends = self.stage.stage_index, dict[tuple[Any, ...], dict[str, list[int]]]()
        others = [other for other in range(self.stage.num_stages) if other != here]
        ahead = [other for other in others if self._store.check([self._loaded_key(other, self._loads + 1)])]
        if ahead:
            raise ConfigError(
                f"stage {ahead[0]} has loaded a state, stage {here} has not: call load_state_dict alike on all stages"
            )
        for stage in [here, *others] if self._loads else ():
            published = self._wait(
                self._loaded_key(stage, self._loads),
                f"stage {here} has loaded a state, but stage {stage} has not within {self.timeout_s:g} s: call "
                "load_state_dict alike on all stages",
            )
            for direction, role, *shared in json.loads(published):
                ends.setdefault((direction, *shared), {"sender": [], "receiver": []})[role].append(stage)
        for (direction, tokens, width, _, number, _), by_role in sorted(ends.items()):
            surplus = len(by_role["sender"]) - len(by_role["receiver"])
            if surplus:
                role, did = ("sender", "sent") if surplus > 0 else ("receiver", "received")
                raise ConfigError(
                    f"the stages have loaded states that do not belong together: stage {by_role[role][-1]} has {did} "
                    f"{number} messages of {tokens} x {width} values {direction}, which no other stage's state "
                    "matches. Load the states of one step on all stages"
                )

    def _loaded_key(self, stage: int, loads: int) -> str:
        return f"{self._prefix}/{stage}/loaded/{loads}"

    def _wait(self, key: str, problem: str) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:  # of the store: the key did not appear in time
            raise ConfigError(problem) from error
        return self._store.get(key)
