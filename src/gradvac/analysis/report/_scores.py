"""The table of BLEU scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradvac.analysis.run import Run
from gradvac.analysis.scores import bleu_by_task, levels_of


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        task: The task, or "average" and of what.
        family: Its family.
        level: Its resource level.
        bleu: Of each run; None where it was not scored.
        differences: To the first run; None for the first.
        is_mean: Whether this is an average.
    """

    task: str
    family: str
    level: str
    bleu: list[float | None]
    differences: list[float | None]
    is_mean: bool = False


@dataclass(frozen=True)
class ScoreTable:
    """All rows, and how each run was scored."""

    rows: list[Row]
    notes: list[str]


def score_table(runs: Sequence[Run]) -> ScoreTable | None:
    """BLEU by task and by resource level; None if no run was scored."""
    by_run = [bleu_by_task(run) for run in runs]
    tasks = list(dict.fromkeys(task for scores in by_run for task in scores))
    if not tasks:
        return None
    levels: dict[str, str] = {}
    for run in reversed(runs):
        levels |= levels_of(run)
    families: dict[str, str] = {}
    for run in reversed(runs):
        families |= run.families
    rows = [
        _row(t, families.get(t, ""), levels.get(t, ""), [s.get(t) for s in by_run]) for t in tasks
    ]
    found = list(dict.fromkeys(levels[task] for task in tasks if task in levels))
    groups = {level: [t for t in tasks if levels.get(t) == level] for level in found}
    means = groups if len(groups) > 1 else {}
    for level, own in {**means, "all": tasks}.items():
        shown = [_mean(scores, own) for scores in by_run]
        rows.append(_row("average", "", level, shown, is_mean=True))
    notes = [_note(run) for run in runs if run.scores]
    return ScoreTable(rows, notes)


def _mean(scores: Mapping[str, float], tasks: Sequence[str]) -> float | None:
    # Averages over different tasks would not compare.
    if not all(task in scores for task in tasks):
        return None
    return sum(scores[task] for task in tasks) / len(tasks)


def _row(
    task: str, family: str, level: str, bleu: list[float | None], *, is_mean: bool = False
) -> Row:
    first = bleu[0]
    differences = [None if b is None or first is None else b - first for b in bleu[1:]]
    return Row(task, family, level.replace("_", " "), bleu, [None, *differences], is_mean)


def _note(run: Run) -> str:
    scores = run.scores or {}
    first: Mapping[str, object] = next(iter(scores.get("by_task", {}).values()), {})
    parts = [f"{run.name}: {scores.get('split', '?')} set, {scores.get('weights', '?')} weights"]
    signature = first.get("bleu_signature")
    return ", ".join(parts) + (f"; BLEU {signature}" if signature else "")
