"""Sections about training with DistributedDataParallel, FSDP2, torchft and local SGD: plots and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from laconic.errors import ConfigError
from laconic.report.plots import Cell, Data, Mark, Plot, Question, Section
from laconic.report.verdicts import Candidate, Verdict, decide
from laconic.suitability import NAMES, Moments, judge
from laconic.units import parse_rate, show_rate
from laconic_lab.report.benches import bars_by_link

__all__ = ["ddp", "fsdp", "gpt", "torchft"]

Values = Mapping[str, Any]
Records = Mapping[str, Sequence[Values]]
Rows = list[tuple[Cell, ...]]
OURS = "laconic "
"""Prefix of the benchmark's names for attachments of ours; torch's hooks have none."""
PLAIN_DDP, PLAIN_FSDP = "ddp", "hsdp"
TORCH_POWERSGD = "powersgd"
JUDGED: Sequence[Moments] = ("none", "momentum", "adam")
"""The optimizers that a codec must suit to be advised without a training by it."""
SUITS = "codecs that suit SGD with and without momentum, and Adam"
POINTS = 0.2
"""A training may end so many points of accuracy below plain DDP's."""


def ddp(records: Records) -> Section:
    """Return the steps over links, and the trainings."""
    plots: list[Plot] = []
    verdicts: list[Verdict] = []
    if steps := _by_link(step for step in records.get("bench.ddp", []) if step["failed"] is None):
        rows: Rows = [
            (_setting(step), _name(step["way"]), 1e3 * step["step_s"], 1e3 * step["exposed_s"], step["step_speed_up"],
             (step["sent_nbytes_per_step"] or 0) / 1e3, step["relative_squared_error"])
            for step in steps
        ]  # fmt: skip
        columns = ("link", "way", "ms a step", "ms exposed", "speed-up", "kB sent", "relative squared error")
        data = Data(columns, rows)
        plots += [
            Plot("ddp-steps", "DDP: time of a step", "Milliseconds of a step over each link.", "bars", data,
                 "ms a step", "way", pick="link", detail=("ms exposed", "speed-up", "kB sent")),
            Plot("ddp-error", "DDP: error by bytes", "Error of one exchange by the bytes that a rank sends.", "points",
                 data, "kB sent", "relative squared error", series="way", pick="link", log="xy", better=(-1, -1)),
        ]  # fmt: skip
        verdicts += _step_verdicts(steps)
    if trainings := _by_link(one for one in records.get("bench.ddp.train", []) if one["failed"] is None):
        plots += _ddp_trainings(trainings)
        verdicts += _training_verdicts(trainings)
    return Section("bench-ddp", "DistributedDataParallel", plots=plots, question=Question.DDP, verdicts=verdicts)


def _by_link(values: Any) -> list[Values]:
    """Return values with the slowest link first: that is where compression matters."""

    def rate(one: Values) -> float:
        try:
            return parse_rate(str(one["rate"]).partition("+")[0])
        except ConfigError:
            return float("inf")

    return sorted(values, key=rate)


def _link(rate: str) -> str:
    """Return a link's rate and delay as words.

    >>> _link("100mbit+50ms"), _link("unshaped")
    ('100 Mbit/s, 50 ms', 'no slow link')
    """
    name, _, delay = rate.partition("+")
    try:
        words = show_rate(parse_rate(name))
    except ConfigError:
        return "no slow link" if name == "unshaped" else rate
    return f"{words}, {delay.removesuffix('ms')} ms" if delay.endswith("ms") else words


def _setting(one: Values) -> str:
    """Return link, ranks and, where it is not a namespace's, the kind of link."""
    made_of = f", {one['made_of']}" if one.get("made_of") else ""
    return f"{_link(one['rate'])}{made_of}"


def _name(way: str) -> str:
    """Return a benchmark's way as other sections call it: ours by their spec, torch's own as such."""
    if way == PLAIN_DDP:
        return "plain DDP"
    if way.startswith("local "):
        return f"LocalSGD, every {way.removeprefix('local ')}"
    return way.removeprefix(OURS) if way.startswith(OURS) else f"torch's {way}"


