"""``laconic plan``."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli import complete
from laconic.cli.options import Json, Wide, option
from laconic.cli.output import examples, print_json, print_stderr, print_table, print_text, stdout_console
from laconic.cli.plan_pipeline import print_pipeline
from laconic.errors import ConfigError, FileError
from laconic.json_files import read_json

if TYPE_CHECKING:
    from laconic.plan import MeasuredRun, PlanRequest, Recommendation
    from laconic.plan.recommend import Row

__all__ = ["EXAMPLES", "per_cent", "plan", "register"]

EXAMPLES = (
    "laconic plan --model vgg11 --workers 4 --bandwidth 100mbit",
    "laconic plan --params 25000000 --step-time 0.3 --family transformer --optimizer adamw --bandwidth 1gbit --json",
    "laconic plan --params 61100840 --step-time 0.6 --workers 16 --bandwidth 1gbit --every 200 --sweep workers",
    "laconic plan --model mlp --workers 4 --bandwidth 100gbit --codec qsgd:4 --rho 0.1 --h 0.2",
    "laconic plan --stages 4 --micro-batches 8 --activations 786432 --step-time 0.2 --bandwidth 100mbit",
)


_training = partial(option, rich_help_panel="The training")
_network = partial(option, rich_help_panel="The network")
_compared = partial(option, rich_help_panel="What is compared")
_pipeline = partial(option, rich_help_panel="Pipelines")


def plan(
    model: Annotated[
        str | None,
        complete.model_option("A model of the profile, with its own step time.", rich_help_panel="The training"),
    ] = None,
    params: Annotated[int | None, _training("Number of parameters of any other model.")] = None,
    step_time: Annotated[
        float | None, _training("Time of one worker's iteration.", "the profile's", metavar="SECONDS")
    ] = None,
    workers: Annotated[int, _training("Number of workers.")] = 2,
    bandwidth: Annotated[
        str | None, _network("Rate of each host's link: 100mbit, 1gbit.", "1gbit", metavar="RATE")
    ] = None,
    topology: Annotated[str, _network("ps, ring, twoshot, fsdp or hsdp.")] = "ps",
    ranks: Annotated[int, _network("With hsdp: ranks of a node; --workers are nodes.")] = 1,
    servers: Annotated[int, _network("With ps: number of servers that share the parameters.")] = 1,
    latency: Annotated[str, _network("Round trip between two hosts: 5ms.", metavar="TIME")] = "0",
    every: Annotated[int, _training("Iterations between two exchanges.")] = 1,
    codec: Annotated[
        list[str] | None,
        complete.spec_option(
            "A codec to compare; may be repeated.", "those of the profile", rich_help_panel="What is compared"
        ),
    ] = None,
    family: Annotated[
        str | None, _training("convolutional, recurrent, transformer or mlp.", "that of --model", metavar="FAMILY")
    ] = None,
    optimizer: Annotated[
        str | None, _training("sgd, momentum, adamw or muon.", "the family's usual one", metavar="NAME")
    ] = None,
    change_optimizer: Annotated[
        bool,
        typer.Option(
            "--change-optimizer",
            rich_help_panel="What is compared",
            help="Compare trainings by another optimizer, too; its own time is not counted.",
        ),
    ] = False,
    give_up: Annotated[
        str, _compared("Points of accuracy, or per cent of the loss, that a codec may cost: 0.5%.", metavar="PERCENT")
    ] = "0%",
    evidence: Annotated[
        Path | None, _compared("Evidence of laconic tune on a model of your own.", "laconic's own", metavar="FILE")
    ] = None,
    rho: Annotated[float | None, _training("With --h: share of the parameters that compressed layers keep.")] = None,
    h: Annotated[float | None, _training("Step time of compressed layers over the dense one.")] = None,
    processes: Annotated[int, _compared("Workers on each machine, which share its cores.")] = 1,
    memory: Annotated[str | None, _training("Memory of a worker: 16gib.", "the profile's", metavar="SIZE")] = None,
    profile: Annotated[
        str, _compared("Machine: a file of laconic calibrate, or cpu, h200, jang2017.", metavar="NAME")
    ] = "cpu",
    sweep: Annotated[
        str | None, _compared("Draw curves over workers, bandwidth, rho or h.", metavar="PARAMETER")
    ] = None,
    plot: Annotated[Path | None, _compared("Draw the curves into a file (needs matplotlib).", metavar="FILE")] = None,
    what_if: Annotated[
        Path | None, _training("Compare codecs for a run of laconic train.", metavar="RUN_FOLDER")
    ] = None,
    stages: Annotated[
        int | None, _pipeline("Plan a pipeline of so many stages instead; --step-time is a stage's.")
    ] = None,
    micro_batches: Annotated[int | None, _pipeline("With --stages: micro-batches of a step.", "4")] = None,
    activations: Annotated[
        int | None, _pipeline("With --stages: values that a stage sends of a micro-batch, windows x length x width.")
    ] = None,
    schedule: Annotated[str | None, _pipeline("With --stages: gpipe or 1f1b.", "1f1b")] = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Predict the time to the same quality with each codec, and recommend one or none.

    Times are modelled: codecs by a profile of the machine, links by their rate.
    Quality is that of trainings of the same family of models by the same
    optimizer: what no training kept is not recommended. See docs/planner.md.
    """
    from laconic.plan import CompressedLayers, PlanRequest, recommend
    from laconic.plan import sweep as swept
    from laconic.plan.evidence import load_evidence
    from laconic.plan.profile import load
    from laconic.plan.sweep import SWEEPS
    from laconic.units import parse_rate, parse_size, parse_time

    if stages is not None:
        foreign = {
            "model": model, "params": params, "rho": rho, "h": h, "memory": memory, "sweep": sweep, "plot": plot,
            "what-if": what_if, "workers": workers if workers != 2 else None, "every": every if every != 1 else None,
            "servers": servers if servers != 1 else None, "topology": topology if topology != "ps" else None,
            "processes": processes if processes != 1 else None, "ranks": ranks if ranks != 1 else None,
            "family": family, "optimizer": optimizer, "change-optimizer": change_optimizer or None,
            "give-up": give_up if give_up != "0%" else None, "evidence": evidence,
        }  # fmt: skip
        for name, value in foreign.items():
            if value is not None:
                raise ConfigError(f"--{name} does not apply to a pipeline: leave --{name} or --stages out")
        print_pipeline(
            load(profile), stages=stages, micro_batches=4 if micro_batches is None else micro_batches,
            activations=activations, step_s=step_time, rate=parse_rate(bandwidth or "1gbit"),
            round_trip_s=parse_time(latency), schedule=schedule or "1f1b", codecs=codec, json=json,
        )  # fmt: skip
        return
    for name, value in (("micro-batches", micro_batches), ("activations", activations), ("schedule", schedule)):
        if value is not None:
            raise ConfigError(f"--{name} describes a pipeline: give --stages, too")
    if sweep is not None and sweep not in SWEEPS:
        raise ConfigError(f"--sweep must be one of {', '.join(SWEEPS)}, got {sweep!r}")
    if plot is not None and sweep is None:
        raise ConfigError("--plot draws a --sweep: give both")
    if plot is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'laconic[plots]'")
    if (rho is None) != (h is None) and sweep not in ("rho", "h"):
        raise ConfigError("--rho and --h describe compressed layers: give both")
    options: dict[str, Any] = {
        "rate": parse_rate(bandwidth or "1gbit"), "topology": topology, "servers": servers, "ranks": ranks,
        "round_trip_s": parse_time(latency), "codecs": codec, "processes": processes,
        "memory": parse_size(memory) if memory is not None else None, "family": family, "optimizer": optimizer,
        "give_up": per_cent(give_up), "change_optimizer": change_optimizer,
        "evidence": None if evidence is None else load_evidence(evidence),
        "layers": CompressedLayers(1.0 if rho is None else rho, 1.0 if h is None else h)
        if rho is not None or h is not None or sweep in ("rho", "h") else None,
    }  # fmt: skip
    machine, run = load(profile), None
    if what_if is not None:
        if model is not None or params is not None or step_time is not None:
            raise ConfigError(
                "--what-if takes model and step time from the run: leave --model, --params, --step-time out"
            )
        run, run_values = _read_run(what_if)
        request = PlanRequest.for_run(machine, run, **options)
        if bandwidth is None:
            request = _fitted(request, run)
    elif model is not None:
        if params is not None:
            raise ConfigError("give --model or --params, not both")
        if model not in machine.models and model in complete.MODELS:
            raise ConfigError(
                f"profile {machine.name} has no model {model!r}: measure it by `laconic calibrate --model {model} -o "
                "FILE`, then plan with --profile FILE"
            )
        request = PlanRequest.for_model(machine, model, step_time, workers=workers, every=every, **options)
    elif params is not None:
        if step_time is None:
            raise ConfigError("--params needs --step-time, the seconds of one worker's iteration")
        request = PlanRequest.for_params(machine, params, step_time, workers=workers, every=every, **options)
    else:
        raise ConfigError("give --model NAME, or --params N --step-time S, or --what-if RUN_FOLDER")
    recommendation = recommend(request, notify=lambda line: print_stderr(f"laconic: {line}"))
    curves = swept(request, sweep) if sweep is not None else None
    if json:
        values = recommendation.values()
        values["asked"]["sweep"] = sweep
        values |= {"run": run_values} if run is not None else {}
        values |= {"sweep": curves.values()} if curves is not None else {}
        print_json(values)
    else:
        _print(recommendation, run, wide)
        if curves is not None:
            stdout_console().print(curves.text(), markup=False)
    if curves is not None and plot is not None:
        curves.save(plot)
        print_stderr(f"{plot} written")


