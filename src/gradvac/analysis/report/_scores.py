"""The table of scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradvac.analysis.run import Run
from gradvac.analysis.scores import by_one_metric
from gradvac.runs import TaskScores
from gradvac.runs.scores import ALL


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        task: The task, or "average" and of what.
        family: Its family.
        level: Its resource level.
        scores: Of each run; "" where it was not scored.
        differences: To the first run; "" for the first.
        verdicts: "up" where a run is better than the first, "down" where it is worse.
        is_mean: Whether this is an average.
    """

    task: str
    family: str
    level: str
    scores: list[str]
    differences: list[str]
    verdicts: list[str]
    is_mean: bool = False


@dataclass(frozen=True)
class ScoreTable:
    """All rows, by which metric, and how each run was scored."""

    metric: str
    rows: list[Row]
    notes: list[str]


def score_table(runs: Sequence[Run]) -> ScoreTable | None:
    """Scores by task and by resource level; None if no run was scored."""
    by_run = by_one_metric(runs)
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
    rows = [
        _row(t, families.get(t, ""), levels.get(t, ""), [v.get(t) for v in values], how)
        for t in tasks
    ]
    named = list(dict.fromkeys(levels[task] for task in tasks if task in levels))
    groups = {level: [t for t in tasks if levels.get(t) == level] for level in named}
    means = groups if len(groups) > 1 else {}
    for level, members in {**means, ALL: tasks}.items():
        shown = [_mean(one, members) for one in values]
        rows.append(_row("average", "", level, shown, how, is_mean=True))
    notes = [_note(run, how) for run in runs if run.scores]
    return ScoreTable(how.metric, rows, notes)


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
) -> Row:
    first = values[0]
    gains = [None if v is None or first is None else v - first for v in values[1:]]
    shown = ["" if value is None else how.show(value) for value in values]
    differences = ["" if gain is None else f"{gain:+z.{how.digits}f}" for gain in gains]
    verdicts = [_verdict(gain, how) for gain in gains]
    level = level.replace("_", " ")
    return Row(task, family, level, shown, ["", *differences], ["", *verdicts], is_mean)


def _verdict(gain: float | None, how: TaskScores) -> str:
    """Better or worse, if the digits that are shown differ at all."""
    if gain is None or abs(gain) < 0.5 * 10**-how.digits:
        return ""
    return "up" if (gain > 0) == how.higher_is_better else "down"


def _note(run: Run, how: TaskScores) -> str:
    assert run.scores is not None
    if run.scores.metric != how.metric:
        return f"{run.name}: {run.scores.metric}, which does not compare with {how.metric}"
    return f"{run.name}: {run.scores.note}" if run.scores.note else run.name
