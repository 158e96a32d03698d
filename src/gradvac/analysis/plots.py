"""What is drawn, decided once: figures draw these objects with matplotlib, the page with Plotly.

`HeatMap` and `Plot` (lines, points or bars) say everything a reader sees: values, order, names,
limits, and which colour of the palette a line has. How many pixels that takes is for those who
draw.
"""

# S steps, K components, T tasks

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradvac.analysis import views
from gradvac.analysis.views import Matrix

# Okabe and Ito's colours, which people with any colour vision can distinguish.
INKS = {
    "light": ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#8c6d00", "#3d9bd1", "#5b5b5b"),
    "dark": ("#5ab4f0", "#ff9248", "#3fd0a4", "#e59ad0", "#f0d350", "#a3d8ff", "#c4c4c4"),
}
_PAPER = (  # colour on light and on dark ground
    ("ink", "#1c2128", "#e6eaef"),
    ("quiet", "#59636e", "#9aa5b1"),
    ("rule", "#e1e5ea", "#2c343e"),
    ("ground", "#ffffff", "#12161c"),
    ("hover", "#ffffff", "#232b35"),
    ("blank", "#e6e9ed", "#2a323c"),  # of a diagonal
    ("hatch", "#9aa5b1", "#6b7682"),  # of what is unknown
)
PAPERS = {
    "light": {name: light for name, light, _ in _PAPER},
    "dark": {name: dark for name, _, dark in _PAPER},
}
# Orange below 0, blue above; 0 is the colour of the page, so that nothing looks like something.
SCALE = (  # position, colour on light and on dark ground
    (0.0, "#7f3b08", "#ffe0a8"),
    (0.15, "#b35806", "#f5a142"),
    (0.32, "#f1a340", "#b3661a"),
    (0.44, "#fddcb0", "#4a3220"),
    (0.5, "#fafafa", "#1c222a"),
    (0.56, "#cfe3f1", "#1f3a55"),
    (0.68, "#67a9cf", "#2f75b5"),
    (0.85, "#2166ac", "#6cb6f5"),
    (1.0, "#08306b", "#d5ecff"),
)
PALE_BLUE = 5  # its number on the scale
LEAST_RANGE = 0.1  # of cosines, on axes and in colours: less would make little look like much
MOST_NUMBERS = 12  # tasks whose cells hold numbers


Numbers = Sequence[float] | NDArray[Any]


class MissingError(Exception):
    """Something cannot be drawn from these runs; the message says what it needs."""


class ColourLimits(NamedTuple):
    """Values at both ends of the colours, and whether these are the blues alone."""

    low: float
    high: float
    is_narrow: bool


@dataclass(frozen=True, eq=False)
class HeatMap:
    """A map of pairs of tasks, in the order shown."""

    values: Matrix  # [T, T]; NaN where unknown
    labels: tuple[str, ...]  # short names of rows and columns
    tasks: tuple[str, ...]  # their full names
    blocks: list[views.Block]  # families, which are framed
    what: str  # a cell, in words
    bounds: tuple[float, float]  # lowest and highest value of all maps that share the colours
    rows: str = ""  # what the task of a row is; "" where (i, j) is (j, i)
    columns: str = ""
    as_percent: bool = False
    title: str = ""
    unit: str = "cosine"  # below the colours

    def colour_limits(self) -> ColourLimits:
        """Centred at 0, unless all values are above it and close together.

        Then the blues run over them alone, lest all look the same. Never less than a tenth. The
        page does the same (`coloursOf`) for whatever is chosen there.
        """
        low, high = self.bounds
        if high / 2 < low < high:
            room = max(0.0, LEAST_RANGE - (high - low)) / 2
            return ColourLimits(low - room, high + room, True)
        limit = max(abs(low), abs(high), LEAST_RANGE)
        return ColourLimits(-limit, limit, False)

    def for_page(self) -> dict[str, Any]:
        """As the page reads it."""
        return vars(self) | {"values": rounded(self.values), "bounds": rounded(self.bounds)}


