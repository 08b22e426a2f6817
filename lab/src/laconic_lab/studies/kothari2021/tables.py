"""The paper's four tables, and those of our additions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import fmean

from laconic_lab.studies.claims import Claim, verdict
from laconic_lab.studies.intervals import Interval, mean_interval
from laconic_lab.studies.kothari2021.claims import (
    GOALS,
    PAPER_ACCURACY,
    PAPER_COMMUNICATION_MIN,
    PAPER_MB,
    PAPER_TOTAL_MIN,
)
from laconic_lab.studies.kothari2021.experiments import MODES, RATE_FACTORS, TUNED
from laconic_lab.studies.kothari2021.results import (
    LINK_NAMES,
    MODEL_NAMES,
    RUN,
    Results,
    Row,
    TimedMethod,
    method_order,
)
from laconic_lab.studies.kothari2021.settings import HYPER
from laconic_lab.studies.kothari2021.times import LINKS
from laconic_lab.studies.kothari2021.trainings import TARGET, seconds_to
from laconic_lab.studies.tables import Table, make_table, mean_and_values

__all__ = ["make_tables"]


def make_tables(results: Results) -> list[Table]:
    """Return all tables but the one of claims."""
    return [
        _top1(results), _links(results), _compute_and_communication(results), _cost(results), _end_to_end(results),
        _readings(results), _goals(results), _ingredients(results), _frontier(results), _workers(results),
        _resnet50(results), _compared(results), _swept(results), _rates(results), _adaptive(results),
        _whole(results), _unequal(results),
    ]  # fmt: skip


def _top1(results: Results) -> Table:
    rows = []
    for model in results.models("accuracy"):
        by_method = (results.by_length(model, preferred.name) for preferred in results.rows("accuracy", model))
        for row in chain.from_iterable(by_method):
            loss, less = results.loss(row), results.less(row)
            rows.append((
                MODEL_NAMES[model], row.name, PAPER_ACCURACY.get((model, row.name), ""), mean_and_values(row.final),
                "" if row.name == "1" or not loss else f"{-fmean(loss):+.2f}", f"{fmean(row.best):.2f}",
                f"{row.bytes_per_iteration / 1e6:.4g}", "" if less is None else f"{less:,.4g}",
                f"{row.values['data']}, {row.values['epochs']}",
            ))  # fmt: skip
    columns = (
        "model", "method", "paper, %", "top-1 % (by seed)", "points over method 1", "best epoch's %", "MB an iteration",
        "method 1's bytes over its", "data, epochs",
    )  # fmt: skip
    return make_table("Top-1 accuracy", columns, rows)


def _cost(results: Results) -> Table:
    """Return the paper's "average communication cost" in megabytes, and in seconds, as its formula gives it."""
    rows = []
    for model in results.models("accuracy"):
        for row in results.rows("accuracy", model):
            paper = PAPER_MB.get((model, row.name))
            timed = [results.times.get((model, link, row.name)) for link in LINKS]
            seconds = ["" if one is None or not one.valid else f"{one.seconds():.3g}" for one in timed]
            megabytes = f"{row.bytes_per_iteration / 1e6:.4g}"
            rows.append((MODEL_NAMES[model], row.name, "" if paper is None else f"{paper:g}", megabytes, *seconds))
    columns = ["model", "method", "paper, MB", "MB an iteration", "s an iteration", "at 1 Gbit/s", "at 100 Mbit/s"]
    while columns[-1] != "MB an iteration" and not any(row[len(columns) - 1] for row in rows):
        columns.pop()
    return make_table("Average cost of an iteration", columns, [row[: len(columns)] for row in rows])


def _goals(results: Results) -> Table:
    rows = []
    for model, method, factor, points in GOALS:
        row = results.row(model, method)
        if row is None or not results.loss(row):
            continue
        less, lost = results.less(row), mean_interval(results.loss(row))
        assert less is not None
        holds = verdict(Claim("", "", "goal", points, "<"), lost) == "yes"
        met = "no: its bytes" if less < factor else "yes" if holds else "no: its interval"
        bytes_goal = f"at most 1/{factor:,}" if factor > 1 else "any"
        runs = f"{lost.runs} run{'s' if lost.runs != 1 else ''}"
        rows.append((
            MODEL_NAMES[model], method, bytes_goal, f"1/{less:,.0f}", f"less than {points:g}", _interval(lost), runs,
            met,
        ))  # fmt: skip
    columns = (
        "model", "method", "goal: bytes", "of method 1's", "goal: points lost", "lost (95 %)", "over", "met",
    )  # fmt: skip
    return make_table("Fewer bytes without losing accuracy", columns, rows)


