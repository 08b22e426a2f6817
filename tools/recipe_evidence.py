"""The evidence of recipes, from the Records of ``laconic study gpt``: src/laconic/recipes.json and its table."""

from __future__ import annotations

import json
from dataclasses import asdict

from page_blocks import RESULTS, ROOT

from laconic import recipes
from laconic.recipes import Evidence, Recipe
from laconic.tables import Table
from laconic_lab.studies import load_study
from laconic_lab.studies.gpt.results import ADAMW, Results, Row

FILE = ROOT / "src" / "laconic" / "recipes.json"
PLAIN = {"outer_momentum": 0.0, "carry": 0.0, "gather": False, "final": 0.1, "momentum": 0.95}
"""Settings of the study that recipes do not change."""


def _follows(row: Row, recipe: Recipe) -> bool:
    codec = recipe.codec.partition("|")[2]
    wanted = {"optimizer": recipe.optimizer, "every": recipe.every, "fragments": recipe.fragments, **PLAIN}
    wanted |= {"up": codec, "down": codec, "overlap": 0, "lr": recipe.lr}
    wanted |= {"outer_lr": recipe.factor, "decay": recipe.decay}
    usual = {"pace": "even", "settle": 1, "averaged": 0.0, "outer_norm": 0.0, "outer_flat": 0.0}
    # of fields that older Records lack
    return (
        row.is_local
        and all(row.values.get(name) == value for name, value in wanted.items())
        and all(row.values.get(name, value) == value for name, value in usual.items())
    )


def _evidence_of(recipe: Recipe, results: Results) -> list[Evidence]:
    runs = []
    for part, rows in results.rows.items():
        for row in rows:
            base = results.best(part, ADAMW, row.values["size"])
            if base is None or not _follows(row, recipe):
                continue
            values = row.values
            runs.append(
                Evidence(
                    values["numel"], values["workers"], values["steps"], len(row.runs), round(row.loss, 6),
                    round(base.loss, 6), round(row.ratio),
                )
            )  # fmt: skip
    # The same runs may belong to several experiments; the lowest loss of AdamW is what they are held against.
    runs.sort(key=lambda each: each.adamw_loss)
    unique = {(each.parameters, each.workers, each.loss): each for each in reversed(runs)}
    return sorted(unique.values(), key=lambda each: (each.parameters, each.workers))


def all_evidence() -> dict[str, list[Evidence]]:
    """Return the evidence of every recipe."""
    results = load_study("gpt").load(RESULTS / "gpt")
    assert isinstance(results, Results)
    return {name: _evidence_of(recipes.get(name), results) for name in recipes.names()}


def evidence_file(evidence: dict[str, list[Evidence]]) -> str:
    """Return the text of src/laconic/recipes.json."""
    return json.dumps({name: [asdict(each) for each in runs] for name, runs in evidence.items()}, indent=1) + "\n"


def _settings_of(recipe: Recipe) -> str:
    outer = "" if recipe.outer == "mean" else f", `outer={recipe.outer}`"
    rate = "" if recipe.lr == Recipe.lr else f", rates times {recipe.lr / Recipe.lr:g}"
    return f"{recipe.optimizer.capitalize()}{rate}, `every={recipe.every}`, `{recipe.codec}`{outer}"


def evidence_table(evidence: dict[str, list[Evidence]]) -> str:
    """Return the table of docs/local-sgd.md."""
    rows = []
    for name, runs in evidence.items():
        recipe = recipes.get(name)
        for each in runs:
            rows.append((
                f"`{name}`", _settings_of(recipe),
                f"{each.parameters / 1e6:.0f} M", str(each.workers), f"{each.beside_adamw:+.1f} %",
                f"1/{each.ratio:,.0f}", str(each.seeds),
            ))  # fmt: skip
    columns = ("recipe", "training", "parameters", "workers", "loss beside AdamW-DDP", "bytes", "seeds")
    return Table(columns, rows, 2).to_markdown()
