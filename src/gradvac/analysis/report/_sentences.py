"""The summary of a run in plain sentences, each computed from its data."""

# S steps, K components, T tasks

from collections import Counter
from collections.abc import Mapping, Sequence
from math import factorial, prod

import numpy as np

from gradvac import tasks as task_names
from gradvac.analysis import statistics, views
from gradvac.analysis.components import weighty
from gradvac.analysis.report._wording import SIGNIFICANT, Sentence, count, p_text
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities, mean_where_known
from gradvac.analysis.views import Matrix
from gradvac.runs import TaskScores
from gradvac.runs.scores import ALL

_SAME = 1e-5
_RULES = {"gradvac": "GradVac", "pcgrad": "PCGrad", "mgda": "MGDA", "gradnorm": "GradNorm"}
_CLEAR = 2 / 3  # share of pairs that must agree
_SLIGHT = 0.01  # changes that two digits hardly show


def summarise(run: Run) -> list[Sentence]:
    """What a run's data say, most important first."""
    said: list[Sentence] = []
    main = views.main_source(run)
    if main is not None and len(main.tasks) < 2:
        said.append(Sentence("Pairs", "There is only one task, so there is nothing to compare."))
    elif main is not None and not views.pair_values(views.side_matrix(main, views.MODEL)).size:
        text = "No two tasks were ever seen together, so nothing can be compared."
        said.append(Sentence("Pairs", text))
    elif main is not None:
        said += [
            Sentence("Families", line) for line in (*_families(main, run), *_distance(main, run))
        ]
        said += [Sentence("Pairs", line) for line in _pairs(main)]
        said += [Sentence("Direction", line) for line in _directions(main)]
        said += [Sentence("Encoder and decoder", line) for line in _sides(main)]
        said += [Sentence("Time", line) for line in _time(main)]
        said += [Sentence("Noise", line) for line in _noise(main, run)]
    said += [Sentence("Rule", line) for line in _rule(run)]
    if run.scores is not None and run.scores.by_task:
        said.append(Sentence("Scores", _scores(run.scores)))
    return said


def _scores(scores: TaskScores) -> str:
    values = scores.by_task
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    mean = scores.show(scores.by_level()[ALL])
    text = f"{scores.metric} is {mean} on average over {count(len(values), 'task')}"
    between = f", from {scores.show(values[low])} ({low}) to {scores.show(values[high])} ({high})"
    return text + (between if len(values) > 1 else "") + "."


