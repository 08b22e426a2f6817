"""Candidates: a codec with the steps between exchanges, and which of them a plan compares by default."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from laconic.errors import ConfigError
from laconic.plan.calibration import GZIP, STOCK, check_specs, without_feedback
from laconic.plan.evidence import Evidence
from laconic.plan.profile import Profile

__all__ = ["Candidate", "default_labels", "with_estimates"]

_LOCAL = re.compile(r"local\s+(\d+)((?:,(?:fragments|overlap)=\d+)*)\s+(.+)")


@dataclass(frozen=True)
class Candidate:
    """A way to exchange: a codec of gradients, or of changes after local steps.

    Written as a spec, or as ``local 96,fragments=4,overlap=8 ef|sign``.

    Args:
        codec: Spec of both directions.
        every: Steps between two exchanges of the same parameter.
        fragments, overlap: As of ``LocalSGD``: parts that are exchanged in turn, and steps that an exchange may take
            while training goes on.
        local: Whether each rank trains alone in between, as ``LocalSGD`` does.

    >>> Candidate.parse("local 96,fragments=4 ef|sign")
    Candidate(codec='ef|sign', every=96, fragments=4, overlap=0, local=True)
    >>> Candidate.parse("qsgd:4").label, Candidate.parse("local 8 ef|sign").label
    ('qsgd:4', 'local 8 ef|sign')
    """

    codec: str
    every: int = 1
    fragments: int = 1
    overlap: int = 0
    local: bool = False

    def __post_init__(self) -> None:
        if self.every < 1 or not 1 <= self.fragments <= self.every:
            raise ConfigError(
                f"fragments must be at most the local steps, got {self.fragments} fragments and {self.every} steps"
            )
        if not 0 <= self.overlap < max(1, self.period):
            raise ConfigError(
                f"overlap must be below the {self.period} steps between two exchanges, got {self.overlap}"
            )

    @classmethod
    def parse(cls, text: str, every: int = 1) -> Candidate:
        """Return the candidate of a label; ``every`` holds for labels without ``local``."""
        match = _LOCAL.fullmatch(text.strip())
        if match is None:
            check_specs([text])
            return cls(text, every)
        options = {name: int(value) for name, value in re.findall(r",(\w+)=(\d+)", match[2])}
        check_specs([match[3]])
        return cls(match[3], int(match[1]), **options, local=True)

    @classmethod
    def of(cls, evidence: Evidence) -> Candidate:
        """Return the candidate that was trained."""
        return cls(evidence.codec, evidence.every, evidence.fragments, evidence.overlap, evidence.every > 1)

    @property
    def label(self) -> str:
        if not self.local:
            return self.codec
        options = "".join(
            f",{name}={value}"
            for name, value, usual in (("fragments", self.fragments, 1), ("overlap", self.overlap, 0))
            if value != usual
        )
        return f"local {self.every}{options} {self.codec}"

    @property
    def period(self) -> int:
        """Whole steps between two exchanges, each of one fragment."""
        return self.every // self.fragments

    @property
    def is_lossless(self) -> bool:
        return self.codec in ("none", GZIP) and not self.local

    def was_trained(self, evidence: Evidence) -> bool:
        """Return whether the evidence is about this candidate. Overlap and fragments change little: see docs."""
        return (evidence.codec, evidence.every) == (self.codec, self.every)


def default_labels(profile: Profile, evidence: Sequence[Evidence], *, local: bool) -> list[str]:
    """Return the labels of what a plan compares by default: codecs of the profile, and what has evidence.

    Args:
        evidence: Of the family and optimizer in question.
        local: Whether trainings with local steps are compared, too.
    """
    trained = {Candidate.of(one).label for one in evidence if one.every == 1 or local}
    return list(dict.fromkeys([*(profile.codecs or STOCK), *sorted(trained)]))


def with_estimates(profile: Profile, specs: Iterable[str]) -> Profile:
    """Return the profile with ``ef|X`` estimated from X, for each such spec that it lacks.

    Error feedback adds the residual, decodes what is sent and subtracts it: the time of decoding and of two passes over
    the values, each as long as encoding float32.
    """
    codecs = dict(profile.codecs)
    for spec in specs:
        codec = without_feedback(spec)
        if spec not in codecs and codec in codecs and "none" in codecs:
            codecs[spec] = tuple(
                replace(
                    point, encode_s=point.encode_s + point.decode_s + 2 * profile.point("none", point.numel).encode_s
                )
                for point in codecs[codec]
            )
    return replace(profile, codecs=codecs)
