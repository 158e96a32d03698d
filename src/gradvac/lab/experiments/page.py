"""A comparison in pictures, and as one offline page: the answer, pictures, tables."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
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
from gradvac.analysis.report import render_page
from gradvac.lab.experiments.comparison import Comparison
from gradvac.lab.experiments.tables import EXPLAINED, tables_of
from gradvac.lab.experiments.verdicts import (
    CLEAR,
    NOT_SHOWN,
    SUGGESTIVE,
    Against,
    Cell,
    is_matched,
    means_by_method,
    pareto_front,
)
from gradvac.utils.hints import some

_LEAST = 0.05  # axes reach so far at least, as a share of the score: less looks like much
_MOST_LETTERS = 36
_CURRENT = "#010203"  # stands for the colour of the text around a picture
_CAPTIONS = {
    "differences": "Every method against the baseline, with 95 % intervals; filled: clear",
    "trade_off": "Large tasks against small ones",
}


def comparison_figures(comparison: Comparison) -> dict[str, Figure]:
    """Name -> picture, of all that the comparison allows: "differences", "trade_off"."""
    with mpl.rc_context(dict(STYLE)):
        drawn = {"differences": _differences(comparison), "trade_off": _trade_off(comparison)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def write_pictures(comparison: Comparison, directory: Path) -> list[Path]:
    """Write them as PDF, SVG and PNG."""
    directory.mkdir(parents=True, exist_ok=True)
    return [
        path
        for name, figure in comparison_figures(comparison).items()
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
    svg = svg[svg.index("<svg") :].replace(_CURRENT, "currentColor")
    return svg.replace(QUIET, "var(--quiet)")


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
    figure = new_figure(5.2, 0.9 + 0.34 * len(cells))
    axes = figure.add_subplot()
    axes.grid(visible=False, axis="y")
    axes.axvline(0, color=QUIET, linewidth=1)
    for height, cell in enumerate(cells.values()):
        assert cell.against is not None
        _interval(axes, height, cell.against)
    axes.set_yticks(range(len(cells)), [_short(name) for name in cells])
    axes.set_ylim(len(cells) - 0.5, -0.5)
    furthest = _LEAST * abs(row.cells[comparison.baseline].mean)
    reach = 1.05 * max(furthest, *map(abs, axes.get_xlim()))
    axes.set_xlim(-reach, reach)
    way = "higher is better" if row.higher_is_better else "lower is better"
    axes.set_xlabel(f"{comparison.metric} minus that of {_short(comparison.baseline)} ({way})")
    return figure


def _interval(axes: Axes, height: float, against: Against) -> None:
    """A difference: coloured if anything is shown, filled if it is clear."""
    ink = QUIET
    if against.verdict in (CLEAR, SUGGESTIVE):
        ink = INKS[0] if against.is_better else INKS[1]
    if not math.isnan(against.low):
        axes.plot([against.low, against.high], [height, height], color=ink, linewidth=2)
    filled = "full" if against.verdict == CLEAR else "none"
    axes.plot(against.difference, height, "o", color=ink, markersize=6, fillstyle=filled)


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
    figure = new_figure(5.2, 4.2)
    axes = figure.add_subplot()
    best = pareto_front([across, up], comparison.mixtures)
    if len(best) > 1:
        line = sorted((points[name][0].mean, points[name][1].mean) for name in best)
        axes.plot(*zip(*line, strict=True), "-", color=QUIET, linewidth=1, zorder=1)
    others = [name for name in points if name not in comparison.mixtures]
    inks = [INKS[others.index(name) % len(INKS)] if name in others else QUIET for name in points]
    for (name, (x, y)), ink in zip(points.items(), inks, strict=True):
        _point(axes, x, y, ink, "D" if name in others else "o")
    axes.margins(0.15)
    _same_scale(axes, 2 * _LEAST * max(abs(cell.mean) for pair in points.values() for cell in pair))
    means = [(x.mean, y.mean) for x, y in points.values()]
    name_points(figure, [_short(name) for name in points], means, inks)
    axes.set_xlabel(f"{comparison.metric}, {across.name} resource tasks".replace("_", " "))
    axes.set_ylabel(f"{comparison.metric}, {up.name} resource tasks".replace("_", " "))
    return figure


def _same_scale(axes: Axes, least: float) -> None:
    """Let both axes span as much, and `least` at least, around what is drawn."""
    limits = [axes.get_xlim(), axes.get_ylim()]
    span = max(least, *(high - low for low, high in limits))
    across, up = (((low + high - span) / 2, (low + high + span) / 2) for low, high in limits)
    axes.set_xlim(across)
    axes.set_ylim(up)


def _point(axes: Axes, x: Cell, y: Cell, ink: str, marker: str) -> None:
    reach = [math.nan if math.isnan(cell.low) else cell.high - cell.mean for cell in (x, y)]
    axes.errorbar(
        x.mean, y.mean, xerr=reach[0], yerr=reach[1], color=ink, linewidth=0.8, alpha=0.45
    )
    axes.plot(x.mean, y.mean, marker, color=ink, markersize=6)


def beyond_the_mixtures(comparison: Comparison) -> list[str] | None:
    """Methods that no mixture equals or beats at all resource levels; None without levels."""
    levels = [row for row in comparison.rows if row.kind == "level"]
    means = means_by_method(levels) if levels else {}
    mixtures = [means[name] for name in comparison.mixtures if name in means]
    if len(levels) < 2 or len(mixtures) < 2:
        return None
    return [
        name
        for name, point in means.items()
        if name not in comparison.mixtures and not any(is_matched(point, one) for one in mixtures)
    ]


def _short(name: str) -> str:
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"


def to_html(comparison: Comparison) -> str:
    """The page, with everything it needs inside."""
    pictures = {name: to_svg(figure) for name, figure in comparison_figures(comparison).items()}
    return render_page(
        Path(__file__).with_name("page.html"),
        title=f"{comparison.metric} of {len(comparison.seeds)} methods",
        headline=answer(comparison),
        trade_off=describe_trade_off(comparison),
        pictures=pictures,
        captions=_CAPTIONS,
        tables=tables_of(comparison),
        verdict_of=_verdict_of,
        explained=f"Verdicts: {comparison.test}. {EXPLAINED}".split("*"),  # every second in italics
        remarks=comparison.remarks,
        note=comparison.note,
    )


def answer(comparison: Comparison) -> str:
    """What a reader wants to know first.

    What is clear; else what is suggestive; else how far methods may still be apart.
    """
    answers = [
        (f"{one.method} against {one.baseline}", one.on, one.digits, one.against)
        for one in comparison.primary
    ] or _averages(comparison)
    if not answers:
        return f"There is one method, {comparison.baseline}: nothing to compare."
    verdicts = [against.verdict for *_, against in answers]
    for verdict in (CLEAR, SUGGESTIVE):
        if verdict in verdicts:
            found = [one for one in answers if one[3].verdict == verdict]
            best = max(found, key=lambda one: (one[3].is_better, abs(one[3].difference)))
            others = Counter(_side(one[3]) for one in answers if one is not best)
            rest = ", ".join(f"{number} {word}" for word, number in others.items())
            return _words(comparison, *best) + (f" Of the others: {rest}." if rest else "")
    undecided = [one for one in answers if one[3].verdict == NOT_SHOWN]
    if not undecided:
        return f"These runs cannot tell whether anything differs from {comparison.baseline}."
    widest = max(undecided, key=lambda one: one[3].largest)
    return f"No difference is shown. The widest interval is that of {_words(comparison, *widest)}"


def _side(against: Against) -> str:
    return _verdict(against, 0).partition(": at most")[0]


def _verdict(against: Against, digits: int) -> str:
    """As in "clearly better"."""
    return re.sub(rf"^({CLEAR}|{SUGGESTIVE}): ", r"\1ly ", against.in_words(digits))


def _averages(comparison: Comparison) -> list[tuple[str, str, int, Against]]:
    row = comparison.rows[0]
    return [
        (f"{name} against {comparison.baseline}", row.name, row.digits, cell.against)
        for name, cell in row.cells.items()
        if cell.against is not None
    ]


def _words(comparison: Comparison, pair: str, on: str, digits: int, against: Against) -> str:
    """A difference in a sentence."""
    where = "on average" if on == comparison.rows[0].name else f"on {on}"
    is_score = on in {row.name for row in comparison.rows}
    return (
        f"{pair}, {where}: {_verdict(against, digits)}, {against.difference:+.{digits}f}"
        f"{f' {comparison.metric}' if is_score else ''} (95 % interval "
        f"{against.low:+.{digits}f} to {against.high:+.{digits}f})."
    )


def describe_trade_off(comparison: Comparison) -> str:
    """Whether a method goes beyond what sampling and task weights reach by themselves."""
    free = beyond_the_mixtures(comparison)
    if free is None:
        return ""
    start = "The line joins the best mixtures of plain joint training (temperatures, task weights)."
    if not free:
        return f"{start} Every other method is equalled or beaten by one of them at all levels."
    return (
        f"{start} By their means, no mixture equals or beats {some(free)} at all levels; the "
        "tables say what is shown."
    )


def _verdict_of(cell: str) -> str:
    """The style of a cell that says something is better or worse."""
    for word in ("better", "worse"):
        if cell.rstrip(")").endswith(f": {word}"):
            return word
    return ""
