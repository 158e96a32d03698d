"""What tuning cost: runs, steps and seconds of every method of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradvac.lab.experiments.plan import Trial
from gradvac.lab.experiments.sweep import DONE, FAILED, Ended
from gradvac.lab.runs import RunFolder


@dataclass(frozen=True)
class Budget:
    """What one method was given.

    Attributes:
        points: Settings tried, seeds apart.
        runs: Runs begun.
        done: Runs trained to their end.
        failed: Runs that failed.
        steps: Optimizer steps of all runs.
        seconds: Training time of all runs, without validation and saving.
    """

    points: int
    runs: int
    done: int
    failed: int
    steps: int
    seconds: float


def budgets(ended: Mapping[Trial, Ended]) -> dict[str, Budget]:
    """Method -> what it was given, by the logs of its runs."""
    by_method = {}
    for method in dict.fromkeys(trial.method for trial in ended):
        of_method = [trial for trial in ended if trial.method == method]
        begun = [trial for trial in of_method if RunFolder(trial.run).is_run()]
        logs = [RunFolder(trial.run).read_metrics() for trial in begun]
        seconds = [[e["train/seconds"] for e in log if e.get("train/seconds")] for log in logs]
        by_method[method] = Budget(
            points=len({trial.name for trial in begun}),
            runs=len(begun),
            done=sum(ended[trial].status == DONE for trial in of_method),
            failed=sum(ended[trial].status == FAILED for trial in of_method),
            steps=sum(max((int(entry["step"]) for entry in log), default=0) for log in logs),
            seconds=sum(max(logged, default=0.0) for logged in seconds),
        )
    return by_method


def budget_table(found: Mapping[str, Budget]) -> str:
    """The budgets in Markdown."""
    head = ("method", "points", "runs", "done", "failed", "steps", "seconds")
    rows = [
        (name, b.points, b.runs, b.done, b.failed, f"{b.steps:,}", f"{b.seconds:,.0f}")
        for name, b in found.items()
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"
