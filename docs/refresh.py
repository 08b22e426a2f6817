"""Put measured figures into README's first screen and docs/choosing.md: python docs/refresh.py [--check]

Every cell is computed from Records in results/; which codec a situation gets follows from the rules below, not from
anybody's taste. README's picture, docs/links.svg, is drawn from the same Records. ``--check`` changes nothing and exits
with 1 when anything is stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, median_high
from typing import Any
from xml.sax.saxutils import escape

from laconic.records import read
from laconic_lab.studies import load_study

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "unshaped": "not shaped"}
MODELS = {"vgg11": "VGG-11", "lenet5": "LeNet-5", "mlp": "MLP"}
GAIN = 1.05
"""A codec that is not at least that many times as fast as float32 is not worth its loss: the planner's rule, too."""

WORDS = {
    "1": "float32 gradients up, weights down",
    "4": "QSGD, 4 bits",
    "5": "Top-k 1 %, then QSGD",
    "6": "the same every 20 iterations, best worker",
    "adaptive": "weights by entropy, Huffman",
    "laconic": "signs of the largest 6 % every 4, error feedback",
    "laconic-min": "signs of the largest 4 % every 10, error feedback",
}


def values_of(name: str) -> list[Mapping[str, Any]]:
    return [record.values for record in read(RESULTS / name)]


def code(spec: str) -> str:
    return f"`{spec}`".replace("|", "\\|")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Markdown; the first columns are words, the others figures."""
    rule = "|".join(" --- " if column < words else " ---: " for column in range(len(columns)))
    lines = [f"| {' | '.join(columns)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def signed(points: float) -> str:
    return f"{round(points, 2) + 0.0:+.2f}".replace("-", "−")


def size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.3g} kB"


def faster(times: float) -> str:
    return f"{times:.2f}×" if times < 10 else f"{times:.0f}×"


# ------------------------------------------------------------------------------------------------- README's first table


class Server:
    """The parameter server's runs: accuracy and bytes by the study's training, seconds by real servers and workers."""

    def __init__(self) -> None:
        self.study = load_study("kothari2021").load(RESULTS / "kothari2021")

    def row(self, model: str, method: str) -> Any:
        found = self.study.row(model, method)
        if found is None:
            raise SystemExit(f"results/kothari2021 has no run of {model} by method {method}")
        return found

    def points(self, model: str, method: str) -> float:
        """Of top-1, against float32."""
        return fmean(self.row(model, method).final) - fmean(self.row(model, "1").final)

    def cell(self, model: str, link: str, method: str) -> Any:
        """Times over a link; None where there are none, or where the link was not what it should have been."""
        found = self.study.times.get((model, link, method))
        return found if found is not None and found.valid else None

    def speed_up(self, model: str, link: str, method: str) -> float | None:
        plain, this = (self.cell(model, link, one) for one in ("1", method))
        return None if plain is None or this is None else plain.seconds() / this.seconds()


def first_table(server: Server) -> str:
    rows = []
    for method, words in WORDS.items():
        row, cell = server.row("vgg11", method), server.cell("vgg11", "100mbit", method)
        gain = server.speed_up("vgg11", "100mbit", method)
        less = server.study.less(row)
        accuracy = f"{fmean(row.final):.1f} ({len(row.seeds)})"
        busy = "" if cell is None or cell.calm else " (busy)"
        rows.append((
            f"`{method}`: {words}", size(row.bytes_per_iteration), f"1/{less:,.0f}" if less > 1.5 else "1", accuracy,
            "" if cell is None else f"{cell.seconds():.2f} s{busy}", "" if gain is None else faster(gain),
        ))  # fmt: skip
    columns = (
        "`laconic train --method`",
        "sent an iteration",
        "of float32",
        "top-1 % (seeds)",
        "at 100 Mbit/s",
        "speed-up",
    )
    machine = read(RESULTS / "kothari2021" / "times.jsonl")[0].machine
    busy_note = " Busy: others used the machine, too." if any("(busy)" in row[4] for row in rows) else ""
    return table(columns, rows) + (
        f"\n\nVGG-11 on CIFAR-10, {server.row('vgg11', '1').values['epochs']} epochs, a server and two workers. Bytes "
        "are frames of both workers, both ways. Accuracy was trained on an H200 by the server's arithmetic. Seconds "
        "are those of an iteration of the real server on "
        f"{machine['cores']} cores ({machine['cpu']}) in network namespaces, batches of 64.{busy_note} From "
        "`laconic study kothari2021` ([the study](docs/studies/kothari2021.md)), filled in by `python docs/refresh.py`."
    )


# ----------------------------------------------------------------------------------------------------- choosing: on DDP

LIMITS = ((1e-4, "nothing to speak of (1e-4)"), (0.1, "a little noise (0.1)"), (float("inf"), "anything, with memory"))
"""Squared error of one exchange over the squared norm of the mean."""


def ways(rate: str) -> list[Mapping[str, Any]]:
    found = [one for one in values_of("ddp/links.jsonl") if one["rate"] == rate]
    if not all(one["valid"] for one in found):
        raise SystemExit(f"results/ddp/links.jsonl: the link of {rate} was not what it should be; measure again")
    return [one for one in found if not one["failed"]]


def pays(way: Mapping[str, Any], plain: Mapping[str, Any]) -> bool:
    """Clearly faster: three quarters of its steps take less than three quarters of plain DDP's."""
    return bool(plain["step_s"] / way["step_s"] >= GAIN and way["step_quartiles_s"][1] < plain["step_quartiles_s"][0])


