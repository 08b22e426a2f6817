"""Records of the studies as plots, with what papers claim drawn in.

Claims come as Records of kind ``study.claim``, which whoever read the study's Records has made of them: ``study``,
``key``, ``claim``, ``section``, ``relation``, ``claimed``, ``unit``, ``measured``, ``low``, ``high``, ``verdict``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from laconic.report.plots import Cell, Data, Figures, Mark, Plot

__all__ = ["claims", "homomorphic", "jang2017", "kothari2021", "oland2015"]

Values = Mapping[str, Any]
MODELS = {"lenet5": "LeNet-5", "vgg11": "VGG-11", "mlp": "MLP", "resnet50": "ResNet-50", "alexnet": "AlexNet"}


METHODS = ("1", "2", "2w", "3", "4", "5", "6", "adaptive", "laconic", "laconic-min")


def _marks(found: Sequence[Values], keys: Mapping[str, tuple[str, str]]) -> tuple[Mark, ...]:
    """Claims of these keys as lines: by key their axis and words."""
    return tuple(
        Mark(keys[one["key"]][0], float(one["claimed"]), keys[one["key"]][1]) for one in found if one["key"] in keys
    )


# ------------------------------------------------------------------------------------------------------------- claims


def claims(study: str, found: Sequence[Values]) -> tuple[list[Figures], list[Plot]]:
    """What a paper says and what came out, side by side."""
    if not found:
        return [], []
    columns = ("claim", "section", "relation", "claimed", "measured", "low", "high", "unit", "verdict")
    data = Data(columns, [tuple(one.get(name) for name in columns) for one in found])
    sign = {"=": "", ">": "more than ", "<": "less than ", "best": "best: "}

    def shown(value: Any) -> str:
        return "–" if value is None else f"{value:.4g}"

    rows = [
        (
            str(one["claim"]), str(one["section"]),
            f"{sign.get(one['relation'], '')}{shown(one['claimed'])} {one.get('unit') or ''}".strip(),
            f"{shown(one['measured'])} {one.get('unit') or ''}".strip(), str(one["verdict"]),
        )
        for one in found
    ]  # fmt: skip
    table = Figures(f"{study}-claims", "Claimed and measured", ("claim", "section", "claimed", "measured", "holds"),
                    rows, 5, data)  # fmt: skip
    words = [str(one["claim"]) for one in found]
    scaled: list[tuple[Cell, ...]] = [
        (_told(one, words), one["measured"] / one["claimed"], one["measured"], one["claimed"], one.get("unit") or "")
        for one in found
        if one["relation"] == "=" and one["claimed"] and one["measured"] is not None
    ]
    if not scaled:
        return [table], []
    times = Data(("claim", "measured over claimed", "measured", "claimed", "unit"), scaled)
    plot = Plot(f"{study}-claimed", "Measured over claimed", "Of claims that give a value: 1 is what the paper says.",
                "bars", times, "measured over claimed", "claim", detail=("measured", "claimed", "unit"),
                marks=(Mark("x", 1.0, "claimed"),))  # fmt: skip
    return [table], [plot]


def _told(one: Values, words: Sequence[str]) -> str:
    """A claim in words, and by its key where others have the same words."""
    return f"{one['key']}: {one['claim']}" if words.count(str(one["claim"])) > 1 else str(one["claim"])


# -------------------------------------------------------------------------------------------------------- kothari2021


def kothari2021(records: Mapping[str, Sequence[Values]], claimed: Sequence[Values]) -> list[Plot]:
    """Accuracy against epochs, bytes and time; the frontier; ingredients; staleness."""
    runs = sorted(records.get("kothari2021.run", []), key=lambda run: (run["name"] not in METHODS, run["name"]))
    times = records.get("kothari2021.time", [])
    plots: list[Plot] = []
    trained = [run for run in runs if run["part"] == "accuracy"]
    for model in dict.fromkeys(run["model"] for run in trained):
        name = MODELS.get(model, model)
        some = [run for run in trained if run["model"] == model]
        marks = _marks(claimed, {"vgg_1_top1": ("y", "paper, method 1"), "vgg_5_top1": ("y", "paper, method 5")})
        marks = marks if model == "vgg11" else ()
        rows: list[tuple[Cell, ...]] = []
        for run in some:
            sent = accumulate(a + b for a, b in zip(run["push_bytes"], run["pull_bytes"], strict=True))
            for epoch, (top1, total) in enumerate(zip(run["accuracy"], sent, strict=False), 1):
                rows.append((run["name"], run["seed"], epoch, total / 1e6, top1))
        data = Data(("method", "seed", "epoch", "MB", "top-1 %"), rows)
        plots.append(
            Plot(f"kothari-{model}-bytes", f"{name}: accuracy against bytes", "After each epoch, on the test set; MB "
                 "sent and received so far by all workers; a line a seed.", "line", data, "MB", "top-1 %",
                 series="method", group="seed", detail=("epoch",), log="x", marks=marks)
        )  # fmt: skip
        plots.append(
            Plot(f"kothari-{model}-epochs", f"{name}: accuracy by epoch", "A line a seed.", "line", data, "epoch",
                 "top-1 %", series="method", group="seed", detail=("MB",), marks=marks)
        )  # fmt: skip
        plots += _against_time(model, name, some, [one for one in times if one["model"] == model], marks)
    plots += _frontier(runs, claimed)
    plots += _ingredients([run for run in runs if run["part"] == "ingredients"])
    plots += _crowds([run for run in runs if run["part"] == "workers"])
    plots += _splits(times)
    return plots


def _seconds(times: Sequence[Values], name: str = "total_s") -> float:
    """Of an iteration."""
    return float(sum(one[name] for one in times) / sum(one["iterations"] for one in times))


def _against_time(
    model: str, name: str, runs: Sequence[Values], times: Sequence[Values], marks: tuple[Mark, ...]
) -> list[Plot]:
    rows: list[tuple[Cell, ...]] = []
    for link in dict.fromkeys(one["link"] for one in times):
        for run in runs:
            mine = [one for one in times if (one["link"], one["method"]) == (link, run["name"]) and one["valid"]]
            if not mine:
                continue
            epoch_s = _seconds(mine) * run["iterations"] / len(run["accuracy"])
            rows += [
                (link, run["name"], run["seed"], epoch, epoch * epoch_s / 60, top1)
                for epoch, top1 in enumerate(run["accuracy"], 1)
            ]
    if not rows:
        return []
    data = Data(("link", "method", "seed", "epoch", "minutes", "top-1 %"), rows)
    return [
        Plot(f"kothari-{model}-time", f"{name}: accuracy against time", "Accuracy after each epoch against what server "
             "and workers took for as many iterations over that link.", "line", data, "minutes", "top-1 %",
             series="method", group="seed", pick="link", detail=("epoch",), log="x", marks=marks)
    ]  # fmt: skip


def _frontier(runs: Sequence[Values], claimed: Sequence[Values]) -> list[Plot]:
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        if run["part"] in ("accuracy", "frontier"):
            sent = (sum(run["push_bytes"]) + sum(run["pull_bytes"])) / run["iterations"] / 1e3
            rows.append((MODELS.get(run["model"], run["model"]), run["name"], run["seed"], sent, run["accuracy"][-1]))
    if not rows:
        return []
    keys = {"vgg_1_mb": ("x", "paper, 1"), "vgg_6_mb": ("x", "paper, 6")}
    marks = tuple(Mark(one.axis, 1e3 * one.value, one.label) for one in _marks(claimed, keys))
    data = Data(("model", "method", "seed", "kB per iteration", "last top-1 %"), rows)
    return [
        Plot("kothari-frontier", "How few bytes suffice", "Last accuracy of each run against bytes, both ways, all "
             "workers. Lines are the paper's data of VGG-11.", "points", data, "kB per iteration", "last top-1 %",
             series="method", pick="model", detail=("seed",), log="x", marks=marks)
    ]  # fmt: skip


def _ingredients(runs: Sequence[Values]) -> list[Plot]:
    if not runs:
        return []
    rows = [
        (MODELS.get(run["model"], run["model"]), run["name"], run["accuracy"][-1],
         (sum(run["push_bytes"]) + sum(run["pull_bytes"])) / run["iterations"] / 1e3)
        for run in runs
    ]  # fmt: skip
    data = Data(("model", "setting", "last top-1 %", "kB per iteration"), rows)
    return [
        Plot("kothari-ingredients", "What each ingredient is worth", "Last accuracy without one of them.", "bars", data,
             "last top-1 %", "setting", pick="model", detail=("kB per iteration",))
    ]  # fmt: skip


def _crowds(runs: Sequence[Values]) -> list[Plot]:
    rows: list[tuple[Cell, ...]] = [
        (run["name"], run["mode"], run["workers"], f"{run['mode']}, {run['workers']} workers", run["accuracy"][-1],
         run.get("staleness_mean"), run.get("staleness_most"))
        for run in runs
    ]  # fmt: skip
    if not rows:
        return []
    data = Data(("method", "mode", "workers", "setting", "top-1 %", "updates missed, mean", "most"), rows)
    return [
        Plot("kothari-workers", "More workers", "Accuracy by workers and mode.", "points", data, "workers", "top-1 %",
             series="mode", pick="method", detail=("updates missed, mean", "most")),
        Plot("kothari-staleness", "Staleness", "Updates that a gradient missed, on average.", "bars", data,
             "updates missed, mean", "setting", pick="method", detail=("most", "top-1 %")),
    ]  # fmt: skip


def _splits(times: Sequence[Values]) -> list[Plot]:
    rows: list[tuple[Cell, ...]] = []
    places = dict.fromkeys((one["model"], one["link"], one["method"]) for one in times if one["valid"])
    for model, link, method in places:
        mine = [one for one in times if (one["model"], one["link"], one["method"]) == (model, link, method)]
        for part, key in (("computing", "compute_s"), ("waiting", "communication_s"), ("applying", "apply_s")):
            where = f"{MODELS.get(model, model)}, {link}"
            rows.append((where, method, part, 1e3 * _seconds(mine, key)))
    if not rows:
        return []
    data = Data(("where", "method", "part", "ms per iteration"), rows)
    return [
        Plot("kothari-times", "Where an iteration's time goes", "Server and workers over links of these rates.", "bars",
             data, "ms per iteration", "method", series="part", pick="where", stacked=True)
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- oland2015


def oland2015(records: Mapping[str, Sequence[Values]], claimed: Sequence[Values]) -> list[Plot]:
    """Accuracy and bits by epoch and by layer; the map of settings."""
    units = sorted(records.get("study.oland2015", []), key=lambda one: (one["part"] != "headline", -one["runs"]))
    keys = ("part", "codec", "data", "lr", "l1", "decay", "batch", "sends", "workers", "epochs")
    groups: dict[tuple[Any, ...], list[Values]] = {}
    for one in units:
        groups.setdefault(tuple(one.get(key) for key in keys), []).append(one)
    curves: list[tuple[Cell, ...]] = []
    layers: list[tuple[Cell, ...]] = []
    points: list[tuple[Cell, ...]] = []
    for group in groups.values():
        first = group[0]
        weights = [one["runs"] for one in group]

        def mean(name: str, group: list[Values] = group, weights: list[int] = weights) -> list[float]:
            columns = zip(*(one[name] for one in group), strict=True)
            return [sum(x * w for x, w in zip(some, weights, strict=True)) / sum(weights) for some in columns]

        setting = f"{first['part']}, {first['data']}"
        about = first["codec"] if first["part"] in ("headline", "fixed") else f"{first['codec']}, l1 {first['l1']:g}"
        if "accuracy_by_epoch" in first and "coded_bits_by_epoch" in first:
            series = (mean("accuracy_by_epoch"), mean("coded_bits_by_epoch"), mean("raw_bits_by_epoch"))
            for epoch, cells in enumerate(zip(*series, strict=True), 1):
                curves.append((setting, about, epoch, *cells))
        if "accuracy_by_epoch" in first:
            by_layer = enumerate(mean("coded_bits_by_layer"), 1)
            layers += [(setting, about, f"layer {layer}", coded) for layer, coded in by_layer]
        points.append(
            (first["part"], first["codec"], first["lr"], first["l1"],
             fmean(x for one in group for x in one["raw_bits"]),
             fmean(x for one in group for x in one["coded_bits"]), fmean(x for one in group for x in one["peak"]),
             sum(weights))
        )  # fmt: skip
    found: list[Plot] = []
    bits = _marks(claimed, {"c5_coded_bits": ("y", "paper, c = 5"), "c6_coded_bits": ("y", "paper, c = 6")})
    if curves:
        data = Data(("part", "codec", "epoch", "accuracy %", "coded bits", "raw bits"), curves)
        found += [
            Plot("oland-accuracy", "Accuracy by epoch", "The mean over runs.", "line", data, "epoch", "accuracy %",
                 series="codec", pick="part"),
            Plot("oland-bits", "Bits per epoch", "A weight, coded, as sent after each epoch; the mean over runs.",
                 "line",
                 data, "epoch", "coded bits", series="codec", pick="part", detail=("raw bits",), marks=bits),
        ]  # fmt: skip
    if layers:
        data = Data(("part", "codec", "layer", "coded bits"), layers)
        found.append(
            Plot("oland-layers", "Bits per layer", "A weight, coded; the mean over runs and epochs.", "bars", data,
                 "coded bits", "layer", series="codec", pick="part")
        )  # fmt: skip
    if points:
        data = Data(("part", "codec", "lr", "l1", "raw bits", "coded bits", "best accuracy %", "runs"), points)
        places = _marks(claimed, {"c5_coded_bits": ("x", "paper, c = 5"), "c6_coded_bits": ("x", "paper, c = 6")})
        found.append(
            Plot("oland-map", "Accuracy against bits", "Every setting: its best accuracy and its bits a weight, coded.",
                 "points", data, "coded bits", "best accuracy %", series="part", detail=("codec", "lr", "l1", "runs"),
                 log="x", marks=places)
        )  # fmt: skip
    return found


# ----------------------------------------------------------------------------------------------------------- jang2017


def jang2017(records: Mapping[str, Sequence[Values]], claimed: Sequence[Values]) -> list[Plot]:
    """The planner's word and real runs, table 1, and where AlexNet's time goes."""
    found: list[Plot] = []
    runs = records.get("jang2017.run", [])
    if runs:
        rows: list[tuple[Cell, ...]] = [
            (run["codec"], run["engine"], run["workers"], run["rate"], run["measured_s"], run["predicted_s"],
             100 * (run["predicted_s"] / run["measured_s"] - 1))
            for run in runs
        ]  # fmt: skip
        data = Data(("codec", "engine", "workers", "link", "measured s", "predicted s", "off by %"), rows)
        found.append(
            Plot("predicted-measured", "Predicted against measured", "Seconds of an iteration. Dotted: as predicted, "
                 "and 10 % off either way.", "points", data, "measured s", "predicted s", series="codec",
                 detail=("engine", "workers", "link", "off by %"), log="xy", diagonals=(0.9, 1.0, 1.1))
        )  # fmt: skip
    table = records.get("jang2017.table1", [])
    if table:
        rows = [
            (one["what"], one["way"], one["nbytes"] / one["compressed_nbytes"], one["compress_s"], one["decompress_s"])
            for one in table
        ]
        data = Data(("what", "way", "times smaller", "compress s", "decompress s"), rows)
        marks = _marks(claimed, {"gzip_weights": ("x", "paper, gzip on AlexNet")})
        found.append(
            Plot("jang-table1", "Table 1: how much smaller", "Original over compressed size.", "bars", data,
                 "times smaller", "way", pick="what", detail=("compress s", "decompress s"), log="x", marks=marks)
        )  # fmt: skip
    kernels = records.get("jang2017.kernels", [])
    if kernels:
        rows = [(one["device"], group, 100 * share) for one in kernels for group, share in one["groups"].items()]
        data = Data(("device", "operation", "% of a step"), rows)
        found.append(
            Plot("jang-kernels", "Where a step of AlexNet goes", "By torch's profiler.", "bars", data, "% of a step",
                 "device", series="operation", stacked=True)
        )  # fmt: skip
    return found


# -------------------------------------------------------------------------------------------------------- homomorphic


def homomorphic(records: Mapping[str, Sequence[Values]], claimed: Sequence[Values]) -> list[Plot]:
    """What compression loses by how much is left, and what a step of compressed layers takes."""
    found: list[Plot] = []
    runs = records.get("homomorphic.run", [])
    if runs:
        rows: list[tuple[Cell, ...]] = [
            (MODELS.get(run["model"], run["model"]), run["part"], run["layers"] or "dense", run["codec"],
             run["workers"],
                 run["seed"], run["rho"], run["accuracy"][-1])
            for run in runs
        ]  # fmt: skip
        data = Data(("model", "part", "layers", "codec", "workers", "seed", "rho", "last top-1 %"), rows)
        found.append(
            Plot("homomorphic-rho", "Accuracy against rho", "Rho: bytes pushed over float32's of the dense model.",
                 "points", data, "rho", "last top-1 %", series="part", pick="model",
                 detail=("layers", "codec", "workers", "seed"), log="x")
        )  # fmt: skip
    steps = [*records.get("homomorphic.step", []), *records.get("bench.layers", [])]
    if steps:
        rows = [
            (
                f"{one['case']}, {one['device']}",
                str(one["scheme"]).partition(":")[0],
                one["scheme"],
                one["rho"],
                one["h"],
            )
            for one in steps
            if one["h"] is not None
        ]
        data = Data(("case", "kind", "scheme", "rho", "h"), rows)
        found.append(
            Plot("homomorphic-h", "What a compressed step takes", "h: its time over the dense model's, by rho.",
                 "points",
                 data, "rho", "h", series="kind", pick="case", detail=("scheme",), log="xy",
                 marks=(Mark("y", 1.0, "as dense"),))
        )  # fmt: skip
    return found
