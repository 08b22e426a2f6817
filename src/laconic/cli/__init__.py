"""The ``laconic`` command: arguments in, one call, text or JSON out."""

__all__ = ["main"]


def main() -> None:
    from laconic.cli.app import main as run  # loads the lab's commands, whose modules import others of this package

    run()