OURS = ("laconic ", "local ")


def ours(way: Mapping[str, Any]) -> bool:
    return str(way["way"]).startswith("laconic ") and way["way"] != "laconic none"


def exchange_rows() -> Iterator[Sequence[str]]:
    for rate, link in LINKS.items():
        some = ways(rate)
        plain = next(one for one in some if one["way"] == "ddp")
        for limit, words in LIMITS:
            within = [one for one in some if one["relative_squared_error"] <= limit]
            stock = min((one for one in within if one["way"][:7] != "laconic"), key=lambda one: one["step_s"])
            mine = min((one for one in within if ours(one)), key=lambda one: one["step_s"], default=None)
            best = min((one for one in (stock, mine) if one is not None), key=lambda one: one["step_s"])
            take = best if pays(best, plain) else plain
            name = "none: plain DDP" if take is plain else code(take["way"].removeprefix("laconic "))
            name += "" if take is plain or ours(take) else ", torch's hook" if take["way"] != "bf16" else " all-reduce"
            yield (
                link, words, name, f"{1e3 * take['step_s']:.0f}", faster(plain["step_s"] / take["step_s"]),
                "" if take is plain or not ours(take) else faster(stock["step_s"] / take["step_s"]),
                size(take["sent_nbytes_per_step"]), "" if take is plain else trained(take["way"]),
            )  # fmt: skip


NEAREST = {"laconic qsgd:4": "laconic ef|qsgd:4", "laconic ef|topk:0.01|qsgd:4": "laconic ef|topk:0.05|qsgd:4"}
"""What was trained under DDP where the codec itself was not."""


def trained(way: str) -> str:
    """Points of top-1 that training by a codec ended from float32, where somebody trained by it."""
    found = _trained(way)
    if not found and way in NEAREST and (near := _trained(NEAREST[way])):
        return f"not trained; {code(NEAREST[way].removeprefix('laconic '))}: {near}"
    return found or "not trained"


