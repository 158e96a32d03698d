"""The summary of a run in plain sentences, each computed from its data."""

# S steps, K components, T tasks

from collections import Counter
from collections.abc import Sequence
from math import factorial, prod

import numpy as np

from gradvac.analysis import statistics, views
from gradvac.analysis.report._wording import SIGNIFICANT, Sentence, count, p_text
from gradvac.analysis.run import Run
from gradvac.analysis.scores import bleu_by_task
from gradvac.analysis.similarities import Similarities, mean_where_known
from gradvac.analysis.views import Matrix

_SAME = 1e-5
_SLIGHT = 0.005  # differences that two digits do not show


def summarise(run: Run) -> list[Sentence]:
    """What a run's data say, most important first."""
    said: list[Sentence] = []
    main = views.main_source(run)
    if main is not None and len(main.tasks) > 1 and not np.isnan(main.values).all():
        said += [
            Sentence("Families", line) for line in (*_families(main, run), *_distance(main, run))
        ]
        said += [Sentence("Pairs", line) for line in _pairs(main)]
        said += [Sentence("Direction", line) for line in _directions(main)]
        said += [Sentence("Encoder and decoder", line) for line in _sides(main)]
        said += [Sentence("Time", line) for line in _time(main)]
        said += [Sentence("Noise", line) for line in _noise(main)]
    elif main is not None:
        said.append(Sentence("Pairs", "There is only one task, so there is nothing to compare."))
    said += [Sentence("Rule", line) for line in _rule(run)]
    scores = bleu_by_task(run)
    if scores:
        mean = sum(scores.values()) / len(scores)
        low, high = min(scores, key=scores.__getitem__), max(scores, key=scores.__getitem__)
        text = f"BLEU is {mean:.1f} on average over {count(len(scores), 'task')}"
        between = f", from {scores[low]:.1f} ({low}) to {scores[high]:.1f} ({high})"
        said.append(Sentence("Scores", text + (between if len(scores) > 1 else "") + "."))
    return said


def describe_source(similarities: Similarities) -> str:
    """What the similarities are, in one sentence."""
    where = {
        "same": "on the same lines of an aligned set",
        "different": "on different lines of an aligned set",
        "training": "on the batches of training",
    }[similarities.lines]
    steps = similarities.steps
    when = (
        f"at step {steps[0]:,}"
        if len(steps) == 1
        else (f"at {len(steps):,} steps from {steps[0]:,} to {steps[-1]:,}")
    )
    num = count(len(similarities.components), "component")
    tasks = count(len(similarities.tasks), "task")
    return f"Cosines between the gradients of {tasks} in {num}, {where}, {when}."


def _families(main: Similarities, run: Run) -> list[str]:
    families = [run.families.get(task, "") for task in main.tasks]
    large = [name for name in dict.fromkeys(families) if name and families.count(name) > 1]
    if not any(families):
        return ["The families of the tasks are not known, so nothing is said about them."]
    if not large:
        return ["No family has two tasks here, so nothing can be said about families."]
    if len(set(families) - {""}) == 1:
        return ["All tasks are of one family, so there is nothing to compare it with."]
    lines = []
    noun = "languages" if all(map(views.direction_of, main.tasks)) else "tasks"
    for part in views.parts(main):
        own = [run.families.get(task, "") for task in part.tasks]
        if len(set(own) - {""}) > 1 and any(f and own.count(f) > 1 for f in own):
            matrix = views.side_matrix(main, part.side, part.tasks)
            lines.append(
                f"{noun.capitalize()} of one family are {_contrast(matrix, own, _where(part))}"
            )
    shared = {name: _family_means(main, families, name) for name in large}
    ranked = sorted(large, key=lambda name: -max(shared[name].values()))
    shown = ranked if len(ranked) <= 3 else [*ranked[:2], ranked[-1]]
    parts = [
        f"{name} {noun} share "
        + ", ".join(f"{v:z.2f}{_in(side)}" for side, v in shared[name].items())
        for name in shown
    ]
    return [*lines, "; ".join(parts) + "."]


