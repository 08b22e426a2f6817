"""Calls a function of a user's file: ``my.py:build``."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from laconic.errors import ConfigError, FileError, LaconicError

__all__ = ["call"]


def call(script: str) -> object:
    """Run a file and call a function of it.

    The file's folder is put on ``sys.path``, as for a script, so that the file can import modules beside it.

    Args:
        script: ``FILE.py:FUNCTION``. The function is called without arguments.

    Raises:
        FileError: The file does not exist.
        ConfigError: The function does not exist, or it or the file raised an exception, which is attached.
    """
    file, _, function = script.rpartition(":")
    if not file or not function.isidentifier():
        raise ConfigError(f"a script must be FILE.py:FUNCTION, such as my.py:build, got {script!r}")
    path = Path(file).resolve()
    if not path.is_file():
        raise FileError(f"script {script!r}: there is no file {path}")
    module = _call(script, path, lambda: _load(path))
    target = getattr(module, function, None)
    if not callable(target):
        raise ConfigError(f"script {script!r}: {file} has no function {function!r}")
    return _call(script, path, target)


def _load(path: Path) -> object:
    name = f"laconic_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file: its name must end in .py")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def _call(script: str, path: Path, function: Callable[[], object]) -> object:
    """Call a user's function; an exception becomes one line with the line number."""
    try:
        return function()
    except LaconicError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        where = f", line {lines[-1]}" if lines else ""
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"script {script!r}{where}: {message}") from error
