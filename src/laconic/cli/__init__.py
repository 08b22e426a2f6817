"""The ``laconic`` command: arguments in, one call, text or JSON out."""

from laconic.cli.app import main

__all__ = ["main"]
