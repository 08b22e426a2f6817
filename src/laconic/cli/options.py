"""Options that several commands share, and short ways to declare options and groups of commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.help import Commands
from laconic.cli.output import examples

__all__ = ["Json", "RecordFile", "Wide", "add_group", "option"]


def option(text: str, default: str | bool = True, *, names: Sequence[str] = (), **settings: Any) -> Any:
    """Return a typer option with this help.

    Args:
        default: What is shown instead of None.
        names: The option's names, if not the parameter's; a flag without a ``--no-`` form needs its own.
    """
    return typer.Option(*names, help=text, show_default=default, **settings)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Wide = Annotated[bool, typer.Option("--wide", help="Show all columns, for wide terminals and files.")]
RecordFile = Annotated[
    Path | None, typer.Option("--record", metavar="FILE.jsonl", help="Write Records, one JSON object per line.")
]


def add_group(
    app: typer.Typer, name: str, text: str, commands: Mapping[str, tuple[Callable[..., None], Sequence[str]]]
) -> None:
    """Add a group of commands, each with its examples. Without a command the group prints its help."""
    group = Commands()

    @group.callback(invoke_without_command=True, help=text)
    def root(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    for command, (function, lines) in commands.items():
        group.command(command, epilog=examples(*lines))(function)
    app.add_typer(group, name=name, epilog=examples(*(line for _, lines in commands.values() for line in lines)))
