"""Figures made of heat maps: 1, 2a, 4a, 8, 9, 10 and 11."""

# T tasks

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from gradvac import tasks as task_names
from gradvac.analysis import statistics, views
from gradvac.analysis.figures.style import (
    BLANK,
    DIVERGING,
    HATCH,
    LEAST_RANGE,
    QUIET,
    SEQUENTIAL,
    MissingError,
    new_figure,
)
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities
from gradvac.analysis.views import Matrix

Order = tuple[list[int], list[views.Block]]
Colours = dict[str, Any]  # of imshow, and what they are of

_MOST_LETTERS = 20  # of a task's name
_MOST_NUMBERS = 12  # tasks whose cells hold numbers


def similarity_by_family(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figures 1, 8, 10 and 11: similarity of each side of the model, clustered by family."""
    drawn = {}
    for run, main in _with_similarities(runs):
        colours = _colours(*_all_sides(main))  # the same in all of a run: they are compared
        for side in views.sides_of(main):
            for direction, tasks in task_names.by_direction(main.tasks).items():
                if len(tasks) < 2:
                    continue
                matrix = views.side_matrix(main, side, tasks)
                order = _order(main, tasks, run)
                label = f"cosine of {side} gradients {direction}".rstrip()
                title = f"{views.short(run.name, 30)}: {label}"
                name = "_".join(part for part in (run.name, side, direction) if part)
                drawn[name] = _alone(matrix, tasks, order, title, colours)
    return drawn


def directions(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 2a: into the pivot (English) against out of it in one model."""
    drawn = {}
    for run, main in _with_similarities(runs):
        pairs = task_names.both_ways(main.tasks)
        if pairs is None:
            continue
        pivot, *pair = pairs
        names = task_names.into(pivot), task_names.out_of(pivot)
        panels = {
            f"{name}, mean {views.pair_mean(matrix):z.2f}": (matrix, tasks)
            for name, tasks in zip(names, pair, strict=True)
            for matrix in [views.side_matrix(main, views.MODEL, tasks)]
        }
        drawn[run.name] = _beside(panels, run.families, run.name)
    if not drawn:
        raise MissingError("needs a run with tasks both into one language and out of it.")
    return drawn


def sides(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 4a: encoder minus decoder."""
    drawn = {}
    for run, main in _with_similarities(runs):
        if views.sides_of(main) == views.SIDES:
            matrix = statistics.encoder_minus_decoder(main)
            title = f"{views.short(run.name, 40)}: encoder minus decoder"
            order = _order(main, main.tasks, run)
            limit = np.abs(views.pair_values(matrix)).max(initial=0.0)  # 0 stays in the middle
            colours = _centred(float(limit)) | {"what": "difference of cosines"}
            drawn[run.name] = _alone(matrix, main.tasks, order, title, colours)
    if not drawn:
        raise MissingError("needs components of an encoder and of a decoder.")
    return drawn


def two_runs(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 9: the first run against each other one on the same tasks, in the same colours."""
    sources = _with_similarities(runs)
    first, main = sources[0]
    drawn = {}
    for run, other in sources[1:]:
        tasks = [task for task in main.tasks if task in other.tasks]
        if len(tasks) < 2 or other.lines != main.lines:
            continue
        panels = {
            f"{views.short(name, 30)}, mean {views.pair_mean(matrix):z.2f}": (matrix, tasks)
            for name, similarities in ((first.name, main), (run.name, other))
            for matrix in [views.side_matrix(similarities, views.MODEL, tasks)]
        }
        drawn[f"{first.name}_{run.name}"] = _beside(panels, first.families | run.families, "")
    if not drawn:
        raise MissingError("needs two runs with the same tasks, such as two sizes of a model.")
    return drawn


def _with_similarities(runs: Sequence[Run]) -> list[tuple[Run, Similarities]]:
    sources = [(run, views.main_source(run)) for run in runs]
    usable = [(run, main) for run, main in sources if main is not None and len(main.tasks) > 1]
    if not usable:
        raise MissingError("needs similarities of at least two tasks.")
    return usable


def _all_sides(main: Similarities) -> list[Matrix]:
    """The matrices of all sides and directions."""
    return [
        views.side_matrix(main, side, tasks)
        for side in views.sides_of(main)
        for tasks in task_names.by_direction(main.tasks).values()
    ]


def _colours(*matrices: Matrix) -> Colours:
    """Centred at 0, unless all pairs are above it and close together: all would look the same.

    They never run over less than a tenth: that would make little look like much.
    """
    values = np.concatenate([views.pair_values(matrix) for matrix in matrices])
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if high / 2 < low < high:
        room = max(0.0, LEAST_RANGE - (high - low)) / 2
        return {"cmap": SEQUENTIAL, "vmin": low - room, "vmax": high + room}
    return _centred(max(abs(low), abs(high)))


def _centred(limit: float) -> Colours:
    limit = max(limit, LEAST_RANGE)
    return {"cmap": DIVERGING, "vmin": -limit, "vmax": limit}


def _order(main: Similarities, tasks: Sequence[str], run: Run) -> Order:
    """The same order in all figures of the same tasks, from the whole model."""
    return views.order_by_family(views.side_matrix(main, views.MODEL, tasks), tasks, run.families)


def _names(tasks: Sequence[str]) -> list[str]:
    return [views.short(name, _MOST_LETTERS) for name in task_names.labels(tasks)]


def _room(tasks: Sequence[str], families: Sequence[str]) -> tuple[float, float, float]:
    """Inches that cells, names of tasks and names of families take."""
    names = 0.35 + 0.066 * max(map(len, _names(tasks)))
    return 0.24 * max(len(tasks), 8), names, 0.3 + 0.066 * max(map(len, families), default=0)


def _alone(
    matrix: Matrix, tasks: Sequence[str], order: Order, title: str, colours: Colours
) -> Figure:
    cells, names, families = _room(tasks, [block.family for block in order[1]])
    width = max(cells + names + families, 4.2)
    lines = wrap(title, int(12 * (width - names)))  # letters that fit above the cells
    height = cells + names + 0.75 + 0.2 * len(lines)
    figure = new_figure(width, height, has_squares=True)
    axes = figure.subplots()
    image = _draw(axes, matrix, tasks, order, colours)
    axes.set_title("\n".join(lines), loc="left")
    _colour_bar(figure, image, colours)
    return figure


def _colour_bar(figure: Figure, image: AxesImage, colours: Colours) -> None:
    bar = figure.colorbar(
        image, ax=figure.axes, orientation="horizontal", fraction=0.03, pad=0.02, aspect=50
    )
    bar.locator = MaxNLocator(5)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    what = colours.get("what", "cosine")
    if image.get_cmap().name == SEQUENTIAL.name:  # pale is not 0 here
        low, high = image.get_clim()
        what += f", colours from {low:.2f} to {high:.2f}"
    bar.set_label(what, fontsize=8)


def _beside(
    panels: Mapping[str, tuple[Matrix, Sequence[str]]], families: Mapping[str, str], title: str
) -> Figure:
    """Two heat maps with the same order of languages and the same colours."""
    (first, tasks), _ = panels.values()
    order, blocks = views.order_by_family(first, tasks, families)
    languages = [task_names.other_languages(tasks)[i] for i in order]
    cells, names, side = _room(tasks, [block.family for block in blocks])
    width, height = 2 * (cells + names + side) + 0.3, cells + names + 1.25
    figure = new_figure(width, height, has_squares=True)
    images = []
    colours = _colours(*(matrix for matrix, _ in panels.values()))
    for axes, (name, (matrix, shown)) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        where = {language: n for n, language in enumerate(task_names.other_languages(shown))}
        same = len(shown) == len(tasks) and all(language in where for language in languages)
        arranged = (
            ([where[language] for language in languages], blocks)
            if same and len(where) == len(shown)
            else views.order_by_family(matrix, shown, families)
        )
        images.append(_draw(axes, matrix, shown, arranged, colours))
        axes.set_title(name, loc="left")
    _colour_bar(figure, images[0], colours)
    if title:
        figure.suptitle(views.short(title, 60), x=0.01, ha="left", fontsize=10)
    return figure


def _draw(
    axes: Axes,
    matrix: Matrix,
    tasks: Sequence[str],
    arranged: Order,
    colours: Colours,
) -> AxesImage:
    """A heat map with frames and brackets around families; the diagonal, always 1, is grey.

    Unknown pairs are hatched; cells hold numbers where there are few.
    """
    order, blocks = arranged
    shown = np.array(matrix, dtype=np.float64)[np.ix_(order, order)]
    np.fill_diagonal(shown, np.nan)
    image = axes.imshow(shown, **{key: colours[key] for key in ("cmap", "vmin", "vmax")})
    labels = [_names(tasks)[i] for i in order]
    for row, column in np.argwhere(np.isnan(shown)):
        look: dict[str, Any] = {"facecolor": BLANK}
        if row != column:
            look = {"facecolor": "none", "hatch": "//////"}
        cell = Rectangle((column - 0.5, row - 0.5), 1, 1, edgecolor=HATCH, linewidth=0, **look)
        axes.add_patch(cell)
    if len(labels) <= _MOST_NUMBERS:
        _write_numbers(axes, shown, image)
    upright = (max(map(len, labels)) > 2 and len(labels) > 8) or max(map(len, labels)) > 5
    axes.set_xticks(range(len(labels)), labels, rotation=90 if upright else 0)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0, labelsize=8)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    edge = len(labels) - 0.5
    for block in blocks:
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


def _write_numbers(axes: Axes, shown: Matrix, image: AxesImage) -> None:
    for row, column in np.argwhere(~np.isnan(shown)):
        value = shown[row, column]
        red, green, blue, _ = image.to_rgba(value)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        text = f"{value:z.2f}".replace("0.", ".")
        ink = "white" if dark else "#1c2128"
        axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink)
