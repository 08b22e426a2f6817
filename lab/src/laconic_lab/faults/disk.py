"""A disk on which something happens at a chosen moment: before a system call or between two pages of a file."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "Disk", "exit_code", "fork"]

PAGE = 4096
CALLS = ("fsync", "mkdir", "open", "rename", "replace", "rmdir", "unlink")


class Disk:
    """Counts moments while files are written, and acts at one of them.

    Args:
        stop: The moment, counted from 0. Each call that changes the disk is one, and so is each page of a file, and
            each first and last byte of a write.
        act: Called at that moment.
        page: Bytes between two moments within a file.
    """

    def __init__(self, stop: int, act: Callable[[Disk], None], page: int = PAGE) -> None:
        self.moments: list[str] = []
        self.files: dict[int, Path] = {}
        """Open files, by descriptor."""
        self.unsynced: list[Path] = []
        """Files whose data a power cut may take."""
        self.renamed: list[tuple[Path, Path]] = []
        """Renames that are not synced."""
        self._stop, self._act, self._page = stop, act, page

    def __enter__(self) -> Disk:
        self._originals = {name: getattr(os, name) for name in CALLS}
        self._open = Path.open
        for name in CALLS:
            setattr(os, name, self._wrapped(name))
        disk = self
        Path.open = lambda path, mode="r", *args, **kwargs: (  # type: ignore[method-assign, assignment]
            _File(disk, path, mode) if mode == "xb" else disk._open(path, mode, *args, **kwargs)
        )
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(os, name, original)
        Path.open = self._open  # type: ignore[method-assign]

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.moment(name)
            result = self._originals[name](*args, **kwargs)
            if name == "fsync" and args[0] in self.files:
                self.unsynced.remove(self.files[args[0]])
            elif name == "fsync":
                self.renamed.clear()  # a folder
            elif name == "rename":
                source, target = map(Path, args)
                self.renamed.append((source, target))
                self.unsynced = [target / path.name if path.parent == source else path for path in self.unsynced]
            return result

        return call

    def rename(self, source: Path, target: Path) -> None:
        """Rename without a moment: what a power cut undoes."""
        self._originals["rename"](source, target)

    def moment(self, name: str) -> None:
        self.moments.append(name)
        if len(self.moments) - 1 == self._stop:
            self._act(self)

    def pieces(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a write at an offset of a file, cut at pages."""
        cuts = {0, 1, nbytes - 1, nbytes, *range(-offset % self._page, nbytes, self._page)}
        yield from itertools.pairwise(sorted(cut for cut in cuts if 0 <= cut <= nbytes))


class _File:
    """An unbuffered file."""

    def __init__(self, disk: Disk, path: Path, mode: str) -> None:
        self._disk = disk
        disk.moment("create")
        self._raw = disk._open(path, mode, buffering=0)
        disk.files[self._raw.fileno()] = path
        disk.unsynced.append(path)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start, end in self._disk.pieces(self._raw.tell(), len(view)):
            self._disk.moment("write")
            self._raw.write(view[start:end])
        return len(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        del self._disk.files[self._raw.fileno()]
        self._raw.close()


def fork(act: Callable[[], object]) -> int:
    """Run a function in a forked process; return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(2)
        os._exit(0)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
