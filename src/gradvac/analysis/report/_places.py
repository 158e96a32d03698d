"""Sentences on where and when: pairs, directions, sides, layers, steps, noise."""

from collections.abc import Callable, Sequence

import numpy as np

from gradvac import tasks as task_names
from gradvac.analysis import statistics, views
from gradvac.analysis.components import weighty
from gradvac.analysis.report._wording import (
    Sentence,
    inside,
    is_clear,
    p_text,
    range_text,
    together,
    way,
)
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities, mean_where_known

PAIRS, DIRECTION, SIDES, DEPTH, TIME, NOISE = (
    "Pairs",
    "Direction",
    "Encoder and decoder",
    "Depth",
    "Time",
    "Reliability",
)
_SAME = 0.005  # the digits shown would be the same


def say_pairs(main: Similarities) -> list[Sentence]:
    """The mean, the most and the least similar pair; numbers alone."""
    matrix, labels = views.side_matrix(main, views.MODEL), task_names.labels(main.tasks)
    rows, columns = np.tril_indices(len(labels), -1)
    values = matrix[rows, columns]
    known = values[~np.isnan(values)]
    best, worst = int(np.nanargmax(values)), int(np.nanargmin(values))

    def name(pair: int) -> str:
        return f"{views.short(labels[columns[pair]])} and {views.short(labels[rows[pair]])}"

    mean = f"Two tasks share {known.mean():z.2f} on average"
    if len(known) == 1:
        return [Sentence(PAIRS, f"{mean}: there is only one pair, {name(best)}.")]
    if known.max() - known.min() < _SAME:
        return [Sentence(PAIRS, f"{mean}, and all pairs about the same.")]
    below = int((known < 0).sum())
    low = f"{below} of {len(known)} pairs are below 0" if below else "no pair is below 0"
    text = (
        f"{mean}, from {values[best]:z.2f} ({name(best)}) down to {values[worst]:z.2f} "
        f"({name(worst)}); {low}."
    )
    return [Sentence(PAIRS, text)]


def say_directions(main: Similarities) -> list[Sentence]:
    """Into the pivot against out of it, over the languages that go both ways."""
    both_ways = task_names.both_ways(main.tasks)
    if both_ways is None:
        return []
    pivot, inward, outward = both_ways
    there = dict(zip(task_names.other_languages(inward), inward, strict=True))
    back = dict(zip(task_names.other_languages(outward), outward, strict=True))
    both = [language for language in there if language in back]
    if len(both) < 2:
        return []
    changes = []
    for side in views.sides_of(main):
        one, two = (
            views.side_matrix(main, side, [tasks[language] for language in both])
            for tasks in (back, there)
        )
        changes.append((side, statistics.paired(one, two)))
    return _compared(
        changes,
        DIRECTION,
        lambda side, change: (
            f"Tasks into {pivot} are {'more' if change.difference.mean > 0 else 'less'} similar "
            f"than tasks out of it{inside(side)}"
        ),
        f"Tasks into {pivot} against tasks out of it",
        inside,
    )


def say_sides(main: Similarities) -> list[Sentence]:
    """The encoder against the decoder."""
    if views.sides_of(main) != views.SIDES:
        return []
    changes = []
    for direction, tasks in task_names.directions(main.tasks):
        if len(tasks) > 1:
            encoder, decoder = (views.side_matrix(main, side, tasks) for side in views.SIDES)
            changes.append((direction, statistics.paired(decoder, encoder)))

    def claim(direction: str, change: statistics.Change) -> str:
        sides = views.SIDES if change.difference.mean > 0 else views.SIDES[::-1]
        return f"The {sides[0]} is more similar than the {sides[1]}{way(direction)}"

    return _compared(changes, SIDES, claim, "Encoder against decoder", way)


def _compared(
    changes: Sequence[tuple[str, statistics.Change]],
    about: str,
    claim: Callable[[str, statistics.Change], str],
    what: str,
    suffix: Callable[[str], str],
) -> list[Sentence]:
    """Differences that tests find as claims, all others as numbers."""
    changes = [(key, change) for key, change in changes if not np.isnan(change.difference.mean)]
    adjusted = statistics.holm([change.difference.p_value for _, change in changes])
    said, rest = [], []
    for (key, change), p_value in zip(changes, adjusted, strict=True):
        means = f"{change.second:z.2f} against {change.first:z.2f}"
        if is_clear(p_value):
            high, low = max(change.second, change.first), min(change.second, change.first)
            more = " more " in claim(key, change) and about == SIDES
            means = f"{high:z.2f} against {low:z.2f}" if more else means
            test = f"{range_text(change.difference)}, {p_text(p_value)}"
            said.append(Sentence(about, f"{claim(key, change)}: {means} ({test}).", claims=True))
        else:
            rest.append(f"{means}{suffix(key)} ({range_text(change.difference)})")
    if rest:
        said.append(Sentence(about, f"{what}, not beyond chance: {together(rest)}."))
    return said


