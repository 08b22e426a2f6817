"""Options that several benchmark commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["PacedSockets"]

PacedSockets = Annotated[
    bool, typer.Option("--paced", help="Emulate slow links by paced sockets, as always without root.")
]
