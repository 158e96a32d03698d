"""How two runs differ, in plain sentences."""

import numpy as np

from gradvac.analysis import statistics, views
from gradvac.analysis.report._wording import SIGNIFICANT, Sentence, count, p_text
from gradvac.analysis.run import Run
from gradvac.analysis.scores import by_one_metric
from gradvac.analysis.similarities import Similarities

_FEWEST_FOR_INTERVAL = 5  # tasks; intervals from resampling fewer are too short


def compare(first: Run, second: Run) -> list[Sentence]:
    """How a run differs from another, where both have the data."""
    about = f"{second.name} against {first.name}"
    said = [Sentence(about, line) for line in _compare_similarities(first, second)]
    said += [Sentence(about, line) for line in _compare_scores(first, second)]
    return said


def _compare_scores(first: Run, second: Run) -> list[str]:
    one, other = by_one_metric([first, second])
    if one is None or other is None:
        return []
    both = [task for task in one.by_task if task in other.by_task]
    if not both:
        return []
    gains = np.array([other.by_task[task] - one.by_task[task] for task in both])
    gain, metric = float(gains.mean()), one.metric
    how = (
        "the same"
        if abs(gain) < 0.5 * 10**-one.digits
        else f"{one.show(abs(gain))} {'higher' if gain > 0 else 'lower'}"
    )
    return [
        f"{metric} is {how} in {second.name} on average, and higher in {int((gains > 0).sum())} of "
        f"{count(len(both), 'task')}. One run each: another seed alone can move {metric} as much, "
        "so this does not show that one is better."
    ]


def _compare_similarities(first: Run, second: Run) -> list[str]:
    a, b = views.main_source(first), views.main_source(second)
    if a is None or b is None:
        return []
    reason = _why_not(first, second, a, b)
    if reason:
        return [f"Their similarities are not compared: {reason}."]
    common = sorted(set(a.steps.tolist()) & set(b.steps.tolist()))
    if common:
        a, b = a.select(steps=common), b.select(steps=common)
    try:
        found = statistics.compare_runs(a, b)
    except ValueError:
        return ["They have fewer than two tasks in common."]
    if not np.isfinite(found.mean_difference):
        return ["Their similarities are not compared: one of them is unknown."]
    lines = [_verdict(found, second.name)]
    if a.lines == "training":
        lines.append("These are raw cosines of training; other batches alone can change them.")
    if found.pattern is not None:
        same = (
            "The same pairs are similar in both"
            if (found.pattern.r > 0 and found.pattern.p_value < SIGNIFICANT)
            else "It is not clear that the same pairs are similar in both"
        )
        lines.append(f"{same} (r = {found.pattern.r:z.2f}, {p_text(found.pattern.p_value)}).")
    return lines


def _why_not(first: Run, second: Run, a: Similarities, b: Similarities) -> str:
    """Why two similarities mean different things; empty if they do not."""
    if a.lines != b.lines:
        return "one was measured on an aligned set, the other in training"
    if a.lines == "training":
        divisions = [run.signature.get("granularity", "") for run in (first, second)]
        sets = ["", ""]
    else:
        divisions = [a.granularity, b.granularity]
        sets = [views.measured_on(run) for run in (first, second)]
    if divisions[0] != divisions[1]:
        return f"one is of {divisions[0]}, the other of {divisions[1]}"
    if sets[0] != sets[1]:
        return f"one was measured on {sets[0]}, the other on {sets[1]}"
    return ""


def _verdict(found: statistics.RunComparison, second: str) -> str:
    low, high = found.interval
    means = f"{found.second:z.2f} against {found.first:z.2f}"
    if len(found.tasks) < _FEWEST_FOR_INTERVAL:
        return f"Their {len(found.tasks)} tasks share {means}; too few to tell it from chance."
    text = f"{means}, difference {low:+.3f} to {high:+.3f} over tasks, one seed each"
    if low <= 0 <= high:
        return f"Similarity over their {len(found.tasks)} tasks is the same within noise ({text})."
    more = "more" if found.mean_difference > 0 else "less"
    return f"Their {len(found.tasks)} tasks are {more} similar in {second} ({text})."
