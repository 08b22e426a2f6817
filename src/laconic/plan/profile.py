"""Profile: the measured times of a machine, as a JSON file that ``laconic calibrate`` writes.

::

    {"format": "laconic profile", "version": 3, "name": …, "about": …, "source": …,
     "machine": {…}, "load": {"load_average", "other_processes", "busy"}, "versions": {…}, "at": …, "commit": …,
     "device": "cpu", "threads": 1, "memory": bytes,
     "codecs": {spec: [{"numel", "nbytes", "encode_s", "decode_s", "add_s"}, …]},
     "models": {name: {"numels": […], "dims": […], "batch", "step_s", "ready": [[time, share], …], "apply_s",
                       "messages": {spec: {"push", "encode_s", "decode_s", "add_s"}}}},
     "slowdown": {"2": factor, …},     how many times as long a step takes while so many processes compute
     "transport": {"exchange_s", "slot_s", "byte_s"} or null,     of a parameter server
     "collective": {"none", "sum", "twoshot": {"exchange_s", "slot_s", "byte_s"}},     of ranks, by reduction
     "links": [{"to", "goodput", "round_trip"}, …]}

Seconds are those of one process with ``threads`` threads, alone on the machine. Files of another version are rejected.
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
from laconic.json_files import parse_json, read_regular_text

__all__ = ["FORMAT", "VERSION", "MachineLoad", "ModelTimes", "Point", "Profile", "Transport", "load", "shipped"]

FORMAT, VERSION = "laconic profile", 3


MAX_VALUE = 1e18
"""The largest figure of a profile, so that products of some of them stay finite."""


@dataclass(frozen=True)
class Point:
    """A codec, measured on a tensor of ``numel`` values.

    Args:
        decode_s: Seconds to decode it into an existing tensor.
        add_s: Seconds to add it to a sum.
    """

    numel: int
    nbytes: float
    encode_s: float
    decode_s: float
    add_s: float

    @property
    def seconds(self) -> tuple[float, float, float]:
        return self.encode_s, self.decode_s, self.add_s


@dataclass(frozen=True)
class ModelTimes:
    """A measured step of a model.

    Args:
        numels: Values of each slot, in the order in which backward computes their gradients.
        step_s: Seconds of forward and backward.
        ready: See ``costs.Work``.
        messages: By spec, the codec on the model's own gradients: ``push``, ``encode_s``, ``decode_s``, ``add_s``.
        dims: Dimensions of each slot: vectors are sent uncompressed.
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
        """Return the number of values and dimensions of each slot."""
        return tuple(zip(self.numels, self.dims or (2,) * len(self.numels), strict=True))


@dataclass(frozen=True)
class Transport:
    """The time of an exchange that no codec and no link explains.

    Args:
        exchange_s: Seconds of an exchange of two slots with next to nothing in them.
        slot_s: Seconds of each further slot.
        byte_s: Seconds that the server (or a rank) computes for each byte that it receives or sends.
    """

    exchange_s: float
    slot_s: float
    byte_s: float

    def seconds(self, slots: int) -> float:
        """Return the seconds of an exchange of so many slots, without those for its bytes."""
        return self.exchange_s + self.slot_s * max(0, slots - 2)


@dataclass(frozen=True)
class MachineLoad:
    """How much other processes used the machine during a calibration.

    Args:
        load_average: The load average before it.
        other_processes: Share of all cores that other processes used meanwhile; None where the system does not tell.
        busy: Whether that was too much for figures of an idle machine.
    """

    load_average: float
    other_processes: float | None
    busy: bool


