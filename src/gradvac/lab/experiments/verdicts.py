"""Verdicts: a method against the baseline in one row of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradvac.analysis.statistics import holm
from gradvac.lab.experiments.groups import Group
from gradvac.lab.experiments.statistics import LEVEL, Scored, difference, spread

BETTER, WORSE, NOISE, UNKNOWN = "better", "worse", "within noise", "cannot tell"


@dataclass(frozen=True)
class Against:
    """A method against the baseline.

    Attributes:
        difference: Method minus baseline.
        low: Lower end of its 95 % confidence interval; NaN with a single seed, as the next four, or
            where all seeds gave the same.
        high: Upper end.
        p_value: Two-sided.
        adjusted: The p-value among all tests of its kind (Holm).
        smallest: The smallest true difference that these runs would have found in 4 of 5 cases.
        verdict: "better", "worse", "within noise", or "cannot tell".
        paired: Whether runs of one seed were compared with each other.
    """

    difference: float
    low: float
    high: float
    p_value: float
    adjusted: float
    smallest: float
    verdict: str
    paired: bool


@dataclass(frozen=True)
class Cell:
    """One method in one row.

    Attributes:
        mean: Over seeds.
        low: Lower end of its 95 % confidence interval; NaN with a single seed, or where all gave
            the same.
        high: Upper end.
        against: The difference to the baseline; None for the baseline itself.
    """

    mean: float
    low: float
    high: float
    against: Against | None


@dataclass(frozen=True)
class Row:
    """One quantity of all methods.

    Attributes:
        kind: "average", "level", "task" or "loss": tests of one kind stand side by side.
        name: What it is.
        cells: Method -> its number; a method of which it is not known is left out.
        digits: Decimals to show.
        higher_is_better: Whether a larger number is the better one.
    """

    kind: str
    name: str
    cells: Mapping[str, Cell]
    digits: int
    higher_is_better: bool


def cells_of(
    groups: Sequence[Group], score: Callable[[Group], Scored | None], *, num_tests: int
) -> dict[str, Cell]:
    """The numbers of all methods, the first being the baseline, before `judged`.

    Args:
        groups: The methods.
        score: The score of a method; None if it has none.
        num_tests: Tests of the same kind that stand side by side.
    """
    baseline = score(groups[0])
    cells = {}
    for group in groups:
        scored = baseline if group is groups[0] else score(group)
        if scored is None:
            continue
        against = None
        if group is not groups[0] and baseline is not None:
            change, paired = difference(baseline, scored)
            p_value, smallest = change.p_value(), change.smallest(num_tests)
            against = Against(
                change.mean, *change.interval(), p_value, p_value, smallest, UNKNOWN, paired
            )
        mean = spread(scored)
        cells[group.name] = Cell(mean.mean, *mean.interval(), against)
    return cells


def judged(rows: Sequence[Row]) -> list[Row]:
    """The rows with verdicts: p-values adjusted among all tests of one kind."""
    tests = {
        kind: [
            (number, name)
            for number, row in enumerate(rows)
            if row.kind == kind
            for name, cell in row.cells.items()
            if cell.against is not None
        ]
        for kind in dict.fromkeys(row.kind for row in rows)
    }
    cells = [dict(row.cells) for row in rows]
    for places in tests.values():
        all_against: list[Any] = [rows[number].cells[name].against for number, name in places]
        for (number, name), against, adjusted in zip(
            places, all_against, holm([one.p_value for one in all_against]), strict=True
        ):
            verdict = _verdict(against.difference, adjusted, rows[number].higher_is_better)
            changed = replace(against, adjusted=adjusted, verdict=verdict)
            cells[number][name] = replace(cells[number][name], against=changed)
    return [replace(row, cells=row_cells) for row, row_cells in zip(rows, cells, strict=True)]


def _verdict(change: float, p_value: float, higher_is_better: bool) -> str:
    if math.isnan(p_value):
        return UNKNOWN
    if p_value >= LEVEL:
        return NOISE
    return BETTER if (change > 0) == higher_is_better else WORSE


def front(rows: Sequence[Row]) -> list[str]:
    """Methods that no other one equals or beats in all rows and beats in one: the Pareto front.

    By means over seeds, without a test: a method may be on it by chance. Methods that lack a row
    are left out.
    """
    signs = [1.0 if row.higher_is_better else -1.0 for row in rows]
    names = [name for name in rows[0].cells if all(name in row.cells for row in rows)]
    points = {
        name: [sign * row.cells[name].mean for sign, row in zip(signs, rows, strict=True)]
        for name in names
    }

    def is_beaten(own: list[float]) -> bool:
        return any(
            other != own and all(a >= b for a, b in zip(other, own, strict=True))
            for other in points.values()
        )

    return [name for name, point in points.items() if not is_beaten(point)]
