"""The paper's claims, and the evidence for them. Its tables are pictures; these numbers are from its text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from laconic_lab.studies.claims import Claim, Evidence
from laconic_lab.studies.intervals import Interval, mean_interval
from laconic_lab.studies.kothari2021.experiments import METHOD_NAMES, PAPER
from laconic_lab.studies.kothari2021.results import MODEL_NAMES, Results, Row, TimedMethod
from laconic_lab.studies.kothari2021.settings import HYPER, MODELS
from laconic_lab.studies.kothari2021.times import LINKS
from laconic_lab.studies.kothari2021.trainings import TARGET, seconds_to
from laconic_lab.studies.scoreboard import GOAL

__all__ = ["CLAIMS", "GOALS", "PAPER_ACCURACY", "PAPER_COMMUNICATION_MIN", "PAPER_MB", "PAPER_TOTAL_MIN"]

PAPER_ACCURACY = {("vgg11", "1"): "86", ("vgg11", "5"): "79", ("vgg11", "6"): "more than 5's"}
PAPER_ACCURACY |= {("lenet5", "6"): "less than 2 points below 1's", ("vgg11", "2w"): "does not converge"}
PAPER_MB = {("vgg11", "1"): 137.0, ("vgg11", "3"): 137.0, ("vgg11", "6"): 0.48}
PAPER_COMMUNICATION_MIN = {("vgg11", "1"): 20.0, ("vgg11", "5"): 10.0, ("vgg11", "6"): 5.0}
PAPER_TOTAL_MIN = {("lenet5", "1"): "20", ("lenet5", "6"): "10", ("vgg11", "6"): "15 less than 1's"}
"""Minutes of all of the paper's epochs, with all processes on one machine."""

GOALS = (
    ("vgg11", "laconic", 285, 0.2),
    ("vgg11", "laconic-min", 1000, 0.5),
    ("lenet5", "laconic", 1, 0.2),
    ("lenet5", "laconic-min", 1, 0.2),
)
"""Model, method, how many times fewer bytes than method 1, and the most points that may be lost."""

SMALLEST = 2000
"""How many times fewer bytes than method 1 the smallest settings of VGG-11 shall have."""

UNSHAPED = LINKS[0]
"""Link for claims about time: the paper's workers "are very near to each other"."""


LAYOUT = "one linear layer, not two"
"""VGG-11 of the paper has four pools and two fully connected layers."""
FEWEST_EXCHANGES = 10
"""Timed exchanges below which a time is no more than a sample."""


def _differs(row: Row, *, trained: bool = True) -> str:
    """Describe how runs differ from the paper's."""
    model, epochs = row.values["model"], row.values["epochs"]
    parts = [LAYOUT] if model == "vgg11" else []
    if row.values["data"] != MODELS[model]:
        parts.append(f"{row.values['data']}, not {MODELS[model]}")
    if trained and epochs != HYPER[model].epochs:
        parts.append(f"{epochs} epochs, not {HYPER[model].epochs}")
    specs = [str(row.values["options"].get(name, "")) for name in ("push", "pull")]
    if any("qsgd" in spec and "bucket=" not in spec for spec in specs):
        parts.append("a norm of 512 values, not of a layer")
    return "; ".join(parts)


def _basis(row: Row) -> str:
    count = len(row.runs)
    return f"{row.values['data']}, {row.values['epochs']} epochs, {count} run{'s' if count != 1 else ''}"


def _megabytes(model: str, method: str) -> Callable[[Results], Evidence | None]:
    def evidence(results: Results) -> Evidence | None:
        row = results.row(model, method)
        if row is None:
            return None
        interval = Interval.exact(row.bytes_per_iteration / 1e6, len(row.runs))
        return Evidence(interval, _basis(row), sources=row.runs, differs=_differs(row, trained=False))

    return evidence


def _transfer(results: Results, method: str) -> list[Mapping[str, Any]]:
    """Return exchanges of a method's gradients with the paper's layers."""
    return [one for one in results.rounds if one["model"] == "vgg11fc" and one["name"].split(",")[0] == method]


