"""Scores of a run, by task."""

from gradvac.analysis.run import Run


def bleu_by_task(run: Run) -> dict[str, float]:
    """BLEU of each scored task; empty if the run was not scored."""
    by_task = (run.scores or {}).get("by_task", {})
    return {task: float(score["bleu"]) for task, score in by_task.items() if "bleu" in score}


def levels_of(run: Run) -> dict[str, str]:
    """Resource level of each scored task, as far as it is known."""
    return dict((run.scores or {}).get("levels", {}))