@dataclass(frozen=True, eq=False)
class Series:
    """Lines, points or bars of one colour."""

    name: str  # in the legend; "" for none
    x: Numbers
    y: Numbers  # NaN leaves a gap
    colour: int = 0  # position in the palette
    dash: int = 0  # 0 is solid
    mode: str = "lines"  # or "markers", "lines+markers", "markers+text", "bars"
    marker: str = "circle"  # by Plotly's name
    size: float = 5  # of markers, in pixels of the page; the width of bars
    alpha: float = 1.0  # of markers
    points: Sequence[str] = ()  # name of every point
    band: tuple[Numbers, Numbers] | None = None  # lowest and highest value at every x
    is_faint: bool = False  # it only stands behind its running mean


@dataclass(frozen=True, eq=False)
class Plot:
    """Series on two axes."""

    series: list[Series]
    x_title: str = "step"
    y_title: str = ""
    y_range: tuple[float, float] | None = None  # None: as the values have it
    missing: str = ""  # what to say if there is nothing to draw
    label: str = ""  # the plot in words, for those who do not see it
    number_format: str = ".3f"  # of values, in the notation of d3
    as_percent: bool = False
    has_legend: bool | None = None  # None: if it has more than one series
    layers: tuple[int, int] | None = None  # first and last number of a layer, if x is layers
    x_names: Sequence[str] = ()  # of the positions 0, 1, ... of bars
    point_words: Sequence[str] = ()  # of named points: what a point, x, y and a series are
    title: str = ""
    is_log: bool = False

    def for_page(self) -> dict[str, Any]:
        """As the page reads it."""
        series = [
            vars(one)
            | {"x": _short_numbers(one.x), "y": _short_numbers(one.y)}
            | {"band": one.band and [_short_numbers(edge) for edge in one.band]}
            for one in self.series
        ]
        return {**vars(self), "series": series}


@dataclass(frozen=True)
class TaskTree:
    """The dendrogram of a run's tasks."""

    positions: list[list[float]]  # of the four corners of every join, from the top
    cosines: list[list[float]]  # at these corners
    leaf: float  # where leaves end: a task alone would be at 1, far from where anything happens
    limits: tuple[float, float]  # cosines that are shown, leaves first
    labels: list[str]  # of the leaves, from the top
    families: list[str]  # "" where unknown


def rounded(values: ArrayLike, digits: int = 4) -> Any:
    """Nested lists of short numbers for JSON; None where a value is not finite."""
    array = np.asarray(values, dtype=np.float64)
    nested = np.round(array, digits).astype(object)
    nested[~np.isfinite(array)] = None
    return nested.tolist()


def _short_numbers(values: Numbers) -> list[float | None]:
    """Integers as they are, others with six digits; None where a value is not finite."""
    array = np.asarray(values)
    if array.dtype.kind in "iu":
        return list(array.tolist())
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in array.tolist()]


def page_style() -> dict[str, Any]:
    """Colours and limits for the scripts of the page."""
    scales = {
        "light": [(at, light) for at, light, _ in SCALE],
        "dark": [(at, dark) for at, _, dark in SCALE],
    }
    return {
        "inks": INKS,
        "papers": PAPERS,
        "scales": scales,
        "paleBlue": PALE_BLUE,
        "leastRange": LEAST_RANGE,
        "mostNumbers": MOST_NUMBERS,
    }


def honest_range(values: ArrayLike) -> tuple[float, float]:
    """Limits that do not make little look like much: with 0, and at least a tenth long."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    low, high = float(known.min(initial=0.0)), float(known.max(initial=0.0))
    if high - low < LEAST_RANGE:
        if low < 0 < high:
            low, high = low - LEAST_RANGE / 2, high + LEAST_RANGE / 2
        else:
            low, high = (-LEAST_RANGE, 0.0) if low < 0 else (0.0, LEAST_RANGE)
    room = 0.04 * (high - low)
    return (low - room if low < 0 else 0.0, high + room if high > 0 else 0.0)


def range_around_one(values: ArrayLike) -> tuple[float, float]:
    """Cosines and ratios of updates are near 1: at least a tenth is shown, with 1 in it."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    low, high = float(known.min(initial=1.0)), float(known.max(initial=1.0))
    room = max(LEAST_RANGE - (high - low), 0.0) / 2 + 0.01
    return low - room, high + room


def all_values(series: Iterable[Series]) -> NDArray[np.float64]:
    """All y, with those of bands."""
    arrays = [edge for one in series for edge in (one.y, *(one.band or ()))]
    return np.concatenate([np.asarray(a, np.float64) for a in arrays]) if arrays else np.zeros(0)