def say_depth(main: Similarities) -> list[Sentence]:
    """From the first layer to the last."""
    profiles, tests = [], []
    for direction, tasks in task_names.directions(main.tasks):
        if len(tasks) < 2:
            continue
        for side, layers in statistics.layer_matrices(main.select(tasks=tasks)).items():
            means = [(n, float(statistics.mean_of_pairs(matrix))) for n, matrix in layers]
            if len(layers) > 1 and not np.isnan([mean for _, mean in means]).any():
                name = "model" if side == "shared" else side  # one without encoder and decoder
                profiles.append((name + way(direction), means))
                tests.append(statistics.depth([matrix for _, matrix in layers]))
    slopes = [test.slope.p_value for test in tests]
    bends = [np.nan if test.bend is None else test.bend.p_value for test in tests]
    adjusted = statistics.holm([*slopes, *bends])
    said, rest = [], []
    for n, ((name, means), test) in enumerate(zip(profiles, tests, strict=True)):
        slope, bend = adjusted[n], adjusted[len(tests) + n]
        (first, start), (last, end) = means[0], means[-1]
        text = f"{start:z.2f} in layer {first}, {end:z.2f} in layer {last}"
        if is_clear(bend) and not (is_clear(slope) and slope <= bend):
            assert test.bend is not None
            inner = np.mean([mean for _, mean in means[1:-1]])
            how = "more" if test.bend.mean > 0 else "less"
            text = (
                f"The middle layers of the {name} are {how} similar than its first and last "
                f"on average: {inner:z.2f} against {(start + end) / 2:z.2f} ({text}; "
                f"{p_text(bend)})."
            )
            said.append(Sentence(DEPTH, text, claims=True))
        elif is_clear(slope):
            verb = "rises" if test.slope.mean > 0 else "falls"
            text = f"Similarity {verb} with depth in the {name}: {text} ({p_text(slope)})."
            said.append(Sentence(DEPTH, text, claims=True))
        else:
            rest.append(f"{text} of the {name}")
    if rest:
        said.append(Sentence(DEPTH, f"By depth, no trend beyond chance: {together(rest)}."))
    return said


def say_time(main: Similarities) -> list[Sentence]:
    """Early steps against late ones, within pairs."""
    over_steps = statistics.change_over_steps(main)
    if over_steps is None or np.isnan(over_steps.change.difference.mean):
        return []
    change, first, last = over_steps.change, int(main.steps[0]), int(main.steps[-1])
    before = (
        f"at step {first:,}" if over_steps.until == first else f"up to step {over_steps.until:,}"
    )
    after = (
        f"at step {last:,}" if over_steps.since == last else f"from step {over_steps.since:,} on"
    )
    means = f"{change.first:z.2f} {before}, {change.second:z.2f} {after}"
    p_value = change.difference.p_value
    if is_clear(p_value):
        verb = "rose" if change.difference.mean > 0 else "fell"
        text = f"Similarity {verb} in training, within pairs: {means} ({p_text(p_value)})."
        return [Sentence(TIME, text, claims=True)]
    text = f"Over steps, no change beyond chance: {means} ({range_text(change.difference)})."
    return [Sentence(TIME, text)]


def say_noise(main: Similarities, run: Run) -> list[Sentence]:
    """How far the numbers can be trusted, and what they would be without noise."""
    if main.lines == "training":
        text = (
            "These are raw cosines of training batches, and larger batches give larger cosines. "
            "Measured on an aligned set (gradvac similarity), they can be corrected for that."
        )
        return [Sentence(NOISE, text)]
    halves = views.two_halves(run)
    if halves is None:
        text = (
            "The reliability of the cosines was not stored; measure again with gradvac similarity."
        )
        return [Sentence(NOISE, text)]
    said = [_say_reliability(halves)]
    parts = []
    for side in views.sides_of(halves):
        corrected = statistics.corrected(halves, None if side == views.MODEL else side)
        if corrected is None:
            continue
        mean, reach = corrected.mean, corrected.mean_reach
        value = "not reliable enough to say" if np.isnan(mean) else f"{mean:z.2f}"
        if reach < 1:  # more than a cosine can be off says nothing
            value += f" (give or take {reach:.2f})"
        parts.append(f"{value}{inside(side)}")
    if parts:
        text = f"With unlimited data, two tasks would share on average: {together(parts)}."
        said.append(Sentence(NOISE, text))
    return said


def _say_reliability(halves: Similarities) -> Sentence:
    assert halves.reliability is not None
    parts = []
    for side in views.sides_of(halves):
        chosen = weighty(halves.components, None if side == views.MODEL else side)
        by_step = mean_where_known(halves.reliability[:, chosen], axis=(1, 2))
        known = by_step[~np.isnan(by_step)]
        if not len(known):
            continue
        steps = (
            f", from {by_step[0]:z.2f} at the first step to {by_step[-1]:z.2f} at the last"
            if len(known) == len(by_step) > 1
            else ""
        )
        parts.append(f"{known.mean():z.2f}{inside(side)}{steps}")
    text = f"A task agrees with itself on other lines (split halves) by {together(parts)}."
    return Sentence(NOISE, text)
