"""``laconic tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli import complete
from laconic.cli.options import Json, RecordFile, option
from laconic.cli.output import check_writable, examples, print_json, print_stderr, print_table, print_text, progress_bar
from laconic.cli.progress import ProgressLog
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.train.task import Task
    from laconic.tuning import Tuning

__all__ = ["EXAMPLES", "register", "tune"]

EXAMPLES = (
    "laconic tune --model mlp --data digits --steps 20 --codec qsgd:4 --bandwidth 10mbit",
    "laconic tune my.py:build --optimizer adamw --lr 1e-3 --bandwidth 100mbit -o mine.json",
)

RATES = {"sgd": 0.1, "momentum": 0.02, "adamw": 1e-3, "muon": 1e-3}
"""Usual learning rates of optimizers; that of muon is for the parameters that AdamW trains."""

LAYERS = 8
"""How many layers the text shows."""
NOISY = 1.0
"""Per cent of the loss that plain trainings may differ by before the user is warned."""


def tune(
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            show_default=False,
            help="Returns (model, train, test, loss), as for laconic train, or a dict of arguments of laconic.tune.",
        ),
    ] = None,
    model: Annotated[str | None, complete.model_option("A model of laconic train, instead of a script.")] = None,
    data: Annotated[str | None, option("Its data: digits, mnist, cifar10 or text.", "the model's")] = None,
    optimizer: Annotated[str, option("sgd, momentum, adamw or muon.", metavar="NAME")] = "adamw",
    lr: Annotated[float | None, option("Learning rate.", "the optimizer's usual one", metavar="RATE")] = None,
    batch: Annotated[int, option("Examples of a worker's step.", min=1)] = 32,
    steps: Annotated[int, option("Steps of each training.")] = 200,
    workers: Annotated[int, option("Simulated workers.")] = 2,
    codec: Annotated[
        list[str] | None,
        complete.spec_option("A codec or 'local 8 ef|sign'; may be repeated.", "a stock of 10"),
    ] = None,
    bandwidth: Annotated[str, option("Rate of each host's link.", metavar="RATE")] = "100mbit",
    latency: Annotated[str, option("Round trip between two hosts: 5ms.", metavar="TIME")] = "0",
    topology: Annotated[str, option("twoshot, ring or ps.")] = "twoshot",
    give_up: Annotated[str, option("Per cent of the loss that a codec may cost: 0.5%.", metavar="PERCENT")] = "0%",
    family: Annotated[
        str | None, option("convolutional, recurrent, transformer or mlp.", "by the layers", metavar="FAMILY")
    ] = None,
    seed: Annotated[int, option("Seed of model and batches.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Keep finished trainings; an interrupted run goes on."),
    ] = None,
    record: RecordFile = None,
    json: Json = False,
) -> None:
    """Train your model for a few hundred steps by several codecs, and choose one.

    Workers are simulated in this process, one after the other; their frames
    are real. Prints the loss beside plain data parallelism, the error of
    encoding and the growth of residuals, bytes and the predicted time on your
    link, and lines to paste. laconic plan --evidence reads the FILE.
    """
    import torch

    from laconic import tuning
    from laconic.cli.plan import per_cent
    from laconic.records import Record, write
    from laconic.units import parse_rate, parse_time

    if (script is None) == (model is None):
        raise ConfigError("give a script FILE.py:FUNCTION or --model NAME")
    for path in (output, record):
        if path is not None:
            check_writable(path)
    arguments = _arguments(script, model, data, optimizer, lr, batch, workers, seed)
    log = ProgressLog()
    with progress_bar("tuning") as (bar, task):

        def notify(label: str, done: int, total: int) -> None:
            log(f"{label}: {done} of {total} steps")
            bar.update(task, description=label, completed=done, total=total)

        torch.manual_seed(seed)
        tuned = tuning.tune(**{
            "steps": steps, "workers": workers, "candidates": codec, "rate": parse_rate(bandwidth), "seed": seed,
            "round_trip_s": parse_time(latency), "topology": topology, "give_up": per_cent(give_up), "family": family,
            "path": output, "notify": notify, **arguments,
        })  # fmt: skip
    if record is not None:
        write([Record("tune.evidence", one.values() | {"steps_trained": steps}, seed=seed) for one in tuned.evidence],
              record)  # fmt: skip
    if json:
        print_json(tuned.values())
        return
    _print(tuned)
    noise = max((one.noise for one in tuned.evidence), default=0.0)
    if noise > NOISY:
        print_stderr(
            f"laconic: the order of batches alone changes the loss by {noise:.1f} %, so smaller differences say "
            "nothing: train for more --steps, or lower the learning rate"
        )
    if output is not None:
        print_stderr(f"{output} written: laconic plan --evidence {output} --family {tuned.settings['family']} …")


def _arguments(
    script: str | None, model: str | None, data: str | None, optimizer: str, lr: float | None, batch: int, workers: int,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of ``laconic.tune`` for a script or a model of laconic."""
    from laconic.plan.evidence import OPTIMIZERS
    from laconic.train import script as scripts
    from laconic.train.models import MODELS
    from laconic.train.task import Task, build_task

    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if script is None:
        assert model is not None
        info = MODELS.get(model)
        chosen = data or (info.data[0] if info is not None and info.data else "digits")
        task: Task = build_task(model, chosen, seed=seed)
        return _of_task(task, optimizer, lr, batch, seed) | {"name": model}
    result = scripts.call(script)
    if isinstance(result, dict):
        missing = [name for name in ("model", "batches", "optimizer") if name not in result]
        if missing:
            raise ConfigError(f"script {script!r}: its dict must have {', '.join(missing)}, too")
        return {"name": Path(script.rpartition(":")[0]).stem, **result}
    if isinstance(result, tuple) and len(result) == 4:
        result = Task(script, *result, holdout=0.05, seed=seed)
    if not isinstance(result, Task):
        raise ConfigError(
            f"script {script!r} must return (model, train, test, loss), a laconic Task or a dict of arguments of "
            f"laconic.tune, got {type(result).__name__}"
        )
    return _of_task(result, optimizer, lr, batch, seed) | {"name": Path(script.rpartition(":")[0]).stem}


