"""Bits of a sent value: changes of real workers, coded by several ways to write positions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from laconic.frames import decode, encode
from laconic.inspect import explain
from laconic.records import Record
from laconic_lab.bench.corpus import Corpus
from laconic_lab.studies.gpt.model import Slots
from laconic_lab.studies.gpt.settings import Setting
from laconic_lab.studies.gpt.training import Training
from laconic_lab.studies.record_log import RecordLog

__all__ = ["KIND", "SPECS", "measure_positions"]

KIND = "gpt.positions"
KEEP = 1 / 64
SPECS = tuple(
    f"topk:{KEEP}{arguments}"
    for arguments in ("|sign", ",code=rans|sign", ",chunk=64,code=rank|sign", ",chunk=4096|bins:2")
)
"""Codecs that send one of 64 values: positions as gaps, as coded gaps, as ranks within chunks; SparseLoCo's values."""


def measure_positions(
    settings: Sequence[Setting], log: RecordLog, corpus: Corpus, device: torch.device
) -> list[Record]:
    """Train each setting and code the last change of the first worker, residual included, by every codec."""
    records = []
    for setting in settings:
        keys = {spec: json.dumps([KIND, corpus.digest[:16], setting.values(), spec], sort_keys=True) for spec in SPECS}
        if any(key not in log for key in keys.values()):
            for spec, values in _measured(setting, corpus, device).items():
                identity = {"key": keys[spec], "part": "positions", "seed": 0, "corpus": corpus.digest}
                log.add(Record(KIND, identity | setting.values() | values, seed=0))
        records += [log.records[key] for key in keys.values()]
    return records


def _measured(setting: Setting, corpus: Corpus, device: torch.device) -> dict[str, dict[str, float | str]]:
    """Return bits of a sent value, and the share of the squared norm that arrives, over all hidden matrices."""
    training = Training(setting, 0, corpus, device)
    assert training.local is not None
    changes: dict[tuple[str, int], Tensor] = {}
    training.local.watch = partial(_keep, changes)
    training.run()
    measured: dict[str, dict[str, float | str]] = {}
    for spec in SPECS:
        kept = nbytes = 0
        arrived = total = 0.0
        for change in changes.values():
            frame = encode(change, spec)
            kept += explain(frame)[0].kept
            nbytes += len(frame)
            lost = change - decode(frame)
            total += float(change.square().sum())
            arrived += float(change.square().sum() - lost.square().sum())
        measured[spec] = {"spec": spec, "bits_per_sent": 8 * nbytes / kept, "kept": kept, "arrived": arrived / total}
    return measured


def _keep(changes: dict[tuple[str, int], Tensor], slots: Slots, first: int, change: Tensor) -> None:
    """Remember the latest change of each hidden matrix of a worker."""
    if slots.hidden:
        for i, row in enumerate(change.view(-1, *slots.shape), first):
            changes[slots.name, i] = row.cpu().clone()
