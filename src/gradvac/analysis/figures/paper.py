"""The figures of the paper, each a function from runs to what is drawn, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from gradvac import tasks as task_names
from gradvac.analysis import pictures, views
from gradvac.analysis.figures.style import draw_map, draw_maps_beside, draw_plots, name_points
from gradvac.analysis.plots import MissingError, Plot
from gradvac.analysis.run import Run


def draw_families(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figures 1, 8, 10 and 11: similarity of each side of the model, clustered by family."""
    return {
        name: draw_map(one)
        for run, main in pictures.with_similarities(runs)
        for name, one in pictures.similarity_maps(run, main).items()
    }


def draw_directions(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 2a: into the pivot (English) against out of it in one model."""
    drawn = {}
    for run, main in pictures.with_similarities(runs):
        pairs = task_names.both_ways(main.tasks)
        if pairs is None:
            continue
        pivot, inward, outward = pairs
        panels = {
            name: (views.side_matrix(main, views.MODEL, tasks), tasks)
            for name, tasks in (
                (task_names.into(pivot), inward),
                (task_names.out_of(pivot), outward),
            )
        }
        drawn[run.name] = draw_maps_beside(pictures.maps_beside(panels, run.families), run.name)
    if not drawn:
        raise MissingError("needs a run with tasks both into one language and out of it.")
    return drawn


def draw_sides(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 4a: encoder minus decoder."""
    found = {run.name: pictures.side_maps([run])[0] for run, _ in pictures.with_similarities(runs)}
    drawn = {name: draw_map(one) for name, one in found.items() if one is not None}
    if not drawn:
        raise MissingError("needs components of an encoder and of a decoder.")
    return drawn


def draw_two_runs(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 9: the first run against each other one on the same tasks, in the same colours."""
    sources = pictures.with_similarities(runs)
    first, main = sources[0]
    drawn = {}
    for run, other in sources[1:]:
        tasks = [task for task in main.tasks if task in other.tasks]
        if len(tasks) < 2 or other.lines != main.lines:
            continue
        panels = {
            views.short(name, 30): (views.side_matrix(similarities, views.MODEL, tasks), tasks)
            for name, similarities in ((first.name, main), (run.name, other))
        }
        maps = pictures.maps_beside(panels, first.families | run.families)
        drawn[f"{first.name}_{run.name}"] = draw_maps_beside(maps, "")
    if not drawn:
        raise MissingError("needs two runs with the same tasks, such as two sizes of a model.")
    return drawn


def draw_score_of_one_task(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 2b: score of a task that all runs share against its similarity to their others."""
    task, plot = pictures.score_of_one_task(runs)
    figure = draw_plots([plot], (4.6, 3.6))
    figure.axes[0].locator_params(axis="x", nbins=6)
    (series,) = plot.series
    points = [(float(x), float(y)) for x, y in zip(series.x, series.y, strict=True)]
    name_points(figure, series.points, points, ["black"] * len(points))
    return {task: figure}


def draw_active(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 3: pairs in conflict, where PCGrad acts, and pairs below their target, over steps."""
    return {"": draw_plots(pictures.active_plots(runs), (7.2, 2.9))}


def draw_layers(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 4b: mean similarity by layer."""
    plot = pictures.layer_plot(runs)
    if not plot.series:
        raise MissingError(
            "needs components that carry the number of a layer (all_layer, all_matrix)."
        )
    plot = replace(plot, y_title=f"{plot.y_title} and steps")  # which the page has in its caption
    return {"": draw_plots([plot], (6.2, 3.2))}


def draw_steps(runs: Sequence[Run], pairs: Sequence[tuple[str, str]] | None) -> dict[str, Figure]:
    """Figure 4c: similarity of some pairs over steps, in the encoder and in the decoder."""
    drawn = {}
    for run in runs:
        main = views.main_source(run)
        if main is None or len(main.steps) < 2 or len(main.tasks) < 2:
            continue
        chosen = [p for p in pairs or views.example_pairs(main) if set(p) <= set(main.tasks)]
        if chosen:
            panels = pictures.step_plots(run, main, chosen)
            drawn[run.name] = draw_plots(panels, (3.4 * len(panels) + 2.0, 3.1))
    if not drawn:
        raise MissingError("needs similarities at two steps or more, and pairs that the run has.")
    return drawn


def draw_distance(runs: Sequence[Run]) -> dict[str, Figure]:
    """Similarity of every pair against its known distance, in the encoder and in the decoder."""
    panels = {run.name: pictures.distance_panels(run) for run in runs}
    drawn = {
        name: draw_plots(found, (3.4 * len(found) + 0.6, 3.1), legend="below")
        for name, found in panels.items()
        if found
    }
    if not drawn:
        raise MissingError("needs five tasks of one direction with different known distances.")
    return drawn


def draw_scores(runs: Sequence[Run], sizes: Mapping[str, int]) -> dict[str, Figure]:
    """Figure 6: the score of each run minus that of the first, largest languages on the left."""
    panels = pictures.score_bars(runs, sizes)
    num = max(len(panels[0].x_names), 8)
    size = 4.2 + 0.24 * num, 3.2 + _letters(panels[0])
    figure = draw_plots(panels, size, legend="inside", widths=[num, 5])
    averages = figure.axes[1]
    averages.tick_params(axis="x", rotation=35)
    averages.set_xlim(-0.6, len(panels[1].x_names) - 0.4)
    return {"": figure}


def draw_sizes(runs: Sequence[Run], sizes: Mapping[str, int]) -> dict[str, Figure]:
    """Figure 7: training pairs of each task."""
    plot = pictures.size_bars(runs, sizes)
    return {"": draw_plots([plot], (3.4 + 0.26 * max(len(plot.x_names), 8), 3.0 + _letters(plot)))}


def _letters(plot: Plot) -> float:
    """Inches that names below bars take."""
    return 0.055 * max(map(len, plot.x_names))