def describe_source(similarities: Similarities, run: Run) -> str:
    """What the similarities are, in one sentence."""
    where = {
        "same": f"on the same lines of an aligned set ({views.measured_on(run)})",
        "different": f"on different lines of an aligned set ({views.measured_on(run)})",
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
    small = len(similarities.components) - sum(weighty(similarities.components))
    but = f" Means leave out the {small} that are normalisations or biases." if small else ""
    return f"Cosines between the gradients of {tasks} in {num}, {where}, {when}.{but}"


def _families(main: Similarities, run: Run) -> list[str]:
    if not any(run.families.get(task) for task in main.tasks):
        return ["The families of the tasks are not known, so nothing is said about them."]
    noun = "languages" if task_names.are_directions(main.tasks) else "tasks"
    contrasts, shares = [], []
    has_relatives = False
    for direction, tasks in task_names.directions(main.tasks):
        own = [run.families.get(task, "") for task in tasks]
        large = [name for name in dict.fromkeys(own) if name and own.count(name) > 1]
        has_relatives |= bool(large)
        if not large or len(set(own) - {""}) == 1:
            continue
        for side in views.sides_of(main):
            where = _where(views.Part(side, direction, tasks))
            try:
                contrast = _contrast(views.side_matrix(main, side, tasks), own, where)
            except ValueError:  # no pair of relatives, or of others, is known
                contrasts.append(f"Too few pairs are known{where} to compare families.")
            else:
                contrasts.append(f"{noun.capitalize()} of one family are {contrast}")
        members = {
            name: [t for t, f in zip(tasks, own, strict=True) if f == name] for name in large
        }
        shares.append(_shares(main, members, noun, _way(direction)))
    if contrasts:
        return [*contrasts, *shares]
    if has_relatives:
        return ["All tasks are of one family, so there is nothing to compare it with."]
    return ["No family has two tasks here, so nothing can be said about families."]


def _shares(main: Similarities, members: Mapping[str, list[str]], noun: str, where: str) -> str:
    """What the most and the least similar families share."""
    sides = views.sides_of(main)
    shared = {name: {s: _mean(main, s, own) for s in sides} for name, own in members.items()}
    ranked = sorted(shared, key=lambda name: -max(shared[name].values()))
    shown = ranked if len(ranked) <= 3 else [*ranked[:2], ranked[-1]]
    parts = [
        f"{name} {noun} share "
        + ", ".join(f"{value:z.2f}{_in(side)}" for side, value in shared[name].items())
        for name in shown
    ]
    return "; ".join(parts) + where + "."


def _contrast(matrix: Matrix, families: Sequence[str], where: str) -> str:
    within, between, difference, p_value = statistics.family_contrast(matrix, families)
    if p_value < SIGNIFICANT:
        digits = 2 if abs(difference) >= _SLIGHT else 3
        return (
            f"{difference:z.{digits}f} more similar than others{where}: {within:z.{digits}f} "
            f"against {between:z.{digits}f} ({p_text(p_value)})."
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
    matrix, labels = views.side_matrix(main, "model"), task_names.labels(main.tasks)
    rows, columns = np.tril_indices(len(labels), -1)
    values = matrix[rows, columns]
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
    found = task_names.both_ways(main.tasks)
    if found is None:
        return []
    pivot, *pair = found
    language = "English" if pivot == task_names.DEFAULT_PIVOT else pivot
    lines = []
    for side in views.sides_of(main):
        into, out = (_mean(main, side, tasks) for tasks in pair)
        lines.append(
            f"Tasks into {language} share {into:z.2f}{_in(side)}, tasks out of {language} "
            f"{out:z.2f}."
        )
    return lines


def _sides(main: Similarities) -> list[str]:
    if views.sides_of(main) != views.SIDES:
        return []
    lines = []
    for direction, tasks in task_names.directions(main.tasks):
        if len(tasks) > 1:
            lines.append(_side_gap(main.select(tasks=tasks), _way(direction)))
    lines += [_depth(part.name, points) for part, points in views.by_layer(main) if len(points) > 1]
    return lines


def _depth(where: str, points: Sequence[tuple[int, float]]) -> str:
    """How similarity goes from the first layer to the last, with the turn it may take."""
    layers, values = zip(*points, strict=True)
    first, last = values[0], values[-1]
    told = [f"{first:z.2f} in layer {layers[0]}", f"{last:z.2f} in layer {layers[-1]}"]
    if max(values) - min(values) < _SLIGHT:
        verb = "hardly changes"
    elif min(values) > min(first, last) - _SLIGHT and max(values) < max(first, last) + _SLIGHT:
        verb = "rises" if last > first else "falls"
    else:
        inner = [max(v - max(first, last), min(first, last) - v) for v in values]
        turn = int(np.argmax(inner))
        verb = "rises and falls" if values[turn] > max(first, last) else "falls and rises"
        told.insert(1, f"{values[turn]:z.2f} in layer {layers[turn]}")
    return f"With depth it {verb} in the {where}: {', '.join(told)}."


def _side_gap(main: Similarities, where: str) -> str:
    encoder, decoder = (_mean(main, side) for side in views.SIDES)
    gaps = views.pair_values(statistics.encoder_minus_decoder(main))
    gap = encoder - decoder
    if f"{encoder:z.2f}" == f"{decoder:z.2f}":
        return (
            f"Encoder and decoder are about equally similar{where}: {encoder:z.2f} and "
            f"{decoder:z.2f}."
        )
    more, less = ("encoder", "decoder") if gap > 0 else ("decoder", "encoder")
    agree = int((gaps * np.sign(gap) > 0).sum())
    if agree < _CLEAR * len(gaps):
        return (
            f"Encoder and decoder do not clearly differ{where}: {encoder:z.2f} and {decoder:z.2f}, "
            f"the {more} higher in {agree} of {count(len(gaps), 'pair')}."
        )
    return (
        f"The {more} is more similar than the {less}{where}: {max(encoder, decoder):z.2f} against "
        f"{min(encoder, decoder):z.2f}; so in {agree} of {count(len(gaps), 'pair')}."
    )


def _time(main: Similarities) -> list[str]:
    steps = main.steps
    if len(steps) < 4:
        return []
    fourth = len(steps) // 4
    parts = slice(0, fourth), slice(len(steps) - fourth, len(steps))
    means = statistics.by_step(main)
    start, end = (float(mean_where_known(means[part], axis=0)) for part in parts)
    change = end - start
    verb = "hardly moved" if abs(change) < _SLIGHT else ("rose" if change > 0 else "fell")
    before = f"up to step {steps[fourth - 1]:,}" if fourth > 1 else f"at step {steps[0]:,}"
    after = f"from step {steps[-fourth]:,} on" if fourth > 1 else f"at step {steps[-1]:,}"
    return [f"Similarity {verb} in training: {start:z.2f} {before}, {end:z.2f} {after}."]


def _noise(main: Similarities, run: Run) -> list[str]:
    if main.lines == "training":
        return [
            "These are raw cosines of training batches, and larger batches give larger cosines. "
            "Measured on an aligned set (gradvac similarity), they can be corrected for that."
        ]
    other = next(
        (s for s in run.measured if s.lines == "different" and s.granularity == main.granularity),
        None,
    )
    if other is None or other.reliability is None or other.corrected is None:
        return []
    counts = weighty(main.components)
    reliability = float(mean_where_known(other.reliability[:, counts], axis=(0, 1, 2)))
    same, different, corrected = (
        float(mean_where_known(statistics.mean_of_pairs(values[:, counts]), axis=(0, 1)))
        for values in (main.values, other.values, other.corrected)
    )
    return [
        f"A task agrees with itself on other lines by {reliability:z.2f} (split halves). Two "
        f"tasks share {same:z.2f} on the same lines, {different:z.2f} on different ones, and "
        f"{corrected:z.2f} there if free of that noise."
    ]


def _rule(run: Run) -> list[str]:
    record = run.record
    if record is None or len(record.tasks) < 2:
        return []
    pairs = int(statistics.known_counts(record).sum())
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
    return _in(part.side) + _way(part.direction)


def _way(direction: str) -> str:
    return f" ({direction})" if direction else ""


def _in(side: str) -> str:
    return f" in the {side}" if side in views.SIDES else ""


def _rule_name(rule: str) -> str:
    """The name without its settings: "GradVac" for "gradvac(beta=0.01)"."""
    name = rule.partition("(")[0]
    return _RULES.get(name.lower(), name or "The rule")
