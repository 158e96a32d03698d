"""What the logs of runs say: losses at equal steps and at equal time, and what training cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradvac.lab.experiments.groups import Group, ScoredRun

LOSS = "dev/loss"
_SECONDS, _TRAIN_LOSS, _MEMORY = "train/seconds", "train/loss", "train/peak_memory"
_LAST = 0.9  # a training loss is the mean of the log entries after this share of the steps


@dataclass(frozen=True)
class Cost:
    """What the runs of a method cost, means over seeds; None: not known.

    Attributes:
        steps: Optimiser steps.
        seconds: Training time, without validation and saving.
        seconds_per_step: Their ratio.
        peak_memory: GiB, the most of any run: of the GPU, or of the process on a CPU.
        best_step: Step of the best weights.
    """

    steps: float | None
    seconds: float | None
    seconds_per_step: float | None
    peak_memory: float | None
    best_step: float | None


def validations(run: ScoredRun, key: str) -> list[tuple[int, float]]:
    """Steps and values of something that was validated."""
    return [(entry["step"], entry[key]) for entry in run.metrics if entry.get(key) is not None]


def last_step(run: ScoredRun) -> int:
    """The last step in the log; 0 without one."""
    return max((int(entry["step"]) for entry in run.metrics), default=0)


def _seconds_at(run: ScoredRun, step: float) -> float:
    logged = [(0, 0.0), *validations(run, _SECONDS)]
    steps, seconds = zip(*logged, strict=True)
    return float(np.interp(step, steps, seconds))


def metric_of(run: ScoredRun) -> tuple[str, bool]:
    """What chose the best weights, and whether more of it is better."""
    settings = run.settings
    return str(settings.get("train.metric", LOSS)), bool(
        settings.get("train.higher_is_better", False)
    )


def best_step(run: ScoredRun) -> int | None:
    """The step of the best weights, by what chose them."""
    key, more_is_better = metric_of(run)
    validated = validations(run, key)
    if not validated:
        return None
    sign = -1.0 if more_is_better else 1.0
    return min(validated, key=lambda entry: (sign * entry[1], entry[0]))[0]


def at_best(run: ScoredRun, key: str) -> float:
    """A value at the step of the best weights; NaN if it is not known."""
    return dict(validations(run, key)).get(best_step(run) or -1, np.nan)


def common_step(runs: Sequence[ScoredRun], key: str) -> int | None:
    """The last step that all runs validated."""
    steps = [{step for step, _ in validations(run, key)} for run in runs]
    return max(set.intersection(*steps), default=None) if steps else None


def at_step(run: ScoredRun, key: str, step: int) -> float:
    """A value at a step that was validated."""
    return dict(validations(run, key)).get(step, np.nan)


def common_seconds(runs: Sequence[ScoredRun]) -> float | None:
    """The training time of the run that had least; None if some log has no times."""
    spent = [_seconds_at(run, last_step(run)) for run in runs]
    return min(spent) if spent and min(spent) > 0 else None


def after_seconds(run: ScoredRun, key: str, seconds: float) -> float:
    """A value after so much training time, between two validations on the line between them.

    NaN before the first validation.
    """
    validated = validations(run, key)
    if not validated:
        return np.nan
    steps, values = zip(*validated, strict=True)
    times = [_seconds_at(run, step) for step in steps]
    return float(np.interp(seconds, times, values, left=np.nan))


def train_loss(run: ScoredRun, step: int) -> float:
    """The mean training loss of the tenth of the steps that ends at `step`."""
    entries = validations(run, _TRAIN_LOSS)
    near = [value for at, value in entries if _LAST * step <= at <= step]
    return float(np.mean(near)) if near else np.nan


def cost_of(group: Group) -> Cost:
    """What its runs cost."""
    runs = [run for run in group.runs if run.metrics]
    if not runs:
        return Cost(None, None, None, None, None)
    steps = [last_step(run) for run in runs]
    seconds = [_seconds_at(run, step) for run, step in zip(runs, steps, strict=True)]
    memory = [_highest(run.metrics) for run in runs]
    best = [step for run in runs if (step := best_step(run)) is not None]
    return Cost(
        float(np.mean(steps)),
        float(np.mean(seconds)),
        sum(seconds) / sum(steps) if sum(steps) else None,
        max((value for value in memory if value is not None), default=None),
        float(np.mean(best)) if best else None,
    )


def _highest(metrics: Sequence[Mapping[str, object]]) -> float | None:
    values = [value for entry in metrics if isinstance(value := entry.get(_MEMORY), float)]
    return max(values, default=None)