def _harm(way: str) -> str | None:
    """Return what a way of the benchmark does to one of ``JUDGED``; None if it suits all of them, as far as known."""
    spec = f"ef|{way}" if way.startswith(TORCH_POWERSGD) else way.removeprefix(OURS) if way.startswith(OURS) else "none"
    effects = {memory: verdict.effect for memory in JUDGED if (verdict := judge(spec, memory))}
    if not effects:
        return None
    return f"with {' or '.join(NAMES[memory] for memory in effects)} {next(reversed(effects.values()))}"


def _step_verdicts(steps: Sequence[Values]) -> list[Verdict]:
    groups: dict[tuple[str, str, int], list[Values]] = {}
    for step in steps:
        if step.get("valid", True):
            groups.setdefault((_setting(step), str(step.get("model")), step.get("ranks", 0)), []).append(step)
    verdicts = []
    for (link, model, ranks), group in groups.items():
        plain = next((step for step in group if step["way"] == PLAIN_DDP), None)
        if plain is None:
            continue
        others = []
        for step in group:
            way = str(step["way"])
            against = _harm(way) or (None if _clearly_faster(step, plain) else "its times overlap plain DDP's")
            lost = against or f"relative squared error {step['relative_squared_error'] or 0.0:.2g} of an exchange"
            if way not in (PLAIN_DDP, f"{OURS}none"):
                others.append(
                    Candidate(_name(way), step["step_s"], step["sent_nbytes_per_step"], lost, against is None)
                )
        base = Candidate("plain DDP", plain["step_s"], plain["sent_nbytes_per_step"], "")
        verdicts.append(decide(f"DDP step, {model}, {ranks} ranks, {link}", base, others, SUITS))
    return verdicts


def _clearly_faster(step: Values, plain: Values) -> bool:
    """Whether three quarters of the steps are faster than three quarters of plain DDP's."""
    mine, others = step.get("step_quartiles_s"), plain.get("step_quartiles_s")
    return not mine or not others or bool(mine[1] < others[0])


def _training_verdicts(trainings: Sequence[Values]) -> list[Verdict]:
    groups: dict[str, dict[str, list[Values]]] = {}
    for one in trainings:
        if one.get("valid", True) and "accuracy" in one:
            groups.setdefault(_training_name(one), {}).setdefault(one["way"], []).append(one)
    verdicts = []
    for name, ways in groups.items():
        plain = ways.pop(PLAIN_DDP, None)
        if plain is None or any("reached_s" not in one for runs in (plain, *ways.values()) for one in runs):
            continue
        wanted = fmean(one["accuracy"] for one in plain)
        candidates = []
        for way, runs in {PLAIN_DDP: plain, **ways}.items():
            reached = [one["reached_s"] for one in runs if one["reached_s"] is not None]
            if len(reached) == len(runs):
                points = fmean(one["accuracy"] for one in runs) - wanted
                seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
                candidates.append(
                    Candidate(
                        _name(way), fmean(reached), None, f"accuracy {points:+.2f} points ({seeds})", points >= -POINTS
                    )
                )
        if candidates and candidates[0].name == _name(PLAIN_DDP):
            limit = f"{POINTS:g} points"
            verdicts.append(decide(f"DDP until plain DDP's accuracy, {name}", candidates[0], candidates[1:], limit))
    return verdicts


def _training_name(one: Values) -> str:
    batch = f", batch {one['batch']}" if one.get("batch") else ""
    return f"{one['model']}, {one['ranks']} ranks{batch}, {_link(one['rate'])}"


def _ddp_trainings(trainings: Sequence[Values]) -> list[Plot]:
    by_time: Rows = []
    by_bytes: Rows = []
    seen: dict[tuple[str, str], int] = {}
    for one in trainings:
        name, way = _training_name(one), _name(one["way"])
        run = seen[name, way] = seen.get((name, way), 0) + 1
        per_step = one["sent_nbytes_per_step"]
        for iteration, seconds, accuracy in one["curve"]:
            by_time.append((name, way, run, iteration, seconds, accuracy))
            if per_step is not None:
                by_bytes.append((name, way, run, per_step * iteration * one["ranks"] / 1e6, accuracy))
    data = Data(("training", "way", "run", "iteration", "seconds", "accuracy %"), by_time)
    plots = [
        Plot("ddp-accuracy-time", "DDP: accuracy by time", "As trained; a line for each seed.", "line", data, "seconds",
             "accuracy %", series="way", group="run", pick="training", detail=("iteration",), log="x")
    ]  # fmt: skip
    if by_bytes:
        data = Data(("training", "way", "run", "MB sent", "accuracy %"), by_bytes)
        plots.append(
            Plot("ddp-accuracy-bytes", "DDP: accuracy by bytes", "MB sent by all ranks; a line for each seed.", "line",
                 data, "MB sent", "accuracy %", series="way", group="run", pick="training", log="x")
        )  # fmt: skip
    return plots


