"""From Records of times to tables: turns put together, and what all of the paper's epochs would take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from laconic_lab.studies.kothari2021.claims import PAPER_COMMUNICATION_MIN, PAPER_TOTAL_MIN
from laconic_lab.studies.kothari2021.experiments import METHOD_NAMES
from laconic_lab.studies.kothari2021.times import LINKS, busy
from laconic_lab.studies.tables import Table

__all__ = ["LINK_NAMES", "MODEL_NAMES", "Cell", "Times", "cells", "compute_and_communication", "end_to_end", "links",
           "place"]  # fmt: skip

MODEL_NAMES = {"lenet5": "LeNet-5", "vgg11": "VGG-11"}
LINK_NAMES = {"unshaped": "unshaped", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}


def place(name: str) -> tuple[int, str]:
    return (METHOD_NAMES.index(name), "") if name in METHOD_NAMES else (len(METHOD_NAMES), "")


@dataclass
class Cell:
    """All turns of a method on a model over a link."""

    turns: list[Mapping[str, Any]]

    @property
    def values(self) -> Mapping[str, Any]:
        return self.turns[0]

    @property
    def iterations(self) -> int:
        return sum(int(turn["iterations"]) for turn in self.turns)

    @property
    def valid(self) -> bool:
        return all(turn["valid"] for turn in self.turns)

    @property
    def calm(self) -> bool:
        """Whether nobody else worked on the machine."""
        return not any(busy(turn) for turn in self.turns)

    def seconds(self, name: str = "total_s") -> float:
        """Of an iteration, the mean."""
        return float(sum(turn[name] for turn in self.turns)) / self.iterations

    @property
    def median(self) -> float:
        """Seconds of an iteration; of several between two exchanges their mean counts as one."""
        return float(median(one / turn["every"] for turn in self.turns for one in turn["exchange_s"]))

    def minutes(self, name: str = "total_s") -> float:
        """For all of the paper's epochs, if they all go like those measured."""
        iterations = int(self.values["epochs"]) * int(self.values["iterations_per_epoch"])
        return self.seconds(name) * iterations / 60


Times = Mapping[tuple[str, str, str], Cell]
"""By model, link and method."""


def cells(records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], Cell]:
    """By model, link and method, in the tables' order.

    Of a method that was changed the newest counts, and of a turn that was measured again the last. Turns behind a link
    that was not what it should be, or on a busy machine, count only where there are no others.
    """
    newest: dict[tuple[str, str, str], tuple[object, dict[int, Mapping[str, Any]]]] = {}
    for values in records:
        where, setting = (values["model"], values["link"], values["method"]), (values["data"], values["options"])
        if where not in newest or newest[where][0] != setting:
            newest[where] = (setting, {})
        newest[where][1][values["turn"]] = values
    found = {}
    for where in sorted(newest, key=lambda p: (list(MODEL_NAMES).index(p[0]), LINKS.index(p[1]), place(p[2]))):
        turns = [turn for _, turn in sorted(newest[where][1].items())]
        turns = [turn for turn in turns if turn["valid"]] or turns
        found[where] = Cell([turn for turn in turns if not busy(turn)] or turns)
    return found


def _time_rows(times: Times, cells_of: Callable[[Cell], Sequence[str]]) -> list[tuple[str, ...]]:
    return [
        (MODEL_NAMES[model], LINK_NAMES[link] + _doubts(cell), method, *cells_of(cell))
        for (model, link, method), cell in times.items()
    ]


def _doubts(cell: Cell) -> str:
    doubts = [] if cell.valid else ["not valid"]
    doubts += [] if cell.calm else ["busy"]
    return f" ({', '.join(doubts)})" if doubts else ""


def compute_and_communication(times: Times) -> Table:
    def cells_of(cell: Cell) -> Sequence[str]:
        names = ("compute_s", "encode_s", "overlapped_s", "communication_s", "apply_s", "total_s")
        per = [*(cell.seconds(name) for name in names), cell.median]
        paper = PAPER_COMMUNICATION_MIN.get((cell.values["model"], cell.values["method"]))
        minutes = f"{cell.minutes('communication_s'):.1f}"
        return (
            *(_ms(one) for one in per), str(cell.iterations), minutes, "" if paper is None else f"{paper:g}",
        )  # fmt: skip

    columns = (
        "model", "link", "method", "compute, ms an iteration", "encode", "overlapped", "communication", "apply", "all",
        "all, median", "iterations", "communication, all epochs, min", "paper, min",
    )  # fmt: skip
    return Table("Compute and communication time", columns, _time_rows(times, cells_of))


def _ms(seconds: float) -> str:
    """Three digits that count, without an exponent."""
    ms = 1e3 * seconds
    return f"{ms:.{0 if ms >= 100 else 1 if ms >= 10 else 2}f}"


def links(times: Times) -> Table:
    rows = []
    for model in MODEL_NAMES:
        for link in LINKS:
            turns = [turn for (m, one, _), cell in times.items() if (m, one) == (model, link)
                     for turn in cell.turns]  # fmt: skip
            if not turns:
                continue
            carried = [bits / 1e6 for turn in turns for bits in turn["link_measured"]]
            load = [one for turn in turns for one in turn["load_average"]]
            rows.append((
                MODEL_NAMES[model], LINK_NAMES[link], " and ".join(sorted({turn["link_made_of"] for turn in turns})),
                _range(carried), "yes" if all(turn["valid"] for turn in turns) else "no", str(len(turns)),
                _range(load, 1), str(sum(turn["retries"] for turn in turns)),
            ))  # fmt: skip
    columns = ("model", "link", "made of", "payload, Mbit/s", "valid", "turns", "load average", "calls made again")
    return Table("Links", columns, rows)


def _range(values: Sequence[float], digits: int = 0) -> str:
    low, high = (f"{one:,.{digits}f}" for one in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def end_to_end(times: Times) -> Table:
    def cells_of(cell: Cell) -> Sequence[str]:
        model, link, method = (cell.values[name] for name in ("model", "link", "method"))
        first = times.get((model, link, "1"))
        faster = "" if first is None else f"{first.seconds() / cell.seconds():.2f}"
        minutes = cell.minutes()
        return (
            f"{cell.seconds():.3g}", str(cell.values["epochs"]), f"{minutes:,.{0 if minutes >= 100 else 1}f}",
            PAPER_TOTAL_MIN.get((model, method), ""), faster,
        )  # fmt: skip

    columns = (
        "model", "link", "method", "s an iteration", "epochs", "minutes for all", "paper, min", "times as fast as 1",
    )  # fmt: skip
    return Table("End-to-end time", columns, _time_rows(times, cells_of))
