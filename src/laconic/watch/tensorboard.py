"""Event files of a run for TensorBoard, written with the package ``tensorboardX``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from laconic.errors import ConfigError, FileError
from laconic.watch.view import View

__all__ = ["EventWriter", "check_tensorboard"]


def check_tensorboard() -> None:
    """Raise ``ConfigError`` if the package that writes event files is not installed."""
    if find_spec("tensorboardX") is None:
        raise ConfigError("--tensorboard needs tensorboardX: pip install 'laconic[tensorboard]'")


class EventWriter:
    """Writes the new points of a run, and its summary at the end, as scalars.

    Args:
        folder: Folder of the event file; it is created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        check_tensorboard()
        from tensorboardX import FileWriter

        try:
            self._writer = FileWriter(str(folder))
        except OSError as error:
            raise FileError(f"cannot write TensorBoard's event files to {folder}: {error.strerror}") from None
        self._last_written_at = -1.0
        self._summary_written = False

    def update(self, view: View) -> None:
        """Write what is new since the last call."""
        for point in view.points:
            if point["at"] <= self._last_written_at:
                continue
            self._last_written_at = point["at"]
            scalars = {
                "bytes/received": point["received"], "bytes/sent": point["sent"], "updates": point["version"],
                "staleness/updates missed": point["missed"], "faults": point["faults"],
            }  # fmt: skip
            if point["loss"] is not None:
                scalars["loss"] = point["loss"]
            self._write(point["iteration"], point["at"], scalars)
        if view.phase == "ended" and view.summary is not None and not self._summary_written:
            self._summary_written = True
            scalars = {
                f"summary/{name}": float(value)
                for name, value in view.summary.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
            self._write(view.iterations, view.at, scalars)
        self._writer.flush()

    def _write(self, step: int, at: float, scalars: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        if values:
            self._writer.add_summary(Summary(value=values), step, at)

    def close(self) -> None:
        self._writer.close()