def gpt(records: Records) -> Section:
    """Return the loss of a GPT by time over each link, the bytes that it took, and the loss by step."""
    trainings = [one for one in records.get("bench.gpt", []) if one["failed"] is None]
    section = Section("bench-gpt", "A GPT over slow links", question=Question.TRANSFORMERS)
    titles = {one["method"]: _title(one) for one in trainings}
    groups: dict[str, list[Values]] = {}
    for one in trainings:
        groups.setdefault(f"{one['ranks']} ranks, {_link(one['link'])}", []).append(one)
    rows: Rows = []
    totals: Rows = []
    for name, group in groups.items():
        for one in group:
            rows += [(name, titles[one["method"]], seconds, loss, step) for step, seconds, loss in one["curve"]]
            totals.append(
                (name, titles[one["method"]], one["sent_nbytes"] / 1e6, one["loss"], 100 * one["waiting_share"])
            )
        section.verdicts += _gpt_verdict(name, group, titles)
    # The last losses of plain DDP differ between numbers of ranks; a line for one of several would mislead.
    goals = {one["goal_loss"] for one in trainings if one["method"] == PLAIN_DDP}
    goal = (Mark("y", goals.pop(), "plain DDP's last loss"),) if len(goals) == 1 else ()
    if rows:
        data = Data(("training", "method", "seconds", "loss", "step"), rows)
        section.plots.append(
            Plot("gpt-loss-time", "GPT: loss by time", "Nats a byte on held-out text; evaluations are not timed.",
                 "line", data, "seconds", "loss", series="method", pick="training", detail=("step",), log="x",
                 marks=goal)
        )  # fmt: skip
    if any(sent for _, _, sent, _, _ in totals):
        data = Data(("training", "method", "MB sent", "loss", "waiting %"), totals)
        section.plots.append(
            Plot("gpt-loss-bytes", "GPT: last loss by bytes", "MB that a rank sends.", "points", data, "MB sent",
                 "loss", series="method", pick="training", detail=("waiting %",), log="x", marks=goal, better=(-1, -1))
        )  # fmt: skip
    curves: Rows = [
        (f"{one['ranks']} ranks", titles.get(one["method"]) or _title(one), run, step, loss)
        for run, one in enumerate(records.get("bench.gpt.loss", []))
        if one["failed"] is None
        for step, loss in one["curve"]
    ]
    if curves:
        data = Data(("ranks", "method", "run", "step", "loss"), curves)
        section.plots.append(
            Plot("gpt-loss-steps", "GPT: loss by step", "Nats a byte on held-out text; a line for each seed.", "line",
                 data, "step", "loss", series="method", group="run", pick="ranks", marks=goal)
        )  # fmt: skip
    return section


def _title(one: Values) -> str:
    """Return a title without Markdown's marks of code; the method's name where there is none."""
    return str(one["title"] if "title" in one else one["method"]).replace("`", "")


def _gpt_verdict(name: str, group: Sequence[Values], titles: Mapping[str, str]) -> list[Verdict]:
    """Return which training is first at plain DDP's last loss."""
    plain = next((one for one in group if one["method"] == PLAIN_DDP and one.get("reached_s")), None)
    if plain is None or not all(one.get("valid", True) for one in group):
        return []
    others = [
        Candidate(titles[one["method"]], one["reached_s"], one["sent_nbytes"],
                  f"last loss {one['loss']:.3f} beside {plain['loss']:.3f}, one seed")
        for one in group
        if one.get("reached_s") and one is not plain
    ]  # fmt: skip
    base = Candidate("AdamW with plain DDP", plain["reached_s"], plain["sent_nbytes"], "")
    size = f"GPT of {plain['numel'] / 1e6:.1f} M parameters" if plain.get("numel") else "GPT"
    return [decide(f"{size} until plain DDP's last loss, {name}", base, others, "reaches it")] if others else []


