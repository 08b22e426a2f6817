"""What trainings by codecs gave up, and how well the planner predicts, from Records: src/laconic/plan/evidence.json."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

from page_blocks import RESULTS, ROOT

from laconic import recipes
from laconic.plan.evidence import FORMAT, MODEL_FAMILIES, Evidence, read_evidence
from laconic.records import Record, read
from laconic.train.models import build_model
from laconic_lab.bench.gpt.methods import METHODS
from laconic_lab.studies.jang2017.runs import latest

FILE = ROOT / "src" / "laconic" / "plan" / "evidence.json"
ABOUT = "Written by `make docs` from results/: see tools/plan_evidence.py"
WITHIN = 0.8
"""Share of predicted speed-ups whose error the planner's error is not below."""
PLAIN = "plain"


@dataclass(frozen=True)
class Run:
    """One training: its setting, in which plain data parallelism was trained, too, and how it exchanged."""

    source: str
    model: str
    numel: int
    family: str
    workers: int
    setting: tuple[Any, ...]
    plain_optimizer: str
    optimizer: str
    lr: float
    codec: str
    every: int
    fragments: int
    overlap: int
    measure: str
    score: float
    steps: float = 1.0
    outer: str = "mean"
    seed: int | None = None


@cache
def _numel(model: str) -> int:
    return sum(parameter.numel() for parameter in build_model(model, seed=0).parameters())


def _records(name: str, kind: str) -> Iterator[Record]:
    file = RESULTS / f"{name}.jsonl"
    return (record for record in read(file) if record.kind == kind) if file.exists() else iter(())


def _kothari2021() -> Iterator[Run]:
    """Trainings of the parameter server in rounds, with the same codec in both directions."""
    for name in ("accuracy", "frontier", "ingredients", "workers"):
        for record in _records(f"kothari2021/{name}", "kothari2021.run"):
            values = record.values
            options = values["options"]
            push, pull = options.get("push", "none"), options.get("pull", "none")
            every = options.get("every", 1)
            changes = options.get("sends") == "changes" and options.get("after") == "mean"
            plain = set(options) <= {"returns"} and options.get("returns") == "weights"
            if values["mode"] != "sync" or "warm" in options or push != pull or (every > 1 and not changes):
                continue
            if not plain and (options.get("returns") != "gradients" or "momentum" in options):
                continue
            yield Run(
                "kothari2021", values["model"], _numel(values["model"]), MODEL_FAMILIES[values["model"]],
                values["workers"], (values["data"], values["batch"], values["epochs"]), "momentum", "momentum",
                values["lr"], PLAIN if plain else push, every, 1, 0, "accuracy", values["accuracy"][-1],
            )  # fmt: skip


def _homomorphic() -> Iterator[Run]:
    """Trainings by sums of packets, without compressed layers."""
    for name in ("sums", "search"):
        for record in _records(f"homomorphic/{name}", "homomorphic.run"):
            values = record.values
            if values["layers"] is None and not values["rules"]:
                codec = PLAIN if values["codec"] == "none" else values["codec"]
                yield Run(
                    "homomorphic", values["model"], _numel(values["model"]), MODEL_FAMILIES[values["model"]],
                    values["workers"], (values["data"], values["batch"], values["epochs"]), "momentum", "momentum",
                    values["lr"], codec, 1, 1, 0, "accuracy", values["accuracy"][-1],
                )  # fmt: skip


def _ddp() -> Iterator[Run]:
    """Trainings of real ranks; torch's fp16 hook exchanges what the codec fp16 does."""
    for name in ("lenet5-100mbit", "lenet5-100mbit-batch32", "lenet5-4ranks"):
        for record in _records(f"ddp/{name}", "bench.ddp.train"):
            values, words = record.values, record.values["way"].split(" ", 2)
            codec, every = {"ddp": PLAIN, "fp16": "fp16"}.get(words[0]), 1
            if words[0] == "laconic":
                codec = words[1]
            elif words[0] == "local":
                codec, every = words[2], int(words[1])
            if codec is not None and values["failed"] is None:
                yield Run(
                    f"ddp/{name}", values["model"], _numel(values["model"]), MODEL_FAMILIES[values["model"]],
                    values["ranks"], (values["data"], values["batch"], values["epochs"]), "momentum", "momentum",
                    values["lr"], codec, every, 1, 0, "accuracy", values["accuracy"],
                )  # fmt: skip