def _of_task(task: Task, optimizer: str, lr: float | None, batch: int, seed: int) -> dict[str, Any]:
    import torch

    from laconic.collective import muon

    rate = RATES[optimizer] if lr is None else lr

    def make(model: torch.nn.Module) -> Any:
        if optimizer == "muon":
            return muon(model, adamw_lr=rate)
        if optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), rate)
        return torch.optim.SGD(model.parameters(), rate, momentum=0.9 if optimizer == "momentum" else 0.0)

    def examples_of(number: int) -> Any:
        generator = torch.Generator().manual_seed(1_000_003 * seed + number)
        return task.batch(torch.randint(task.num_train, (batch,), generator=generator))

    def loss(model: torch.nn.Module, examples: Any) -> torch.Tensor:
        device = next(model.parameters()).device
        return task.loss_function(model(examples.inputs.to(device)), examples.targets.to(device))

    return {
        "model": task.model, "batches": examples_of, "optimizer": make, "loss": loss,
        "held_out": task.held_out() or None,
    }  # fmt: skip


def _print(tuned: Tuning) -> None:
    from laconic.tables import Table
    from laconic.units import show_bytes, show_time

    rows = {row.codec: row for row in tuned.recommendation.rows}
    plain = tuned.outcomes["none"].loss
    cells = []
    for label, outcome in tuned.outcomes.items():
        row = rows.get(label)
        times = (show_time(row.step.total_s), f"{row.speedup_fp32:.2f}") if row is not None else ("", "")
        cells.append((
            label + " *" * (label == tuned.codec), f"{outcome.loss:.4f}", f"{100 * (outcome.loss / plain - 1):+.1f} %",
            f"{outcome.error:.2g}", f"{outcome.growth:.2f}", show_bytes(outcome.nbytes), *times,
        ))  # fmt: skip
    settings, request = tuned.settings, tuned.recommendation.request
    title = (
        f"{settings['model']}: {settings['numel']:,} parameters, {settings['family']}, {settings['optimizer']}, "
        f"{settings['workers']} simulated workers, {settings['steps']} steps each"
    )
    columns = ("codec", "loss", "beside none", "error", "residuals", "bytes a step", "step", "speed-up")
    print_table(Table(columns, cells, title=title))
    print_text(
        "error: the largest relative squared error of a layer. residuals: the largest growth between the middle and "
        f"the end. step: predicted, {request.topology} at {request.rate / 1e6:g} Mbit/s.", wrap=True,
    )  # fmt: skip
    _print_layers(tuned)
    print_text(f"recommended: {tuned.codec}: {tuned.recommendation.reason}", wrap=True)
    print_text("", tuned.code)


def _print_layers(tuned: Tuning) -> None:
    """Print the layers that a codec changes most: error of encoding, residual, and its growth."""
    from laconic.tables import Table

    shown = tuned.shown
    slots = sorted(shown.slots.items(), key=lambda slot: (-slot[1]["error"], slot[0]))
    rows = [
        (name, tuned.rules.get(name, slot["codec"]), f"{slot['error']:.2g}", f"{slot['residual']:.2g}",
         f"{slot['growth']:.2f}")
        for name, slot in slots[:LAYERS] if slot["error"] > 0
    ]  # fmt: skip
    if rows:
        more = f", {len(slots) - len(rows)} more in --json" if len(slots) > len(rows) else ""
        columns = ("layer", "codec", "error", "residual", "growth")
        print_table(Table(columns, rows, title=f"{shown.label}: layers by error of encoding{more}"))


def register(app: typer.Typer) -> None:
    app.command(epilog=examples(*EXAMPLES))(tune)
