"""Profile: what a machine was measured to do, as a file.

::

    {"format": "laconic profile", "version": 1, "name": …, "about": …,
     "machine": {…}, "versions": {…}, "at": …, "commit": …, "device": "cpu", "threads": 1, "memory": bytes,
     "codecs": {spec: [{"numel", "nbytes", "encode_s", "decode_s", "add_s"}, …]},
     "models": {name: {"numels": […], "batch", "step_s", "ready": [[t, share], …],
                       "messages": {spec: {"push", "encode_s", "decode_s", "add_s"}}}},
     "crowd": {"2": factor, …},     how many times as long a step takes while that many processes compute
     "transport": {"exchange_s", "byte_s", …},
     "links": [{"to", "goodput", "round_trip"}, …]}

Seconds are of one process with ``threads`` threads, alone. A file of another version is refused: measure again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError, FileError

__all__ = ["FORMAT", "VERSION", "ModelTimes", "Point", "Profile", "load", "shipped"]

FORMAT, VERSION = "laconic profile", 1


@dataclass(frozen=True)
class Point:
    """A codec on a tensor of so many values.

    Args:
        numel: Values.
        nbytes: Of the frame.
        encode_s: Seconds to make it.
        decode_s: Seconds to read it into a tensor that is there.
        add_s: Seconds to add it to a sum.
    """

    numel: int
    nbytes: float
    encode_s: float
    decode_s: float
    add_s: float


@dataclass(frozen=True)
class ModelTimes:
    """A model's step.

    Args:
        numels: Of its slots, in the order in which backward makes their gradients.
        batch: Examples.
        step_s: Seconds of forward and backward.
        ready: See ``costs.Work``.
        messages: By spec, what its own gradients took: ``push``, ``encode_s``, ``decode_s``, ``add_s``.
        dims: Of each slot, how many dimensions: vectors go uncompressed.
        apply_s: Seconds of the optimizer's step.
    """

    numels: tuple[int, ...]
    batch: int
    step_s: float
    ready: tuple[tuple[float, float], ...]
    messages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    dims: tuple[int, ...] = ()
    apply_s: float = 0.0

    @property
    def numel(self) -> int:
        return sum(self.numels)

    def layout(self) -> tuple[tuple[int, int], ...]:
        """Values and dimensions of each slot."""
        return tuple(zip(self.numels, self.dims or (2,) * len(self.numels), strict=True))


@dataclass(frozen=True)
class Profile:
    """See the module's docstring for its file."""

    name: str
    about: str = ""
    device: str = "cpu"
    threads: int = 1
    memory: float | None = None
    codecs: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    models: Mapping[str, ModelTimes] = field(default_factory=dict)
    crowd: Mapping[int, float] = field(default_factory=dict)
    transport: Mapping[str, float] = field(default_factory=dict)
    links: Sequence[Mapping[str, Any]] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    at: str = ""
    commit: str | None = None

    def slowdown(self, processes: int) -> float:
        """How many times as long a step takes while so many processes compute on the machine.

        Between what was measured on a line; beyond it in proportion to the processes, as cores are shared.
        """
        known = {1: 1.0, **self.crowd}
        if processes in known:
            return known[processes]
        below = max((n for n in known if n < processes), default=1)
        above = min((n for n in known if n > processes), default=None)
        if above is None:
            return known[below] * processes / below if below > 1 or len(known) > 1 else 1.0
        part = (processes - below) / (above - below)
        return known[below] + part * (known[above] - known[below])

    def point(self, spec: str, numel: int) -> Point:
        """The codec on a tensor of so many values, between what was measured on a line."""
        points = sorted(self.codecs[spec], key=lambda one: one.numel)
        if numel <= points[0].numel:  # a call takes its time however little it is given
            low = points[0]
            share = numel / low.numel
            return Point(numel, low.nbytes * share, *(s * max(share, 0.25) for s in _seconds(low)))
        if numel >= points[-1].numel:
            share = numel / points[-1].numel
            return Point(numel, points[-1].nbytes * share, *(s * share for s in _seconds(points[-1])))
        above = next(i for i, one in enumerate(points) if one.numel >= numel)
        a, b = points[above - 1], points[above]
        part = (numel - a.numel) / (b.numel - a.numel)
        mixed = [x + part * (y - x) for x, y in zip((a.nbytes, *_seconds(a)), (b.nbytes, *_seconds(b)), strict=True)]
        return Point(numel, *mixed)

    # ----------------------------------------------------------------------------------------------------------- files

    def to_json(self) -> dict[str, Any]:
        found = {"format": FORMAT, "version": VERSION, **asdict(self)}
        found["crowd"] = {str(n): factor for n, factor in self.crowd.items()}
        return found

    def save(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise FileError(f"cannot write the profile {path}: {error.strerror}") from None

    @classmethod
    def from_json(cls, values: Any, where: str) -> Profile:
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise FileError(f"{where} is no profile: write one by `laconic calibrate -o {Path(where).name}`")
        if values.get("version") != VERSION:
            raise FileError(
                f"{where} is a profile of version {values.get('version')}, this laconic reads version {VERSION}: "
                "measure again by `laconic calibrate`"
            )
        try:
            return cls._checked({key: value for key, value in values.items() if key not in ("format", "version")})
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise FileError(f"{where} is not a whole profile: {error}") from None

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> Profile:
        known = {one.name for one in fields(cls)}
        if set(values) != known:
            raise ValueError(f"it has the fields {', '.join(sorted(values))}, expected {', '.join(sorted(known))}")
        codecs = {spec: tuple(Point(**one) for one in points) for spec, points in values.get("codecs", {}).items()}
        for spec, points in codecs.items():
            if not points:
                raise ValueError(f"codec {spec!r} has no points")
            for one in points:
                if one.numel < 1:
                    raise ValueError(f"codec {spec!r} was measured on {one.numel} values")
                _positive(f"codec {spec!r}", asdict(one))
        models = {}
        for name, one in values.get("models", {}).items():
            found = {**one, "numels": tuple(one["numels"]), "dims": tuple(one.get("dims", ()))}
            found["ready"] = tuple((float(t), float(share)) for t, share in one["ready"])
            models[name] = ModelTimes(**found)
            slots, dims = len(models[name].numels), len(models[name].dims)
            if dims not in (0, slots):
                raise ValueError(f"model {name!r} has {slots} slots and {dims} dims")
            sizes = {f"slot {i}": numel for i, numel in enumerate(models[name].numels)}
            _positive(f"model {name!r}", {"step_s": models[name].step_s, "apply_s": models[name].apply_s, **sizes})
            for spec, message in models[name].messages.items():
                _positive(f"model {name!r}, codec {spec!r}", message)
        crowd = {int(n): float(factor) for n, factor in values.get("crowd", {}).items()}
        _positive("crowd", {str(n): factor for n, factor in crowd.items()})
        _positive("transport", values.get("transport", {}))
        _positive("machine", {"memory": values["memory"] or 0, "threads": values["threads"]})
        return cls(**{**values, "codecs": codecs, "models": models, "crowd": crowd, "links": tuple(values["links"])})


def _seconds(one: Point) -> tuple[float, float, float]:
    return one.encode_s, one.decode_s, one.add_s


def _positive(where: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{where}: {name} is {value!r}")


def shipped() -> list[str]:
    """The names of the profiles that come with laconic."""
    folder = resources.files("laconic.plan") / "profiles"
    return sorted(one.name.removesuffix(".json") for one in folder.iterdir() if one.name.endswith(".json"))


def load(name: str | Path) -> Profile:
    """A profile that comes with laconic, by its name, or a file.

    Raises:
        ConfigError: There is neither.
        FileError: It is no profile, or one of another version.
    """
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise FileError(f"cannot read the profile {path}: {error.strerror}") from None
    elif str(name) in shipped():
        text = (resources.files("laconic.plan") / "profiles" / f"{name}.json").read_text(encoding="utf-8")
    else:
        raise ConfigError(f"unknown profile {str(name)!r}: a file, or one of {', '.join(shipped())}")
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    return Profile.from_json(values, str(name))
