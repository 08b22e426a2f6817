"""The tables of docs/choosing.md and README's first table, computed from Records in results/.

Which codec a situation gets follows from the rules in this file and from nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from statistics import fmean, median
from typing import Any

from ddp_records import LACONIC, LINKS, signed, steps, trainings, values_of
from page_blocks import RESULTS

from laconic.records import read
from laconic.suitability import NAMES, judge
from laconic.tables import Table
from laconic_lab.studies import load_study

Row = Sequence[str]
MODELS = {"vgg11": "VGG-11", "lenet5": "LeNet-5", "mlp": "MLP"}
GAIN = 1.05
"""A codec must be this many times as fast as float32 to be chosen; the planner uses the same rule."""
JUDGED = (
    "qsgd:8", "qsgd:4", "ef|qsgd:4", "ef|thc:4", "ef|powersgd:4", "ef|sign", "ef|topk:0.01|qsgd:4",
    "momentum:0.9|topk:0.01|qsgd:4", "topk:0.01|qsgd:4",
)  # fmt: skip
"""Codecs of gradients whose verdicts are shown."""
METHODS = {
    "1": "float32", "4": "QSGD, 4 bits", "5": "Top-k 1 %, then QSGD", "6": "the same every 20, best worker",
    "adaptive": "`adaptive`: weights by entropy, Huffman", "laconic": "`laconic`: signs of the largest 6 %, every 4",
    "laconic-min": "`laconic-min`: signs of the largest 4 %, every 10",
}  # fmt: skip


def code(spec: str) -> str:
    return f"`{spec}`"


def size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.3g} kB"


def times(factor: float) -> str:
    return f"{factor:.2f}×" if factor < 10 else f"{factor:.1f}×" if factor < 100 else f"{factor:.0f}×"


def points_word(limit: float) -> str:
    return f"{limit:g} point{'s' * (limit != 1)}"


@lru_cache(maxsize=1)
def layer_study() -> Any:
    return load_study("homomorphic").load(RESULTS / "homomorphic")


class ServerRuns:
    """The parameter server's results: accuracy and bytes from the study's trainings, seconds from real processes."""

    def __init__(self) -> None:
        self.study = load_study("kothari2021").load(RESULTS / "kothari2021")

    def row(self, model: str, method: str) -> Any:
        """Return a method's runs, of method 1's length where there are such: accuracies stand beside its own."""
        plain, row = self.study.row(model, "1"), self.study.row(model, method)
        if plain is None or row is None:
            raise SystemExit(f"results/kothari2021 has no run of {model} by method {'1' if plain is None else method}")
        return self.study.alike(plain, method) or row

    def points(self, model: str, method: str) -> float:
        """Return the top-1 accuracy relative to float32, in points."""
        return fmean(self.row(model, method).final) - fmean(self.row(model, "1").final)

    def cell(self, model: str, link: str, method: str) -> Any:
        """Return the times over a link; None where none were measured or the link was not valid."""
        cell = self.study.times.get((model, link, method))
        return cell if cell is not None and cell.valid else None

    def speed_up(self, model: str, link: str, method: str) -> float | None:
        plain, compressed = (self.cell(model, link, name) for name in ("1", method))
        return None if plain is None or compressed is None else plain.seconds() / compressed.seconds()


def first_table(server: ServerRuns) -> str:
    rows = []
    for method, description in METHODS.items():
        row, cell = server.row("vgg11", method), server.cell("vgg11", "100mbit", method)
        gain = server.speed_up("vgg11", "100mbit", method)
        ratio = server.study.less(row)
        busy = "" if cell is None or cell.calm else " (busy)"
        rows.append((
            description, size(row.bytes_per_iteration), f"1/{ratio:,.0f}" if ratio > 1.5 else "1",
            f"{fmean(row.final):.1f} ({len(row.seeds)})", "" if cell is None else f"{cell.seconds():.2f} s{busy}",
            "" if gain is None else times(gain),
        ))  # fmt: skip
    columns = (
        "what is sent", "bytes", "of float32", "top-1 % (seeds)", "at 100 Mbit/s", "speed-up",
    )  # fmt: skip
    machine = read(RESULTS / "kothari2021" / "times.jsonl")[0].machine
    busy_note = " Busy: other processes used the machine." if any("(busy)" in row[4] for row in rows) else ""
    return Table(columns, rows).to_markdown() + (
        f"\n\nVGG-11 on CIFAR-10, {server.row('vgg11', '1').values['epochs']} epochs, one server and two workers. "
        "Bytes are the frames of both workers in both directions of an iteration. *Every 4*: after every 4 iterations; "
        "`laconic` and `laconic-min` have error feedback. Accuracies come from trainings on an H200 that "
        "compute what the server computes. Times are per iteration of the real server with batches of 64, on "
        f"{machine['cores']} cores ({machine['cpu']}) with network namespaces.{busy_note} Source: `laconic study "
        "kothari2021` ([the study](docs/studies/kothari2021.md)); filled in by `make docs`."
    )


LIMITS = ((1e-4, "almost nothing (1e-4)"), (0.1, "a little (0.1)"), (float("inf"), "anything, with error feedback"))
"""Squared error of one exchange over the squared norm of the mean."""
TRAININGS = ("ddp/lenet5-100mbit.jsonl", "ddp/lenet5-100mbit-batch32.jsonl", "ddp/lenet5-4ranks.jsonl")
NEAREST = {"laconic qsgd:4": "laconic ef|qsgd:4", "laconic ef|topk:0.01|qsgd:4": "laconic ef|topk:0.05|qsgd:4"}
"""The nearest codec that was trained under DDP, for codecs that were not."""


def pays(step: Mapping[str, Any], plain: Mapping[str, Any]) -> bool:
    """Whether steps are clearly faster: by ``GAIN``, and the upper quartile is below plain DDP's lower quartile."""
    faster = plain["step_s"] / step["step_s"] >= GAIN
    return bool(faster and step["step_quartiles_s"][1] < plain["step_quartiles_s"][0])


