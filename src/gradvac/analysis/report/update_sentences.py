"""Sentences on the update: what the rule did, who influences whom; and on how two runs differ."""

from collections.abc import Iterator, Mapping

import numpy as np

from gradvac import tasks as task_names
from gradvac.analysis import statistics, views
from gradvac.analysis.report.wording import Statement, count, is_clear, listed, p_text, range_text
from gradvac.analysis.run import Run, scores_by_one_metric
from gradvac.analysis.similarities import Similarities, mean_where_known
from gradvac.analysis.statistics import Influence
from gradvac.rules import RULES

RULE, INFLUENCE = "Rule", "Who pushes whom"
_SAME = 1e-5
_MOST_HELPERS = 3
_WORTH_NAMING = 0.005  # of a task's progress


def describe_rule(run: Run) -> list[Statement]:
    """How often the rule acted, of the pairs it could act on, and what became of the update."""
    record = run.record
    if record is None or len(record.tasks) < 2:
        return []
    counts = statistics.rule_counts(record)
    eligible = int(counts.eligible.sum())
    if not eligible:
        return []
    conflicts = counts.conflicts.sum() / eligible
    which = "of these pairs, altered or not,"
    text = f"{conflicts:.0%} {which} were in conflict (below 0), where PCGrad would act."
    active = counts.active.sum() / eligible
    rows = record.eligible()
    of_whom = (
        "of all tasks"
        if len(rows) == len(record.tasks)
        else f"of {listed([record.tasks[i] for i in rows])}, the vaccinated tasks"
    )
    if active or not np.isnan(record.target).all():
        text = (
            f"{_rule_name(record.rule)} altered {active:.0%} of the pairs it could, those "
            f"{of_whom}, in layers; {text}"
        )
    else:
        text = text.replace(which, "of all pairs in layers")
    found = [*describe_method(record.rule), Statement(RULE, text)]
    cosine = float(mean_where_known(record.update_cosine, axis=(0, 1)))
    ratio = float(mean_where_known(record.update_ratio, axis=(0, 1)))
    if np.isfinite(cosine) and np.isfinite(ratio):
        if cosine > 1 - _SAME and abs(ratio - 1) < _SAME:
            return [*found, Statement(RULE, "The update was the plain sum.")]
        small = ": it hardly changed the direction" if cosine > 0.99 else ""
        text = (
            f"The update had cosine {cosine:.3f} with the plain sum and {ratio:.2f} times its "
            f"length{small}."
        )
        found.append(Statement(RULE, text))
    return found


def describe_method(rule: str) -> list[Statement]:
    rule_class = RULES.get(rule.partition("(")[0].lower())
    return (
        [] if rule_class is None else [Statement(RULE, f"{rule_class.__name__} {rule_class.does}.")]
    )


def _rule_name(rule: str) -> str:
    """The name without its settings: "GradVac" for "gradvac(beta=0.01)"."""
    name = rule.partition("(")[0]
    rule_class = RULES.get(name.lower())
    return rule_class.__name__ if rule_class is not None else name or "The rule"


def describe_influence(influence: Influence) -> list[Statement]:
    """In short: the strongest help between tasks, and every predicted harm that is clear."""
    labels = task_names.labels(influence.tasks)
    shares = influence.shares.copy()
    np.fill_diagonal(shares, np.nan)
    better = _tasks_that_move(influence, 1)
    shares[[i for i in range(len(labels)) if i not in better]] = np.nan  # shares of a small number
    found = []
    if not np.isnan(shares).all():
        task, helper = np.unravel_index(int(np.nanargmax(shares)), shares.shape)
        if shares[task, helper] > 0:
            text = (
                f"The largest help from another task: {labels[task]} gets "
                f"{shares[task, helper]:.0%} of its predicted progress from {labels[helper]}."
            )
            found.append(Statement(INFLUENCE, text))
    harmful = _harmful_pairs(influence)
    by_task = {i: [labels[j] for task, j in harmful if task == i] for i, _ in harmful}
    harm = [f"{labels[i]} (by {listed(others, 5)})" for i, others in by_task.items()]
    if harm:
        text = f"Losses that other tasks are predicted to push up: {listed(harm)}."
        found.append(Statement(INFLUENCE, text, claims=True))
    worse = [labels[i] for i in _tasks_that_move(influence, -1)]
    if worse:
        text = f"Predicted to get worse by the whole update: {listed(worse)}."
        found.append(Statement(INFLUENCE, text, claims=True))
    if not harm and not worse:
        text = "No task is clearly predicted to push another's loss up."
        found.append(Statement(INFLUENCE, text))
    return found


def describe_progress(
    influence: Influence, names: Mapping[str, str] | None = None
) -> list[Statement]:
    """One sentence per task: where its predicted progress comes from.

    Args:
        influence: Predicted effects of tasks on each other's losses.
        names: Task -> how to call it; others by task name.
    """
    labels = [(names or {}).get(task, task) for task in influence.tasks]
    if len(set(labels)) < len(labels):  # one language, both ways
        labels = list(influence.tasks)
    return [Statement(labels[task], text) for task, text in enumerate(_each(influence, labels))]


