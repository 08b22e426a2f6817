"""Bits of a sent value: changes of real workers, by codecs, and by contexts and selections that no codec has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.frames import decode, encode
from laconic.inspect import explain
from laconic.records import Record
from laconic_lab.bench.corpus import Corpus
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.gpt.contexts import (
    NEEDS_SPARSE,
    POSITIONS,
    SIGNS,
    code_length,
    position_features,
    sign_features,
)
from laconic_lab.studies.gpt.messages import CODED_WORKERS, Matrix, MessageLog
from laconic_lab.studies.gpt.selections import CHUNKS, PRICES, largest, largest_of_chunks, least_information, priced
from laconic_lab.studies.gpt.settings import Setting
from laconic_lab.studies.gpt.training import Training
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.text_runs import run_key

__all__ = ["CONTEXTS", "GROUPS", "KIND", "SPECS", "measure_positions"]

KIND, CONTEXTS = "gpt.positions", "gpt.contexts"
KEEP = 1 / 64
SPECS = tuple(
    f"topk:{KEEP}{arguments}"
    for arguments in (
        "|sign",
        ",code=rans|sign",
        ",code=context|sign",
        ",chunk=64,code=rank|sign",
        ",chunk=64,code=context|sign",
        ",chunk=4096|bins:2",
    )
)
"""Codecs that send one of 64 values: positions as gaps, as coded gaps, by the contexts of rows and columns, as ranks
within chunks, within chunks by the contexts of columns; SparseLoCo's values."""
GROUPS = ("hidden", "embedding", "head")
SHARE = 0.97
"""Squared norm, beside that of the largest values, at which the least information is computed."""
MAX_VALUES = 1 << 20
"""Values of one kind of matrix whose contexts are computed."""
ROWS_AND_COLUMNS = POSITIONS["row and column so far"]

Outcomes = tuple[dict[str, Tensor], Tensor]
"""Features, and what happened."""


