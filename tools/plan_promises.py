"""What ``laconic plan`` promises and what real runs kept, and utilisation predicted and measured, from Records.

Tables of docs/planner.md. A promise is made from the time of a step alone, the link, and the shipped profile ``cpu``
with as many processes as ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from page_blocks import RESULTS

from laconic.plan import PlanRequest, profile, recommend
from laconic.plan.candidates import Candidate
from laconic.plan.internet import Fleet, Line, LocalTraining, predict
from laconic.records import read
from laconic.tables import Table
from laconic.units import parse_rate, parse_time
from laconic_lab.bench.gpt.methods import METHODS
from laconic_lab.bench.gpt.settings import link_parts, show_link

KEPT = 0.8
"""Share of a promised gain that must be kept."""


@dataclass(frozen=True)
class Promise:
    """A recommendation, and the run that followed it.

    Args:
        promised, kept: How many times as soon as by plain DDP the same quality is reached.
        quality: What the run reached, and plain DDP.
        reached: Whether that is the same quality.
    """

    model: str
    link: str
    ranks: int
    recipe: str
    promised: float
    kept: float | None
    quality: str
    reached: bool

    @property
    def holds(self) -> bool:
        return self.reached and self.kept is not None and self.kept >= KEPT * self.promised


def _link(text: str) -> dict[str, float]:
    rate, delay = link_parts(text)
    return {"rate": 1e15 if rate is None else parse_rate(rate), "round_trip_s": 2 * parse_time(delay)}


def _gpt_runs() -> list[Mapping[str, Any]]:
    file = RESULTS / "bench" / "gpt.jsonl"
    runs = [record.values for record in read(file) if record.kind == "bench.gpt"] if file.exists() else []
    return [run for run in runs if run["valid"] and run["failed"] is None]


def _gpt_promises() -> Iterator[Promise]:
    """The GPT of ``laconic bench gpt`` by AdamW: time until the loss of plain DDP."""
    runs = _gpt_runs()
    for plain in (run for run in runs if run["method"] == "ddp"):
        request = PlanRequest.for_params(
            profile.load("cpu"), plain["numel"], plain["compute_s"], family="transformer", workers=plain["ranks"],
            processes=plain["ranks"], topology="ring", **_link(plain["link"]),
        )  # fmt: skip
        advice = recommend(request, break_even=False)
        chosen, evidence = advice.row.candidate, advice.row.evidence
        outer = "mean" if evidence is None else evidence.outer
        recipe = advice.codec if outer == "mean" else f"{advice.codec}, outer={outer}"
        for run in runs:
            method = METHODS[run["method"]]
            way = Candidate(method.codec or "none", max(1, method.every), method.fragments, method.overlap, True)
            same = (run["link"], run["ranks"]) == (plain["link"], plain["ranks"])
            if same and method.optimizer == "adamw" and method.every and method.outer == outer and way == chosen:
                yield Promise(
                    "GPT, 3.7 M", show_link(run["link"]), run["ranks"], recipe, advice.quality_speedup,
                    None if run["reached_s"] is None else plain["reached_s"] / run["reached_s"],
                    f"loss {run['loss']:.3f}, plain DDP {plain['loss']:.3f}", run["reached_s"] is not None,
                )  # fmt: skip


def _lenet_promises() -> Iterator[Promise]:
    """LeNet-5 of ``laconic bench ddp --train``: time of as many steps, with the accuracy of plain DDP."""
    for file in sorted((RESULTS / "ddp").glob("*.jsonl")):
        runs = [record.values for record in read(file) if record.kind == "bench.ddp.train"]
        runs = [run for run in runs if run["valid"] and run["failed"] is None and "median_step_s" in run]
        plain = next((run for run in runs if run["way"] == "ddp"), None)
        local = next((run for run in runs if run["way"].startswith("local ")), None)
        if plain is None or local is None:
            continue
        # Most local steps exchange nothing: their median is the time of a step alone, while all ranks compute.
        request = PlanRequest.for_model(
            profile.load("cpu"), plain["model"], local["median_step_s"], workers=plain["ranks"], topology="ring",
            **_link(plain["rate"]),
        )  # fmt: skip
        advice = recommend(request, break_even=False)
        for run in runs:
            if run["way"] == advice.codec and run["batch"] == plain["batch"]:
                lost = plain["accuracy"] - run["accuracy"]
                yield Promise(
                    "LeNet-5", show_link(run["rate"]), run["ranks"], advice.codec, advice.quality_speedup,
                    plain["train_s"] / run["train_s"],
                    f"{run['accuracy']:.2f} %, plain DDP {plain['accuracy']:.2f} %", lost <= 0.25,
                )  # fmt: skip
                break


def promises() -> list[Promise]:
    """Return all recommendations that were followed by a real run."""
    return [*_gpt_promises(), *_lenet_promises()]


def promise_table() -> str:
    rows = [
        (one.model, one.link, str(one.ranks), f"`{one.recipe}`", f"{one.promised:.1f}",
         "not reached" if one.kept is None else f"{one.kept:.1f}", one.quality, "yes" if one.holds else "no")
        for one in promises()
    ]  # fmt: skip
    columns = ("model", "link", "ranks", "recommended", "promised, times", "kept", "quality", "holds")
    return Table(columns, rows, 2).to_markdown()


@dataclass(frozen=True)
class Utilisation:
    """Share of the time in which ranks compute, with local steps over a link."""

    link: str
    ranks: int
    method: str
    predicted: float
    measured: float


def utilisations() -> Iterator[Utilisation]:
    """Yield utilisation by ``laconic.plan.internet`` beside that of real runs with local steps."""
    for run in _gpt_runs():
        method = METHODS[run["method"]]
        if not method.every:
            continue
        link = _link(run["link"])
        line, ranks = Line(link["rate"], link["rate"], link["round_trip_s"]), run["ranks"]
        sent = 8 * run["sent_nbytes"] / run["steps"] * method.every / (2 * (ranks - 1) / ranks)
        step_s = run["step_s"] * (1 - run["waiting_share"])
        training = LocalTraining(
            method.every, 1.0, sent / run["numel"], fragments=method.fragments, overlap=method.overlap
        )
        predicted = predict(run["numel"], 1e6, Fleet(ranks, 1 / step_s, line), training, rounds=3)
        yield Utilisation(show_link(run["link"]), ranks, run["title"], predicted.utilisation, 1 - run["waiting_share"])


def utilisation_table() -> str:
    rows = [
        (one.link, str(one.ranks), one.method, f"{100 * one.predicted:.0f} %", f"{100 * one.measured:.0f} %")
        for one in utilisations()
    ]
    return Table(("link", "ranks", "exchange", "predicted", "measured"), rows, 3).to_markdown()
