"""Accuracy of sums, of layers in fewer numbers and of both; what they cost; and where the bound is met."""

from __future__ import annotations

from collections.abc import Iterator

from laconic.plan import Bound
from laconic_lab.studies.homomorphic.experiments import BITS, RHOS, SCHEMES, WORKERS
from laconic_lab.studies.homomorphic.results import DEVICES, MODEL_NAMES, Results, Row
from laconic_lab.studies.tables import Table, make_table, mean_and_values

__all__ = ["make_tables"]

RATES = ((1e9, "1 Gbit/s"), (10e9, "10 Gbit/s"))
WORKER_COUNTS = (4, 16, 25)
BEST_WAYS = 1
ONE_LAUNCH = "°"
"""Mark of h on a GPU where a step was one launch, of a CUDA graph."""


def make_tables(results: Results) -> list[Table]:
    """Return all tables but the one of claims."""
    return [
        _sums(results), _layers(results), _products(results), _search(results), _steps(results), _codecs(results),
        _bounds(results), _compared(results),
    ]  # fmt: skip


def _sums(results: Results) -> Table:
    """Return top-1 of dense layers by bits and workers."""
    rows = []
    for model in results.models("sums"):
        for codec in ("none", *(f"ef|thc:{bits}" for bits in BITS)):
            shown = [results.find("sums", model, None, codec, workers=count) for count in WORKERS]
            first = next((row for row in shown if row is not None), None)
            if first is not None:
                top1 = (_top1(results, row) for row in shown)
                rows.append((MODEL_NAMES[model], first.codec, _small(first.rho), *top1))
    columns = ("model", "codec", "rho up", *(f"{count} workers" for count in WORKERS))
    return make_table("Sums of integers, top-1 %", columns, rows)


def _layers(results: Results) -> Table:
    """Return a row for each model and scheme, with top-1 by rho."""
    rows = []
    for model in results.models("layers"):
        for scheme in SCHEMES:
            by_rho = [results.find("layers", model, f"{scheme}:{rho:g}") for rho in RHOS]
            if any(by_rho):
                rows.append((MODEL_NAMES[model], scheme, *(_top1(results, row) for row in by_rho)))
    return make_table("Layers in fewer numbers, top-1 %", ("model", "scheme", *(f"rho {rho:g}" for rho in RHOS)), rows)


def _products(results: Results) -> Table:
    rows = []
    for model in results.models("products"):
        for row in sorted(results.rows["products", model], key=lambda row: -row.rho):
            h = [_number(results.h(model, row.layers, device)) for device in DEVICES]
            rows.append((
                MODEL_NAMES[model], row.layers, row.codec, str(row.values["workers"]),
                _small(row.values["rho_layers"]), _small(_nominal(row)), _small(row.rho), mean_and_values(row.final),
                _signed(results.lost(row)), *h,
            ))  # fmt: skip
    columns = ("model", "layers", "codec", "workers", "rho of the layers", "rho of the values", "rho of the bytes",
               "top-1 %", "points lost", *(f"h, {name}" for name in DEVICES.values()))  # fmt: skip
    return make_table("Both", columns, rows)


def _nominal(row: Row) -> float:
    """Return rho without headers: the share of parameters times their bits over 32."""
    bits = row.codec.partition(":")[2].partition(",")[0]
    return float(row.values["rho_layers"]) * (float(bits) / 32 if bits else 1.0)


def _search(results: Results) -> Table:
    rows = []
    for model in results.models("search"):
        for row in sorted(results.rows["search", model], key=lambda row: -row.top1):
            held = f"{row.values['held_loss'][-1]:.3f}"
            rows.append((row.layers, row.codec, _changes(row), _small(row.rho), f"{row.top1:.2f}", held))
    return make_table(
        "How the products were found", ("layers", "codec", "else", "rho", "top-1 %", "loss, held out"), rows
    )


def _changes(row: Row) -> str:
    """Describe how a setting differs from the usual one."""
    usual = {"lr": 0.05, "decay": 5e-4, "carry": True, "at_renewal": "spend"}
    names = {"lr": "rate", "decay": "decay", "carry": "scales", "at_renewal": "momentum"}
    words = {False: "agreed first", "forget": "forgotten at renewals"}
    changed = {name: row.values[name] for name, value in usual.items() if row.values[name] != value}
    return ", ".join(f"{names[name]} {words.get(value, value)}" for name, value in changed.items())


def _steps(results: Results) -> Table:
    """Return h of each model or layer and scheme, by rho; schemes with rules are in the table of both.

    LeNet-5 is left out: its steps are overhead.
    """
    cells: dict[tuple[str, str], dict[float, list[str]]] = {}
    for place, device in enumerate(DEVICES):
        for (where, case, scheme), step in results.steps.items():
            name, _, rest = scheme.partition(":")
            rho, _, options = rest.partition(",")
            if case != "lenet5" and where == device and float(rho) in RHOS and " " not in options:
                row = cells.setdefault((case, f"{name}, {options}" if options else name), {})
                mark = ONE_LAUNCH if step.get("graph") and step["h"] is not None else ""
                row.setdefault(float(rho), ["–", "–"])[place] = _number(step["h"]) + mark
    rows = [
        (MODEL_NAMES.get(case, case), name, *(" / ".join(row.get(rho, ["–", "–"])) for rho in RHOS))
        for (case, name), row in cells.items()
    ]
    columns = ("model or layer", "scheme", *(f"rho {rho:g}: h on CPU / GPU" for rho in RHOS))
    return make_table("What a step costs", columns, rows)