def _size_of_1(results: Results) -> Evidence | None:
    transfers = _transfer(results, "1")
    if not transfers:
        return _megabytes("vgg11", "1")(results)
    basis = "one transfer of VGG-11 with four pools and linear layers 2048-4096-4096-10"
    interval = Interval.exact(transfers[0]["transfer_bytes"] / 1e6)
    return Evidence(interval, basis, "fitted", transfers[:1])


def _size_of_6(results: Results) -> Evidence | None:
    """Return the closest of the sizes that were swept: the paper states neither the share of Top-k nor the bits."""
    transfers = [one for one in _transfer(results, "6") if "%" in one["name"]]
    if not transfers:
        return _megabytes("vgg11", "6")(results)

    def megabytes(one: Mapping[str, Any]) -> float:
        return float(one["transfer_bytes"] / one["every"] / 1e6)

    best = min(transfers, key=lambda one: abs(megabytes(one) - PAPER_MB["vgg11", "6"]))
    basis = f"{best['name'].partition(', ')[2]}: the closest of {len(transfers)} readings, one transfer"
    return Evidence(Interval.exact(megabytes(best)), basis, "fitted", [best])


def _async_over_sync(results: Results) -> Evidence | None:
    """Asynchronous minus synchronous accuracy of method 1 with four equal workers, seed by seed."""
    sync, free = (results.row("lenet5", f"1/4/{mode}", "workers") for mode in ("sync", "async"))
    if sync is None or free is None:
        return None
    by_seed = dict(zip(sync.seeds, sync.final, strict=True))
    gains = [top1 - by_seed[seed] for seed, top1 in zip(free.seeds, free.final, strict=True) if seed in by_seed]
    if not gains:
        return None
    return Evidence(mean_interval(gains), f"4 workers, {_basis(free)}", sources=free.runs, differs=_differs(free))


def _time_of_async(results: Results) -> Evidence | None:
    """Seconds until the accuracy without rounds over those in rounds, while one worker is slow."""
    rows = [results.trainings.get(("unequal", "1", "one slow worker", update)) for update in ("async", "sync")]
    if any(row is None for row in rows):
        return None
    reached = [[seconds_to(run, TARGET).seconds for run in row.runs] for row in rows if row is not None]
    known = [[seconds for seconds in one if seconds is not None] for one in reached]
    if not all(known):
        return None
    ratio = Interval.exact(fmean(known[0]) / fmean(known[1]), min(map(len, known)))
    runs = [run for row in rows if row is not None for run in row.runs]
    return Evidence(ratio, f"to {TARGET:g} %, 3 workers, one at a quarter of its speed", sources=runs)


def _goal(model: str, method: str, factor: int, points: float) -> Claim:
    """A goal of ours: a method's bytes, and the most points that it may lose."""

    def evidence(results: Results) -> Evidence | None:
        row = results.row(model, method)
        if row is None or not (lost := results.loss(row)):
            return None
        less = results.less(row) or 0.0
        basis = f"1/{less:,.0f} of the bytes, {_basis(row)}"
        interval = mean_interval(lost) if less >= factor else Interval.exact(math.inf)
        return Evidence(interval, basis, sources=row.runs)

    bytes_ = f" at 1/{factor:,} of the bytes or fewer" if factor > 1 else ""
    statement = f"{MODEL_NAMES[model]}, `{method}`{bytes_}: points lost"
    return Claim(f"goal_{model}_{method}", statement, GOAL, points, "<", "points", evidence=evidence)


def _smallest(results: Results) -> Evidence | None:
    """The setting of the frontier that loses least of those with 1/2,000 of the bytes or fewer."""
    rows = [row for row in results.rows("frontier", "vgg11") if (results.less(row) or 0.0) >= SMALLEST]
    losses = [(mean_interval(lost), row) for row in rows if (lost := results.loss(row))]
    if not losses:
        return None
    interval, row = min(losses, key=lambda pair: pair[0].mean)
    basis = f"{row.name}, the best of {len(losses)}: 1/{results.less(row):,.0f} of the bytes, {_basis(row)}"
    return Evidence(interval, basis, sources=row.runs)