def _trained(way: str) -> str:
    spec, found = way.removeprefix("laconic "), []
    for name in ("ddp/lenet5-100mbit.jsonl", "ddp/lenet5-100mbit-batch32.jsonl", "ddp/lenet5-4ranks.jsonl"):
        for training in trainings(name):
            if training.way == way:
                model = MODELS[training.runs[0]["model"]]
                found.append(f"{training.top1[:-1]}, {model}, {training.runs[0]['ranks']} ranks)")
    study = load_study("homomorphic").load(RESULTS / "homomorphic")
    for model in ("vgg11", "mlp"):
        row = study.find("sums", model, None, spec, workers=2)
        if row is not None and spec != "none":
            found.append(f"{signed(-study.lost(row))} ({MODELS[model]}, {len(row.runs)} seeds)")
    return "; ".join(found)


class Training:
    """All runs of a way of training, by seed."""

    def __init__(self, way: str, runs: Sequence[Mapping[str, Any]]) -> None:
        self.way, self.runs = way, runs

    @property
    def top1(self) -> str:
        points = fmean(one["accuracy"] - one["plain_accuracy"] for one in self.runs)
        return f"{signed(points)} ({len(self.runs)} seed{'s' * (len(self.runs) > 1)})"

    @property
    def reached_s(self) -> float:
        """Seconds until as good as plain DDP; infinite where fewer than half of the seeds came as far."""
        return median_high([float("inf") if one["reached_s"] is None else one["reached_s"] for one in self.runs])


def trainings(name: str) -> list[Training]:
    some = values_of(name)
    return [Training(way, [one for one in some if one["way"] == way]) for way in dict.fromkeys(v["way"] for v in some)]


def small_rows() -> Iterator[Sequence[str]]:
    """A model too small to gain step by step: the whole training, at 100 Mbit/s."""
    for training in trainings("ddp/lenet5-100mbit.jsonl"):
        reached = training.reached_s
        yield (
            code(training.way.removeprefix("laconic ")) + ("" if training.way.startswith(OURS) else ", torch's"),
            f"{median(one['train_s'] for one in training.runs):.1f}", training.top1,
            "never" if reached == float("inf") else f"{reached:.1f}",
        )  # fmt: skip


# ------------------------------------------------------------------------------------------- choosing: through a server

LOSSES = (0.2, 1.0)


def server_rows(server: Server) -> Iterator[Sequence[str]]:
    for model in ("vgg11", "lenet5"):
        for link, words in LINKS.items():
            plain = server.cell(model, link, "1")
            for most in LOSSES:
                where = (MODELS[model], words, f"{most:g} point{'s' * (most != 1)}")
                if plain is None:
                    if most == LOSSES[0]:
                        yield (*where[:2], "", "no valid times here yet", "", "", "", "")
                    continue
                fit = [
                    method for method in WORDS
                    if server.cell(model, link, method) is not None and server.study.row(model, method) is not None
                    and len(server.row(model, method).seeds) > 1 and -server.points(model, method) <= most
                ]  # fmt: skip
                best = min(fit, key=lambda method: server.cell(model, link, method).seconds())
                if (server.speed_up(model, link, best) or 1) < GAIN:
                    best = "1"
                cell, row = server.cell(model, link, best), server.row(model, best)
                yield (
                    *where, "none: method `1`" if best == "1" else f"method `{best}`", f"{cell.seconds():.3g} s",
                    faster(plain.seconds() / cell.seconds()), size(row.bytes_per_iteration),
                    signed(server.points(model, best)) + f" ({len(row.seeds)} seed{'s' * (len(row.seeds) > 1)})",
                )  # fmt: skip