def _contrast(matrix: Matrix, families: Sequence[str], where: str) -> str:
    within, between, difference, p_value = statistics.family_contrast(matrix, families)
    if p_value < SIGNIFICANT:
        return (
            f"{difference:z.2f} more similar than others{where}: {within:z.2f} against "
            f"{between:z.2f} ({p_text(p_value)})."
        )
    least = _least_p_value(families)
    few = "; with so few tasks it cannot be smaller" if p_value <= least else ""
    return (
        f"not clearly more similar than others{where}: {within:z.2f} against {between:z.2f} "
        f"({p_text(p_value)}{few})."
    )


def _least_p_value(families: Sequence[str]) -> float:
    """What the permutation test gives if only the true families are so extreme, roughly.

    Tasks can be put into families of these sizes in n! / (sizes! x families of equal size!) ways.
    """
    sizes = Counter(Counter(name for name in families if name).values())
    same = prod(factorial(size) ** number * factorial(number) for size, number in sizes.items())
    ways = factorial(sum(size * number for size, number in sizes.items())) // same
    return 1.1 / float(ways)  # the test draws permutations, so its p-value scatters


def _family_means(main: Similarities, families: Sequence[str], name: str) -> dict[str, float]:
    own = [task for task, family in zip(main.tasks, families, strict=True) if family == name]
    return {side: _mean(main, side, own) for side in views.sides_of(main)}


def _distance(main: Similarities, run: Run) -> list[str]:
    if run.distances is None:
        return []
    lines = []
    for part, matrix, distances in views.against_distance(main, run.distances):
        r, p_value = statistics.mantel(matrix, distances)
        follows = "falls with" if r < 0 else "rises with"
        if not p_value < SIGNIFICANT:
            follows = "does not clearly follow"
        what = f"{run.distances.name}{_where(part)}"
        lines.append(f"Similarity {follows} {what}: r = {r:z.2f} ({p_text(p_value)}).")
    return lines


def _pairs(main: Similarities) -> list[str]:
    matrix, labels = views.side_matrix(main, "model"), views.labels(main.tasks)
    rows, columns = np.tril_indices(len(labels), -1)
    values = matrix[rows, columns]
    if np.isnan(values).all():
        return ["No two tasks were ever seen together, so nothing can be compared."]
    known = ~np.isnan(values)
    best, worst = int(np.nanargmax(values)), int(np.nanargmin(values))

    def name(pair: int) -> str:
        return f"{labels[columns[pair]]} and {labels[rows[pair]]}"

    mean = f"Two tasks share {values[known].mean():z.2f} on average"
    if known.sum() == 1:
        return [f"{mean}: there is only one pair, {name(best)}."]
    text = (
        f"{mean}. Most alike are {name(best)} ({values[best]:z.2f}), least alike {name(worst)} "
        f"({values[worst]:z.2f})."
    )
    below = int((values[known] < 0).sum())
    conflict = (
        "No pair pulls apart on average"
        if not below
        else (f"{below} of {int(known.sum())} pairs pull apart on average (below 0)")
    )
    return [text, f"{conflict}."]


def _directions(main: Similarities) -> list[str]:
    tasks = views.by_direction(main.tasks)
    pair = [tasks.get(name, []) for name in (views.TO_ENGLISH, views.FROM_ENGLISH)]
    if min(map(len, pair)) < 2:
        return []
    lines = []
    for side in views.sides_of(main):
        into, out = (_mean(main, side, own) for own in pair)
        lines.append(
            f"Tasks into English share {into:z.2f}{_in(side)}, tasks out of English {out:z.2f}."
        )
    return lines


