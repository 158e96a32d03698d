"""The paper's figures, for your own runs.

`write_figures` draws what the data of the given runs allow and says in one line what every other
figure would need. Files are named after the figures of the paper:

    fig01_RUN_encoder...    similarity clustered by family (figures 1, 8, 10 and 11)
    fig02a_RUN              into English against out of English, in one model
    fig02b_TASK             score against similarity, over runs
    fig03                   share of pairs in conflict, and of pairs active, over steps
    fig04a_RUN              encoder minus decoder
    fig04b                  by layer
    fig04c_RUN              chosen pairs over steps
    fig05                   the method in the plane, drawn by the rules themselves
    fig06                   scores of several runs, by task and resource level
    fig07                   data sizes
    fig09_RUN_RUN           two runs side by side, such as two sizes of a model

One more is not in the paper: `distance_RUN`, similarity against the known distance of tasks.

    paper.py    each figure: which plots and maps of `gradvac.analysis.plots`, and how large
    style.py    how matplotlib draws a plot and a map, and how figures are saved
    method.py   figure 5, the method in the plane
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from gradvac.analysis.figures import paper
from gradvac.analysis.figures.method import draw_method
from gradvac.analysis.figures.style import STYLE, save_figure
from gradvac.analysis.plots import MissingError
from gradvac.analysis.run import Run, check_runs_differ

FORMATS = ("pdf", "svg", "png")


@dataclass(frozen=True)
class Figures:
    """What was drawn, and what was not."""

    paths: list[Path]
    missing: dict[str, str]  # figure -> what it needs


def write_figures(
    runs: Sequence[Run],
    directory: str | Path,
    formats: Sequence[str] = FORMATS,
    *,
    sizes: Mapping[str, int] | None = None,
    pairs: Sequence[tuple[str, str]] | None = None,
    on_written: Callable[[str], None] = lambda _: None,
) -> Figures:
    """Draw the paper's figures for some runs.

    Args:
        runs: From `load_run`; the first is what the others are compared with.
        directory: Where the files go; made if missing.
        formats: Of "pdf", "svg" and "png".
        sizes: Task -> number of training pairs.
        pairs: Pairs of tasks to follow over steps; None: the most similar, a middling and the least
            similar one.
        on_written: Called with the name of every figure as it is written.

    Raises:
        ValueError: A format is unknown, there is no run, or two have the same name.
    """
    unknown = [kind for kind in formats if kind not in FORMATS]
    if unknown or not formats:
        raise ValueError(f"formats: choose from {', '.join(FORMATS)}, got {list(formats)}.")
    check_runs_differ(runs)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    drawers: dict[str, Callable[[], dict[str, Figure]]] = {
        "fig01": partial(paper.draw_families, runs),
        "fig02a": partial(paper.draw_directions, runs),
        "fig02b": partial(paper.draw_score_of_one_task, runs),
        "fig03": partial(paper.draw_active, runs),
        "fig04a": partial(paper.draw_sides, runs),
        "fig04b": partial(paper.draw_layers, runs),
        "fig04c": partial(paper.draw_steps, runs, pairs),
        "fig05": draw_method,
        "fig06": partial(paper.draw_scores, runs, sizes or {}),
        "fig07": partial(paper.draw_sizes, runs, sizes or {}),
        "fig09": partial(paper.draw_two_runs, runs),
        "distance": partial(paper.draw_distance, runs),
    }
    paths: list[Path] = []
    missing = {}
    for name, draw in drawers.items():
        try:
            with mpl.rc_context(dict(STYLE)):
                drawn = draw()
        except MissingError as reason:
            missing[name] = str(reason)
            continue
        for what, figure in drawn.items():
            stem = f"{name}_{what}" if what else name
            paths += save_figure(figure, directory / stem, formats)
            on_written(stem)
    return Figures(paths, missing)


__all__ = ["FORMATS", "Figures", "write_figures"]
