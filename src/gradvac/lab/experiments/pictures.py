"""A comparison in pictures: differences to the baseline, and the trade-off between levels."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradvac.analysis.figures import FORMATS
from gradvac.analysis.figures.style import (
    INKS,
    QUIET,
    STYLE,
    name_points,
    new_figure,
    save_figure,
    unknown_glyphs_as_boxes,
)
from gradvac.lab.experiments.comparison import Comparison
from gradvac.lab.experiments.verdicts import BETTER, WORSE, Cell, Row, front

_INK = {BETTER: INKS[0], WORSE: INKS[1]}  # all others are quiet
_MOST_LETTERS = 36
_CURRENT = "#010203"  # stands for the colour of the text around a picture


def draw(comparison: Comparison) -> dict[str, Figure]:
    """Name -> picture, of all that the comparison allows: "differences", "trade_off"."""
    with mpl.rc_context(dict(STYLE)):
        drawn = {"differences": _differences(comparison), "trade_off": _trade_off(comparison)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def write_pictures(comparison: Comparison, directory: Path) -> list[Path]:
    """Write them as PDF, SVG and PNG."""
    directory.mkdir(parents=True, exist_ok=True)
    return [
        path
        for name, figure in draw(comparison).items()
        for path in save_figure(figure, directory / name, FORMATS)
    ]


def to_svg(figure: Figure) -> str:
    """A picture to stand in a page, in the colour of its text."""
    inks = {"text.color", "axes.labelcolor", "xtick.color", "ytick.color"}
    for axes in figure.axes:
        _recolour(axes)
    with mpl.rc_context(dict(STYLE) | dict.fromkeys(inks, _CURRENT)), unknown_glyphs_as_boxes():
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(_CURRENT, "currentColor")


def _recolour(axes: Axes) -> None:
    axes.tick_params(colors=_CURRENT)
    texts = [axes.xaxis.label, axes.yaxis.label, axes.title, *axes.texts]
    for text in texts:
        text.set_color(_CURRENT)
    for line in [*axes.get_xgridlines(), *axes.get_ygridlines()]:
        line.set_alpha(0.25)


def _differences(comparison: Comparison) -> Figure | None:
    """Every method's difference to the baseline on average, with its 95 % interval."""
    row = comparison.rows[0]
    cells = {name: cell for name, cell in row.cells.items() if cell.against is not None}
    if not cells:
        return None
    figure = new_figure(6.4, 0.9 + 0.34 * len(cells))
    axes = figure.add_subplot()
    axes.grid(visible=False, axis="y")
    axes.axvline(0, color=QUIET, linewidth=1)
    for place, cell in enumerate(cells.values()):
        against = cell.against
        assert against is not None
        ink = _INK.get(against.verdict, QUIET)
        if not math.isnan(against.low):
            axes.plot([against.low, against.high], [place, place], color=ink, linewidth=2)
        axes.plot(against.difference, place, "o", color=ink, markersize=6)
    axes.set_yticks(range(len(cells)), [_short(name) for name in cells])
    axes.set_ylim(len(cells) - 0.5, -0.5)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.1), max(high, 0.1))
    way = "higher is better" if row.higher_is_better else "lower is better"
    axes.set_xlabel(f"{comparison.metric} minus that of {_short(comparison.baseline)} ({way})")
    return figure


def _trade_off(comparison: Comparison) -> Figure | None:
    """Large languages against small ones: the front of the mixtures, and every method's point."""
    levels = [row for row in comparison.rows if row.kind == "level"]
    if len(levels) < 2:
        return None
    across, up = levels[0], levels[-1]
    points = {
        name: (across.cells[name], up.cells[name]) for name in across.cells if name in up.cells
    }
    if len(points) < 2:
        return None
    figure = new_figure(6.4, 4.6)
    axes = figure.add_subplot()
    best = _front(across, up, [name for name in comparison.mixtures if name in points])
    if len(best) > 1:
        line = sorted((points[name][0].mean, points[name][1].mean) for name in best)
        axes.plot(*zip(*line, strict=True), "-", color=QUIET, linewidth=1, zorder=1)
    others = [name for name in points if name not in comparison.mixtures]
    inks = [INKS[others.index(name) % len(INKS)] if name in others else QUIET for name in points]
    for (name, (x, y)), ink in zip(points.items(), inks, strict=True):
        _point(axes, x, y, ink, "D" if name in others else "o")
    axes.margins(0.15)
    means = [(x.mean, y.mean) for x, y in points.values()]
    name_points(figure, [_short(name) for name in points], means, inks)
    axes.set_xlabel(f"{comparison.metric}, {across.name} resource tasks".replace("_", " "))
    axes.set_ylabel(f"{comparison.metric}, {up.name} resource tasks".replace("_", " "))
    return figure


def _point(axes: Axes, x: Cell, y: Cell, ink: str, marker: str) -> None:
    reach = [math.nan if math.isnan(cell.low) else cell.high - cell.mean for cell in (x, y)]
    axes.errorbar(
        x.mean, y.mean, xerr=reach[0], yerr=reach[1], color=ink, linewidth=0.8, alpha=0.45
    )
    axes.plot(x.mean, y.mean, marker, color=ink, markersize=6)


def _front(across: Row, up: Row, names: Sequence[str]) -> list[str]:
    """The Pareto front of some methods in two rows."""
    rows: list[Row] = []
    for row in (across, up):
        cells: Mapping[str, Cell] = {name: row.cells[name] for name in names}
        rows.append(Row(row.kind, row.name, cells, row.digits, row.higher_is_better))
    return front(rows) if names else []


def beyond_the_mixtures(comparison: Comparison) -> list[str] | None:
    """Methods that no mixture equals or beats at all resource levels; None without levels."""
    levels = [row for row in comparison.rows if row.kind == "level"]
    mixtures = [name for name in comparison.mixtures if all(name in row.cells for row in levels)]
    if len(levels) < 2 or len(mixtures) < 2:
        return None
    signs = [1.0 if row.higher_is_better else -1.0 for row in levels]

    def is_beaten(name: str, mixture: str) -> bool:
        pairs = [(row.cells[mixture].mean, row.cells[name].mean) for row in levels]
        return all(sign * (one - own) >= 0 for sign, (one, own) in zip(signs, pairs, strict=True))

    return [
        name
        for name in comparison.seeds
        if name not in mixtures
        and all(name in row.cells for row in levels)
        and not any(is_beaten(name, mixture) for mixture in mixtures)
    ]


def _short(name: str) -> str:
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"