def is_ours(step: Mapping[str, Any]) -> bool:
    return str(step["way"]).startswith(LACONIC) and step["way"] != "laconic none"


def exchange_rows() -> Iterator[Row]:
    def step_s(step: Mapping[str, Any]) -> float:
        return float(step["step_s"])

    for rate, link in LINKS.items():
        measured = steps(rate)
        plain = next(step for step in measured if step["way"] == "ddp")
        for limit, words in LIMITS:
            within = [step for step in measured if step["relative_squared_error"] <= limit]
            stock = min((step for step in within if not step["way"].startswith(LACONIC.strip())), key=step_s)
            best = min([stock, *(step for step in within if is_ours(step))], key=step_s)
            chosen = best if pays(best, plain) else plain
            name = "none: plain DDP" if chosen is plain else code(chosen["way"].removeprefix(LACONIC))
            if chosen is not plain and not is_ours(chosen):
                name += ", torch's hook" if chosen["way"] != "bf16" else " all-reduce"
            yield (
                link, words, name, f"{1e3 * chosen['step_s']:.0f}", times(plain["step_s"] / chosen["step_s"]),
                "" if chosen is plain or not is_ours(chosen) else times(stock["step_s"] / chosen["step_s"]),
                size(chosen["sent_nbytes_per_step"]), "" if chosen is plain else trained(chosen["way"]),
            )  # fmt: skip


def trained(way: str) -> str:
    """Return the accuracy of trainings by a codec, relative to float32, as text."""
    text = _trained(way)
    if not text and way in NEAREST and (near := _trained(NEAREST[way])):
        return f"not trained; {code(NEAREST[way].removeprefix(LACONIC))}: {near}"
    return text or "not trained"


def _trained(way: str) -> str:
    spec, parts = way.removeprefix(LACONIC), []
    for name in TRAININGS:
        for training in trainings(name):
            if training.way == way:
                model = MODELS[training.runs[0]["model"]]
                parts.append(f"{training.top1[:-1]}, {model}, {training.runs[0]['ranks']} ranks)")
    for model in ("vgg11", "mlp"):
        row = layer_study().find("sums", model, None, spec, workers=2)
        if row is not None and spec != "none":
            parts.append(f"{signed(-layer_study().lost(row))} ({MODELS[model]}, {len(row.runs)} seeds)")
    return "; ".join(parts)


def small_model_rows() -> Iterator[Row]:
    """Whole trainings at 100 Mbit/s of a model that is too small to gain from compressing single steps."""
    for training in trainings("ddp/lenet5-100mbit.jsonl"):
        reached = training.reached_s
        yield (
            code(training.way.removeprefix(LACONIC))
            + ("" if training.way.startswith((LACONIC, "local ")) else ", torch's"),
            f"{median(run['train_s'] for run in training.runs):.1f}", training.top1,
            "never" if reached == float("inf") else f"{reached:.1f}",
        )  # fmt: skip


LOSSES = (0.2, 1.0)


