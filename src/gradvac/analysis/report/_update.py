"""Sentences on the update: what the rule did, and who pushes whom."""

from collections.abc import Iterator, Mapping

import numpy as np

from gradvac import tasks as task_names
from gradvac.analysis import statistics
from gradvac.analysis.report._wording import Sentence, count, is_clear, listed
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import mean_where_known
from gradvac.analysis.statistics import Pushes
from gradvac.rules import RULES

RULE, PUSHES = "Rule", "Who pushes whom"
_SAME = 1e-5
_MOST_HELPERS = 3
_WORTH_NAMING = 0.005  # of a task's progress


def say_rule(run: Run) -> list[Sentence]:
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
    said = [*_what_it_does(record.rule), Sentence(RULE, text)]
    cosine = float(mean_where_known(record.update_cosine, axis=(0, 1)))
    ratio = float(mean_where_known(record.update_ratio, axis=(0, 1)))
    if np.isfinite(cosine) and np.isfinite(ratio):
        if cosine > 1 - _SAME and abs(ratio - 1) < _SAME:
            return [*said, Sentence(RULE, "The update was the plain sum.")]
        small = ": it hardly changed the direction" if cosine > 0.99 else ""
        text = (
            f"The update had cosine {cosine:.3f} with the plain sum and {ratio:.2f} times its "
            f"length{small}."
        )
        said.append(Sentence(RULE, text))
    return said


def _what_it_does(rule: str) -> list[Sentence]:
    rule_class = RULES.get(rule.partition("(")[0].lower())
    return (
        [] if rule_class is None else [Sentence(RULE, f"{rule_class.__name__} {rule_class.does}.")]
    )


def _rule_name(rule: str) -> str:
    """The name without its settings: "GradVac" for "gradvac(beta=0.01)"."""
    name = rule.partition("(")[0]
    rule_class = RULES.get(name.lower())
    return rule_class.__name__ if rule_class is not None else name or "The rule"


def say_pushes(pushes: Pushes) -> list[Sentence]:
    """In short: the strongest help between tasks, and every predicted harm that is clear."""
    labels = task_names.labels(pushes.tasks)
    shares = pushes.shares.copy()
    np.fill_diagonal(shares, np.nan)
    better = _tasks_that_move(pushes, 1)
    shares[[i for i in range(len(labels)) if i not in better]] = np.nan  # shares of a small number
    said = []
    if not np.isnan(shares).all():
        task, helper = np.unravel_index(int(np.nanargmax(shares)), shares.shape)
        if shares[task, helper] > 0:
            text = (
                f"The largest help from another task: {labels[task]} gets "
                f"{shares[task, helper]:.0%} of its predicted progress from {labels[helper]}."
            )
            said.append(Sentence(PUSHES, text))
    harmful = _harmful_pairs(pushes)
    by_task = {i: [labels[j] for task, j in harmful if task == i] for i, _ in harmful}
    harm = [f"{labels[i]} (by {listed(others, 5)})" for i, others in by_task.items()]
    if harm:
        text = f"Losses that other tasks are predicted to push up: {listed(harm)}."
        said.append(Sentence(PUSHES, text, claims=True))
    worse = [labels[i] for i in _tasks_that_move(pushes, -1)]
    if worse:
        text = f"Predicted to get worse by the whole update: {listed(worse)}."
        said.append(Sentence(PUSHES, text, claims=True))
    if not harm and not worse:
        said.append(Sentence(PUSHES, "No task is clearly predicted to push another's loss up."))
    return said


def say_each_push(pushes: Pushes, names: Mapping[str, str] | None = None) -> list[Sentence]:
    """One sentence per task: where its predicted progress comes from.

    Args:
        pushes: Who pushes whom.
        names: Task -> how to call it; others by task name.
    """
    labels = [(names or {}).get(task, task) for task in pushes.tasks]
    if len(set(labels)) < len(labels):  # one language, both ways
        labels = list(pushes.tasks)
    return [Sentence(labels[task], text) for task, text in enumerate(_each(pushes, labels))]


def _each(pushes: Pushes, labels: list[str]) -> Iterator[str]:
    harmful = set(_harmful_pairs(pushes))
    better, worse = _tasks_that_move(pushes, 1), _tasks_that_move(pushes, -1)
    for task, label in enumerate(labels):
        shares = pushes.shares[task]
        own_name = pushes.tasks[task]
        name = label if label == own_name else f"{label} ({own_name})"
        if np.isnan(pushes.totals[task]):
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


def _harmful_pairs(pushes: Pushes) -> list[tuple[int, int]]:
    """Pairs whose predicted harm a test finds, all pairs considered."""
    num = len(pushes.tasks)
    apart = [(i, j) for i in range(num) for j in range(num) if i != j]
    adjusted = statistics.holm([pushes.p_values[pair] for pair in apart])
    return [
        pair
        for pair, p_value in zip(apart, adjusted, strict=True)
        if is_clear(p_value) and pushes.values[pair] < 0
    ]


def _tasks_that_move(pushes: Pushes, sign: int) -> list[int]:
    """Tasks that a test finds to get better (1) or worse (-1), all tasks considered."""
    adjusted = statistics.holm(pushes.total_p_values.tolist())
    return [i for i, p in enumerate(adjusted) if is_clear(p) and sign * pushes.totals[i] > 0]