def _gpt_study() -> Iterator[Run]:
    """Trainings of transformers, each beside AdamW and beside Muon with plain data parallelism."""
    files = sorted((RESULTS / "gpt").glob("*.jsonl"))
    usual = {
        "outer_momentum": 0.0, "outer_norm": 0.0, "outer_flat": 0.0, "carry": 0.0, "gather": False, "final": 0.1,
        "momentum": 0.95, "pace": "even", "settle": 1, "averaged": 0.0, "senders": False, "merge": "progress",
    }  # fmt: skip
    # A factor of the mean and fading residuals only as recipes have them: a plan cannot name other combinations.
    by_recipe = {(1.0, 1.0)} | {(each.factor, each.decay) for each in map(recipes.get, recipes.names())}
    seen = set()
    for record in chain.from_iterable(_records(f"gpt/{file.stem}", "gpt.run") for file in files):
        values = record.values
        run = json.dumps(json.loads(values["key"])[1:])  # the same run may belong to several experiments
        plain = values["exchange"] == "ddp" and values["up"] == "none"
        changed = any(values.get(name, value) != value for name, value in usual.items())
        changed = changed or (values["outer_lr"], values["decay"]) not in by_recipe
        # Updates exchanged in every step are no evidence for gradients exchanged in every step, which plan compares.
        compared = plain or (values["exchange"] == "local" and values["every"] > 1)
        if changed or values["up"] != values["down"] or run in seen or not compared:
            continue
        seen.add(run)
        feedback = "ef" if values["decay"] == 1 else f"ef:{values['decay']:g}"
        codec = PLAIN if plain else values["up"] if values["up"] == "none" else f"{feedback}|{values['up']}"
        beside = [values["optimizer"]] if plain else ["adamw", "muon"]
        for optimizer in beside:
            yield Run(
                "gpt", f"gpt-{values['size']}", values["numel"], "transformer", values["workers"],
                (values["size"], values["steps"]), optimizer, values["optimizer"], values["lr"], codec, values["every"],
                values["fragments"], values["overlap"], "loss", values["validation_loss"][-1],
                outer="mean" if values["outer_lr"] == 1 else f"mean:{values['outer_lr']:g}",
            )  # fmt: skip


def _gpt_bench() -> Iterator[Run]:
    """Trainings of a small transformer by real ranks: steps until the loss of plain data parallelism.

    Its loss is only reached if it stays there: the last evaluation counts.
    """
    for name in ("bench/gpt", "bench/gpt-gradients"):
        groups: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = defaultdict(dict)
        for record in _records(name, "bench.gpt.loss"):
            groups[record.seed, record.values["ranks"]][record.values["method"]] = record.values
        for (seed, _), found in groups.items():
            if "ddp" in found:
                comparable = [values for values in found.values() if _comparable(values)]
                yield from (replace(_gpt_run(name, found["ddp"], values), seed=seed) for values in comparable)


def _comparable(values: Mapping[str, Any]) -> bool:
    method = METHODS[values["method"]]
    return values["failed"] is None and method.hook != "powersgd" and method.outer.startswith("mean")


def _gpt_run(source: str, plain: Mapping[str, Any], values: Mapping[str, Any]) -> Run:
    """Return a training beside plain DDP's of the same seed."""
    method, curve = METHODS[values["method"]], values["curve"]
    codec = "fp16" if method.hook else method.codec if method.every or method.ours else PLAIN
    total, goal = plain["curve"][-1]
    longer = curve[-1][0] > total
    reached = next((step for step, loss in curve if loss <= goal), None) if curve[-1][1] <= goal else None
    return Run(
        source, "gpt-small", values["numel"], "transformer", values["ranks"], ("bench",), "adamw", method.optimizer,
        1.0, codec, max(1, method.every), method.fragments, method.overlap, "loss",
        goal if longer and reached else curve[-1][1], (reached or curve[-1][0]) / total if longer else 1.0,
        method.outer,
    )  # fmt: skip


def _tuned() -> Iterator[Evidence]:
    """Trainings of ``laconic tune`` on models of the examples."""
    for file in sorted((RESULTS / "tune").glob("*.jsonl")):
        values = [record.values for record in read(file) if record.kind == "tune.evidence"]
        trainings = read_evidence({"format": FORMAT, "trainings": values}, str(file))
        for one, record in zip(trainings, values, strict=True):
            name = f"{one.model} ({record['steps_trained']} steps)"
            yield replace(one, model=name, source=f"results/tune/{file.stem}")


def _evidence(runs: Iterable[Run]) -> Iterator[Evidence]:
    """Yield the evidence of every way to exchange: means over seeds, each at its best learning rate and outer step."""
    settings: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        workers = 0 if run.source == "gpt" and run.codec == PLAIN else run.workers
        settings[run.source, run.model, run.setting, run.plain_optimizer, workers].append(run)
    for (source, model, setting, optimizer, workers), trained in settings.items():
        everywhere = settings.get((source, model, setting, optimizer, 0), []) if workers else []
        plain = _best([run for run in [*trained, *everywhere] if run.codec == PLAIN])
        ways: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
        for run in trained:
            if run.codec != PLAIN and (run.codec, run.every) != ("none", 1):
                ways[run.codec, run.every, run.fragments, run.overlap, run.optimizer].append(run)
        for way in ways.values() if plain else ():
            yield _compared(plain, _best(way))