def server_rows(server: ServerRuns) -> Iterator[Row]:
    for model in ("vgg11", "lenet5"):
        for link, link_name in LINKS.items():
            plain = server.cell(model, link, "1")
            if plain is None:
                yield MODELS[model], link_name, "", "no valid times yet", "", "", "", ""
                continue
            for limit in LOSSES:
                fitting = [
                    method for method in METHODS
                    if server.cell(model, link, method) is not None and server.study.row(model, method) is not None
                    and len(server.row(model, method).seeds) > 1 and -server.points(model, method) <= limit
                ]  # fmt: skip
                best = min(fitting, key=lambda method: server.cell(model, link, method).seconds())
                if (server.speed_up(model, link, best) or 1) < GAIN:
                    best = "1"
                cell, row = server.cell(model, link, best), server.row(model, best)
                yield (
                    MODELS[model], link_name, points_word(limit),
                    "none: method `1`" if best == "1" else f"method `{best}`", f"{cell.seconds():.3g} s",
                    times(plain.seconds() / cell.seconds()), size(row.bytes_per_iteration),
                    signed(server.points(model, best)) + f" ({len(row.seeds)} seed{'s' * (len(row.seeds) > 1)})",
                )  # fmt: skip


def byte_rows(server: ServerRuns) -> Iterator[Row]:
    """Settings of VGG-11 that no other setting beats in both bytes and accuracy; single seeds do not count."""
    base = fmean(server.row("vgg11", "1").final)
    full = server.row("vgg11", "1").bytes_per_iteration
    settings: list[tuple[float, float, str, int, str]] = []
    for part in ("accuracy", "frontier"):
        for row in server.study.rows(part, "vgg11"):
            name = f"method `{row.name}`" if part == "accuracy" else row.name
            points = fmean(row.final) - base
            settings.append((row.bytes_per_iteration, points, name, len(row.seeds), f"kothari2021/{part}"))
    for part in ("sums", "products"):
        for row in layer_study().rows.get((part, "vgg11"), []):
            nbytes = (sum(row.values["push_bytes"]) + sum(row.values["pull_bytes"])) / row.values["iterations"]
            layers = "" if row.values["layers"] is None else f", layers {row.layers}"
            settings.append((nbytes, row.top1 - base, code(row.codec) + layers, len(row.runs), f"homomorphic/{part}"))
    for sums in (False, True):
        candidates = [one for one in settings if one[3] > 1 and one[4].startswith("homomorphic") == sums]
        for nbytes, points, name, seeds, source in sorted(candidates, reverse=True):
            if any(other[0] <= 1.02 * nbytes and other[1] > points for other in candidates):
                continue  # another one is more accurate with as few bytes
            yield (
                "adds integers only" if sums else "decodes", name, size(nbytes), f"1/{full / nbytes:,.0f}",
                f"{signed(points)} ({seeds} seeds)", f"`results/{source}.jsonl`",
            )  # fmt: skip


def weight_rows() -> Iterator[Row]:
    """Averaged weights instead of gradients: the MLP of oland2015 with five workers."""
    by_codec: dict[str, list[Mapping[str, Any]]] = {}
    for name in ("oland2015/headline.jsonl", "oland2015/fixed.jsonl"):
        for values in values_of(name):
            by_codec.setdefault(values["codec"], []).append(values)
    headline = values_of("oland2015/headline.jsonl")
    plain = fmean(values["accuracy_by_epoch"][-1] for values in headline if values["codec"] == "none")
    for codec in ("uniform:8", "uniform:7", "uniform:6", "adaptive:6|huffman", "uniform:4", "adaptive:5|huffman"):
        runs = by_codec[codec]
        bits = fmean(fmean(values["coded_bits"]) for values in runs)
        accuracy = fmean(values["accuracy_by_epoch"][-1] for values in runs)
        count = sum(values["runs"] for values in runs)
        yield code(codec), f"{bits:.2f}", f"{accuracy:.2f}", signed(accuracy - plain), str(count)


def break_even_rows() -> Iterator[Row]:
    """The link rate above which a codec costs more time than it saves, if nothing overlaps it."""
    for name in ("bench/codecs.jsonl", "bench/coders.jsonl"):
        records = read(RESULTS / name)
        memcpy = next(record.values["memcpy_gb_per_s"] for record in records if record.kind == "bench.machine")
        for record in records:
            values = record.values
            if record.kind != "bench.codec" or values["spec"] == "none" or values.get("data", "gaussian") != "gaussian":
                continue
            encode, decode = (memcpy * values[f"{way}_x_memcpy"] for way in ("encode", "decode"))
            rate = (32 - values["bits_per_value"]) / (4e-9 / encode + 4e-9 / decode)
            yield (
                code(values["spec"]), f"{values['bits_per_value']:.2f}", f"{encode:.1f}", f"{decode:.1f}",
                f"{rate / 1e9:.1f} Gbit/s",
            )  # fmt: skip


