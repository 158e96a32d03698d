"""Tables of the page: scores by task and resource level, and the settings that differ."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradvac.analysis.run import Run, scores_by_one_metric
from gradvac.analysis.run_files import ALL, TaskScores, flatten


@dataclass(frozen=True)
class ScoreRow:
    """A line of the table."""

    task: str  # the task, or "average" and of what
    family: str
    level: str
    scores: list[str]  # of each run; "" where it was not scored
    differences: list[str]  # to the first run; "" for the first
    is_mean: bool = False


@dataclass(frozen=True)
class ScoreTable:
    """All rows, by which metric, and how each run was scored."""

    metric: str
    rows: list[ScoreRow]
    notes: list[str]


def score_table(runs: Sequence[Run]) -> ScoreTable | None:
    """Scores by task and by resource level; None if no run was scored."""
    by_run = scores_by_one_metric(runs)
    scored = [scores for scores in by_run if scores is not None]
    tasks = list(dict.fromkeys(task for scores in scored for task in scores.by_task))
    if not tasks:
        return None
    levels: dict[str, str] = {}
    for scores in reversed(scored):
        levels |= scores.levels
    families: dict[str, str] = {}
    for run in reversed(runs):
        families |= run.families
    values = [{} if scores is None else scores.by_task for scores in by_run]
    how = scored[0]
    by_task = [[one.get(task) for one in values] for task in tasks]
    rows = [
        _row(t, families.get(t, ""), levels.get(t, ""), task_values, how)
        for t, task_values in zip(tasks, by_task, strict=True)
    ]
    named = list(dict.fromkeys(levels[task] for task in tasks if task in levels))
    groups = {level: [t for t in tasks if levels.get(t) == level] for level in named}
    means = groups if len(groups) > 1 else {}
    averages = [  # first: a long table scrolls
        _row("average", "", level, [_mean(one, members) for one in values], how, is_mean=True)
        for level, members in {ALL: tasks, **means}.items()
    ]
    notes = [_note(run, how) for run in runs if run.scores]
    if len(scored) > 1:
        notes.append(
            "Differences are to the first run. One run each: another seed moves scores too; "
            "gradvac compare judges methods over seeds."
        )
    return ScoreTable(how.metric, [*averages, *rows], notes)


def _mean(scores: Mapping[str, float], tasks: Sequence[str]) -> float | None:
    # Averages over different tasks would not compare.
    if not all(task in scores for task in tasks):
        return None
    return sum(scores[task] for task in tasks) / len(tasks)


def _row(
    task: str,
    family: str,
    level: str,
    values: list[float | None],
    how: TaskScores,
    *,
    is_mean: bool = False,
) -> ScoreRow:
    first = values[0]
    gains = [None if v is None or first is None else v - first for v in values[1:]]
    shown = ["" if value is None else how.show(value) for value in values]
    differences = ["" if gain is None else f"{gain:+z.{how.digits}f}" for gain in gains]
    level = level.replace("_", " ")
    return ScoreRow(task, family, level, shown, ["", *differences], is_mean)


def _note(run: Run, how: TaskScores) -> str:
    assert run.scores is not None
    if run.scores.metric != how.metric:
        return f"{run.name}: {run.scores.metric}, which is not comparable with {how.metric}"
    return f"{run.name}: {run.scores.note}" if run.scores.note else run.name


def changed_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs: name, and the value in each run."""
    if len(runs) < 2:
        return []
    flat = [
        {name: str(value) for name, value in flatten(_parsed(run.settings)).items() if value != {}}
        for run in runs
    ]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [(name, [one.get(name, "") for one in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _parsed(settings: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(settings)
    except tomllib.TOMLDecodeError:
        return {}
