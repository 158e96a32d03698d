"""A comparison as Markdown and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from gradvac.lab.experiments.comparison import Comparison
from gradvac.lab.experiments.methods import Cost
from gradvac.lab.experiments.verdicts import (
    Against,
    Cell,
    ComparisonRow,
    pareto_front,
)

_UNKNOWN = "-"
_VERDICT = "verdict"  # the last column of some tables


def to_json(comparison: Comparison) -> str:
    """Everything; what is not known is null."""
    return json.dumps(_plain(asdict(comparison)), ensure_ascii=False, indent=1) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Table(NamedTuple):
    """A table of a comparison, in words."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(comparison: Comparison) -> list[_Table]:
    """All tables, in the order in which they are read."""
    methods, rows = list(comparison.seeds), comparison.rows
    tables = [_primary(comparison), _average(rows[0], comparison)]
    for kind, title in (("level", "By resource level"), ("task", "By task")):
        tables.append(_by_method(title, [row for row in rows if row.kind == kind], methods))
    losses = "Losses, at equal steps and at equal time"
    tables += [_by_method(losses, comparison.losses, methods), _costs(comparison)]
    return [table for table in tables if table.rows]


def to_markdown(comparison: Comparison) -> str:
    """Tables and the test behind them."""
    methods = list(comparison.seeds)
    parts = [
        f"# {comparison.metric}: {len(methods)} methods against {comparison.baseline}",
        f"Scored: {comparison.note}." if comparison.note else "",
    ]
    levels = [row for row in comparison.rows if row.kind == "level"]
    for table in tables_of(comparison):
        rows = table.rows
        if table.head[-1] == _VERDICT:
            rows = [(*cells, f"**{verdict}**") for *cells, verdict in rows]
        lines = [_line(table.head), _line(["---"] * len(table.head)), *map(_line, rows)]
        parts += [f"## {table.title}", "\n".join(lines)]
        if table.title == "By task" and levels and len(methods) > 2:
            parts += ["## Trade-off between resource levels", _trade_off(levels)]
    parts += ["## How this was tested", f"Verdicts: {comparison.test}. {EXPLAINED}"]
    if comparison.remarks:
        parts.append("\n".join(f"- {line}" for line in comparison.remarks))
    return "\n\n".join(part for part in parts if part) + "\n"


EXPLAINED = (
    "Numbers are means over seeds with the reach of their 95 % confidence interval. *Clear*: "
    "shown, also after the correction; only primary questions can be. *Suggestive*: the 95 % "
    "interval does not hold 0, which happens by chance in one of twenty rows; try again with new "
    "seeds. *Not shown*: the interval holds 0; the true difference may still be as large as *at "
    "most* says. *Cannot tell*: a single seed, or all seeds gave the same. *Needed*: a difference "
    "of that size would have been clear, or suggestive where the question is no primary one. "
    "Losses and scores of development sets know no sentences: their intervals are about other "
    "seeds."
)


def _primary(comparison: Comparison) -> _Table:
    head = ("primary question", "pairs of seeds", *_DIFFERENCE)
    rows = [
        (
            f"{one.method} against {one.baseline}, {one.on}",
            str(one.against.pairs or "unpaired"),
            *_difference(one.against, one.digits),
        )
        for one in comparison.primary
    ]
    return _Table("Asked beforehand", head, rows)


def _average(row: ComparisonRow, comparison: Comparison) -> _Table:
    lines: list[Sequence[str]] = []
    for name, seeds in comparison.seeds.items():
        cell, trained = row.cells.get(name), str(len(seeds))
        if cell is None:
            lines.append((name, trained, *[_UNKNOWN] * (1 + len(_DIFFERENCE))))
        elif cell.against is None:
            blank = [""] * (len(_DIFFERENCE) - 1)
            lines.append((name, trained, _mean(cell, row), *blank, "baseline"))
        else:
            pairs = cell.against.pairs
            if pairs != len(seeds):
                trained += f", {pairs} in pairs" if pairs else ", unpaired"
            lines.append((name, trained, _mean(cell, row), *_difference(cell.against, row.digits)))
    head = ("method", "seeds", comparison.metric, *_DIFFERENCE)
    return _Table(f"Average {comparison.metric}", head, lines)


_DIFFERENCE = ("difference (95 % interval)", "p", "p, corrected", "needed", _VERDICT)


def _difference(against: Against, digits: int) -> Sequence[str]:
    """The cells of a difference, as `_DIFFERENCE` heads them."""
    difference = f"{against.difference:+.{digits}f}"
    if not math.isnan(against.low):
        difference += f" ({against.low:+.{digits}f} to {against.high:+.{digits}f})"
    return (
        difference,
        _p_value(against.p_value),
        _p_value(against.adjusted),
        _number(against.needed, digits),
        against.in_words(digits),
    )


def _p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else _number(value, 3)


def _by_method(title: str, rows: Sequence[ComparisonRow], methods: Sequence[str]) -> _Table:
    return _Table(
        title,
        ("", *methods),
        [(row.name, *(_cell(row.cells.get(name), row) for name in methods)) for row in rows],
    )


def _cell(cell: Cell | None, row: ComparisonRow) -> str:
    if cell is None:
        return _UNKNOWN
    if cell.against is None:
        return _mean(cell, row)
    difference = f"{cell.against.difference:+.{row.digits}f}, {cell.against.in_words(row.digits)}"
    return f"{_mean(cell, row)} ({difference})"


def _trade_off(levels: Sequence[ComparisonRow]) -> str:
    """Who is on the Pareto front of the resource levels."""
    best = pareto_front(levels)
    return (
        f"No other method is at least as good at all levels and better at one: {', '.join(best)}. "
        "By means over seeds, without a test: the verdicts above say what is shown."
    )


def _costs(comparison: Comparison) -> _Table:
    head = ("method", "steps", "best step", "seconds", "ms per step", "relative")
    first = comparison.costs[comparison.baseline].seconds_per_step
    rows = [(name, *_cost(cost, first)) for name, cost in comparison.costs.items()]
    return _Table("Cost", (*head, "peak memory, GiB"), rows)


def _cost(cost: Cost, first: float | None) -> Sequence[str]:
    per_step = cost.seconds_per_step
    return (
        _number(cost.steps, 0),
        _number(cost.best_step, 0),
        _number(cost.seconds, 1),
        _number(None if per_step is None else 1000 * per_step, 1),
        _number(None if per_step is None or not first else per_step / first, 2),
        _number(cost.peak_memory, 2),
    )


def _mean(cell: Cell, row: ComparisonRow) -> str:
    text = f"{cell.mean:.{row.digits}f}"
    return text if math.isnan(cell.low) else f"{text} ± {cell.high - cell.mean:.{row.digits}f}"


def _number(value: float | None, digits: int) -> str:
    return _UNKNOWN if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