def _each(influence: Influence, labels: list[str]) -> Iterator[str]:
    harmful = set(_harmful_pairs(influence))
    better, worse = _tasks_that_move(influence, 1), _tasks_that_move(influence, -1)
    for task, label in enumerate(labels):
        shares = influence.shares[task]
        own_name = influence.tasks[task]
        name = label if label == own_name else f"{label} ({own_name})"
        if np.isnan(influence.totals[task]):
            yield f"{name} was never seen."
            continue
        if np.isnan(shares).all():
            clearly = "is" if task in worse else "is, not beyond chance,"
            yield f"{name} {clearly} predicted to get worse by the update."
            continue
        others = [j for j in np.argsort(-shares) if j != task and shares[j] > _WORTH_NAMING]
        helpers = [f"{shares[j]:.0%} from {labels[j]}" for j in others[:_MOST_HELPERS]]
        rest = float(sum(shares[j] for j in others[_MOST_HELPERS:]))
        helpers += [f"{rest:.0%} from {count(len(others) - _MOST_HELPERS, 'other')}"] * (rest > 0)
        from_itself = f"{shares[task]:.0%} of its predicted progress from its own data"
        text = f"{name} gets {listed([from_itself, *helpers])}"
        against = [j for j in range(len(labels)) if j != task and shares[j] < -_WORTH_NAMING]
        held = [
            f"{labels[j]} ({shares[j]:z.0%}{'' if (task, j) in harmful else ', can be chance'})"
            for j in sorted(against, key=lambda j: shares[j])
        ]
        text += f"; held back by {listed(held, 4)}" if held else ""
        yield text + ("." if task in better else "; this progress itself is not beyond chance.")


def _harmful_pairs(influence: Influence) -> list[tuple[int, int]]:
    """Pairs whose predicted harm a test finds, all pairs considered."""
    num = len(influence.tasks)
    apart = [(i, j) for i in range(num) for j in range(num) if i != j]
    adjusted = statistics.holm([influence.p_values[pair] for pair in apart])
    return [
        pair
        for pair, p_value in zip(apart, adjusted, strict=True)
        if is_clear(p_value) and influence.values[pair] < 0
    ]


def _tasks_that_move(influence: Influence, sign: int) -> list[int]:
    """Tasks that a test finds to get better (1) or worse (-1), all tasks considered."""
    adjusted = statistics.holm(influence.total_p_values.tolist())
    return [i for i, p in enumerate(adjusted) if is_clear(p) and sign * influence.totals[i] > 0]


def describe_difference(first: Run, second: Run) -> list[Statement]:
    """How a run differs from another, where both have the data."""
    about = f"{second.name} against {first.name}"
    found = _compare_similarities(about, first, second)
    found += [Statement(about, line) for line in _compare_scores(first, second)]
    return found


def _compare_scores(first: Run, second: Run) -> list[str]:
    one, other = scores_by_one_metric([first, second])
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


def _compare_similarities(about: str, first: Run, second: Run) -> list[Statement]:
    a, b = views.main_source(first), views.main_source(second)
    if a is None or b is None:
        return []
    reason = _why_not(first, second, a, b)
    if reason:
        return [Statement(about, f"Their similarities are not compared: {reason}.")]
    common = sorted(set(a.steps.tolist()) & set(b.steps.tolist()))
    if common:
        a, b = a.select(steps=common), b.select(steps=common)
    try:
        comparison = statistics.compare_similarities(a, b)
    except ValueError:
        return [Statement(about, "They have fewer than two tasks in common.")]
    if np.isnan(comparison.change.difference.mean):
        return [Statement(about, "Their similarities are not compared: one of them is unknown.")]
    found = [_verdict(about, comparison, second.name)]
    if a.lines == "training":
        text = "These are raw cosines of training; other batches alone can change them."
        found.append(Statement(about, text))
    if comparison.pattern is not None:
        test = f"r = {comparison.pattern.r:z.2f}, {p_text(comparison.pattern.p_value)}"
        clear = comparison.pattern.r > 0 and is_clear(comparison.pattern.p_value)
        text = (
            f"The same pairs are similar in both ({test})."
            if clear
            else f"Whether the same pairs are similar in both is unclear ({test})."
        )
        found.append(Statement(about, text, claims=clear))
    return found


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


def _verdict(about: str, comparison: statistics.SimilarityComparison, second: str) -> Statement:
    change = comparison.change
    num = len(comparison.tasks)
    text = f"{change.second:z.2f} against {change.first:z.2f}"
    text += f", {range_text(change.difference)}, one seed each"
    if not is_clear(change.difference.p_value):
        text = f"Similarity over their {num} tasks, not beyond chance: {text}."
        return Statement(about, text)
    more = "more" if change.difference.mean > 0 else "less"
    return Statement(
        about, f"Their {num} tasks are {more} similar in {second} ({text}).", claims=True
    )