def _codecs(results: Results) -> Table:
    """Return a row for each device and family of codecs, by bits."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for (device, codec), timed in results.codecs.items():
        encode, decode = (1e9 * timed[name] / timed["values"] for name in ("encode_s", "decode_s"))
        family, _, bits = codec.partition(":")
        cells.setdefault((device, family), {})[bits] = f"{encode:.2f} / {decode:.2f} / {timed['error']:.3f}"
    all_bits = list(dict.fromkeys(bits for row in cells.values() for bits in row))
    rows = [
        (DEVICES[device], family, *(row.get(bits, "–") for bits in all_bits)) for (device, family), row in cells.items()
    ]
    return make_table("What a codec costs", ("on", "codec", *(f"{bits} bits" for bits in all_bits)), rows)


def _bounds(results: Results) -> Table:
    """Return the smallest feasible multiple of the ideal time: of dense layers, and of the best ways to train a model.

    The best are those with the smallest multiple for the slowest link and most workers. LeNet-5's steps are overhead.
    """
    groups: dict[tuple[str, str], list[tuple[float, tuple[str, ...]]]] = {}
    for device, name in DEVICES.items():
        for model, layers, codec, rho, numel, dense in _trainings(results):
            h, step = results.h(model, layers, device), results.dense_step_s(model, device)
            if h is None or step is None or model == "lenet5":
                continue
            multiples = []
            for rate, _ in RATES:
                for workers in WORKER_COUNTS:
                    bound = Bound(workers=workers, nbytes=4 * dense, step_s=step, bandwidth=rate / 8)
                    total = bound.with_encoding(h, results.coding_s(codec, numel, device))
                    multiples.append((bound.r_min(rho, total), workers))
            how = f"{layers} × {'float32' if codec == 'none' else codec}"
            cells = [_multiple(*one) for one in multiples]
            row = (f"{MODEL_NAMES.get(model, model)}, {name}", how, _small(rho), f"{h:.2f}", *cells)
            most = multiples[len(WORKER_COUNTS) - 1][0]
            groups.setdefault((model, device), []).append((most, row))
    rows = []
    for ways in groups.values():
        best = sorted(ways)[:BEST_WAYS]
        rows += [way[1] for way in ways if way[1][1] == "dense × float32" or way in best]
    columns = ("model", "how", "rho", "h", *(f"{rate}, {workers}" for _, rate in RATES for workers in WORKER_COUNTS))
    return make_table("Where the bound is met", columns, rows)


def _trainings(results: Results) -> Iterator[tuple[str, str, str, float, int, int]]:
    """Yield model, layers, codec, rho, values sent and parameters of the dense model; AlexNet was not trained."""
    for model in results.models("sums", "layers", "products"):
        experiments = ("sums", "layers", "products")
        rows = [row for experiment in experiments for row in results.rows.get((experiment, model), [])]
        seen = set()
        for row in sorted(rows, key=lambda row: -row.rho):
            key = (row.layers, row.codec)
            if key not in seen:
                seen.add(key)
                values = row.values
                yield model, row.layers, values["codec"], row.rho, values["numel"], values["numel_dense"]
    for (device, case, scheme), values in results.steps.items():
        if case == "alexnet" and device == "cpu":
            yield case, scheme, "none", values["rho"], values["numel_compressed"], values["numel"]
            for codec in ("ef|thc:4", "ef|thc:1"):
                bits = int(codec[-1])
                rho = values["rho"] * (bits / 32 + 1 / 1024)
                yield case, scheme, codec, rho, values["numel_compressed"], values["numel"]


def _multiple(r: float, workers: int) -> str:
    """Format a multiple of the ideal time, in brackets where one node alone is faster."""
    return f"{r:.3g}" if r < workers else f"({r:.3g})"


def _compared(results: Results) -> Table:
    runs = [run for rows in results.rows.values() for row in rows for run in row.runs]
    compared, differing = (sum(run[name] for run in runs) for name in ("frames_compared", "frames_other"))
    shown = [(str(len(runs)), f"{compared:,}", str(differing))] if compared else []
    return make_table("Frames made and compared", ("runs", "frames compared", "that differ"), shown)


def _top1(results: Results, row: Row | None) -> str:
    if row is None:
        return "–"
    lost = results.lost(row)
    plain = row.codec == "float32" and row.values["layers"] is None
    return f"{row.top1:.2f}" + ("" if lost is None or plain else f" ({-lost:+.2f})")


def _small(rho: float) -> str:
    return f"{rho:.3g}"


def _signed(points: float | None) -> str:
    return "–" if points is None else f"{points:+.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