def measure_positions(
    settings: Sequence[Setting], log: RecordLog, corpus: Corpus, device: torch.device, iterations: int | None,
    deadline: Deadline,
) -> list[Record]:  # fmt: skip
    """Train each setting; code the last change of the first worker by every codec, and measure contexts of messages."""
    records = []
    for setting in settings:
        if iterations is not None:
            setting = replace(setting, steps=iterations, warmup=min(setting.warmup, iterations // 4))
        spec_keys, group_keys = (
            {name: f"{run_key(setting, kind, 0, corpus.digest)} {name}" for name in names}
            for kind, names in ((KIND, SPECS), (CONTEXTS, GROUPS))
        )
        if any(key not in log for key in (*spec_keys.values(), *group_keys.values())):
            deadline.check()
            matrices = _trained(setting, corpus, device)
            identity = {"part": "positions", "seed": 0, "corpus": corpus.digest, **setting.values()}
            for kind, keys, measured in (
                (KIND, spec_keys, _measured(matrices)), (CONTEXTS, group_keys, _contexts(matrices))
            ):  # fmt: skip
                for name, values in measured.items():
                    if keys[name] not in log:
                        log.add(Record(kind, {"key": keys[name], **identity, **values}, seed=0))
        records += [log.records[key] for key in (*spec_keys.values(), *group_keys.values())]
    return records


def _trained(setting: Setting, corpus: Corpus, device: torch.device) -> list[Matrix]:
    training = Training(setting, 0, corpus, device)
    assert training.local is not None
    messages = MessageLog(training.local)
    training.run()
    if any(len(matrix.exchanges) < 2 for matrix in messages.matrices):
        raise ConfigError(
            f"contexts need two exchanges, got {setting.steps} steps with an exchange every {setting.every}. "
            "Give more --iterations."
        )
    return messages.matrices


def _measured(matrices: Sequence[Matrix]) -> dict[str, dict[str, float | str]]:
    """Return bits of a sent value, and the share of the squared norm that arrives, over all hidden matrices."""
    measured: dict[str, dict[str, float | str]] = {}
    for spec in SPECS:
        kept = nbytes = 0
        arrived = total = 0.0
        for matrix in matrices:
            if not matrix.hidden:
                continue
            change = matrix.exchanges[-1].changes[0]
            frame = encode(change, spec)
            kept += explain(frame)[0].kept
            nbytes += len(frame)
            lost = change - decode(frame)
            total += float(change.square().sum())
            arrived += float(change.square().sum() - lost.square().sum())
        measured[spec] = {"spec": spec, "bits_per_sent": 8 * nbytes / kept, "kept": kept, "arrived": arrived / total}
    return measured


def _contexts(matrices: Sequence[Matrix]) -> dict[str, dict[str, Any]]:
    """Return ideal bits of positions and signs by context, and of other selections, for each group of matrices."""
    by_kind: dict[str, list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        if len(by_kind[matrix.kind]) * matrix.initial.numel() * CODED_WORKERS < MAX_VALUES:
            by_kind[matrix.kind].append(matrix)
    totals = {group: _Totals() for group in GROUPS}
    for kind, alike in by_kind.items():
        totals["hidden" if alike[0].hidden else kind].add(alike)
    return {group: {"matrices": group, **total.values()} for group, total in totals.items()}


class _Totals:
    """Bits and squared norms of a group of matrices."""

    def __init__(self) -> None:
        self.sent, self.norm, self.information = 0, 0.0, 0.0
        self.bits: dict[str, dict[str, float]] = {"positions": defaultdict(float), "signs": defaultdict(float)}
        self.selected: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """Bits of positions and squared norm, by selection."""

    def add(self, matrices: Sequence[Matrix]) -> None:
        """Add matrices of one kind, with a logistic function of their own for each context."""
        fitted, measured = ({way: _outcomes(matrices, age, way) for way in ("positions", "signs")} for age in (2, 1))
        dense = all(bool(each.signs.all()) for matrix in matrices for each in matrix.exchanges)
        for way, contexts in (("positions", POSITIONS), ("signs", SIGNS)):
            for context, names in contexts.items():
                if dense and context in NEEDS_SPARSE:
                    continue
                self.bits[way][context] += code_length(fitted[way], measured[way], names)
        self.sent += int(measured["positions"][1].sum())
        for matrix in matrices:
            for change in matrix.exchanges[-1].changes:
                self._add_selections(change)
        for price in PRICES:
            by_age = [_outcomes(matrices, age, "positions", price) for age in (2, 1)]
            self.selected[f"price {price:g}"][0] += code_length(by_age[0], by_age[1], ROWS_AND_COLUMNS)

    def _add_selections(self, change: Tensor) -> None:
        selected, squares = largest(change), change.double().square()
        k = int(selected.sum())
        self.norm += float(squares[selected].sum())
        self.information += k * least_information(change, SHARE)
        for chunk in CHUNKS:
            bits, norm = largest_of_chunks(change, chunk)
            total = self.selected[f"chunk {chunk}"]
            total[0], total[1] = total[0] + k * bits, total[1] + norm
        for price in PRICES:
            self.selected[f"price {price:g}"][1] += float(squares[priced(change, price)].sum())

    def values(self) -> dict[str, Any]:
        selections = {name: [bits / self.sent, norm / self.norm] for name, (bits, norm) in self.selected.items()}
        selections["least information"] = [self.information / self.sent, SHARE]
        by_context = {way: {name: bits / self.sent for name, bits in each.items()} for way, each in self.bits.items()}
        return {"sent": self.sent, **by_context, "selections": selections}


def _outcomes(matrices: Sequence[Matrix], age: int, way: str, price: float = 0.0) -> Outcomes:
    """Return features and outcomes of the messages of the last exchange (1) or of the one before it (2)."""
    features: dict[str, list[Tensor]] = defaultdict(list)
    happened = []
    for matrix in matrices:
        exchanges = list(matrix.exchanges)
        now, before = exchanges[-age], exchanges[: len(exchanges) - age]
        for worker, change in enumerate(now.changes):
            selected = priced(change, price) if price else largest(change)
            of = position_features if way == "positions" else sign_features
            for name, values in of(selected, worker, change, before, now.common, matrix.initial).items():
                features[name].append(values)
            happened.append(selected.reshape(-1) if way == "positions" else change[selected] > 0)
    return {name: torch.cat(each) for name, each in features.items()}, torch.cat(happened)
