"""Goals of the study as numbers: loss beside the uncompressed pipeline, and step time over a slow link."""

from __future__ import annotations

from collections.abc import Callable

from laconic_lab.studies.claims import Claim, Evidence
from laconic_lab.studies.intervals import Interval, mean_interval
from laconic_lab.studies.pipeline.experiments import LARGE, TRANSFORM
from laconic_lab.studies.pipeline.results import Results

__all__ = ["CLAIMS"]

CODEC, FEWER = "thc:4", "klt:3.8"


def _loss(*parts: str, **setting: object) -> Callable[[Results], Evidence | None]:
    """Return by how many per cent a loss is above the uncompressed one, in the first part that has the setting."""

    def evidence(results: Results) -> Evidence | None:
        compared = [
            [
                (row, plain)
                for row in results.of(part)
                if all(row.values.get(key) == x for key, x in setting.items())
                and (plain := results.plain(row)) is not None
            ]
            for part in parts
        ]
        if not any(compared):
            return None
        first = next(pairs for pairs in compared if pairs)
        row, plain = max(first, key=lambda pair: len(pair[0].runs))  # the setting with most seeds
        # Runs of one seed have the same weights and windows at first, so the spread is that of their differences.
        uncompressed = dict(zip((run["seed"] for run in plain.runs), plain.losses, strict=True))
        pairs = [
            (loss, uncompressed[run["seed"]])
            for run, loss in zip(row.runs, row.losses, strict=True)
            if run["seed"] in uncompressed
        ]
        if not pairs:
            return None
        interval = mean_interval([100 * (loss / base - 1) for loss, base in pairs])
        basis = f"{row.values['method']}, 1/{row.mean('ratio'):.2f} of the bytes, {row.values['size']}"
        return Evidence(interval, basis, sources=row.runs)

    return evidence


def _ratio(codec: str, *parts: str) -> Callable[[Results], Evidence | None]:
    """Return how many times fewer bytes a whole training sends by a codec, in the first part that has it."""

    def evidence(results: Results) -> Evidence | None:
        rows = [row for part in parts for row in results.of(part) if row.values["method"] == codec]
        if not rows:
            return None
        basis = f"{codec}, {rows[0].values['steps']} steps, headers included"
        return Evidence(Interval.exact(rows[0].mean("ratio")), basis, "formula")

    return evidence


def _speed_up(codec: str, model: str) -> Callable[[Results], Evidence | None]:
    def evidence(results: Results) -> Evidence | None:
        timed = [
            time for time in results.times
            if (time["codec"], time["link"], time["model"], time["stages"]) == (codec, "100mbit", model, 2)
        ]  # fmt: skip
        gain = results.speed_up(timed[0]) if timed else None
        if gain is None:
            return None
        return Evidence(Interval.exact(gain), f"{codec}, {timed[0]['made_of']}", sources=timed[:1])

    return evidence


CLAIMS = (
    Claim("loss2", "4 bits both ways between 2 stages end within 1 % of the uncompressed loss", "goal", 1.0, "<", "%",
          evidence=_loss(LARGE, "bits", method=CODEC, stages=2)),
    Claim("loss4", "4 bits both ways between 4 stages end within 1 % of the uncompressed loss", "goal", 1.0, "<", "%",
          evidence=_loss(LARGE, "bits", method=CODEC, stages=4)),
    Claim("small4", "the same, of a GPT of width 64 in its first 300 steps", "goal", 1.0, "<", "%",
          evidence=_loss("bits", method=CODEC, stages=4, size="small")),
    Claim("klt4", "`klt:4`, bits by direction, both ways between 4 stages ends within 1 % of the uncompressed loss",
          "goal", 1.0, "<", "%", evidence=_loss(TRANSFORM, method="klt:4", stages=4)),
    Claim("klt38", f"`{FEWER}` both ways between 4 stages ends within 1 % of the uncompressed loss", "goal", 1.0, "<",
          "%", evidence=_loss(TRANSFORM, method=FEWER, stages=4)),
    Claim("klt38bytes", f"all of a training by `{FEWER}` sends 8 times fewer bytes", "goal", 8.0, "=",
          "x", tolerance=0.2, evidence=_ratio(FEWER, TRANSFORM)),
    Claim("klt36large2", "`klt:3.6` between 2 stages of 7 M parameters ends within 1 % of the uncompressed loss",
          "goal", 1.0, "<", "%", evidence=_loss(LARGE, method="klt:3.6", stages=2)),
    Claim("klt36large4", "the same between 4 stages", "goal", 1.0, "<", "%",
          evidence=_loss(LARGE, method="klt:3.6", stages=4)),
    Claim("klt2", "`klt:2` both ways between 4 stages ends within 1 % of the uncompressed loss", "goal", 1.0, "<", "%",
          evidence=_loss(LARGE, TRANSFORM, method="klt:2", stages=4)),
    Claim("mixed4", "6 bits forward and 2 backward between 4 stages end within 1 % of the uncompressed loss", "goal",
          1.0, "<", "%", evidence=_loss(LARGE, "directions", method="thc:6 / thc:2", stages=4)),
    Claim("narrow64", "a projection to an eighth, with 4 bits, ends within 1 % of the uncompressed loss", "goal", 1.0,
          "<", "%", evidence=_loss(LARGE, "bottleneck", forward=CODEC, bottleneck=8, reads_tokens=True)),
    Claim("narrow128", "a projection to a sixteenth, with 4 bits, ends within 1 % of the uncompressed loss", "goal",
          1.0, "<", "%", evidence=_loss(LARGE, "bottleneck", forward=CODEC, bottleneck=16, reads_tokens=True)),
    Claim("bytes", "4 bits send 8 times fewer bytes than float32", "goal", 8.0, "=", "x", tolerance=0.2,
          evidence=_ratio(CODEC, LARGE, "bits")),
    Claim("time", "a step of GPT-2's activations over 100 Mbit/s is at least 4 times as fast", "goal", 4.0, ">", "x",
          evidence=_speed_up(CODEC, "gpt2")),
    Claim("timeklt", "the same by `klt:4`", "goal", 4.0, ">", "x", evidence=_speed_up("klt:4", "gpt2")),
)  # fmt: skip