def _top1(model: str, method: str) -> Callable[[Results], Evidence | None]:
    """A method's accuracy in the longest runs, which come closest to the paper's epochs, however few there are."""

    def evidence(results: Results) -> Evidence | None:
        row = next(reversed(results.by_length(model, method)), None)
        if row is None:
            return None
        return Evidence(mean_interval(row.final), _basis(row), sources=row.runs, differs=_differs(row))

    return evidence


def _workers_top1(model: str, reading: str) -> Callable[[Results], Evidence | None]:
    """The accuracy of the weights that workers hold: those that the paper's workers train and test."""

    def evidence(results: Results) -> Evidence | None:
        row = results.row(model, reading, "readings")
        if row is None:
            return None
        held = mean_interval([run["worker_accuracy"] for run in row.runs])
        return Evidence(held, f"{reading}: {_basis(row)}", sources=row.runs, differs=_differs(row))

    return evidence


def _vgg_2w(results: Results) -> Evidence | None:
    """Weights by QSGD as the paper has it, with one norm per layer, or else with norms of 512 values."""
    return _workers_top1("vgg11", "2w, 4 bits, a norm per layer")(results) or _top1("vgg11", "2w")(results)


def _bytes_of_3_over_1(results: Results) -> Evidence | None:
    first, third = results.row("vgg11", "1"), results.row("vgg11", "3")
    if first is None or third is None:
        return None
    ratio = third.bytes_per_iteration / first.bytes_per_iteration
    return Evidence(Interval.exact(ratio, len(third.runs)), _basis(third), sources=third.runs)


def _top1_of_6_over_5(results: Results) -> Evidence | None:
    six = results.row("vgg11", "6")
    five = None if six is None else results.alike(six, "5")
    if five is None or six is None:
        return None
    fives, mean = dict(zip(five.seeds, five.final, strict=True)), fmean(five.final)
    gains = [top1 - fives.get(seed, mean) for seed, top1 in zip(six.seeds, six.final, strict=True)]
    return Evidence(mean_interval(gains), _basis(six), sources=[*five.runs, *six.runs], differs=_differs(six))


def _largest_loss(results: Results) -> Evidence | None:
    names = set(METHOD_NAMES) - {"1", "2w"}
    rows = [row for row in results.rows("accuracy", "lenet5") if row.name in names]
    losses = [(mean_interval(loss), row) for row in rows if (loss := results.loss(row))]
    if not losses:
        return None
    interval, row = max(losses, key=lambda pair: pair[0].mean)
    tried = [row.name for _, row in losses]
    missing = [method for method in PAPER if method in names and method not in tried]
    basis = f"method {row.name} of {', '.join(tried)}: {_basis(row)}"
    differs = [_differs(row), f"{', '.join(missing)} not run" if missing else ""]
    return Evidence(interval, basis, sources=row.runs, differs="; ".join(filter(None, differs)))


def _calm(results: Results, model: str, method: str) -> TimedMethod | None:
    """Return times of a calm machine: on a busy one the method that computes more is slowed down more."""
    timed = results.times.get((model, UNSHAPED, method))
    return timed if timed is not None and timed.calm else None


def _time_over_method_1(model: str, method: str, name: str) -> Callable[[Results], Evidence | None]:
    def evidence(results: Results) -> Evidence | None:
        own, first = (_calm(results, model, one) for one in (method, "1"))
        if own is None or first is None or not first.seconds(name):
            return None
        ratio, differs = Interval.exact(own.seconds(name) / first.seconds(name)), _few_exchanges(own, first)
        if name == "total_s":
            differs = "; ".join(filter(None, [_extrapolated(own, first), differs]))
        return Evidence(ratio, "the server, unshaped", sources=own.runs, differs=differs)

    return evidence