def layer_rows() -> Iterator[Row]:
    """Layers with fewer parameters: the loss of accuracy and the step time. Single seeds do not count."""
    study = layer_study()
    criteria = {"fewest parameters": lambda row: row.rho, "fastest step": _h}
    for limit in (0.1, 0.5, 1.0):
        candidates = [
            row for row in study.rows[("layers", "mlp")]
            if row.values["layers"] is not None and study.lost(row) <= limit and _h(row) < float("inf")
        ]  # fmt: skip
        best = {name: min(candidates, key=key) for name, key in criteria.items()}
        same = best["fewest parameters"] is best["fastest step"]
        for name, row in best.items():
            if not same or name == "fewest parameters":
                yield (
                    points_word(limit), "either" if same else name, code(row.layers),
                    f"{row.values['rho_layers']:.3f}", f"{_h(row):.2f}",
                    f"{signed(-study.lost(row))} ({len(row.runs)} seeds)",
                )  # fmt: skip


def _h(row: Any) -> float:
    h = layer_study().h(row.values["model"], row.values["layers"], "cpu")
    return float("inf") if h is None else float(h)


def summary_rows(server: ServerRuns) -> Iterator[Row]:
    """One row per situation, taken from the tables below it on the page."""
    for link, words, chosen, _, gain, _, sent, top1 in exchange_rows():
        if words == LIMITS[-1][1]:
            yield "DDP", f"{link}, VGG-11's gradients", chosen, gain, sent, top1, "`ddp/links`"
    small = {training.way: training for training in trainings("ddp/lenet5-100mbit.jsonl")}
    best = min(small.values(), key=lambda training: training.reached_s)
    nbytes = best.runs[0]["sent_nbytes_per_step"]
    yield (
        "DDP", "100 Mbit/s, LeNet-5, time to plain DDP's accuracy", code(best.way.removeprefix(LACONIC)),
        times(small["ddp"].reached_s / best.reached_s), "" if nbytes is None else size(nbytes), best.top1,
        "`ddp/lenet5-100mbit`",
    )  # fmt: skip
    for model, link, limit, chosen, _, gain, sent, top1 in server_rows(server):
        if limit.startswith("0.2"):
            yield "server", f"{link}, {model}", chosen, gain, sent, top1, "`kothari2021/times`, `accuracy`"
    for kind, name, sent, share, top1, source in byte_rows(server):
        task = "decodes" if kind == "decodes" else "must not decode"
        records = source.replace("results/", "").replace(".jsonl", "")
        yield "server", f"fewest bytes, VGG-11; it {task}", name, "", f"{sent} ({share})", top1, records
    weights = [row for row in weight_rows() if float(row[3].replace("−", "-")) >= -0.05]
    codec, bits, _, points, runs = min(weights, key=lambda row: float(row[1]))
    yield "any", "averaged weights, MLP", codec, "", f"{bits} bits each", f"{points} ({runs} runs)", "`oland2015`"
    for limit, criterion, chosen, rho, h, top1 in layer_rows():
        if limit.startswith("0.5"):
            share = f"{rho} of the parameters"
            yield "any", f"a smaller model, MLP: {criterion}", chosen, times(1 / float(h)), share, top1, "`homomorphic`"


def optimizer_rows() -> Iterator[Row]:
    """Yield how codecs of gradients suit optimizers, by the table that ``attach`` uses."""
    for spec in JUDGED:
        verdicts = (judge(spec, memory) for memory in NAMES)
        yield code(spec), *("suits" if verdict is None else f"**{verdict.effect}**" for verdict in verdicts)


def choosing_blocks(server: ServerRuns) -> dict[str, str]:
    """Return the generated tables of docs/choosing.md by block name."""
    against = "top-1 against float32"
    tables = {
        "short": Table(("engine", "situation", "choice", "speed-up", "bytes", against, "Records"),
                       list(summary_rows(server)), 3),
        "optimizers": Table(("codec of gradients", "SGD", "SGD with momentum, Lion", "Adam and the like", "Muon"),
                            list(optimizer_rows()), 5),
        "exchange": Table(("link", "error allowed per step", "choice", "step, ms", "× plain DDP", "× torch's best",
                           "sent per rank", against), list(exchange_rows()), 3),
        "small": Table(("exchange", "training, s", "points of top-1", "plain DDP's accuracy after, s"),
                       list(small_model_rows())),
        "server": Table(("model", "link", "loss allowed", "choice", "per iteration", "× method 1",
                         "bytes per iteration", against), list(server_rows(server)), 4),
        "bytes": Table(("the server", "setting", "bytes per iteration", "of float32", against, "Records"),
                       list(byte_rows(server)), 2),
        "weights": Table(("codec", "bits per weight", "top-1 %", "against float32", "runs"), list(weight_rows())),
        "layers": Table(("loss allowed", "criterion", "choice", "rho", "h", "top-1 against dense"),
                        list(layer_rows()), 3),
        "even": Table(("codec", "bits per value", "encode, GB/s", "decode, GB/s", "pays below"),
                      list(break_even_rows())),
    }  # fmt: skip
    return {name: table.to_markdown() for name, table in tables.items()}