def fsdp(records: Records) -> Section:
    """Return the steps of FSDP2 with replicas between nodes, and the loss that each way ends at."""
    section = Section("bench-fsdp", "FSDP2 and HSDP", question=Question.DDP)
    steps = [step for step in records.get("bench.fsdp", []) if step["valid"]]
    groups: dict[str, list[Values]] = {}
    for step in steps:
        name = f"{step['nodes']} nodes of {step['shards']} ranks, {_link(step['link'])}"
        groups.setdefault(name, []).append(step)
    rows: Rows = [
        (name, _title(step), 1e3 * step["step_s"], step["step_speed_up"], (step["node_nbytes_per_step"] or 0) / 1e3)
        for name, group in groups.items()
        for step in group
    ]
    # HSDP is trained again beside other ways. The runs of a seed have their goal in common.
    by_run = {
        (one["nodes"], one["shards"], one["way"], one["goal_loss"]): one for one in records.get("bench.fsdp.loss", [])
    }
    trainings = list(by_run.values())
    if rows:
        columns = ("link", "way", "ms a step", "speed-up", "kB from a node")
        note = "Milliseconds of a step over each link between nodes."
        section.plots.append(bars_by_link("fsdp-steps", "FSDP2: time of a step", note, columns, rows))
        section.verdicts = [
            verdict for name, group in groups.items() for verdict in _fsdp_verdict(name, group, trainings)
        ]
    curves: Rows = [
        (
            f"{one['nodes']} nodes of {one['shards']} ranks, {'Muon' if _title(one).startswith('Muon') else 'AdamW'}",
            _title(one), run, step, loss,
        )
        for run, one in enumerate(trainings)
        for step, loss in one["curve"]
    ]  # fmt: skip
    if curves:
        data = Data(("nodes", "way", "run", "step", "loss"), curves)
        section.plots.append(
            Plot("fsdp-loss", "FSDP2: loss by step", "Nats a byte on held-out text; a line for each seed.", "line",
                 data, "step", "loss", series="way", group="run", pick="nodes")
        )  # fmt: skip
    return section


def _fsdp_verdict(name: str, group: Sequence[Values], trainings: Sequence[Values]) -> list[Verdict]:
    plain = next((step for step in group if step["way"] == PLAIN_FSDP), None)
    if plain is None:
        return []

    def losses(step: Values) -> dict[float, float]:  # by seed
        key = (step["nodes"], step["shards"], step["way"])
        return {one["goal_loss"]: one["loss"] for one in trainings if (one["nodes"], one["shards"], one["way"]) == key}

    def candidate(step: Values) -> Candidate:
        mine, stock = losses(step), losses(plain)
        both = [goal for goal in mine if goal in stock]
        known = Candidate(_title(step), step["step_s"], step["node_nbytes_per_step"], "")
        if not both:  # then it must be a codec of gradients that suits the usual optimizers
            harm = "its local steps" if step["way"].startswith("local ") else _harm(step["way"])
            return known._replace(lost=f"loss not measured{f', {harm}' if harm else ''}", allowed=harm is None)
        loss, wanted = fmean(mine[goal] for goal in both), fmean(stock[goal] for goal in both)
        seeds = "one seed" if len(both) == 1 else f"mean of {len(both)} seeds"
        return known._replace(lost=f"last loss {loss:.3f} beside {wanted:.3f}, {seeds}", allowed=loss <= 1.01 * wanted)

    others = [candidate(step) for step in group if step is not plain]
    return [decide(f"FSDP2, {name}", candidate(plain), others, f"1 % of the loss, or {SUITS}")] if others else []


def torchft(records: Records) -> Section:
    """Return the steps of torchft's replicas by codec; the kills are in the section about faults."""
    rows: Rows = [
        ("torchft alone" if step["spec"] == "plain" else step["spec"], 1e3 * step["step_s"], step["steps"],
         step["parameters"])
        for step in records.get("faults.replica_step", [])
    ]  # fmt: skip
    data = Data(("codec", "ms a step", "steps", "parameters"), rows)
    about = "Milliseconds of a step on one host: without a slow link a codec only costs time."
    plots = [Plot("torchft-steps", "torchft: time of a step", about, "bars", data, "ms a step", "codec",
                  detail=("steps", "parameters"))]  # fmt: skip
    return Section("torchft", "torchft", plots=plots if rows else [], question=Question.DDP)