def _best(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of the learning rate and outer step with the best mean, of several the one with fewest steps."""
    tried: dict[tuple[float, str], list[Run]] = defaultdict(list)
    for run in runs:
        tried[run.lr, run.outer].append(run)
    sign = -1 if runs and runs[0].measure == "loss" else 1

    def score(runs: Sequence[Run]) -> tuple[float, float]:
        return sign * statistics.fmean(run.score for run in runs), -statistics.fmean(run.steps for run in runs)

    return max(tried.values(), key=score, default=[])


def _compared(plain: Sequence[Run], runs: Sequence[Run]) -> Evidence:
    run, seeds = runs[0], {one.seed for one in runs}
    base = statistics.fmean(one.score for one in [one for one in plain if one.seed in seeds] or plain)
    spread = statistics.stdev(one.score for one in plain) if len(plain) > 1 else 0.0
    noise = spread if run.measure == "accuracy" else 100 * spread / base
    lr = run.lr / plain[0].lr if run.optimizer == run.plain_optimizer else 1.0  # rates of two optimizers say nothing
    return Evidence(
        run.codec, run.family, run.model, run.numel, run.plain_optimizer, run.optimizer, run.workers, len(runs),
        run.measure, round(base, 6), round(statistics.fmean(one.score for one in runs), 6), round(noise, 4), run.every,
        run.fragments, run.overlap, run.outer, round(lr, 4),
        round(max(one.steps for one in runs), 4), f"results/{run.source}",
    )  # fmt: skip


def model_errors() -> Mapping[str, float]:
    """Return by engine the error of speed-ups over float32 that ``WITHIN`` of the predictions stay below."""
    file = RESULTS / "jang2017" / "runs.jsonl"
    records = latest(read(file)) if file.exists() else ()
    runs = [record.values for record in records if record.kind == "jang2017.run" and record.values["valid"]]
    errors: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        cell = [run[name] for name in ("engine", "workers", "rate")]
        plain = next((one for one in runs if [one[n] for n in ("engine", "workers", "rate")] == cell
                      and one["codec"] == "none"), None)  # fmt: skip
        if plain is not None and run is not plain:
            predicted, measured = (plain[name] / run[name] for name in ("predicted_s", "measured_s"))
            errors[run["engine"]].append(abs(predicted / measured - 1))
    return {
        engine: round(statistics.quantiles(of_engine, n=100, method="inclusive")[round(100 * WITHIN) - 1], 3)
        for engine, of_engine in sorted(errors.items())
    }


def collective() -> Mapping[str, Mapping[str, float]]:
    """Return the fixed times of exchanges of two ranks by gloo: means over the calibrations of the study jang2017."""
    calibrations = [record.values for record in _records("jang2017/runs", "jang2017.calibration")]
    two = [one for one in calibrations if (one["engine"], one["workers"]) == ("ddp", 2)]
    byte_s = statistics.fmean(one["byte_s"] for one in two)
    ways = {"none": [(one["fixed_s"], one["slot_s"]) for one in two]}
    ways |= {way: [one["ways"][way] for one in two] for way in ("sum", "twoshot")}
    return {
        way: {"exchange_s": statistics.fmean(base for base, _ in pairs),
              "slot_s": statistics.fmean(slot for _, slot in pairs), "byte_s": byte_s}
        for way, pairs in ways.items()
    }  # fmt: skip


def evidence_file() -> str:
    """Return the text of src/laconic/plan/evidence.json."""
    runs = chain(_kothari2021(), _homomorphic(), _ddp(), _gpt_study(), _gpt_bench())
    found = sorted([*_evidence(runs), *_tuned()], key=lambda one: json.dumps(asdict(one)))
    usual = {"fragments": 1, "overlap": 0, "lr": 1.0, "steps": 1.0, "every": 1, "noise": 0.0, "outer": "mean"}
    trainings = [{k: v for k, v in asdict(one).items() if usual.get(k) != v} for one in found]
    lines = ",\n".join("  " + json.dumps(one) for one in trainings)
    head = {"format": FORMAT, "about": ABOUT, "model_error": model_errors(), "collective": collective()}
    return json.dumps(head, indent=1).removesuffix("\n}") + f',\n "trainings": [\n{lines}\n ]\n}}\n'
