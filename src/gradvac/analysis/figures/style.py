"""How matplotlib draws plots and maps (`gradvac.analysis.plots`), and how figures are saved."""

# T tasks

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import (
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
    StrMethodFormatter,
)
from matplotlib.transforms import Bbox

from gradvac.analysis import plots, views
from gradvac.analysis.plots import HeatMap, Plot, Series

INKS = plots.INKS["light"]
_PAPER = plots.PAPERS["light"]
QUIET = _PAPER["quiet"]
DASHES = ("-", "--", ":", "-.", (0, (7, 1, 1, 1, 1, 1)), (0, (2, 1)), (0, (9, 3)))
DIVERGING = LinearSegmentedColormap.from_list(
    "similarity", [(at, light) for at, light, _ in plots.SCALE]
).with_extremes(bad="#ffffff")
# Its blues, for values that are all above 0 and close to each other; white means 0, or nothing.
SEQUENTIAL = LinearSegmentedColormap.from_list(
    "closely similar", DIVERGING(np.linspace(plots.SCALE[plots.PALE_BLUE][0], 1.0, 129))
).with_extremes(bad="#ffffff")
_MOST_LETTERS = 20  # of a task's name
_MOST_TICKS = 12  # of layers
# For names in scripts that DejaVu Sans, which comes with matplotlib, does not have. Verdana and
# Arial are for browsers without it, which would take the next font for Latin letters too.
_FALLBACKS = (
    "Verdana",
    "Arial",
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "WenQuanYi Zen Hei",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "Malgun Gothic",
    "Noto Sans Devanagari",
    "Lohit Devanagari",
    "Nirmala UI",
    "Arial Unicode MS",
)
STYLE: Mapping[Any, Any] = {
    "font.family": ["DejaVu Sans", *_FALLBACKS, "sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.parse_math": False,  # a name is shown as it is, whatever signs it has
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa5b1",
    "axes.grid": True,
    "grid.color": "#e6e9ed",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.handlelength": 3.0,  # dashes must show
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.hashsalt": "gradvac",  # the same data give the same file
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
}
_DATELESS = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


def new_figure(width: float, height: float, *, has_squares: bool = False) -> Figure:
    """An empty figure, in inches, that keeps its labels apart.

    Args:
        width: In inches.
        height: In inches.
        has_squares: Its axes have a fixed shape; the usual layout lets their titles stick out.
    """
    return Figure(figsize=(width, height), layout="compressed" if has_squares else "constrained")


def save_figure(figure: Figure, stem: Path, formats: Sequence[str]) -> list[Path]:
    """Write a figure once for each format."""
    paths = []
    for kind in formats:
        path = stem.with_name(f"{stem.name}.{kind}")
        with mpl.rc_context(dict(STYLE)), unknown_glyphs_as_boxes():
            figure.savefig(path, dpi=200, metadata=_DATELESS.get(kind))
        paths.append(path)
    return paths


@contextmanager
def unknown_glyphs_as_boxes() -> Iterator[None]:
    """No machine has all fonts: a letter that none has is a box, without a warning each time."""
    fonts = logging.getLogger("matplotlib.font_manager")
    level = fonts.level
    fonts.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Glyph \d+ ", UserWarning)
            warnings.filterwarnings("ignore", "Matplotlib currently does not support", UserWarning)
            yield
    finally:
        fonts.setLevel(level)


# Where a name may stand, from its point.
_PLACES = ((6, 5), (6, -11), (-6, 5), (-6, -11), (6, 16), (6, -22), (-6, 16), (-6, -22))


@unknown_glyphs_as_boxes()
def name_points(
    figure: Figure, names: Sequence[str], points: Sequence[tuple[float, float]], inks: Sequence[str]
) -> None:
    """Write a name beside every point, where it meets no other point or name.

    The limits of the axes must be set.
    """
    figure.draw_without_rendering()
    (axes,) = figure.axes
    reach = 4 * figure.dpi / 72  # of a point's mark
    taken = [
        Bbox.from_extents(*(at - reach), *(at + reach)) for at in axes.transData.transform(points)
    ]
    for name, point, ink in zip(names, points, inks, strict=True):
        for place in _PLACES:
            text = axes.annotate(
                name,
                point,
                place,
                textcoords="offset points",
                ha="left" if place[0] > 0 else "right",
                color=ink,
                fontsize=8,
            )
            box = text.get_window_extent()
            if place == _PLACES[-1] or not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def draw_plots(
    panels: Sequence[Plot],
    size: tuple[float, float],
    *,
    legend: str = "right",
    widths: Sequence[float] | None = None,
) -> Figure:
    """Plots side by side, on one scale.

    Args:
        panels: The plots.
        size: Inches.
        legend: Where it stands: "right" of all plots, "below" each, or "inside" the first.
        widths: Of the plots, relative to each other.
    """
    figure = new_figure(*size)
    grid = figure.subplots(1, len(panels), sharey=True, width_ratios=widths)
    all_axes = list(np.atleast_1d(grid))
    entries: dict[str, Artist] = {}
    for axes, plot in zip(all_axes, panels, strict=True):
        drawn = _draw_plot(axes, plot)
        if plot.has_legend is not False:
            entries |= drawn
        if legend == "below":
            below = (0.5, -0.22)  # on no point
            _legend(axes, drawn, fontsize=8, loc="upper center", bbox_to_anchor=below)
    if legend == "right":
        _legend(figure, entries, loc="outside right upper", fontsize=8)
    elif legend == "inside":
        _legend(all_axes[0], entries)
    return figure


def _draw_plot(axes: Axes, plot: Plot) -> dict[str, Artist]:
    """Draw a plot; what belongs into its legend, by name."""
    drawn = {series.name: _draw_series(axes, series) for series in plot.series}
    drawn.pop("", None)
    if plot.missing and not plot.series:
        axes.text(0.5, 0.5, plot.missing, transform=axes.transAxes, ha="center")
    has_bars = any(series.mode == "bars" for series in plot.series)
    is_signed = has_bars or (plot.y_range is not None and not plot.as_percent)
    if is_signed and not plot.is_log:
        axes.axhline(0, color=QUIET, linewidth=0.8, zorder=1)  # where pulling the same way ends
    if plot.title:
        axes.set_title(plot.title, loc="left")
    axes.set_xlabel(plot.x_title)
    axes.set_ylabel(plot.y_title)
    if plot.y_range is not None:
        axes.set_ylim(plot.y_range)
    if plot.as_percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if plot.layers is not None:
        first, last = plot.layers
        axes.set_xticks(range(first, last + 1, (last - first) // _MOST_TICKS + 1))
    if has_bars:
        upright = max(map(len, plot.x_names)) > 2
        axes.set_xticks(range(len(plot.x_names)), list(plot.x_names), rotation=90 if upright else 0)
        axes.grid(axis="x", visible=False)
    if plot.is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if plot.number_format.startswith(","):
        axes.yaxis.set_major_formatter(StrMethodFormatter(f"{{x:{plot.number_format}}}"))
    return drawn


def _draw_series(axes: Axes, series: Series) -> Artist:
    color = INKS[series.colour % len(INKS)]
    if series.mode == "bars":
        bars = axes.bar(np.asarray(series.x), np.asarray(series.y), color=color, width=series.size)
        return bars.patches[0]
    if series.mode == "markers":
        look: dict[str, Any] = {"s": 26, "zorder": 3} if series.points else {"s": 12}
        return axes.scatter(series.x, series.y, color=color, alpha=series.alpha, **look)
    if series.is_faint:
        return axes.plot(series.x, series.y, color=color, alpha=0.25, linewidth=0.7)[0]
    look = {"linestyle": DASHES[series.dash % len(DASHES)]}
    if "markers" in series.mode:
        is_open = series.marker.endswith("-open")
        look["marker"] = "s" if series.marker.startswith("square") else "o"
        look["fillstyle"] = "none" if is_open else "full"
    return axes.plot(series.x, series.y, color=color, **look)[0]


def _legend(owner: Axes | Figure, entries: Mapping[str, Artist], **look: Any) -> None:
    """A legend of all entries; matplotlib itself leaves out names that begin with "_"."""
    if not entries:
        return
    made = owner.legend(list(entries.values()), [str(n) for n in range(len(entries))], **look)
    for text, name in zip(made.get_texts(), entries, strict=True):
        text.set_text(name)


def draw_map(heat_map: HeatMap) -> Figure:
    """A map alone, below its title."""
    cells, names, families = _room(heat_map)
    width = max(cells + names + families, 4.2)
    lines = wrap(heat_map.title, int(12 * (width - names)))  # letters that fit above the cells
    height = cells + names + 0.75 + 0.2 * len(lines)
    figure = new_figure(width, height, has_squares=True)
    axes = figure.subplots()
    image = _draw_map(axes, heat_map)
    axes.set_title("\n".join(lines), loc="left")
    _colour_bar(figure, image, heat_map)
    return figure


def draw_maps_beside(maps: Sequence[HeatMap], title: str) -> Figure:
    """Maps side by side, which have the same colours."""
    cells, names, families = _room(maps[0])
    width, height = 2 * (cells + names + families) + 0.3, cells + names + 1.25
    figure = new_figure(width, height, has_squares=True)
    images = []
    for axes, heat_map in zip(figure.subplots(1, 2), maps, strict=True):
        images.append(_draw_map(axes, heat_map))
        axes.set_title(heat_map.title, loc="left")
    _colour_bar(figure, images[0], maps[0])
    if title:
        figure.suptitle(views.short(title, 60), x=0.01, ha="left", fontsize=10)
    return figure


def _names(heat_map: HeatMap) -> list[str]:
    return [views.short(name, _MOST_LETTERS) for name in heat_map.labels]


def _room(heat_map: HeatMap) -> tuple[float, float, float]:
    """Inches that cells, names of tasks and names of families take."""
    names = 0.35 + 0.066 * max(map(len, _names(heat_map)))
    families = max((len(block.family) for block in heat_map.blocks), default=0)
    return 0.24 * max(len(heat_map.labels), 8), names, 0.3 + 0.066 * families


def _colour_bar(figure: Figure, image: AxesImage, heat_map: HeatMap) -> None:
    bar = figure.colorbar(
        image, ax=figure.axes, orientation="horizontal", fraction=0.03, pad=0.02, aspect=50
    )
    bar.locator = MaxNLocator(5)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    limits = heat_map.colour_limits()
    what = heat_map.unit
    if limits.is_narrow:  # pale is not 0 here
        what += f", colours from {limits.low:.2f} to {limits.high:.2f}"
    bar.set_label(what, fontsize=8)


def _draw_map(axes: Axes, heat_map: HeatMap) -> AxesImage:
    """A map with frames and brackets around families; the diagonal, always 1, is grey.

    Unknown pairs are hatched; cells hold numbers where there are few.
    """
    shown, labels, limits = heat_map.values, _names(heat_map), heat_map.colour_limits()
    colours = SEQUENTIAL if limits.is_narrow else DIVERGING
    image = axes.imshow(shown, cmap=colours, vmin=limits.low, vmax=limits.high)
    for row, column in np.argwhere(np.isnan(shown)):
        look: dict[str, Any] = {"facecolor": _PAPER["blank"]}
        if row != column:
            look = {"facecolor": "none", "hatch": "//////"}
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, edgecolor=_PAPER["hatch"], linewidth=0, **look))
    if len(labels) <= plots.MOST_NUMBERS:
        _write_numbers(axes, shown, image)
    upright = (max(map(len, labels)) > 2 and len(labels) > 8) or max(map(len, labels)) > 5
    axes.set_xticks(range(len(labels)), labels, rotation=90 if upright else 0)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0, labelsize=8)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    edge = len(labels) - 0.5
    for block in heat_map.blocks:
        low, size = block.start - 0.5, block.stop - block.start
        axes.add_patch(Rectangle((low, low), size, size, fill=False, linewidth=0.9, clip_on=False))
        ends = (low + 0.12, low + size - 0.12)
        gap = 0.012 * len(labels)
        axes.plot([edge + 2 * gap] * 2, ends, color=QUIET, linewidth=1.2, clip_on=False)
        middle = low + size / 2
        family = views.short(block.family, 28)
        axes.text(edge + 4 * gap, middle, family, fontsize=8, va="center", ha="left")
    axes.set_xlim(-0.5, edge)
    axes.set_ylim(edge, -0.5)
    return image


def _write_numbers(axes: Axes, shown: views.Matrix, image: AxesImage) -> None:
    for row, column in np.argwhere(~np.isnan(shown)):
        value = shown[row, column]
        red, green, blue, _ = image.to_rgba(value)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        text = f"{value:z.2f}".replace("0.", ".")
        ink = "white" if dark else _PAPER["ink"]
        axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink)
