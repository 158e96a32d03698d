"""A comparison as Markdown and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from gradvac.experiments.comparison import Comparison
from gradvac.experiments.curves import Cost
from gradvac.experiments.verdicts import Cell, Row, front

_UNKNOWN = "-"


def to_json(comparison: Comparison) -> str:
    """Everything; what is not known is null."""
    return json.dumps(_plain(asdict(comparison)), ensure_ascii=False, indent=1) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_markdown(comparison: Comparison) -> str:
    """Tables and the test behind them."""
    metric = comparison.metric
    average, *others = comparison.rows
    methods = list(comparison.seeds)
    parts = [
        f"# {metric}: {len(methods)} methods against {comparison.baseline}",
        f"Scored: {comparison.note}." if comparison.note else "",
        f"## Average {metric}",
        _average(average, comparison),
    ]
    for kind, title in (("level", "By resource level"), ("task", "By task")):
        rows = [row for row in others if row.kind == kind]
        if rows:
            parts += [f"## {title}", _rows(rows, methods)]
    levels = [row for row in others if row.kind == "level"]
    if levels and len(methods) > 2:
        parts += ["## Trade-off between resource levels", _trade_off(levels)]
    if comparison.losses:
        parts += ["## Losses, at equal steps and at equal time", _rows(comparison.losses, methods)]
    parts += ["## Cost", _costs(comparison)]
    parts += ["## How this was tested", f"Verdicts: {comparison.test}. {_EXPLAINED}"]
    if comparison.remarks:
        parts.append("\n".join(f"- {line}" for line in comparison.remarks))
    return "\n\n".join(part for part in parts if part) + "\n"


_EXPLAINED = (
    "Numbers are means over seeds with the reach of their 95 % confidence interval. *Smallest "
    "found*: a true difference of that size would have been found in four cases of five; a method "
    "within noise may still differ by less. Losses and scores of development sets know no "
    "sentences: their intervals are about other seeds."
)


def _average(row: Row, comparison: Comparison) -> str:
    head = ("method", "seeds", comparison.metric, "difference", "95 % interval", "p")
    lines = [_line((*head, "smallest found", "verdict")), _line(["---"] * 8)]
    for name, seeds in comparison.seeds.items():
        cell = row.cells.get(name)
        if cell is None:
            lines.append(_line((name, len(seeds), *[_UNKNOWN] * 6)))
            continue
        against = cell.against
        if against is None:
            rest: Sequence[str] = ("", "", "", "", "baseline")
        else:
            interval = f"{_signed(against.low, row)} to {_signed(against.high, row)}"
            rest = (
                _signed(against.difference, row),
                _UNKNOWN if math.isnan(against.low) else interval,
                _number(against.adjusted, 3),
                _number(against.smallest, row.digits),
                f"**{against.verdict}**",
            )
        lines.append(_line((name, len(seeds), _mean(cell, row), *rest)))
    return "\n".join(lines)


def _rows(rows: Sequence[Row], methods: Sequence[str]) -> str:
    lines = [_line(("", *methods)), _line(["---"] * (1 + len(methods)))]
    for row in rows:
        cells = (row.cells.get(name) for name in methods)
        lines.append(_line((row.name, *(_cell(cell, row) for cell in cells))))
    return "\n".join(lines)


def _cell(cell: Cell | None, row: Row) -> str:
    if cell is None:
        return _UNKNOWN
    if cell.against is None:
        return _mean(cell, row)
    return f"{_mean(cell, row)} ({_signed(cell.against.difference, row)}, {cell.against.verdict})"


def _trade_off(levels: Sequence[Row]) -> str:
    """Who is on the Pareto front of the resource levels."""
    best = front(levels)
    return (
        f"No other method is at least as good at all levels and better at one: {', '.join(best)}. "
        "By means over seeds, without a test: the verdicts above say what is more than noise."
    )


def _costs(comparison: Comparison) -> str:
    head = ("method", "steps", "best step", "seconds", "ms a step", "relative", "peak memory, GiB")
    lines = [_line(head), _line(["---"] * len(head))]
    first = comparison.costs[comparison.baseline].seconds_per_step
    for name, cost in comparison.costs.items():
        lines.append(_line((name, *_cost(cost, first))))
    return "\n".join(lines)


def _cost(cost: Cost, first: float | None) -> Sequence[str]:
    own = cost.seconds_per_step
    return (
        _number(cost.steps, 0),
        _number(cost.best_step, 0),
        _number(cost.seconds, 1),
        _number(None if own is None else 1000 * own, 1),
        _number(None if own is None or not first else own / first, 2),
        _number(cost.peak_memory, 2),
    )


def _mean(cell: Cell, row: Row) -> str:
    text = f"{cell.mean:.{row.digits}f}"
    return text if math.isnan(cell.low) else f"{text} ± {cell.high - cell.mean:.{row.digits}f}"


def _signed(value: float, row: Row) -> str:
    return f"{value:+.{row.digits}f}"


def _number(value: float | None, digits: int) -> str:
    return _UNKNOWN if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
