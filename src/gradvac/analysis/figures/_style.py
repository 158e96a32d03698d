"""How figures look, and how they are saved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision tell apart.
INKS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#8c6d00", "#56b4e9", "#5b5b5b")
DASHES = ("-", "--", ":", "-.", (0, (7, 1, 1, 1, 1, 1)), (0, (2, 1)), (0, (9, 3)))
QUIET = "#59636e"
# Orange below 0, white at 0, blue above: told apart by people with any colour vision.
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
# Its upper half, for values that are all above 0 and close to each other.
SEQUENTIAL = LinearSegmentedColormap.from_list(
    "closely similar", DIVERGING(np.linspace(0.5, 1.0, 129))
).with_extremes(bad="#ffffff")
STYLE: Mapping[Any, Any] = {
    "font.size": 9,
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


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that keeps its labels apart."""
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, stem: Path, formats: Sequence[str]) -> list[Path]:
    """Write a figure once for each format."""
    paths = []
    for kind in formats:
        path = stem.with_name(f"{stem.name}.{kind}")
        with mpl.rc_context(dict(STYLE)):
            figure.savefig(path, dpi=200, metadata=_DATELESS.get(kind))
        paths.append(path)
    return paths


def zero_line(axes: Axes) -> None:
    """Mark 0, where pulling the same way ends."""
    axes.axhline(0, color=QUIET, linewidth=0.8, zorder=1)
