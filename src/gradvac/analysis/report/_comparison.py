"""How two runs differ, in plain sentences."""

import numpy as np

from gradvac.analysis import statistics, views
from gradvac.analysis.report._wording import SIGNIFICANT, Sentence, count, p_text
from gradvac.analysis.run import Run
from gradvac.analysis.scores import bleu_by_task


def compare(first: Run, second: Run) -> list[Sentence]:
    """How a run differs from another, where both have the data."""
    about = f"{second.name} against {first.name}"
    said = [Sentence(about, line) for line in _compare_similarities(first, second)]
    scores = bleu_by_task(first), bleu_by_task(second)
    both = [task for task in scores[0] if task in scores[1]]
    if both:
        gains = np.array([scores[1][task] - scores[0][task] for task in both])
        gain = float(gains.mean())
        how = (
            "the same"
            if abs(gain) < 0.05
            else f"{abs(gain):.1f} {'higher' if gain > 0 else 'lower'}"
        )
        text = (
            f"BLEU is {how} in {second.name} on average, and higher in {int((gains > 0).sum())} of "
            f"{count(len(both), 'task')}. One run each: another seed alone can move BLEU as much, "
            "so this does not show that one is better."
        )
        said.append(Sentence(about, text))
    return said


def _compare_similarities(first: Run, second: Run) -> list[str]:
    a, b = views.main_source(first), views.main_source(second)
    if a is None or b is None:
        return []
    if a.lines != b.lines:
        return ["Their similarities were measured in different ways and are not compared."]
    try:
        found = statistics.compare_runs(a, b)
    except ValueError:
        return ["They have fewer than two tasks in common."]
    low, high = found.interval
    text = f"{found.second:z.2f} against {found.first:z.2f}, difference {low:+.3f} to {high:+.3f}"
    if low <= 0 <= high:
        lines = [
            f"Similarity over their {len(found.tasks)} tasks is the same within noise ({text})."
        ]
    else:
        more = "more" if found.mean_difference > 0 else "less"
        lines = [f"Their {len(found.tasks)} tasks are {more} similar in {second.name} ({text})."]
    if found.pattern is not None:
        same = (
            "The same pairs are similar in both"
            if (found.pattern.r > 0 and found.pattern.p_value < SIGNIFICANT)
            else "It is not clear that the same pairs are similar in both"
        )
        lines.append(f"{same} (r = {found.pattern.r:z.2f}, {p_text(found.pattern.p_value)}).")
    return lines
