"""Commands that other distributions add to ``laconic``, through the entry-point group ``laconic.commands``."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

from laconic.errors import ConfigError

__all__ = ["register"]

GROUP = "laconic.commands"
LAB_COMMANDS = {
    "bench": "Time codecs, coders, layers, DDP and the parameter server.",
    "lab": "Emulate slow networks on this host; run the fault campaign.",
    "study": "Repeat the experiments of a paper.",
}
"""Commands of the distribution laconic-lab, with the help line shown when it is not installed."""


def register(app: typer.Typer) -> None:
    """Add the installed commands of the group, and a line of advice in place of each missing lab command."""
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    for entry in installed.values():
        entry.load()(app)
    for name, description in LAB_COMMANDS.items():
        if name not in installed:
            _register_missing(app, name, description)


def _register_missing(app: typer.Typer, name: str, description: str) -> None:
    def missing() -> None:
        how = "pip install laconic-lab, or pip install ./lab in a checkout"
        raise ConfigError(f"`laconic {name}` is part of laconic-lab: {how}")

    app.command(
        name,
        help=f"{description} Needs laconic-lab: pip install laconic-lab.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
    )(missing)
