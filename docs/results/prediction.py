"""How far short runs predict long ones: would halving have kept the right points?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from gradvac.lab.experiments.methods import LOSS
from gradvac.lab.runs import RunFolder

_FEWEST = 4  # points; fewer have no order to speak of


class Prediction(NamedTuple):
    """How the points stood at one step, against how they ended.

    Attributes:
        step: The step.
        rank_correlation: Spearman's, of the losses there and at the end.
        lost: How much worse the best point of this step ended than the best point of all.
    """

    step: int
    rank_correlation: float
    lost: float


def predictions(points: Mapping[str, Sequence[Path]]) -> list[Prediction]:
    """What every validation would have said, of points whose runs all went to the last step.

    Losses are `dev/loss`, means over the runs of a point; empty with fewer than four points.
    """
    curves = {name: _curve(runs) for name, runs in points.items()}
    last = max((max(curve) for curve in curves.values() if curve), default=0)
    whole = {name: curve for name, curve in curves.items() if last in curve}
    if len(whole) < _FEWEST:
        return []
    ends = np.array([curve[last] for curve in whole.values()])
    made = []
    for step in sorted(set.intersection(*(set(curve) for curve in whole.values())) - {last}):
        losses = np.array([curve[step] for curve in whole.values()])
        if np.ptp(losses) and np.ptp(ends):
            correlation = float(stats.spearmanr(losses, ends).statistic)
        else:
            correlation = math.nan  # all alike: there is no order
        made.append(Prediction(step, correlation, float(ends[losses.argmin()] - ends.min())))
    return made


def _curve(runs: Sequence[Path]) -> dict[int, float]:
    """Step -> mean loss, of the steps that all runs of a point have validated."""
    losses = [
        {e["step"]: e[LOSS] for e in RunFolder(run).read_metrics() if e.get(LOSS) is not None}
        for run in runs
    ]
    shared = set.intersection(*map(set, losses)) if losses else set()
    return {step: float(np.mean([of_run[step] for of_run in losses])) for step in shared}


def prediction_table(found: Sequence[Prediction]) -> str:
    """The predictions in Markdown."""
    lines = [
        "| step | rank correlation with the end | lost by choosing here |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {p.step:,} | {p.rank_correlation:.2f} | {p.lost:.4f} |" for p in found]
    return "\n".join(lines) + "\n"
