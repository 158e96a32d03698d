"""What rules did to the update: a summary of a run's record, and the tables made of summaries."""

# S steps, K components, T tasks, P pairs

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.record import Record

SUMMARY = "update.json"  # in the folder of a run
_STEADY = 0.02  # lengths that vary less do not depend on anything

Summary = Mapping[str, Any]


def summary(record: Record) -> dict[str, Any]:
    """What is kept of a record.

    `update`: means over components and steps; targets and what varies are those of the last third
    of training, of pairs that the rule may alter. `lengths`: after the first quarter; deviations
    from step to step as shares of the mean. `cosines`: of the last third, mean by component and
    pair `[K, P]`; `variance`: of the same from step to step.
    """
    last = record.steps > record.steps[-1] * 2 / 3
    rows, columns = np.triu_indices(len(record.tasks), 1)
    cosines = record.similarity[last][:, :, rows, columns]
    return {
        "update": _rounded(_update(record, last)),
        "lengths": _rounded(_lengths(record)),
        "cosines": np.round(np.nanmean(cosines, 0), 4).tolist(),
        "variance": float(np.nanmean(np.nanvar(cosines, 0, ddof=1))),
    }


def _rounded(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {key: None if np.isnan(one) else round(one, 5) for key, one in numbers.items()}


def _update(record: Record, last: NDArray[np.bool_]) -> dict[str, float]:
    may_alter = np.isin(np.arange(len(record.tasks)), record.eligible())
    pairs = ~np.eye(len(record.tasks), dtype=bool)
    own = pairs & may_alter[:, None]
    weights = np.nanmean(record.weights, (0, 1))  # [T]
    varies = np.nanstd(record.weights[last], 0) / np.nanmean(record.weights[last], 0)
    targets = record.target[last][:, :, own]
    return {
        "cosine": float(np.nanmean(record.update_cosine)),
        "length": float(np.nanmean(record.update_ratio)),
        "altered": float(np.mean(record.active[:, :, own])),
        "similarity": float(np.nanmean(record.similarity[:, :, pairs])),
        "target": float(np.nanmean(targets)) if np.isfinite(targets).any() else np.nan,
        "weight": float(np.mean(weights[may_alter])),
        "weight_of_others": float(np.mean(weights[~may_alter])) if not may_alter.all() else np.nan,
        "weights_vary": float(np.nanmean(varies)),
    }


def _lengths(record: Record) -> dict[str, float]:
    later = record.steps > record.steps[-1] / 4
    ratio, norms = record.update_ratio[later], np.nan_to_num(record.norms[later])
    pairs = ~np.eye(len(record.tasks), dtype=bool)
    similarity = np.where(pairs, np.nan_to_num(record.similarity[later]), 1.0)
    sums = np.sqrt(np.einsum("skij,ski,skj->sk", similarity, norms, norms).clip(min=0.0))
    cosines = similarity[:, :, pairs].mean(-1)
    varies, sums_vary, updates_vary = (x.std(0) / x.mean(0) for x in (ratio, sums, sums * ratio))
    both = zip(ratio.T, cosines.T, strict=True)
    follows = [np.corrcoef(a, b)[0, 1] for a, b in both] if varies.min() > 0 else [np.nan]
    return {
        "ratio": float(ratio.mean()),
        "varies": float(varies.mean()),
        "follows": float(np.mean(follows)) if varies.mean() > _STEADY else np.nan,
        "sums_vary": float(sums_vary.mean()),
        "updates_vary": float(updates_vary.mean()),
    }


def means(runs: Sequence[Summary], part: str) -> dict[str, float | None]:
    """Means over runs; None where no run has a number."""
    found = {}
    for key in runs[0][part]:
        known = [run[part][key] for run in runs if run[part][key] is not None]
        found[key] = round(float(np.mean(known)), 4) if known else None
    return found


def noise(runs: Sequence[Summary]) -> dict[str, float]:
    """How far cosines of batches say something about pairs of tasks."""
    by_run = np.array([run["cosines"] for run in runs])  # [runs, K, P]
    from_step_to_step = float(np.sqrt(np.mean([run["variance"] for run in runs])))
    apart = by_run - by_run.mean(-1, keepdims=True)
    between_pairs = float(np.sqrt(apart.mean(0).var(-1, ddof=1).mean()))
    alike = np.corrcoef(apart.reshape(len(runs), -1))[np.triu_indices(len(runs), 1)]
    found = {
        "cosine": float(by_run.mean()),
        "from_step_to_step": from_step_to_step,
        "between_pairs": between_pairs,
        "of_the_variance": between_pairs**2 / (between_pairs**2 + from_step_to_step**2),
        "alike": float(alike.mean()),
    }
    return {key: round(one, 4) for key, one in found.items()}