def _interval(interval: Interval) -> str:
    mean, low, high, _ = interval
    return f"{mean:.3f}" + (f" ({low:.3f} to {high:.3f})" if low < high else "")


SETTING_COLUMNS = (
    "model", "setting", "top-1 %", "points over method 1", "kB an iteration", "method 1's bytes over its",
)  # fmt: skip


def _settings(results: Results, experiment: str, base: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for model in results.models(experiment):
        reference = results.row(model, base)
        shown = ([reference] if reference is not None else []) + results.rows(experiment, model)
        for row in shown:
            less, loss = results.less(row), results.loss(row)
            rows.append((
                MODEL_NAMES[model], row.name, mean_and_values(row.final), "" if not loss else f"{-fmean(loss):+.2f}",
                _kilobytes(row.bytes_per_iteration), "" if less is None else f"{less:,.0f}",
            ))  # fmt: skip
    return rows


def _readings(results: Results) -> Table:
    """Return the readings of what the paper leaves open, with the accuracy of the server's and a worker's weights."""
    rows = []
    for model in results.models("readings"):
        every = results.rows_by_data("readings", model)
        for row in sorted(every, key=lambda row: method_order(row.name.split(",")[0])):
            held = [run["worker_accuracy"] for run in row.runs if "worker_accuracy" in run]
            name, second = f"method {row.name}", mean_and_values(held) if held else ""
            rows.append((MODEL_NAMES[model], name, *_accuracy_and_bytes(results, row, second)))
    columns = ("model", "reading", "data, epochs", "server's top-1 %", "a worker's top-1 %", *BYTES_COLUMNS)
    return make_table("Readings", columns, rows)


BYTES_COLUMNS = ("kB an iteration", "method 1's bytes over its")


def _accuracy_and_bytes(results: Results, row: Row, second: str) -> tuple[str, ...]:
    """Return a row's data, accuracy, a second column about accuracy, and bytes."""
    less = results.less(row)
    return (
        f"{row.values['data']}, {row.values['epochs']}", mean_and_values(row.final), second,
        _kilobytes(row.bytes_per_iteration), "" if less is None else f"{less:,.4g}",
    )  # fmt: skip


def _kilobytes(nbytes: float) -> str:
    """Format bytes as kilobytes with four digits and without an exponent.

    >>> _kilobytes(147_704_896), _kilobytes(477_350)
    ('147,705', '477.4')
    """
    return f"{nbytes / 1e3:,.0f}" if nbytes >= 1e7 else f"{nbytes / 1e3:,.4g}"


def _ingredients(results: Results) -> Table:
    return make_table(
        "What each ingredient is worth", SETTING_COLUMNS, _settings(results, "ingredients", "laconic-min")
    )


def _frontier(results: Results) -> Table:
    rows = _settings(results, "frontier", "laconic")
    rows.sort(key=lambda row: (row[0], -float(row[4].replace(",", ""))))
    return make_table("Fewer and fewer bytes", SETTING_COLUMNS, rows)


def _workers(results: Results) -> Table:
    """Return a row for each method and number of workers, with the modes side by side."""
    by_count: dict[tuple[str, int], dict[str, Row]] = {}
    for row in results.rows("workers", "lenet5"):
        by_count.setdefault((row.name, row.values["workers"]), {})[row.values["mode"]] = row
    rows = []
    for (name, count), modes in by_count.items():
        shown = [modes.get(mode) for mode in MODES]
        kilobytes = fmean(row.bytes_per_iteration / 1e3 for row in modes.values())
        rows.append((
            name, str(count), f"{kilobytes:,.4g}", *("" if row is None else _top1_or_diverged(row) for row in shown),
            *("" if row is None else _staleness(row) for row in shown[1:]),
        ))  # fmt: skip
    columns = (
        "method", "workers", "kB an iteration", *(f"{mode}, top-1 %" for mode in MODES),
        *(f"{mode}: staleness, mean and most" for mode in MODES[1:]),
    )  # fmt: skip
    return make_table("Four and eight workers", columns, rows)


def _top1_or_diverged(row: Row) -> str:
    return "diverged" if row.values["diverged"] else mean_and_values(row.final)


def _staleness(row: Row) -> str:
    return f"{row.values['staleness_mean']:.2f}, {row.values['staleness_most']}"


def _resnet50(results: Results) -> Table:
    of_resnet = [values for values in results.rounds if values["model"] == "resnet50"]
    rounds = sorted(of_resnet, key=lambda values: method_order(values["name"]))
    first = next((values["bytes_per_iteration"] for values in rounds if values["name"] == "1"), None)
    rows = [
        (
            values["name"],
            f"{values['bytes_per_iteration'] / 1e6:.4g}",
            "" if first is None else f"{first / values['bytes_per_iteration']:,.4g}",
            *(f"{1e3 * values[name]:.1f}" for name in ("encode_s", "aggregate_s", "answer_s", "decode_s")),
        )
        for values in rounds
    ]
    columns = (
        "method", "MB an iteration", "method 1's bytes over its", "encode, ms an exchange", "server: mean",
        "server: encode", "decode",
    )  # fmt: skip
    return make_table("ResNet-50's gradients", columns, rows)


def _compared(results: Results) -> Table:
    runs = [run for run in results.of_kind(RUN) if run.get("frames_compared")]
    compared, differing = (sum(run[name] for run in runs) for name in ("frames_compared", "frames_other"))
    rows = [(f"{len(runs):,}", f"{compared:,}", f"{differing:,}")] if runs else []
    return make_table("Frames made and compared", ("runs", "frames compared", "that differ in value or size"), rows)


def _links(results: Results) -> Table:
    rows = []
    for model in MODEL_NAMES:
        for link in LINKS:
            turns = [turn for key, timed in results.times.items() if key[:2] == (model, link) for turn in timed.runs]
            if not turns:
                continue
            goodput = [bits / 1e6 for turn in turns for bits in turn["link_measured"]]
            load = [one for turn in turns for one in turn["load_average"]]
            rows.append((
                MODEL_NAMES[model], LINK_NAMES[link], " and ".join(sorted({turn["link_made_of"] for turn in turns})),
                _range(goodput), "yes" if all(turn["valid"] for turn in turns) else "no", str(len(turns)),
                _range(load, 1), str(sum(turn["retries"] for turn in turns)),
            ))  # fmt: skip
    columns = ("model", "link", "made of", "payload, Mbit/s", "valid", "turns", "load average", "retried calls")
    return make_table("Links", columns, rows)


def _range(values: Sequence[float], digits: int = 0) -> str:
    low, high = (f"{one:,.{digits}f}" for one in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _time_rows(
    results: Results, cells: Callable[[TimedMethod], Sequence[str]], *, valid: bool = False
) -> list[tuple[str, ...]]:
    return [
        (MODEL_NAMES[model], LINK_NAMES[link] + _caveats(timed), method, *cells(timed))
        for (model, link, method), timed in results.times.items()
        if timed.valid or not valid
    ]


def _caveats(timed: TimedMethod) -> str:
    caveats = [] if timed.valid else ["not valid"]
    caveats += [] if timed.calm else ["busy"]
    return f" ({', '.join(caveats)})" if caveats else ""


def _compute_and_communication(results: Results) -> Table:
    def cells(timed: TimedMethod) -> Sequence[str]:
        names = ("compute_s", "encode_s", "overlapped_s", "communication_s", "apply_s", "total_s")
        seconds = [*(timed.seconds(name) for name in names), timed.median]
        paper = PAPER_COMMUNICATION_MIN.get((timed.values["model"], timed.values["method"]))
        minutes = f"{timed.minutes('communication_s'):.1f}" if timed.valid else ""
        return (
            *(_milliseconds(one) for one in seconds), str(timed.iterations), minutes,
            "" if paper is None else f"{paper:g}",
        )  # fmt: skip

    columns = (
        "model", "link", "method", "compute, ms an iteration", "encode", "overlapped", "communication", "apply", "all",
        "all, median", "iterations", "communication, all epochs, extrapolated min", "paper, min",
    )  # fmt: skip
    return make_table("Compute and communication time", columns, _time_rows(results, cells))


def _milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with three significant digits and without an exponent."""
    ms = 1e3 * seconds
    return f"{ms:.{0 if ms >= 100 else 1 if ms >= 10 else 2}f}"


def _end_to_end(results: Results) -> Table:
    """Return the time of a training, extrapolated from iterations over valid links."""

    def cells(timed: TimedMethod) -> Sequence[str]:
        model, link, method = (timed.values[name] for name in ("model", "link", "method"))
        first = results.times.get((model, link, "1"))
        faster = "" if first is None else f"{first.seconds() / timed.seconds():.2f}"
        minutes = timed.minutes()
        return (
            f"{timed.seconds():.3g}", str(timed.values["epochs"]), f"{minutes:,.{0 if minutes >= 100 else 1}f}",
            PAPER_TOTAL_MIN.get((model, method), ""), faster,
        )  # fmt: skip

    columns = (
        "model", "link", "method", "s an iteration", "epochs", "minutes for all, extrapolated", "paper, min",
        "an iteration's time of 1 over its",
    )  # fmt: skip
    return make_table("End-to-end time", columns, _time_rows(results, cells, valid=True))


def _swept(results: Results) -> Table:
    """Return the bytes of one transfer with the paper's layers by share of Top-k and bits, and of method 6."""
    rows = []
    for values in results.rounds:
        if values["model"] != "vgg11fc":
            continue
        transfer, every = values["transfer_bytes"] / 1e6, values["every"]
        plain = ""
        if match := re.fullmatch(r"6, ([\d.]+) %, (\d+) bits", values["name"]):
            kept = float(match[1]) / 100 * values["values"]
            plain = f"{kept * (32 + int(match[2])) / 8e6 / every:.3g}"
        rows.append((
            f"method {values['name']}", f"{transfer:.4g}", f"{transfer / every:.3g}", plain,
            f"{values['bytes_per_iteration'] / 1e6:.3g}",
        ))  # fmt: skip
    columns = (
        "reading", "MB of a transfer", "of an iteration", "with positions of 32 bits", "of an iteration, all transfers",
    )  # fmt: skip
    return make_table("Bytes by keep and bits, with the paper's layers", columns, rows)


def _rates(results: Results) -> Table:
    """Return each method at the same learning rates; its best one is marked."""
    rows = []
    for model in results.models("rates"):
        by_name = {row.name: row for row in results.rows("rates", model)}
        for method in TUNED:
            shown = [by_name.get(f"{method}, rate {round(factor * HYPER[model].lr, 6):g}") for factor in RATE_FACTORS]
            means = [None if row is None else fmean(row.final) for row in shown]
            best = max((mean for mean in means if mean is not None), default=None)
            if best is None:
                continue
            cells = ["" if mean is None else f"**{mean:.2f}**" if mean == best else f"{mean:.2f}" for mean in means]
            data = next(f"{row.values['data']}, {row.values['epochs']}" for row in shown if row is not None)
            rows.append((MODEL_NAMES[model], method, data, *cells))
    columns = ("model", "method", "data, epochs", *(f"{factor:g} × the rate, top-1 %" for factor in RATE_FACTORS))
    return make_table("Methods at the same learning rates", columns, rows)


def _adaptive(results: Results) -> Table:
    rows = []
    for model in results.models("adaptive"):
        for row in results.rows("adaptive", model):
            loss = results.loss(row)
            points = "" if not loss else f"{-fmean(loss):+.2f}"
            rows.append((MODEL_NAMES[model], row.name, *_accuracy_and_bytes(results, row, points)))
    columns = ("model", "setting", "data, epochs", "top-1 % (by seed)", "points over method 1", *BYTES_COLUMNS)
    return make_table("Codec and local steps apart", columns, rows)


def _whole(results: Results) -> Table:
    shown = {key: row for key, row in results.trainings.items() if key[0] == "whole"}
    first = shown.get(("whole", "1", "equal", "sync"))
    rows = []
    for (_, method, _, _), row in shown.items():
        seconds = [run["seconds"] for run in row.runs]
        faster = "" if first is None else f"{fmean(run['seconds'] for run in first.runs) / fmean(seconds):.2f}"
        rows.append((
            MODEL_NAMES[row.values["model"]], LINK_NAMES[row.values["link"]], method,
            f"{row.values['data']}, {row.values['epochs']}", mean_and_values(seconds, 1), faster,
            mean_and_values(row.final),
        ))  # fmt: skip
    columns = ("model", "link", "method", "data, epochs", "seconds in all", "times as fast as 1", "top-1 %")
    return make_table("Trained from start to end over a slow link", columns, rows)


def _unequal(results: Results) -> Table:
    rows = []
    for (part, method, situation, update), row in results.trainings.items():
        if part == "unequal":
            reached = [seconds_to(run, TARGET).seconds for run in row.runs]
            known = [seconds for seconds in reached if seconds is not None]
            rows.append((
                method, situation, update, f"{row.values['data']}, {row.values['epochs']}", str(row.values["workers"]),
                mean_and_values(known, 1) if len(known) == len(reached) else "not reached",
                mean_and_values([run["seconds"] for run in row.runs], 1), mean_and_values(row.final),
            ))  # fmt: skip
    columns = (
        "method", "situation", "server", "data, epochs", "workers", f"s to {TARGET:g} %", "s in all", "top-1 %",
    )  # fmt: skip
    return make_table("One slow worker, one slow link", columns, rows)