def per_cent(text: str) -> float:
    try:
        return float(text.strip().removesuffix("%"))
    except ValueError:
        raise ConfigError(f"--give-up must be a percentage such as 0.5%, got {text!r}") from None


def _read_run(folder: Path) -> tuple[MeasuredRun, dict[str, Any]]:
    """Return the times of a run, and what ``--json`` repeats of them."""
    from laconic.plan import MeasuredRun
    from laconic.train.run import SUMMARY, Config, trainable

    config = Config.load(folder)
    try:
        summary = read_json(folder / SUMMARY)
    except FileNotFoundError:
        raise FileError(f"{folder} has no {SUMMARY}: the run has not ended") from None
    for key in ("compute_s", "total_s", "wire_bytes_per_iteration"):
        value = summary.get(key) if isinstance(summary, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise FileError(f"{folder / SUMMARY}: {key} must be a number of at least 0, got {value!r:.40}")
    slots = tuple((x.numel(), x.dim()) for x in trainable(config.task().model).values())
    job = config.job
    run = MeasuredRun(
        slots, job.workers, job.every, job.push, config.iterations, summary["compute_s"], summary["total_s"],
        None if config.script else config.model,
    )  # fmt: skip
    return run, {
        "run": str(folder), "workers": run.workers, "every": run.every, "step_s": run.step_s, "codec": run.codec,
        "method": config.method, "measured_step_s": run.measured_step_s,
        "measured_bytes_per_iteration": summary["wire_bytes_per_iteration"] / run.workers,
    }  # fmt: skip


def _fitted(request: PlanRequest, run: MeasuredRun) -> PlanRequest:
    """Return the request with the rate at which the run's own codec takes as long as the run took."""
    from laconic.plan.recommend import fitted_rate

    rate = fitted_rate(request, run.codec, run.measured_step_s)
    if rate is None:
        print_stderr("laconic: the run took no longer than without a network: any rate fits it, 100 Gbit/s is assumed")
    return replace(request, rate=1e11 if rate is None else rate)


COLUMNS = ("codec", "bytes", "step", "speed-up", "quality")
WIDE_COLUMNS = (
    "codec", "push", "pull", "iteration", "compute", "encode", "push", "add", "pull", "decode", "hidden", "over fp32",
    "over bf16", "pays below", "memory", "quality",
)  # fmt: skip


def _print(recommendation: Recommendation, run: MeasuredRun | None, wide: bool) -> None:
    from laconic.tables import Table
    from laconic.units import show_rate, show_time

    request = recommendation.request
    title = (
        f"{request.workload.numel:,} parameters, {request.workers} workers, {request.topology} at "
        f"{show_rate(request.rate)}, a step of {show_time(request.step_s)} alone"
    )
    rows = sorted(recommendation.rows, key=lambda row: row.step.total_s)
    optimizer = request.trained_by
    cells = [(_wide_cells if wide else _cells)(row, row.codec == recommendation.codec, optimizer) for row in rows]
    print_table(Table(WIDE_COLUMNS if wide else COLUMNS, cells, title=title), wide=wide)
    print_text(*dict.fromkeys(f"{row.codec}: {row.step.note}" for row in recommendation.rows if row.step.note))
    if not wide:
        print_text(
            "bytes: pushed and pulled by a worker in an iteration; quality: accuracy or loss beside float32, + is "
            "better. --wide shows the parts of a step.",
            wrap=True,
        )
    if run is not None:
        print_text(f"the run itself: {run.codec} pushed, an iteration took {show_time(run.measured_step_s)}", wrap=True)
    print_text(f"recommended: {recommendation.codec}: {recommendation.reason}", wrap=True)


def _cells(row: Row, recommended: bool, optimizer: str | None) -> list[str]:
    from laconic.units import show_bytes, show_time

    nbytes = (row.message.push + row.message.pull) / row.step.every
    memory = "" if row.fits else " (memory!)"
    return [
        row.codec + " *" * recommended, show_bytes(nbytes), show_time(row.step.total_s) + memory,
        f"{row.speedup_fp32:.2f}", _quality(row, optimizer),
    ]  # fmt: skip


def _wide_cells(row: Row, recommended: bool, optimizer: str | None) -> list[str]:
    from laconic.units import show_bytes, show_rate, show_time

    step = row.step
    parts = (
        step.compute_s, step.encode_s, step.push_s, step.aggregate_s, step.pull_s, step.decode_s, step.hidden_s,
    )  # fmt: skip
    limit = row.pays if row.break_even is None or math.isinf(row.break_even) else show_rate(row.break_even)
    return [
        row.codec + " *" * recommended, show_bytes(row.message.push), show_bytes(row.message.pull),
        show_time(step.total_s), *(show_time(part / step.every) for part in parts), f"{row.speedup_fp32:.2f}",
        f"{row.speedup_bf16:.2f}", "" if row.codec == "none" else limit,
        show_bytes(row.memory) + ("" if row.fits else " (too much)"), _quality(row, optimizer),
    ]  # fmt: skip


def _quality(row: Row, optimizer: str | None) -> str:
    """Return what a row's codec is known to change under an optimizer, in a few words."""
    from laconic.plan.evidence import OPTIMIZERS
    from laconic.suitability import known_loss

    if row.evidence is not None:
        unit = "%" if row.evidence.measure == "loss" else "points"
        steps = f", {row.steps:.3g}x steps" if row.steps != 1 else ""
        gained = f"{-row.evidence.given_up:+.2g}" if round(row.evidence.given_up, 3) else "0"
        return f"{gained} {unit}{steps}"
    known = "none known"
    if row.objection and row.candidate.every == 1:
        known = known_loss(row.candidate.codec, None if optimizer is None else OPTIMIZERS[optimizer])
    return row.objection or "exact" if known == "none known" else known


def register(app: typer.Typer) -> None:
    app.command(epilog=examples(*EXAMPLES))(plan)
