"""How figures look, and how they are saved."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

# Okabe and Ito's colours, which people with any colour vision can distinguish.
INKS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#8c6d00", "#56b4e9", "#5b5b5b")
DASHES = ("-", "--", ":", "-.", (0, (7, 1, 1, 1, 1, 1)), (0, (2, 1)), (0, (9, 3)))
QUIET = "#59636e"
LEAST_RANGE = 0.1  # of cosines, on axes and in colours
BLANK, HATCH = "#e6e9ed", "#9aa5b1"  # of a diagonal, of what is unknown
# Orange below 0, white at 0, blue above: distinguishable with any colour vision.
DIVERGING = LinearSegmentedColormap.from_list(
    "similarity",
    [
        (0.0, "#7f3b08"),
        (0.15, "#b35806"),
        (0.32, "#f1a340"),
        (0.44, "#fddcb0"),
        (0.5, "#fafafa"),
        (0.56, "#cfe3f1"),
        (0.68, "#67a9cf"),
        (0.85, "#2166ac"),
        (1.0, "#08306b"),
    ],
).with_extremes(bad="#ffffff")
# Its blues, for values that are all above 0 and close to each other; white means 0, or nothing.
SEQUENTIAL = LinearSegmentedColormap.from_list(
    "closely similar", DIVERGING(np.linspace(0.56, 1.0, 129))
).with_extremes(bad="#ffffff")
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


class MissingError(Exception):
    """A figure cannot be drawn from these runs; the message says what it needs."""


def new_figure(width: float, height: float, *, has_squares: bool = False) -> Figure:
    """An empty figure, in inches, that keeps its labels apart.

    Args:
        width: In inches.
        height: In inches.
        has_squares: Its axes have a fixed shape; the usual layout lets their titles stick out.
    """
    return Figure(figsize=(width, height), layout="compressed" if has_squares else "constrained")


def save(figure: Figure, stem: Path, formats: Sequence[str]) -> list[Path]:
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


def legend(owner: Axes | Figure, entries: Mapping[str, Artist], **look: Any) -> None:
    """A legend of all entries; matplotlib itself leaves out names that begin with "_"."""
    if not entries:
        return
    made = owner.legend(list(entries.values()), [str(n) for n in range(len(entries))], **look)
    for text, name in zip(made.get_texts(), entries, strict=True):
        text.set_text(name)


def cosine_axis(axes: Axes) -> None:
    """Mark 0, and show at least a tenth: less would make little look like much."""
    zero_line(axes)
    low, high = axes.get_ylim()
    room = max(0.0, LEAST_RANGE - (high - low)) / 2
    axes.set_ylim(low - room, high + room)


def zero_line(axes: Axes) -> None:
    """Mark 0, where pulling the same way ends."""
    axes.axhline(0, color=QUIET, linewidth=0.8, zorder=1)
