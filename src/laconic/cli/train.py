"""``laconic train``."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.output import examples, progress_bar, results, show_json, size
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.train.run import Config

__all__ = ["EXAMPLES", "register", "train"]

EXAMPLES = (
    "laconic train --method 5 --explain",
    "laconic train --method laconic --model mlp --iterations 20",
)


def train(
    method: Annotated[str, typer.Option("--method", help="1, 2, 2w, 3, 4, 5, 6, laconic or adaptive.")] = "1",
    model: Annotated[str, typer.Option("--model", help="mlp, lenet5, vgg11, gpt, …")] = "mlp",
    data: Annotated[str, typer.Option("--data", help="digits (embedded), mnist, cifar10 or text.")] = "digits",
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Where data sets lie; else $LACONIC_DATA.")
    ] = None,
    script: Annotated[
        str | None, typer.Option("--script", metavar="FILE.py:FUNCTION", help="A model of your own.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", help="How many workers.")] = 2,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the data; or give --iterations.")] = None,
    iterations: Annotated[int | None, typer.Option("--iterations", help="How many; by default three epochs.")] = None,
    batch: Annotated[int, typer.Option("--batch", help="Examples of a worker in an iteration.")] = 64,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 0.05,
    momentum: Annotated[float | None, typer.Option("--momentum", help="By default 0.9, or the method's.")] = None,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Of the descent.")] = 0.0,
    schedule: Annotated[str, typer.Option("--schedule", help="constant or cosine.")] = "constant",
    warmup: Annotated[int, typer.Option("--warmup", help="Iterations that lead up to the learning rate.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Decides everything random.")] = 0,
    mode: Annotated[str, typer.Option("--mode", help="sync, async or bounded:S.")] = "sync",
    push: Annotated[str | None, typer.Option("--push", metavar="SPEC", help="Channel of what workers send.")] = None,
    pull: Annotated[str | None, typer.Option("--pull", metavar="SPEC", help="Channel of what they get.")] = None,
    returns: Annotated[str | None, typer.Option("--returns", help="weights, gradients or delta.")] = None,
    sends: Annotated[str | None, typer.Option("--sends", help="gradients, changes or weights.")] = None,
    every: Annotated[int | None, typer.Option("--every", help="Iterations between exchanges.")] = None,
    after: Annotated[str | None, typer.Option("--after", help="mean or best.")] = None,
    backup: Annotated[int, typer.Option("--backup-workers", help="Workers that a round does not wait for.")] = 0,
    checkpoint_every: Annotated[int, typer.Option("--checkpoint-every", help="Exchanges between checkpoints.")] = 20,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="The run's folder; by default a new one in runs/.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --run-dir.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only print the flags that the method stands for.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a model with a parameter server and workers, each a process of its own on this host.

    A method is a set of options; every option can be given by its flag, which then counts.
    """
    from laconic.cluster.job import Job
    from laconic.train.methods import METHODS, method_flags, method_options
    from laconic.train.run import Config, launch

    options = method_options(method)
    if explain:
        if json:
            show_json({"method": method, "summary": METHODS[method][0], "flags": method_flags(method)})
        else:
            print(f"laconic train {shlex.join(method_flags(method))}  # {METHODS[method][0]}")
        return
    given: dict[str, Any] = {
        "push": push, "pull": pull, "returns": returns, "sends": sends, "every": every, "after": after,
        "momentum": momentum,
    }  # fmt: skip
    options |= {name: value for name, value in given.items() if value is not None}
    base: dict[str, Any] = {
        "workers": workers, "mode": mode, "lr": lr, "weight_decay": weight_decay, "backup": backup,
        "checkpoint_every": checkpoint_every, "seed": seed,
    }  # fmt: skip
    job = Job(**base | options)
    config = Config(
        model=model, data=data, data_dir=str(data_dir) if data_dir else None, script=script, batch=batch,
        iterations=job.every, method=method, schedule=schedule, warmup=warmup, job=job,
    )  # fmt: skip
    config = _long_enough(config, epochs, iterations)
    if resume and run_dir is None:
        raise ConfigError("--resume needs the --run-dir of the run to go on with")
    folder = run_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{method}"
    with progress_bar("starting") as (bar, task):

        def tell(lines: list[dict[str, Any]]) -> None:
            done = min(line["iteration"] for line in lines)
            sent = sum(line["bytes_sent"] + line["bytes_received"] for line in lines)
            loss = sum(line["loss"] for line in lines) / len(lines)
            seconds = max(line["total_s"] for line in lines)
            bar.update(
                task,
                completed=done,
                total=config.iterations,
                description=f"iteration {done}, loss {loss:.3f}, {size(sent / max(seconds, 1e-9))}/s",
            )

        (summary,) = launch({folder: config}, resume=resume, tell=tell)
    if json:
        show_json(summary | {"run_dir": str(folder)})
    else:
        _print(summary, folder)


def _long_enough(config: Config, epochs: int | None, iterations: int | None) -> Config:
    """As many iterations as were asked for, rounded up to whole exchanges."""
    from dataclasses import replace

    from laconic.train.shards import Shards

    if epochs is not None and iterations is not None:
        raise ConfigError("give --epochs or --iterations, not both")
    if iterations is None:
        job = config.job
        per_epoch = Shards(config.task().num_train, job.workers, config.batch, job.seed).iterations_per_epoch
        iterations = (3 if epochs is None else epochs) * per_epoch
    if iterations < 1:
        raise ConfigError(f"expected at least one iteration, got {iterations}")
    every = config.job.every
    return replace(config, iterations=-(-iterations // every) * every)


def _print(summary: dict[str, Any], folder: Path) -> None:
    from rich.table import Table

    table = Table("method", "push", "pull")
    for column in ("accuracy %", "per iteration", "compute s", "encode s", "waiting s", "total s"):
        table.add_column(column, justify="right")
    accuracy = summary.get("accuracy")
    table.add_row(
        summary["method"],
        summary["codec_push"],
        summary["codec_pull"],
        "" if accuracy is None else f"{accuracy:.2f}",
        size(summary["wire_bytes_per_iteration"]),
        *(f"{summary[key]:.2f}" for key in ("compute_s", "encode_s", "communication_s", "total_s")),
    )
    console = results()
    console.print(table, markup=False)
    console.print(f"wrote {folder}", markup=False)


def register(app: typer.Typer) -> None:
    app.command("train", epilog=examples(*EXAMPLES))(train)