def byte_rows(server: Server) -> Iterator[Sequence[str]]:
    """Settings of VGG-11 that no other beats in both bytes and accuracy; those of one seed do not count."""
    base = fmean(server.row("vgg11", "1").final)
    full = server.row("vgg11", "1").bytes_per_iteration
    found: list[tuple[float, float, str, int, str]] = []
    for part in ("accuracy", "frontier"):
        for row in server.study.rows(part, "vgg11"):
            name = f"method `{row.name}`" if part == "accuracy" else row.name
            found.append(
                (row.bytes_per_iteration, fmean(row.final) - base, name, len(row.seeds), f"kothari2021/{part}")
            )
    study = load_study("homomorphic").load(RESULTS / "homomorphic")
    for part in ("sums", "products"):
        for row in study.rows.get((part, "vgg11"), []):
            nbytes = (sum(row.values["push_bytes"]) + sum(row.values["pull_bytes"])) / row.values["iterations"]
            layers = "" if row.values["layers"] is None else f", layers {row.layers}"
            found.append((nbytes, row.top1 - base, code(row.codec) + layers, len(row.runs), f"homomorphic/{part}"))
    found = [one for one in found if one[3] > 1]
    for sums in (False, True):
        some = [one for one in found if one[4].startswith("homomorphic") == sums]
        for nbytes, points, name, seeds, where in sorted(some, reverse=True):
            if any(other[0] <= 1.02 * nbytes and other[1] > points for other in some):
                continue  # as few bytes, and more accurate
            yield (
                "adds integers only" if sums else "decodes", name, size(nbytes), f"1/{full / nbytes:,.0f}",
                f"{signed(points)} ({seeds} seeds)", f"`results/{where}.jsonl`",
            )  # fmt: skip


# --------------------------------------------------------------------------------------------------- choosing: the rest


