"""The command group, and the conversion of errors into one line and an exit code.

Exit codes: 0 success; 1 wrong data or files; 2 wrong command line, codec spec or missing package; 130 Ctrl-C.
A command without a package that it needs ends with one line that says what to install.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from laconic._version import __version__
from laconic.cli import (
    calibrate,
    certs,
    codecs,
    demo,
    interrupts,
    pack,
    plan,
    plugins,
    report,
    roles,
    train,
    tune,
    unpack,
    watch,
)
from laconic.cli.extras import advice_for
from laconic.cli.help import Commands, HelpGroup
from laconic.cli.output import encode_everything, print_stderr
from laconic.errors import ConfigError, LaconicError

__all__ = ["app"]

# typer.BadParameter -> UsageError -> ClickException. Newer versions of typer contain click, so it has no fixed module.
_ClickError: type[Any] = typer.BadParameter.__mro__[2]


class _Group(HelpGroup):
    """Prints errors as one line on stderr."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
        standalone_mode: bool = True, windows_expand_args: bool = True, **extra: Any,
    ) -> Any:  # fmt: skip
        encode_everything(sys.stdout, sys.stderr)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except ConfigError as error:
            print_stderr(f"laconic: {error}")
            code = 2
        except LaconicError as error:
            print_stderr(f"laconic: {error}")
            code = 1
        except OSError as error:
            print_stderr(f"laconic: {error.filename}: {error.strerror}" if error.filename else f"laconic: {error}")
            code = 1
        except MemoryError:
            print_stderr("laconic: out of memory: try fewer values or a smaller file")
            code = 1
        except (KeyboardInterrupt, typer.Abort):
            code = 130
        except _ClickError as error:
            message = error.format_message().rstrip(".")
            print_stderr(f"laconic: {message}{'' if message.endswith('?') else '.'} Try --help.")
            code = 2
        except Exception as error:
            advice = advice_for(error)
            if advice is not None:
                print_stderr(f"laconic: {advice}")
                code = 2
            elif not interrupts.received:  # torch turns a KeyboardInterrupt while it reads a sequence into a ValueError
                raise
            else:
                code = 130
        code = code if isinstance(code, int) else 0
        if code == 130:
            print_stderr("laconic: interrupted")
        if not standalone_mode:
            return code
        sys.exit(code)


app = Commands(
    name="laconic", cls=_Group, pretty_exceptions_enable=False,
    help="Distributed training in few words: gradient codecs, an open wire format and a planner, for PyTorch.",
)  # fmt: skip

for _module in (demo, plan, tune, codecs, train, watch, report, roles, certs, calibrate, pack, unpack, plugins):
    _module.register(app)

_SECTIONS = {
    "Begin": ("demo", "plan", "tune", "codecs"),
    "Train with a parameter server": ("train", "watch", "report", "server", "worker", "certs"),
    "Measure": ("calibrate", "bench", "study", "lab"),
    "Files": ("pack", "unpack"),
}
_infos: list[Any] = [*app.registered_commands, *app.registered_groups]
for _info in _infos:
    _name = _info.name or (_info.callback.__name__ if _info.callback else "")
    _info.rich_help_panel = next((title for title, names in _SECTIONS.items() if _name in names), "More commands")


def _show_version(requested: bool) -> None:
    if requested:
        print(f"laconic {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
