"""Figures by resource level: 6 and 7."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from gradvac.analysis import views
from gradvac.analysis.figures.style import INKS, MissingError, legend, new_figure, zero_line
from gradvac.analysis.run import Run, scores_by_one_metric
from gradvac.run_files import level_rank
from gradvac.tasks import labels, languages_of


def scores_by_level(runs: Sequence[Run], sizes: Mapping[str, int]) -> dict[str, Figure]:
    """Figure 6: the score of each run minus that of the first, largest languages on the left."""
    scored = [
        (run, scores)
        for run, scores in zip(runs, scores_by_one_metric(runs), strict=True)
        if scores
    ]
    if len(scored) < 2:
        raise MissingError("needs at least two runs with scores; the first is the baseline.")
    (first, base), *rest = scored
    baseline, levels = base.by_task, base.levels
    others = [
        (run, scores.by_task)
        for run, scores in rest
        if not baseline.keys().isdisjoint(scores.by_task)
    ]
    tasks = [task for task in baseline if any(task in values for _, values in others)]
    if not others:
        raise MissingError("needs a task that two runs were scored on.")
    tasks.sort(key=lambda task: (-sizes.get(task, 0), level_rank(levels.get(task, ""))))
    letters = min(20, max(map(len, labels(tasks))))
    figure = new_figure(2.6 + 0.24 * max(len(tasks), 8) + 1.6, 3.2 + 0.055 * letters)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[max(len(tasks), 8), 5])
    drawn: dict[str, Artist] = {}
    for number, (run, values) in enumerate(others):
        gains = {task: values[task] - baseline[task] for task in tasks if task in values}
        width = 0.8 / len(others)
        shift = (number - (len(others) - 1) / 2) * width
        look: dict[str, Any] = {"color": INKS[number % len(INKS)], "width": width}
        places = [tasks.index(task) + shift for task in gains]
        drawn[run.name] = left.bar(places, list(gains.values()), **look)[0]
        means = replace(base, by_task=gains).by_level()
        right.bar([n + shift for n in range(len(means))], list(means.values()), **look)
        right.set_xticks(range(len(means)), [name.replace("_", " ") for name in means], rotation=35)
        right.set_xlim(-0.6, len(means) - 0.4)
    names = [views.short(name, 20) for name in labels(tasks)]
    upright = max(map(len, names)) > 2
    left.set_xticks(range(len(tasks)), names, rotation=90 if upright else 0)
    left.set_ylabel(f"{base.metric} minus {views.short(first.name, 20)}")
    order = "largest data first" if all(task in sizes for task in tasks) else "by resource level"
    left.set_title(f"by task, {order}", loc="left")
    right.set_title("averages", loc="left")
    for axes in (left, right):
        axes.grid(axis="x", visible=False)
        zero_line(axes)
    legend(left, drawn)
    return {"": figure}


def data_sizes(runs: Sequence[Run], sizes: Mapping[str, int]) -> dict[str, Figure]:
    """Figure 7: training pairs of each task; a pair that goes both ways is one."""
    task_of_pair: dict[frozenset[str], str] = {}
    for task in (task for run in runs for task in run.tasks):
        if sizes.get(task, 0) > 0:
            task_of_pair.setdefault(frozenset(languages_of(task)), task)
    if not task_of_pair:
        raise MissingError("needs the number of training pairs of each task.")
    tasks = sorted(task_of_pair.values(), key=lambda task: -sizes[task])
    families: dict[str, str] = {}
    for run in runs:
        families |= run.families
    letters = min(20, max(map(len, labels(tasks))))
    figure = new_figure(3.4 + 0.26 * max(len(tasks), 8), 3.0 + 0.055 * letters)
    axes = figure.subplots()
    heights = [sizes[task] for task in tasks]
    drawn = _bars(axes, heights, [families.get(task, "") for task in tasks])
    legend(figure, drawn, loc="outside right upper", fontsize=8)
    names = [views.short(name, 20) for name in labels(tasks)]
    upright = max(map(len, names)) > 2
    axes.set_xticks(range(len(tasks)), names, rotation=90 if upright else 0)
    if heights[0] > 10 * heights[-1]:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("training pairs")
    return {"": figure}


def _bars(axes: Axes, heights: Sequence[int], families: Sequence[str]) -> dict[str, Artist]:
    """Draw a bar for each task; the first bar of each family that has a name and a colour."""
    names = list(dict.fromkeys(families))
    few = len(names) <= len(INKS)  # more families than colours: colours would say nothing
    drawn: dict[str, Artist] = {}
    for number, name in enumerate(names if few else [""]):
        places = [i for i, family in enumerate(families) if family == name or not few]
        drawn[name] = axes.bar(places, [heights[i] for i in places], color=INKS[number])[0]
    drawn.pop("", None)
    return drawn