def weight_rows() -> Iterator[Sequence[str]]:
    """Weights that travel and are averaged: the MLP of oland2015, five workers."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name in ("oland2015/headline.jsonl", "oland2015/fixed.jsonl"):
        for one in values_of(name):
            found.setdefault(one["codec"], []).append(one)
    plain = fmean(
        one["accuracy_by_epoch"][-1] for one in values_of("oland2015/headline.jsonl") if one["codec"] == "none"
    )
    for codec in ("uniform:8", "uniform:7", "uniform:6", "adaptive:6|huffman", "uniform:4", "adaptive:5|huffman"):
        some = found[codec]
        bits, accuracy = (
            fmean(fmean(one["coded_bits"]) for one in some),
            fmean(one["accuracy_by_epoch"][-1] for one in some),
        )
        runs = sum(one["runs"] for one in some)
        yield code(codec), f"{bits:.2f}", f"{accuracy:.2f}", signed(accuracy - plain), str(runs)


def even_rows() -> Iterator[Sequence[str]]:
    """Rates of a link above which a codec costs more time than it saves, if nothing hides it."""
    for name in ("bench/codecs.jsonl", "bench/coders.jsonl"):
        some = read(RESULTS / name)
        memcpy = next(one.values["memcpy_gb_per_s"] for one in some if one.kind == "bench.machine")
        for one in some:
            v = one.values
            if one.kind != "bench.codec" or v["spec"] == "none" or v.get("data", "gaussian") != "gaussian":
                continue
            seconds = sum(4e-9 / (memcpy * v[f"{way}_x_memcpy"]) for way in ("encode", "decode"))  # of a value
            rate = (32 - v["bits_per_value"]) / seconds
            yield (
                code(v["spec"]), f"{v['bits_per_value']:.2f}", f"{memcpy * v['encode_x_memcpy']:.1f}",
                f"{memcpy * v['decode_x_memcpy']:.1f}", f"{rate / 1e9:.1f} Gbit/s",
            )  # fmt: skip


def layer_rows() -> Iterator[Sequence[str]]:
    """Layers in fewer numbers: what they lose, and what a step takes. Models of one seed do not count."""
    study = load_study("homomorphic").load(RESULTS / "homomorphic")
    counts = {"fewest numbers": lambda row: row.rho, "fastest step": lambda row: _h(study, row)}
    for most in (0.1, 0.5, 1.0):
        some = [
            row for row in study.rows[("layers", "mlp")]
            if row.values["layers"] is not None and study.lost(row) <= most and _h(study, row) < float("inf")
        ]  # fmt: skip
        best = {what: min(some, key=key) for what, key in counts.items()}
        alike = best["fewest numbers"] is best["fastest step"]
        for what, row in best.items():
            if not alike or what == "fewest numbers":
                yield (
                    f"{most:g} point{'s' * (most != 1)}", "either" if alike else what, code(row.layers),
                    f"{row.values['rho_layers']:.3f}", f"{_h(study, row):.2f}",
                    f"{signed(-study.lost(row))} ({len(row.runs)} seeds)",
                )  # fmt: skip


def short_rows(server: Server) -> Iterator[Sequence[str]]:
    """Of the tables below what most people ask for: one row a situation."""
    for link, words, take, _, gain, _, sent, top1 in exchange_rows():
        if words == LIMITS[-1][1]:
            yield "DDP", f"{link}, VGG-11's gradients", take, gain, sent, top1, "`ddp/links`"
    small = {training.way: training for training in trainings("ddp/lenet5-100mbit.jsonl")}
    best = min(small.values(), key=lambda training: training.reached_s)
    sent = best.runs[0]["sent_nbytes_per_step"]
    yield (
        "DDP", "100 Mbit/s, LeNet-5, until as good as plain DDP", code(best.way.removeprefix("laconic ")),
        faster(small["ddp"].reached_s / best.reached_s), "" if sent is None else size(sent), best.top1,
        "`ddp/lenet5-100mbit`",
    )  # fmt: skip
    for model, link, most, take, _, gain, nbytes, top1 in server_rows(server):
        if most.startswith("0.2"):
            yield "server", f"{link}, {model}", take, gain, nbytes, top1, "`kothari2021/times`, `accuracy`"
    for kind, name, nbytes, share, top1, where in byte_rows(server):
        does = "decodes" if kind == "decodes" else "must not decode"
        records = where.replace("results/", "").replace(".jsonl", "")
        yield "server", f"fewest bytes, VGG-11; it {does}", name, "", f"{nbytes} ({share})", top1, records
    weights = [row for row in weight_rows() if float(row[3].replace("−", "-")) >= -0.05]
    codec, bits, _, points, runs = min(weights, key=lambda row: float(row[1]))
    yield "any", "weights are averaged, MLP", codec, "", f"{bits} bits each", f"{points} ({runs} runs)", "`oland2015`"
    for most, what, take, rho, h, top1 in layer_rows():
        if most.startswith("0.5"):
            size_of = f"{rho} of the numbers"
            yield "any", f"a smaller model, MLP: {what}", take, faster(1 / float(h)), size_of, top1, "`homomorphic`"


def _h(study: Any, row: Any) -> float:
    found = study.h(row.values["model"], row.values["layers"], "cpu")
    return float("inf") if found is None else float(found)


# ---------------------------------------------------------------------------------------------------------- the picture

SHOWN = ("ddp", "fp16", "powersgd:1", "laconic qsgd:4", "laconic ef|thc:4", "laconic ef|sign",
         "laconic ef|topk:0.01|qsgd:4")  # fmt: skip
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de } text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .quiet { fill: #59636e } .head { font-weight: 600 }
  .plain { fill: #8c959f } .stock { fill: #bf8700 } .ours { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #3d444d } text { fill: #f0f6fc } .quiet { fill: #9198a1 }
    .plain { fill: #656c76 } .stock { fill: #d29922 } .ours { fill: #4493f8 }
  }
"""


