"""How two runs differ, in plain sentences."""

import numpy as np

from gradvac.analysis import statistics, views
from gradvac.analysis.report._wording import Sentence, count, is_clear, p_text, range_text
from gradvac.analysis.run import Run
from gradvac.analysis.scores import by_one_metric
from gradvac.analysis.similarities import Similarities


def compare(first: Run, second: Run) -> list[Sentence]:
    """How a run differs from another, where both have the data."""
    about = f"{second.name} against {first.name}"
    said = _compare_similarities(about, first, second)
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


def _compare_similarities(about: str, first: Run, second: Run) -> list[Sentence]:
    a, b = views.main_source(first), views.main_source(second)
    if a is None or b is None:
        return []
    reason = _why_not(first, second, a, b)
    if reason:
        return [Sentence(about, f"Their similarities are not compared: {reason}.")]
    common = sorted(set(a.steps.tolist()) & set(b.steps.tolist()))
    if common:
        a, b = a.select(steps=common), b.select(steps=common)
    try:
        comparison = statistics.compare_runs(a, b)
    except ValueError:
        return [Sentence(about, "They have fewer than two tasks in common.")]
    if np.isnan(comparison.change.difference.mean):
        return [Sentence(about, "Their similarities are not compared: one of them is unknown.")]
    said = [_verdict(about, comparison, second.name)]
    if a.lines == "training":
        text = "These are raw cosines of training; other batches alone can change them."
        said.append(Sentence(about, text))
    if comparison.pattern is not None:
        test = f"r = {comparison.pattern.r:z.2f}, {p_text(comparison.pattern.p_value)}"
        clear = comparison.pattern.r > 0 and is_clear(comparison.pattern.p_value)
        text = (
            f"The same pairs are similar in both ({test})."
            if clear
            else f"Whether the same pairs are similar in both is unclear ({test})."
        )
        said.append(Sentence(about, text, claims=clear))
    return said


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


def _verdict(about: str, comparison: statistics.RunComparison, second: str) -> Sentence:
    change = comparison.change
    num = len(comparison.tasks)
    text = f"{change.second:z.2f} against {change.first:z.2f}"
    text += f", {range_text(change.difference)}, one seed each"
    if not is_clear(change.difference.p_value):
        text = f"Similarity over their {num} tasks, not beyond chance: {text}."
        return Sentence(about, text)
    more = "more" if change.difference.mean > 0 else "less"
    return Sentence(
        about, f"Their {num} tasks are {more} similar in {second} ({text}).", claims=True
    )
