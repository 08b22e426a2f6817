"""Help texts: options in groups, a line or two each, for terminals of 80 columns."""

from __future__ import annotations

import io
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from laconic.cli.output import encodable

__all__ = ["Commands", "HelpCommand", "HelpGroup"]

WIDEST, LABEL = 100, 24
"""Columns of a help text and of an option's name and value, at most. A longer name has a line of its own."""

NO_BREAK = "\N{NO-BREAK SPACE}"

_OPTION_AND_VALUE = re.compile(r"(--?[\w-]+) (?=[^-\s])")

METAVARS = {"int": "N", "integer": "N", "float": "X", "str": "NAME", "text": "NAME", "path": "PATH"}
"""Names of values by their type, for options without a name of their own. click and typer call types differently."""


class HelpCommand(TyperCommand):
    """A command that prints its help in this module's format."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help_text(self, ctx))


class HelpGroup(TyperGroup):
    """A group of commands that prints its help in this module's format."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help_text(self, ctx))


class Commands(typer.Typer):
    """A group of commands with help in this module's format."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"cls": HelpGroup, "rich_markup_mode": None, **settings})

    def command(self, *args: Any, **settings: Any) -> Any:
        return super().command(*args, **{"cls": HelpCommand, **settings})


def _help_text(command: Any, ctx: Any) -> str:
    """Return usage, description, groups of options or commands, and examples."""
    terminal = Console(highlight=False)
    width = min(terminal.width, WIDEST)
    out = Console(
        file=io.StringIO(), width=width, highlight=False, force_terminal=sys.stdout.isatty(),
        no_color=terminal.no_color, color_system="standard" if sys.stdout.isatty() else None,
    )  # fmt: skip

    def write(line: str, style: str = "") -> None:
        out.print(Text(line, style), soft_wrap=True)

    usage = encodable(" ".join(["Usage:", ctx.command_path, *_usage(command, ctx)]))
    write("\n".join(textwrap.wrap(usage, width - 1, subsequent_indent="  ", break_on_hyphens=False)), "bold")
    write("")
    for line in (command.help or "").strip().splitlines():
        write("\n".join(textwrap.wrap(line, width - 3, break_on_hyphens=False)) if len(line) > width - 1 else line)
    # Spelled in the terminal's characters before columns get a width: "…" is three characters in ASCII.
    sections = [
        (title, [(encodable(label), _spelled(text)) for label, text in rows]) for title, rows in _sections(command, ctx)
    ]
    indent = max((len(label) for _, rows in sections for label, _ in rows if len(label) <= LABEL), default=0)
    for title, rows in sections:
        write(f"\n{title}:", "bold")
        for label, text in rows:
            lines = textwrap.wrap(text, width - indent - 5, break_on_hyphens=False) or [""]
            if len(label) > indent:
                lines = ["", *lines]
            out.print(Text("  ").append(f"{label:{indent}}", "cyan"), Text(lines[0]), soft_wrap=True)
            for line in lines[1:]:
                write(f"{'':{indent + 3}}{line}")
    for line in filter(None, (command.epilog or "").splitlines()):
        if line.endswith(":"):
            write(f"\n{line}", "bold")
        else:
            broken = textwrap.wrap(
                _OPTION_AND_VALUE.sub(rf"\1{NO_BREAK}", line), width - 3, subsequent_indent="      ",
                break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
            write(" \\\n".join(broken))
    assert isinstance(out.file, io.StringIO)
    # click would print UTF-8 on a terminal that only has ASCII.
    text = encodable(out.file.getvalue().replace(NO_BREAK, " "))
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _spelled(text: str) -> str:
    """Return a text in characters that stdout has, with its no-break spaces, which lines are broken by."""
    return NO_BREAK.join(map(encodable, text.split(NO_BREAK)))


def _usage(command: Any, ctx: Any) -> Iterator[str]:
    """Yield what follows the command's name: ``[OPTIONS]``, ``RUN…`` for one or more, ``[RUN]`` for none or one."""
    pieces = command.collect_usage_pieces(ctx)  # versions of click and typer write arguments differently
    arguments = [one for one in command.get_params(ctx) if one.param_type_name == "argument"]
    yield from (pieces[:1] if arguments else pieces)
    for argument in arguments:
        name = _metavar(argument).rstrip("….") + ("…" if argument.nargs == -1 else "")
        yield name if argument.required else f"[{name}]"


def _sections(command: Any, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the titles and rows of a help text: arguments, commands, groups of options, options of no group."""
    groups: dict[str, list[tuple[str, str]]] = {}
    plain: list[tuple[str, str]] = []
    for parameter in command.get_params(ctx):
        if getattr(parameter, "hidden", False):
            continue
        row = (_label(parameter), _description(parameter))
        if parameter.param_type_name == "argument":
            groups.setdefault("Arguments", []).append(row)
        elif getattr(parameter, "rich_help_panel", None):
            groups.setdefault(parameter.rich_help_panel, []).append(row)
        else:
            plain.append(row)
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            title = getattr(inner, "rich_help_panel", None) or "Commands"
            first = " ".join((inner.help or "").partition("\n\n")[0].split())
            groups.setdefault(title, []).append((name, first))
    yield from groups.items()
    grouped = any(getattr(parameter, "rich_help_panel", None) for parameter in command.get_params(ctx))
    yield "More options" if grouped else "Options", plain


def _label(parameter: Any) -> str:
    metavar = _metavar(parameter)
    if parameter.param_type_name == "argument":
        return metavar
    names = " / ".join([", ".join(sorted(parameter.opts, key=len)), *parameter.secondary_opts])
    return f"{names} {metavar}".rstrip()


def _metavar(parameter: Any) -> str:
    if parameter.metavar is not None:
        return str(parameter.metavar)
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    if getattr(parameter, "is_flag", False) or getattr(parameter, "count", False):
        return ""
    descriptor = getattr(parameter, "type_descriptor", None)  # of typer from 0.27; click's types have names
    kind = getattr(descriptor, "annotation", None) or parameter.type
    name = getattr(kind, "__name__", None) or getattr(kind, "name", "text")
    return METAVARS.get(str(name).lower().split()[0], "VALUE")


def _description(parameter: Any) -> str:
    text = getattr(parameter, "help", None) or ""
    shown, default = getattr(parameter, "show_default", False), parameter.default
    if parameter.required:
        return text if parameter.param_type_name == "argument" else f"{text} [required]"
    if isinstance(shown, str):
        return _with_default(text, shown)
    if getattr(parameter, "is_flag", False):
        if not parameter.secondary_opts:
            return text
        default = (parameter.opts if default else parameter.secondary_opts)[0].lstrip("-")
    if not shown or default is None or callable(default) or (isinstance(default, Sequence) and not default):
        return text
    return _with_default(text, f"{default:g}" if isinstance(default, float) else str(default))


def _with_default(text: str, default: str) -> str:
    """Append a default; a short one is not torn apart at the end of a line."""
    shown = f"[default: {default}]"
    return f"{text} {shown.replace(' ', NO_BREAK) if len(shown) < LABEL else shown}".lstrip()