def _extrapolated(*timed: TimedMethod) -> str:
    """Describe times that stand for those of a whole training."""
    return f"{min(one.iterations for one in timed)} iterations timed, not a training"


def _few_exchanges(*timed: TimedMethod) -> str:
    fewest = min(sum(len(turn["exchange_s"]) for turn in one.runs) for one in timed)
    return f"{fewest} exchange{'s' * (fewest != 1)} timed" if fewest < FEWEST_EXCHANGES else ""


def _minutes_saved(results: Results) -> Evidence | None:
    first, sixth = (_calm(results, "vgg11", method) for method in ("1", "6"))
    if first is None or sixth is None:
        return None
    saved = Interval.exact(first.minutes() - sixth.minutes())
    differs = "; ".join(filter(None, [_extrapolated(first, sixth), _few_exchanges(first, sixth)]))
    return Evidence(saved, "the server, unshaped", sources=sixth.runs, differs=differs)


CLAIMS = (
    Claim("vgg_1_mb", "data of an iteration, VGG-11, method 1", "4.2", 137.0, "=", "MB", 13.7,
          _size_of_1),
    Claim("vgg_3_as_1", "method 3's data over method 1's", "8", 1.0, "=", "×", 0.01, _bytes_of_3_over_1),
    Claim("vgg_6_mb", "data of an iteration, VGG-11, method 6", "8", 0.48, "=", "MB", 0.24, _size_of_6),
    Claim("vgg_1_top1", "top-1 of VGG-11, method 1", "8", 86.0, "=", "%", 1.0, _top1("vgg11", "1")),
    Claim("vgg_5_top1", "top-1 of VGG-11, method 5", "8", 79.0, "=", "%", 1.0, _top1("vgg11", "5")),
    Claim("vgg_6_over_5", "method 6's top-1 over method 5's, VGG-11", "8", 0.0, ">", "points",
          evidence=_top1_of_6_over_5),
    Claim("lenet_loss", "largest loss of any method on LeNet-5 (without 2w)", "8", 2.0, "<", "points",
          evidence=_largest_loss),
    Claim("vgg_2w", "top-1 of VGG-11, weights by QSGD: no convergence", "5", 20.0, "<", "%",
          evidence=_vgg_2w),
    Claim("lenet_2w", "top-1 of a worker's LeNet-5, weights by QSGD with 4 bits and a norm per layer: no convergence",
          "5", 20.0, "<", "%", evidence=_workers_top1("lenet5", "2w, 4 bits, a norm per layer")),
    Claim("vgg_comm_5", "method 5's communication time over method 1's", "8", 0.5, "=", "×", 0.1,
          _time_over_method_1("vgg11", "5", "communication_s")),
    Claim("vgg_comm_6", "method 6's communication time over method 1's", "8", 0.25, "=", "×", 0.05,
          _time_over_method_1("vgg11", "6", "communication_s")),
    Claim("vgg_minutes_6", "time that method 6 saves on VGG-11, 50 epochs", "8", 15.0, "=", "min", 5.0,
          _minutes_saved),
    Claim("lenet_time_6", "whole training of LeNet-5, method 6 over method 1", "8", 0.5, "=", "×", 0.1,
          _time_over_method_1("lenet5", "6", "total_s")),
    Claim("async_top1", "top-1 without rounds minus in rounds, method 1", "4.1.2", 0.0, "<", "points",
          evidence=_async_over_sync),
    Claim("async_time", "time to 95 % without rounds over in rounds, one slow worker", "4.1.2", 1.0, "<", "×",
          evidence=_time_of_async),
    *(_goal(*goal) for goal in GOALS),
    Claim("goal_smallest", f"VGG-11, any setting at 1/{SMALLEST:,} of the bytes or fewer: points lost", GOAL, 0.5, "<",
          "points", evidence=_smallest),
)  # fmt: skip
"""In the paper's order, then our goals. The bound of 20 % for "does not converge" is ours: chance is 10 %."""