@dataclass(frozen=True)
class Profile:
    """The measured times of a machine; see the module's docstring."""

    name: str
    about: str = ""
    source: str = ""
    device: str = "cpu"
    threads: int = 1
    memory: float | None = None
    codecs: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    models: Mapping[str, ModelTimes] = field(default_factory=dict)
    slowdown: Mapping[int, float] = field(default_factory=dict)
    transport: Transport | None = None
    collective: Mapping[str, Transport] = field(default_factory=dict)
    links: Sequence[Mapping[str, Any]] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    load: MachineLoad | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    at: str = ""
    commit: str | None = None

    def slowdown_of(self, processes: int) -> float:
        """Return how many times as long a step takes while so many processes compute on the machine.

        Between measured numbers of processes it is interpolated; beyond them it grows in proportion to the processes,
        because they share the cores. If nothing was measured, they share the cores of the machine, or its GPU, evenly.
        """
        known = {1: 1.0, **self.slowdown}
        if processes in known:
            return known[processes]
        below = max((n for n in known if n < processes), default=1)
        above = min((n for n in known if n > processes), default=None)
        if above is None:
            cores = 1 if self.device == "cuda" else self.machine.get("cores") or 1
            return known[below] * processes / below if len(known) > 1 else max(1.0, processes / cores)
        part = (processes - below) / (above - below)
        return known[below] + part * (known[above] - known[below])

    def point(self, spec: str, numel: int) -> Point:
        """Return a codec's size and times on a tensor of ``numel`` values, interpolated between measured sizes."""
        points = sorted(self.codecs[spec], key=lambda point: point.numel)
        if numel <= points[0].numel:  # a call on few values takes at least a quarter of the smallest measured one
            low, share = points[0], numel / points[0].numel
            return Point(numel, low.nbytes * share, *(s * max(share, 0.25) for s in low.seconds))
        if numel >= points[-1].numel:
            high, share = points[-1], numel / points[-1].numel
            return Point(numel, high.nbytes * share, *(s * share for s in high.seconds))
        place = next(i for i, point in enumerate(points) if point.numel >= numel)
        low, high = points[place - 1], points[place]
        part = (numel - low.numel) / (high.numel - low.numel)
        pairs = zip((low.nbytes, *low.seconds), (high.nbytes, *high.seconds), strict=True)
        return Point(numel, *(a + part * (b - a) for a, b in pairs))

    # ---------------------------------------------------------------------------------------------------------- files

    def to_json(self) -> dict[str, Any]:
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        values["slowdown"] = {str(n): factor for n, factor in self.slowdown.items()}
        return values

    def save(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise FileError(f"cannot write the profile {path}: {error.strerror}") from None

    @classmethod
    def from_json(cls, values: Any, where: str) -> Profile:
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise FileError(f"{where} is not a profile: write one by `laconic calibrate -o {Path(where).name}`")
        if values.get("version") != VERSION:
            raise FileError(
                f"{where} is a profile of version {values.get('version')}, this laconic reads version {VERSION}: "
                "measure again by `laconic calibrate`"
            )
        try:
            return cls._validated({key: value for key, value in values.items() if key not in ("format", "version")})
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise FileError(f"{where} is not a complete profile: {error}") from None

    @classmethod
    def _validated(cls, values: dict[str, Any]) -> Profile:
        expected = {one.name for one in fields(cls)}
        if set(values) != expected:
            raise ValueError(f"its fields must be {', '.join(sorted(expected))}, got {', '.join(sorted(values))}")
        for name in ("machine", "versions", "codecs", "models", "slowdown"):
            if not isinstance(values[name], Mapping):
                raise ValueError(f"{name} must be an object, got {values[name]!r:.40}")
        if not isinstance(values["machine"].get("cores") or 1, int):
            raise ValueError(f"machine: cores must be a whole number, got {values['machine']['cores']!r:.40}")
        codecs = {spec: tuple(Point(**point) for point in points) for spec, points in values["codecs"].items()}
        for spec, points in codecs.items():
            if not points or any(point.numel < 1 for point in points):
                raise ValueError(f"codec {spec!r} must have points of at least one value")
            for point in points:
                _check_numbers(f"codec {spec!r}", asdict(point))
        slowdown = {int(n): float(factor) for n, factor in values["slowdown"].items()}
        _check_numbers("slowdown", values["slowdown"])
        transport = None if values["transport"] is None else Transport(**values["transport"])
        _check_numbers("transport", values["transport"] or {})
        collective = {way: Transport(**times) for way, times in values["collective"].items()}
        for way, times in values["collective"].items():
            _check_numbers(f"collective {way!r}", times)
        memory = 0 if values["memory"] is None else values["memory"]
        _check_numbers("machine", {"memory": memory, "threads": values["threads"]})
        return cls(**{
            **values, "codecs": codecs, "models": {name: _model(name, one) for name, one in values["models"].items()},
            "slowdown": slowdown, "transport": transport, "collective": collective, "links": tuple(values["links"]),
            "load": None if values["load"] is None else MachineLoad(**values["load"]),
        })  # fmt: skip


def _model(name: str, values: Mapping[str, Any]) -> ModelTimes:
    ready = tuple((float(time), float(share)) for time, share in values["ready"])
    model = ModelTimes(**{
        **values, "numels": tuple(values["numels"]), "dims": tuple(values.get("dims", ())), "ready": ready,
    })  # fmt: skip
    if len(model.dims) not in (0, len(model.numels)):
        raise ValueError(f"model {name!r} has {len(model.numels)} slots and {len(model.dims)} dims")
    sizes = {f"slot {i}": numel for i, numel in enumerate(model.numels)}
    _check_numbers(f"model {name!r}", {"step_s": model.step_s, "apply_s": model.apply_s, **sizes})
    for spec, message in model.messages.items():
        _check_numbers(f"model {name!r}, codec {spec!r}", message)
    return model


def _check_numbers(where: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{where}: {name} must be finite and at least 0, got {value!r}")
        if value > MAX_VALUE:
            raise ValueError(f"{where}: {name} must be at most {MAX_VALUE:g}, got {value!r}")


def shipped() -> list[str]:
    """Return the names of the profiles that come with laconic."""
    folder = resources.files("laconic.plan") / "profiles"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def load(name: str | Path) -> Profile:
    """Return a profile that comes with laconic, by its name, or that of a file.

    Raises:
        ConfigError: There is neither.
        FileError: The file is not a profile, or one of another version.
    """
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        try:
            text = read_regular_text(path)
        except OSError as error:
            raise FileError(f"cannot read the profile {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            text = ""  # which is not a profile
    elif str(name) in shipped():
        text = (resources.files("laconic.plan") / "profiles" / f"{name}.json").read_text(encoding="utf-8")
    else:
        raise ConfigError(f"profile must be a file or one of {', '.join(shipped())}, got {str(name)!r}")
    try:
        values = parse_json(text)
    except ValueError:
        values = None
    return Profile.from_json(values, str(name))