def picture() -> str:
    """Step times of DDP by codec on three links, as parts of plain DDP's; an SVG for light pages and dark ones."""
    label, panel, gap, line, top = 190, 190, 32, 26, 62
    height = top + line * len(SHOWN) + 60
    width = label + 3 * panel + 2 * gap + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="title">',
        '<title id="title">Time of a DDP step by codec on three links, beside plain DDP</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        '<text class="head" x="16" y="28">A step of DistributedDataParallel, ms</text>',
    ]
    for row, way in enumerate(SHOWN):
        name = {"ddp": "plain DDP, float32", "fp16": "torch's fp16 hook", "powersgd:1": "torch's PowerSGD, rank 1"}
        words = name.get(way, way.removeprefix("laconic "))
        parts.append(f'<text x="16" y="{top + line * row + 16}">{escape(words)}</text>')
    for column, (rate, link) in enumerate(LINKS.items()):
        left = label + 16 + column * (panel + gap)
        by_way = {one["way"]: one for one in ways(rate)}
        longest = max(by_way[way]["step_s"] for way in SHOWN)
        parts.append(f'<text class="quiet" x="{left}" y="{top - 10}">{escape(link)}</text>')
        for row, way in enumerate(SHOWN):
            step = by_way[way]["step_s"]
            bar = max(2.0, (panel - 48) * step / longest)
            kind = "plain" if way == "ddp" else "ours" if way.startswith("laconic") else "stock"
            y = top + line * row
            parts.append(f'<rect class="{kind}" x="{left}" y="{y + 3}" width="{bar:.1f}" height="17" rx="2"/>')
            parts.append(f'<text x="{left + bar + 6:.1f}" y="{y + 16}">{1e3 * step:,.0f}</text>')
    one = ways("100mbit")[0]
    below = (
        f"{one['numel']:,} values (VGG-11's parameters), {one['ranks']} ranks of one thread, gloo; medians.",
        "Blue: laconic.attach(model, spec). Records: results/ddp/links.jsonl, drawn by docs/refresh.py.",
    )
    for row, words in enumerate(below):
        parts.append(f'<text class="quiet" x="16" y="{height - 36 + 20 * row}">{escape(words)}</text>')
    return "\n".join([*parts, "</svg>", ""])


# ---------------------------------------------------------------------------------------------------------------- pages


def blocks() -> dict[Path, dict[str, str]]:
    """What goes between ``<!-- name:begin -->`` and ``<!-- name:end -->``, by page."""
    server = Server()
    choosing = {
        "short": table(("engine", "situation", "take", "speed-up", "bytes", "top-1 against float32", "Records"),
                       short_rows(server), 3),
        "exchange": table(
            ("link", "one step may lose", "take", "step, ms", "× plain DDP", "× torch's best", "a rank sends",
             "top-1 against float32"), exchange_rows(), 3),
        "small": table(("way", "training, s", "points of top-1", "as good as plain DDP after, s"), small_rows()),
        "server": table(
            ("model", "link", "may lose", "take", "an iteration", "× method 1", "bytes an iteration",
             "top-1 against float32"), server_rows(server), 4),
        "bytes": table(
            ("the server", "setting", "bytes an iteration", "of float32", "top-1 against float32", "Records"),
            byte_rows(server), 2),
        "weights": table(("codec", "bits a weight", "top-1 %", "against float32", "runs"), weight_rows()),
        "layers": table(
            ("may lose", "what counts", "take", "rho", "h", "top-1 against dense"), layer_rows(), 3),
        "even": table(
            ("codec", "bits a value", "encode, GB/s", "decode, GB/s", "pays below"), even_rows()),
    }  # fmt: skip
    return {ROOT / "README.md": {"first": first_table(server)}, ROOT / "docs" / "choosing.md": choosing}


def filled(page: str, name: str, text: str) -> str:
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = page.partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise SystemExit(f"a page has no place for {name}: add the lines {first} and {last}")
    return f"{before}{first}\n{text}\n{last}{after}"


def stale() -> dict[Path, str]:
    """Files that should read otherwise, and how."""
    wanted: dict[Path, str] = {ROOT / "docs" / "links.svg": picture()}
    for path, some in blocks().items():
        text = path.read_text(encoding="utf-8")
        for name, block in some.items():
            text = filled(text, name, block)
        wanted[path] = text
    return {
        path: text for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill README's first screen and docs/choosing.md from results/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a page is stale")
    check = parser.parse_args(argv).check
    found = stale()
    for path, text in found.items():
        print(f"{path.relative_to(ROOT)}: {'stale: run python docs/refresh.py' if check else 'rewritten'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
