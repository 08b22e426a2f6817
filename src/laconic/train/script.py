"""A function of somebody's own file, called: ``my.py:build``."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from laconic.errors import ConfigError, FileError, LaconicError

__all__ = ["call"]


def call(script: str) -> object:
    """Run a file and return what a function of it returns.

    The file's folder is put on ``sys.path``, as Python does for a script, so that it can import its neighbours.

    Args:
        script: ``FILE.py:FUNCTION``. The function is called without arguments.

    Raises:
        FileError: There is no such file.
        ConfigError: There is no such function, or it (or the file) raised something; the cause is attached.
    """
    file, _, function = script.rpartition(":")
    if not file or not function.isidentifier():
        raise ConfigError(f"a script is given as FILE.py:FUNCTION, such as my.py:build, got {script!r}")
    path = Path(file).resolve()
    if not path.is_file():
        raise FileError(f"script {script!r}: there is no file {path}")
    module = _guarded(script, path, lambda: _load(path))
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"script {script!r}: {file} has no function {function!r}")
    return _guarded(script, path, found)


def _load(path: Path) -> object:
    name = f"laconic_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file: its name must end in .py")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def _guarded(script: str, path: Path, function: Callable[[], object]) -> object:
    """Call what somebody else wrote; whatever it raises becomes one line that says where."""
    try:
        return function()
    except LaconicError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        where = f", line {lines[-1]}" if lines else ""
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"script {script!r}{where}: {said}") from error
