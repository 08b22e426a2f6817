"""One colour for each name on a page: a method has the same colour in all plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from laconic.report.plots import Plot

__all__ = ["COLOURS", "assign"]

COLOURS = 10
"""Colours of the page's style, ``--c0`` and so on."""


def assign(plots: Sequence[Plot]) -> dict[str, int]:
    """Return a number for each name: its colour is the number modulo ``COLOURS``, its dashes or shape the rest.

    Names that are drawn together get different numbers, and different colours while there are enough. Names that never
    meet may share a number: a page has more names than colours. A bar's name has a colour only if another plot draws it
    as a series: the layers of a network need none.
    """
    together = [names for plot in plots if plot.series for names in _drawn_together(plot, plot.series)]
    series = {name for names in together for name in names}
    together += [
        [name for name in names if name in series]
        for plot in plots
        if plot.kind == "bars" and plot.series is None
        for names in _drawn_together(plot, plot.y)
    ]
    neighbours: dict[str, set[str]] = {}
    for names in together:
        for name in names:
            neighbours.setdefault(name, set()).update(names)
    numbers: dict[str, int] = {}
    for name, others in neighbours.items():
        numbers[name] = _first_free([numbers[other] for other in others if other in numbers])
    return numbers


def _first_free(taken: Iterable[int]) -> int:
    """Return the smallest number whose colour is used least among these."""
    used = list(taken)
    fewest = min(sum(number % COLOURS == colour for number in used) for colour in range(COLOURS))
    colour = next(c for c in range(COLOURS) if sum(number % COLOURS == c for number in used) == fewest)
    return next(number for number in range(colour, COLOURS * (len(used) + 2), COLOURS) if number not in used)


def _drawn_together(plot: Plot, column: str) -> Iterator[list[str]]:
    """Yield the names of a column that are drawn at the same time."""
    place = plot.data.columns.index(column)
    picked = plot.data.columns.index(plot.pick) if plot.pick else None
    by_pick: dict[object, dict[str, None]] = {}
    for row in plot.data.rows:
        if row[place] is not None:
            by_pick.setdefault(row[picked] if picked is not None else None, {})[str(row[place])] = None
    yield from (list(names) for names in by_pick.values())
