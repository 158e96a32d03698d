"""A comparison as one offline page, in the manner of the report: the answer, pictures, tables."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from gradvac.analysis.report import render_page
from gradvac.hints import some
from gradvac.lab.experiments.comparison import Comparison
from gradvac.lab.experiments.pictures import beyond_the_mixtures, draw, to_svg
from gradvac.lab.experiments.tables import EXPLAINED, tables_of
from gradvac.lab.experiments.verdicts import BETTER, WORSE

_CAPTIONS = {
    "differences": "Every method against the baseline, with 95 % intervals",
    "trade_off": "Large tasks against small ones",
}


def to_html(comparison: Comparison) -> str:
    """The page, with everything it needs inside."""
    pictures = {name: to_svg(figure) for name, figure in draw(comparison).items()}
    return render_page(
        Path(__file__).with_name("page.html"),
        title=f"{comparison.metric} of {len(comparison.seeds)} methods",
        headline=headline(comparison),
        trade_off=say_trade_off(comparison),
        pictures=pictures,
        captions=_CAPTIONS,
        tables=tables_of(comparison),
        verdict_of=_verdict_of,
        explained=f"Verdicts: {comparison.test}. {EXPLAINED.replace('*', '')}",
        remarks=comparison.remarks,
        note=comparison.note,
    )


def headline(comparison: Comparison) -> str:
    """What a reader wants to know first: who is better than the baseline, on average."""
    row, baseline = comparison.rows[0], comparison.baseline
    judged = {name: cell.against for name, cell in row.cells.items() if cell.against is not None}
    digits, metric = row.digits, comparison.metric
    told = {name: one for name, one in judged.items() if one.verdict in (BETTER, WORSE)}
    if told:
        order = {n: (one.verdict == BETTER, abs(one.difference)) for n, one in told.items()}
        name = max(order, key=order.__getitem__)
        one = told[name]
        rest = Counter(judged[other].verdict for other in judged if other != name)
        others = ", ".join(f"{count} {verdict}" for verdict, count in rest.items())
        return (
            f"{name} is {one.verdict} than {baseline} by {abs(one.difference):.{digits}f} {metric} "
            f"(95 % interval {one.low:+.{digits}f} to {one.high:+.{digits}f})."
            + (f" Of the others: {others}." if others else "")
        )
    if not judged:
        return f"There is one method, {baseline}: nothing to compare."
    smallest = [one.smallest for one in judged.values() if not math.isnan(one.smallest)]
    if not smallest:
        return f"Whether anything differs from {baseline} cannot be told from these runs."
    return (
        f"No method differs from {baseline} by more than noise; a difference of "
        f"{max(smallest):.{digits}f} {metric} would have been found in four cases of five."
    )


def say_trade_off(comparison: Comparison) -> str:
    """Whether a method goes beyond what sampling and task weights reach by themselves."""
    free = beyond_the_mixtures(comparison)
    if free is None:
        return ""
    start = "The line joins the best mixtures of plain joint training (temperatures, task weights)."
    if not free:
        return f"{start} Every other method is equalled or beaten by one of them at all levels."
    return (
        f"{start} By their means, no mixture equals or beats {some(free)} at all levels; the "
        "tables say what is more than noise."
    )


def _verdict_of(cell: str) -> str:
    for verdict in (BETTER, WORSE):
        if cell == verdict or cell.endswith(f", {verdict})"):
            return verdict
    return ""