def _sides(main: Similarities) -> list[str]:
    if views.sides_of(main) != views.SIDES:
        return []
    encoder, decoder = (_mean(main, side) for side in views.SIDES)
    gaps = views.pair_values(statistics.encoder_minus_decoder(main))
    gap = encoder - decoder
    if abs(gap) < _SLIGHT:
        first = (
            f"Encoder and decoder are about equally similar ({encoder:z.2f} and {decoder:z.2f})."
        )
    else:
        more, less = ("encoder", "decoder") if gap > 0 else ("decoder", "encoder")
        agree = int((gaps * np.sign(gap) > 0).sum())
        first = (
            f"The {more} is more similar than the {less} ({max(encoder, decoder):z.2f} against "
            f"{min(encoder, decoder):z.2f}; so in {agree} of {count(len(gaps), 'pair')})."
        )
    lines = [first]
    for side, points in views.by_layer(main).items():
        if len(points) < 2:
            continue
        (low, start), (high, end) = points[0], points[-1]
        change = end - start
        verb = (
            "hardly changes" if abs(change) < 2 * _SLIGHT else ("rises" if change > 0 else "falls")
        )
        lines.append(
            f"With depth it {verb} in the {side}: {start:z.2f} in layer {low}, {end:z.2f} in layer "
            f"{high}."
        )
    return lines


def _time(main: Similarities) -> list[str]:
    steps = main.steps
    if len(steps) < 4:
        return []
    fourth = len(steps) // 4
    parts = slice(0, fourth), slice(len(steps) - fourth, None)
    means = statistics.by_step(main)
    start, end = (float(mean_where_known(means[part], axis=0)) for part in parts)
    change = end - start
    verb = "hardly moved" if abs(change) < 2 * _SLIGHT else ("rose" if change > 0 else "fell")
    return [
        f"Similarity {verb} in training: {start:z.2f} up to step {steps[fourth - 1]:,}, "
        f"{end:z.2f} from step {steps[len(steps) - fourth]:,} on."
    ]


def _noise(main: Similarities) -> list[str]:
    if main.reliability is None or main.corrected is None:
        if main.lines != "training":
            return []
        return [
            "These are raw cosines of training batches, and larger batches give larger cosines. "
            "Measured on an aligned set (gradvac similarity), they can be corrected for that."
        ]
    reliability = float(mean_where_known(main.reliability, axis=(0, 1, 2)))
    raw, corrected = (
        float(mean_where_known(statistics.mean_of_pairs(values), axis=(0, 1)))
        for values in (main.values, main.corrected)
    )
    return [
        f"A task agrees with itself on other sentences by {reliability:z.2f} (split halves); free "
        f"of that noise, two tasks share {corrected:z.2f} instead of {raw:z.2f}."
    ]


def _rule(run: Run) -> list[str]:
    record = run.record
    if record is None or len(record.tasks) < 2:
        return []
    others = ~np.eye(len(record.tasks), dtype=bool)
    pairs = int((~np.isnan(record.similarity[..., others])).sum())
    if not pairs:
        return []
    conflicts = statistics.conflict_counts(record).sum() / pairs
    text = f"{conflicts:.0%} of all pairs were in conflict (below 0), where PCGrad would act."
    active = statistics.active_counts(record).sum() / pairs
    if active or not np.isnan(record.target).all():
        text = f"{_rule_name(record.rule)} altered {active:.0%} of all pairs; {text}"
    lines = [text]
    cosine = float(mean_where_known(record.update_cosine, axis=(0, 1)))
    ratio = float(mean_where_known(record.update_ratio, axis=(0, 1)))
    if np.isfinite(cosine) and np.isfinite(ratio):
        if cosine > 1 - _SAME and abs(ratio - 1) < _SAME:
            return [*lines, "The update was the plain sum."]
        small = ": it hardly changed the direction" if cosine > 0.99 else ""
        lines.append(
            f"The update had cosine {cosine:.3f} with the plain sum and {ratio:.2f} times its "
            f"length{small}."
        )
    return lines


def _mean(main: Similarities, side: str, tasks: Sequence[str] | None = None) -> float:
    values = views.pair_values(views.side_matrix(main, side, tasks))
    return float(values.mean()) if values.size else float("nan")


def _where(part: views.Part) -> str:
    return _in(part.side) + (f" ({part.direction})" if part.direction else "")


def _in(side: str) -> str:
    return f" in the {side}" if side in views.SIDES else ""


def _rule_name(rule: str) -> str:
    """The name without its settings: "GradVac" for "GradVac(beta=0.01)"."""
    return rule.partition("(")[0] or "The rule"
