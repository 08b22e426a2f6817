"""The table of what to pick, with the training behind each pick: README.md and docs/choosing.md."""

from __future__ import annotations

import json
from dataclasses import dataclass

from plan_evidence import evidence_file

from laconic.errors import FileError
from laconic.plan.evidence import Evidence, read_evidence
from laconic.tables import Table

NOT_TRAINED = "not trained here"
NAMES = {"gpt-small": "GPT", "vgg11": "VGG-11", "lenet5": "LeNet-5"}
GBIT, SLOWER = "1\N{NO-BREAK SPACE}Gbit/s", "slower"


@dataclass(frozen=True)
class Pick:
    """What to use for which training on which link, and the training that speaks for it.

    Args:
        trained: Family, optimizer, codec and steps between exchanges of the evidence; None: there is none.
        outer: Its outer step.
    """

    who: str
    link: str
    what: str
    trained: tuple[str, str, str, int] | None
    outer: str = "mean"


TRANSFORMERS = "a transformer, or with Adam, AdamW"
CONVOLUTIONAL = "a convolutional network, SGD with momentum"
PICKS = (
    Pick(TRANSFORMERS, GBIT, "`attach`, `qsgd:4`", ("transformer", "adamw", "qsgd:4", 1)),
    Pick(
        TRANSFORMERS, SLOWER, "`LocalSGD`, `every=16`, `ef|sign`, `fragments=2`, `overlap=6`, `outer=\"mean:1.8\"`",
        ("transformer", "adamw", "ef|sign", 16), "mean:1.8",
    ),
    Pick(CONVOLUTIONAL, GBIT, "`attach`, `ef|thc:2`", ("convolutional", "momentum", "ef|thc:2", 1)),
    Pick(CONVOLUTIONAL, GBIT, "`attach`, `ef|qsgd:4`", ("convolutional", "momentum", "ef|qsgd:4", 1)),
    Pick(CONVOLUTIONAL, SLOWER, "`LocalSGD`, `every=8`, `ef|qsgd:4`", ("convolutional", "momentum", "ef|qsgd:4", 8)),
    Pick(
        "the same, by a server", SLOWER, "`laconic train --method laconic`",
        ("convolutional", "momentum", "ef|topk:0.06|sign", 4),
    ),
    Pick("with SGD without momentum", SLOWER, "`attach`, `ef|topk:0.01|qsgd:4`", None),
)  # fmt: skip


def picks_table() -> str:
    """Return the picks as a Markdown table."""
    found = read_evidence(json.loads(evidence_file()), "evidence.json")
    before = (None, *(pick.who for pick in PICKS))
    rows = [
        ("" if pick.who == above else pick.who, pick.link, pick.what, behind(pick, found))
        for pick, above in zip(PICKS, before, strict=False)
    ]
    return Table(("you train", "link", "pick", "trained here, beside float32"), rows, 4).to_markdown()


def evidence_of(pick: Pick, found: tuple[Evidence, ...]) -> Evidence | None:
    """Return the training of the largest model by a pick; of several the one that gave up most."""
    if pick.trained is None:
        return None
    about = [
        one
        for one in found
        if (one.family, one.plain_optimizer, one.codec, one.every) == pick.trained
        and (one.optimizer, one.outer) == (one.plain_optimizer, pick.outer)
    ]
    if not about:
        raise FileError(f"results/ have no training for the pick {pick.what}: train it, or give it no evidence")
    return max(about, key=lambda one: (one.numel, one.given_up))


def behind(pick: Pick, found: tuple[Evidence, ...]) -> str:
    """Return a pick's training in words."""
    one = evidence_of(pick, found)
    if one is None:
        return NOT_TRAINED
    change = one.given_up if one.measure == "loss" else -one.given_up
    unit = "% of the loss" if one.measure == "loss" else "points of accuracy"
    figure = f"{change:+.2f} {unit}".replace("-", "−") if abs(change) >= 0.005 else f"the same {one.measure}"
    longer = f" in {one.steps:.2g} times the steps" if one.steps != 1 else ""
    seeds = f"{one.seeds} seed{'s' * (one.seeds != 1)}"
    return f"{NAMES.get(one.model, one.model)} of {_size(one.numel)}: {figure}{longer} ({seeds})"


def _size(numel: int) -> str:
    return f"{numel / 1e6:.2g} M" if numel >= 1e6 else f"{numel / 1e3:.0f} k"
