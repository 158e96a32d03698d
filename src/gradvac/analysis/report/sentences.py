"""The summary of a run in plain sentences, each computed from its data.

A sentence makes a claim only if a test says so (`Statement.claims`) and the numbers it shows
differ; else it gives the numbers alone, and says whether they were tested. Tests of one kind that
stand side by side are corrected for their number; the headline is the clearest claim, all kinds
considered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradvac import tasks as task_names
from gradvac.analysis import statistics, views
from gradvac.analysis.run import Run, scores_by_one_metric
from gradvac.analysis.run_files import ALL, TaskScores
from gradvac.analysis.similarities import Similarities, mean_where_known, weighty
from gradvac.rules import RULES

# What a sentence is about.
FAMILIES, DISTANCE, PAIRS = "Relatives", "Distance", "Pairs"
DIRECTION, SIDES = "Direction", "Encoder and decoder"
DEPTH, TIME, NOISE, SCORES = "Depth", "Time", "Reliability", "Scores"
RULE, INFLUENCE = "Rule", "Help and harm"
_SAME_UPDATE = 1e-5
_MOST_HELPERS = 3
_MOST_PROGRESS = 12  # tasks
_MOST_CANCELLED = 2  # a part may be twice of the whole, if others take it back
_WORTH_NAMING = 0.005  # of a task's progress
_LEAST_P = 1e-4  # permutations tell no smaller ones, so these are equally clear
SIGNIFICANT = 0.05
NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Statement:
    """A sentence of the report.

    Attributes:
        about: The question it answers.
        text: The sentence.
        claims: Whether it says more than numbers. Then a test stands behind it.
        p_value: Of this test, corrected among those of its kind; NaN without one.
    """

    about: str
    text: str
    claims: bool = False
    p_value: float = float("nan")


def summarise(run: Run) -> list[Statement]:
    """What a run's data say, most important first."""
    found: list[Statement] = []
    main = views.main_source(run)
    why_not = None if main is None else _why_nothing(main)
    if why_not:
        found.append(Statement(PAIRS, why_not))
    elif main is not None:
        found += describe_families(main, run) + describe_distances(main, run)
        found += describe_pairs(main) + describe_directions(main, run)
        found += describe_sides(main, run) + describe_depth(main)
        found += describe_time(main, run) + describe_noise(main, run)
    influence = views.find_influence(run)
    found += [] if influence is None else describe_influence(influence)
    found += describe_rule(run)
    if run.scores is not None and run.scores.by_task:
        found += _describe_scores(run.scores, main, views.two_halves(run))
    return found


@dataclass(frozen=True)
class Summary:
    """What the data of some runs say: of each, and of each but the first against the first."""

    by_run: list[list[Statement]]
    comparison: list[Statement]


def summarise_runs(runs: Sequence[Run]) -> Summary:
    """What the data of some runs say."""
    comparison = [s for run in runs[1:] for s in describe_difference(runs[0], run)]
    return Summary([summarise(run) for run in runs], comparison)


def run_headline(run: Run, said: Sequence[Statement]) -> Statement:
    """The one sentence to remember: the clearest finding, or the numbers if nothing is clear.

    Args:
        run: Any.
        said: What `summarise` said of it.
    """
    main = views.main_source(run)
    why_not = None if main is None else _why_nothing(main)
    if main is None or why_not:
        return Statement("", why_not or "This run has no similarities yet.")
    pairs = describe_pairs(main)[0].text
    share = _conflict_share(run)
    if not np.isnan(share):
        pairs += (
            f" In training batches, two tasks were in conflict (below 0) in a layer {share:.0%} of "
            "the time; the noise of a batch alone moves cosines to both sides of 0."
        )
    tested = [one for one in said if not np.isnan(one.p_value)]
    kinds = {one.about for one in tested}
    # What is known of the tasks is asked first; one question, since few tasks leave few p-values.
    primary = set([kind for kind in (FAMILIES, DISTANCE) if kind in kinds][:1])
    halves = [half for half in (primary, kinds - primary) if half]  # each may err half as often
    asked = {kind: len(half) * len(halves) for half in halves for kind in half}
    clear = [
        (max(one.p_value, _LEAST_P), n)
        for n, one in enumerate(tested)
        if one.claims and is_clear(one.p_value * asked[one.about])
    ]
    if not clear:
        return Statement("", pairs)
    one = tested[min(clear)[1]]  # of equally clear ones, the first
    return replace(one, text=f"{pairs} {one.text}")


def _conflict_share(run: Run) -> float:
    """How often two tasks were in conflict in a layer at a step; NaN if nothing was recorded."""
    if run.record is None or len(run.record.tasks) < 2:
        return float("nan")
    counts = statistics.rule_counts(run.record)
    eligible = int(counts.eligible.sum())
    return float(counts.conflicts.sum() / eligible) if eligible else float("nan")


def _why_nothing(main: Similarities) -> str:
    """Why nothing can be compared; empty if something can."""
    if len(main.tasks) < 2:
        return "There is only one task, so there is nothing to compare."
    if not views.pair_values(views.side_matrix(main, views.MODEL)).size:
        return (
            "No similarity of two tasks is known, so nothing can be compared: no two were in one "
            "batch, or their gradients were zero or not finite."
        )
    return ""


def _describe_scores(
    scores: TaskScores, main: Similarities | None, halves: Similarities | None
) -> list[Statement]:
    values = scores.by_task
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    mean = scores.show(scores.by_level()[ALL])
    text = f"{scores.metric} is {mean} on average over {count(len(values), 'task')}"
    ends = [scores.show(values[low]), scores.show(values[high])]
    between = f", from {ends[0]} ({low}) to {ends[1]} ({high})" if ends[0] != ends[1] else ""
    found = [Statement(SCORES, f"{text}{between}.")]
    if main is None:
        return found
    points = [(x, y) for _, x, y in views.similarity_and_score(main, scores)]
    try:
        correlation = statistics.similarity_against_score(points)
    except ValueError:  # too few, or all alike
        return found
    test = f"Spearman {correlation.rho:z.2f}, {p_text(correlation.p_value)}"
    why = ""
    if not is_clear(correlation.p_value):
        why = "not beyond chance"
    elif main.lines == "training":  # larger batches give larger cosines, and better scores
        why = "which batch sizes alone can bring about"
    elif not _holds_without_noise(correlation.rho, scores, halves):
        why = "which the noise of each task alone can bring about"
    if why:
        text = f"{scores.metric} of tasks against their similarity, {why}: {test}."
        return [*found, Statement(SCORES, text)]
    how = "higher" if correlation.rho > 0 else "lower"
    text = f"Tasks that are more similar to the others have {how} {scores.metric} ({test})."
    return [*found, Statement(SCORES, text, claims=True, p_value=correlation.p_value)]


def _holds_without_noise(rho: float, scores: TaskScores, halves: Similarities | None) -> bool:
    """Whether scores also follow similarities from which every task's own noise is taken out.

    A task with noisy gradients is less similar to all others, and often scores less.
    """
    means = None if halves is None else statistics.task_means(halves)
    if halves is None or means is None:
        return False
    pairs = zip(halves.tasks, means.tolist(), strict=True)
    points = [(mean, scores.by_task[task]) for task, mean in pairs if task in scores.by_task]
    try:
        correlation = statistics.similarity_against_score(
            [point for point in points if not np.isnan(point[0])]
        )
    except ValueError:
        return False
    return is_clear(correlation.p_value) and correlation.rho * rho > 0


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


@dataclass(frozen=True)
class Finding:
    """What a test found in one part of the model, for the sentence and for the headline.

    Attributes:
        claim: The sentence if the test is clear.
        numbers: The numbers alone.
        p_value: Of the test, before others are considered.
        difference: The size of what is claimed, in cosines.
        interval: Of a difference, in words.
    """

    claim: str
    numbers: str
    p_value: float
    difference: float
    interval: str = ""


def family_findings(main: Similarities, run: Run) -> list[Finding]:
    """Within families against between them, in every part that has both."""
    findings = []
    noun, pairs = _noun(main).capitalize(), views.for_pairs(main, run)
    for subset in views.subsets(main):
        families = statistics.families_of(subset.tasks, run.families)
        matrix = views.side_matrix(main, subset.side, subset.tasks)
        pattern = views.side_pattern(pairs, subset.side, subset.tasks)
        in_common = views.shared_noise(main, run, subset.tasks)
        try:
            contrast = statistics.family_contrast(
                matrix, families, tested=pattern, in_common=in_common
            )
        except ValueError:  # no pair of relatives, or of others, is known
            continue
        within, between, difference, p_value, least = contrast
        more = "more" if difference > 0 else "less"
        means = f"{within:z.2f} against {between:z.2f}"
        shown = _shown(within, between)
        claim = (
            f"{noun} of one family are {shown:.2f} {more} similar than "
            f"others{where(subset)}: {means}"
        )
        apart = f"{abs(difference):.2f} with the noise of every task taken out, "
        few = ""
        if least >= SIGNIFICANT:
            few = f"; with so few {noun.lower()} p cannot be below {least:.2f}"
        told = min(abs(difference), shown) if difference * (within - between) > 0 else 0.0
        numbers = f"{means}{where(subset)} ({p_text(p_value)}{few})"
        findings.append(Finding(claim, numbers, p_value, told, apart))
    return findings


def _shown(first: float, second: float) -> float:
    """The difference that a reader of two digits subtracts."""
    return round(abs(round(float(first), 2) - round(float(second), 2)), 2)


def describe_families(main: Similarities, run: Run) -> list[Statement]:
    """What families have to do with similarity, and who is left out."""
    if not any(run.families.get(task) for task in main.tasks):
        text = "The families of the tasks are not known, so nothing is said about them."
        return [Statement(FAMILIES, text)]
    noun = _noun(main)
    findings = family_findings(main, run)
    what = f"{noun.capitalize()} of one family against others"
    found = _describe_findings(FAMILIES, findings, what)
    if not findings:
        found.append(Statement(FAMILIES, _why_no_contrast(main, run)))
    for direction, tasks in task_names.directions(main.tasks):
        families = [run.families.get(task, "") for task in tasks]
        large = [name for name in dict.fromkeys(families) if name and families.count(name) > 1]
        members = {
            name: [t for t, f in zip(tasks, families, strict=True) if f == name] for name in large
        }
        found += _shares(main, members, noun, way(direction))
    unknown = [task for task in main.tasks if not run.families.get(task)]
    if unknown:
        text = f"Of no known family, and left out of this: {listed(unknown)} (see --families)."
        found.append(Statement(FAMILIES, text))
    return found


def distance_findings(main: Similarities, run: Run) -> list[Finding]:
    """Similarity against known distance, in every part."""
    findings = []
    for subset, matrix, distances in views.against_distance(main, run.distances):
        found, p_value = views.correlation_with_distance(main, run, subset, distances)
        values = views.pair_values(matrix)
        r = float(np.corrcoef(values, views.pair_values(distances))[0, 1])
        rise = abs(r) * float(values.std()) * 4 * (found * r > 0)  # from the nearest to the rest
        assert run.distances is not None
        follows = "falls with" if r < 0 else "rises with"
        claim = f"Similarity {follows} {run.distances.name}{where(subset)}: r = {r:z.2f}"
        numbers = f"r = {r:z.2f}{where(subset)} ({p_text(p_value)})"
        findings.append(Finding(claim, numbers, p_value, rise))
    return findings


def describe_distances(main: Similarities, run: Run) -> list[Statement]:
    """Whether similarity follows known distances."""
    if run.distances is None:
        return []
    what = f"Similarity against {run.distances.name}"
    found = _describe_findings(DISTANCE, distance_findings(main, run), what)
    missing = [task for task in main.tasks if task not in run.distances.tasks]
    if found and missing:
        text = f"Of unknown {run.distances.name}, and left out of this: {listed(missing)}."
        found.append(Statement(DISTANCE, text))
    return found


def _describe_findings(about: str, findings: list[Finding], what: str) -> list[Statement]:
    """A sentence for every clear finding, and one for the numbers of all others.

    A difference that two digits do not show is no finding, however clear it is.
    """
    adjusted = statistics.holm([one.p_value for one in findings])
    found, rest = list[Statement](), dict[str, list[str]]()
    for one, p_value in zip(findings, adjusted, strict=True):
        if is_clear(p_value) and one.difference >= statistics.LEAST:
            text = f"{one.claim} ({one.interval}{p_text(p_value)})."
            found.append(Statement(about, text, claims=True, p_value=p_value))
        else:
            among = is_clear(one.p_value) and not is_clear(p_value)
            numbers = one.numbers + f", which {len(findings)} such tests allow" * among
            rest.setdefault(_why_no_claim(p_value), []).append(numbers)
    for why, parts in rest.items():
        text = f"{what}, {why}: {'; '.join(parts)}."
        p_value = float("nan") if why == NOT_TESTED else float(np.nanmax(adjusted))
        found.append(Statement(about, text, p_value=p_value))
    return found


def _why_no_claim(p_value: float) -> str:
    """Why a sentence gives numbers alone."""
    if np.isnan(p_value):
        return NOT_TESTED
    return "too small to matter" if is_clear(p_value) else "not beyond chance"


def _why_no_contrast(main: Similarities, run: Run) -> str:
    families = [run.families.get(task, "") for task in main.tasks]
    named = [name for name in families if name]
    if len(set(named)) == 1 and len(named) > 1:
        return "All tasks are of one family, so there is nothing to compare it with."
    if len(set(named)) == len(named):
        return "No family has two tasks here, so nothing can be said about families."
    return "Too few pairs are known to compare families."


def _shares(
    main: Similarities, members: Mapping[str, list[str]], noun: str, suffix: str
) -> list[Statement]:
    """The mean cosines inside the most and the least similar families."""
    sides = views.sides_of(main)
    shared = {
        name: {side: views.pair_mean(views.side_matrix(main, side, tasks)) for side in sides}
        for name, tasks in members.items()
    }
    known = {
        name: by_side for name, by_side in shared.items() if not np.isnan([*by_side.values()]).any()
    }
    ranked = sorted(known, key=lambda name: -max(known[name].values()))
    shown = ranked if len(ranked) <= 3 else [*ranked[:2], ranked[-1]]
    parts = [
        f"among {name} {noun} "
        + ", ".join(f"{value:z.2f}{inside(side)}" for side, value in known[name].items())
        for name in shown
    ]
    if not parts:
        return []
    return [Statement(FAMILIES, f"Average cosine similarity: {'; '.join(parts)}{suffix}.")]


def _noun(main: Similarities) -> str:
    return "languages" if task_names.are_directions(main.tasks) else "tasks"


def describe_pairs(main: Similarities) -> list[Statement]:
    """The mean, the most and the least similar pair; numbers alone."""
    matrix, labels = views.side_matrix(main, views.MODEL), task_names.labels(main.tasks)
    rows, columns = np.tril_indices(len(labels), -1)
    values = matrix[rows, columns]
    known = values[~np.isnan(values)]
    best, worst = int(np.nanargmax(values)), int(np.nanargmin(values))

    def name(pair: int) -> str:
        return f"{views.short(labels[columns[pair]])} and {views.short(labels[rows[pair]])}"

    if len(known) == 1:
        text = f"The cosine of {name(best)}, the only pair, is {known[0]:z.2f}."
        return [Statement(PAIRS, text)]
    mean = f"The average cosine of two tasks is {known.mean():z.2f}"
    if _shown(known.max(), known.min()) < statistics.LEAST:
        return [Statement(PAIRS, f"{mean}, and all pairs about the same.")]
    below = int((known < 0).sum())
    are = "is" if below == 1 else "are"
    low = f"{below:,} of {len(known):,} pairs {are} below 0" if below else "no pair is below 0"
    text = (
        f"{mean}, from {values[best]:z.2f} ({name(best)}) down to {values[worst]:z.2f} "
        f"({name(worst)}); {low}."
    )
    return [Statement(PAIRS, text)]


def describe_directions(main: Similarities, run: Run) -> list[Statement]:
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
    findings, in_common = [], views.shared_noise(main, run)
    for side in views.sides_of(main):
        one, two = (
            views.side_by_step(main, side, [tasks[language] for language in both])
            for tasks in (back, there)
        )
        change = statistics.paired(one, two, over=_sampled(main), in_common=in_common)
        more = "more" if change.difference.mean > 0 else "less"
        claim = f"Tasks into {pivot} are {more} similar than tasks out of it{inside(side)}"
        findings += _difference_finding(claim, change, inside(side))
    return _describe_findings(DIRECTION, findings, f"Tasks into {pivot} against tasks out of it")


def describe_sides(main: Similarities, run: Run) -> list[Statement]:
    """The encoder against the decoder."""
    if views.sides_of(main) != views.SIDES:
        return []
    findings = []
    for direction, tasks in task_names.directions(main.tasks):
        if len(tasks) > 1:
            encoder, decoder = (views.side_by_step(main, side, tasks) for side in views.SIDES)
            in_common = views.shared_noise(main, run, tasks)
            change = statistics.paired(decoder, encoder, over=_sampled(main), in_common=in_common)
            high, low = views.SIDES
            is_more = change.difference.mean > 0
            high, low = (high, low) if is_more else (low, high)
            claim = f"The {high} is more similar than the {low}{way(direction)}"
            findings += _difference_finding(claim, change, way(direction), turned=not is_more)
    return _describe_findings(SIDES, findings, "Encoder against decoder")


def _difference_finding(
    claim: str, change: statistics.Change, suffix: str, *, turned: bool = False
) -> list[Finding]:
    """A difference within pairs; `turned`: the claim names the first of the two means first."""
    if np.isnan(change.difference.mean):
        return []
    interval = range_text(change.difference)
    means = f"{change.second:z.2f} against {change.first:z.2f}"
    numbers = f"{means}{suffix} ({interval})"
    claimed = means
    if turned:
        claimed = f"{change.first:z.2f} against {change.second:z.2f}"
        low, high = change.difference.interval
        interval = range_text(change.difference._replace(interval=(-high, -low)))
    shown, p_value = _shown(change.first, change.second), change.difference.p_value
    if (change.second - change.first) * change.difference.mean < 0:
        shown = 0.0  # tasks that come and go: the means would say the contrary
    return [Finding(f"{claim}: {claimed}", numbers, p_value, shown, f"{interval}, ")]


def _sampled(main: Similarities) -> str:
    """What a test of a mean is over."""
    return "records" if main.lines == "training" else "tasks"


def _of_batches(main: Similarities) -> str:
    """What else may have changed the cosines of training."""
    return "; the noise of batches alone can do this" if main.lines == "training" else ""


def describe_depth(main: Similarities) -> list[Statement]:
    """From the first layer to the last."""
    profiles, tests = [], []
    for direction, tasks in task_names.directions(main.tasks):
        if len(tasks) < 2:
            continue
        for side, layers in statistics.layers_of(main.select(tasks=tasks)).items():
            means = [
                (layer.number, float(statistics.mean_of_pairs(layer.matrix))) for layer in layers
            ]
            if len(layers) > 1 and not np.isnan([mean for _, mean in means]).any():
                name = "model" if side == "shared" else side  # one without encoder and decoder
                profiles.append((name + way(direction), means))
                tests.append(statistics.depth(layers, over=_sampled(main)))
    slopes, bends = [t.slope_p_value for t in tests], [t.bend_p_value for t in tests]
    adjusted = statistics.holm([*slopes, *bends])
    found, rest = list[Statement](), dict[str, list[str]]()
    for n, ((name, means), test) in enumerate(zip(profiles, tests, strict=True)):
        slope, bend = adjusted[n], adjusted[len(tests) + n]
        (first, start), (last, end) = means[0], means[-1]
        text = f"{start:z.2f} in layer {first}, {end:z.2f} in layer {last}"
        ends, inner = (start + end) / 2, float(np.mean([mean for _, mean in means[1:-1] or means]))
        is_bend = is_clear(bend) and not (is_clear(slope) and slope <= bend)
        if is_bend and _shown(ends, inner) >= statistics.LEAST and test.bend * (inner - ends) > 0:
            how = "more" if test.bend > 0 else "less"
            text = (
                f"The middle layers of the {name} are {how} similar than its first and last "
                f"on average: {inner:z.2f} against {ends:z.2f} ({text}; "
                f"{p_text(bend)}{_of_batches(main)})."
            )
            found.append(Statement(DEPTH, text, claims=True, p_value=bend))
        elif (
            is_clear(slope)
            and _shown(start, end) >= statistics.LEAST
            and test.slope * (end - start) > 0
        ):
            verb = "rises" if test.slope > 0 else "falls"
            test_text = f"{p_text(slope)}{_of_batches(main)}"
            text = f"Similarity {verb} with depth in the {name}: {text} ({test_text})."
            found.append(Statement(DEPTH, text, claims=True, p_value=slope))
        else:
            why = _why_no_claim(slope)
            rest.setdefault(why, []).append(f"{text} of the {name}")
    for why, parts in rest.items():
        p_value = float("nan") if why == NOT_TESTED else float(np.nanmax(adjusted))
        what = f"{why} (too few layers or records)" if why == NOT_TESTED else f"a trend {why}"
        text = f"By depth, {what}: {'; '.join(parts)}."
        found.append(Statement(DEPTH, text, p_value=p_value))
    return found


def describe_time(main: Similarities, run: Run) -> list[Statement]:
    """Early steps against late ones, within pairs."""
    change = statistics.change_over_steps(main, views.shared_noise(main, run))
    if change is None or np.isnan(change.first):
        return []
    first, last, p_value = int(main.steps[0]), int(main.steps[-1]), change.p_value
    before = f"at step {first:,}" if change.until == first else f"up to step {change.until:,}"
    after = f"at step {last:,}" if change.since == last else f"from step {change.since:,} on"
    means = f"{change.first:z.2f} {before}, {change.second:z.2f} {after}"
    if is_clear(p_value) and _shown(change.first, change.second) >= statistics.LEAST:
        verb = "rose" if change.second > change.first else "fell"
        test = f"{p_text(p_value)}{_of_batches(main)}"
        text = f"Similarity {verb} in training, within pairs: {means} ({test})."
        return [Statement(TIME, text, claims=True, p_value=p_value)]
    if np.isnan(p_value):
        text = f"Over steps, {NOT_TESTED} (too few independent steps): {means}."
    else:
        text = f"Over steps, a trend {_why_no_claim(p_value)}: {means} ({p_text(p_value)})."
    return [Statement(TIME, text, p_value=p_value)]


def describe_noise(main: Similarities, run: Run) -> list[Statement]:
    """How far the numbers can be trusted, and what they would be without noise."""
    if main.lines == "training":
        text = (
            "These are raw cosines of training batches, and larger batches give larger cosines. "
            "Measured on an aligned set (gradvac similarity), they can be corrected for that."
        )
        return [Statement(NOISE, text)]
    halves = views.two_halves(run)
    if halves is None:
        text = (
            "The reliability of the cosines was not stored; measure again with gradvac similarity."
        )
        return [Statement(NOISE, text)]
    found = [_describe_reliability(halves)]
    parts = []
    for side in views.sides_of(halves):
        corrected = statistics.corrected(halves, None if side == views.MODEL else side)
        if corrected is None:
            continue
        value = f"{corrected.mean:z.2f} (give or take {corrected.mean_reach:.2f})"
        value = "not reliable enough to say" if np.isnan(corrected.mean) else value
        parts.append(f"{value}{inside(side)}")
    if parts:
        text = (
            "With unlimited data, the average cosine similarity of two tasks would be: "
            f"{'; '.join(parts)}."
        )
        found.append(Statement(NOISE, text))
    return found


def _describe_reliability(halves: Similarities) -> Statement:
    parts = []
    for side, by_step in views.reliability_by_step(halves).items():
        known = by_step[~np.isnan(by_step)]
        if not len(known):
            continue
        steps = (
            f", from {by_step[0]:z.2f} at the first step to {by_step[-1]:z.2f} at the last"
            if len(known) == len(by_step) > 1
            else ""
        )
        parts.append(f"{known.mean():z.2f}{inside(side)}{steps}")
    text = f"A task agrees with itself on other lines (split halves) by {'; '.join(parts)}."
    return Statement(NOISE, text)


def describe_rule(run: Run) -> list[Statement]:
    """How often the rule acted, of the pairs it could act on, and what became of the update."""
    record = run.record
    if record is None or len(record.tasks) < 2:
        return []
    counts = statistics.rule_counts(record)
    eligible = int(counts.eligible.sum())
    if not eligible:
        return []
    conflicts = _conflict_share(run)
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
    if conflicts > 0 and run.measured:
        text = (
            "Conflicts are counted in single training batches, whose noise moves cosines to both "
            "sides of 0; similarities on the aligned set are means over many lines, which average "
            "this noise out. So a pair can be above 0 there and in conflict in many batches."
        )
        found.append(Statement(RULE, text))
    cosine = float(mean_where_known(record.update_cosine, axis=(0, 1)))
    ratio = float(mean_where_known(record.update_ratio, axis=(0, 1)))
    if np.isfinite(cosine) and np.isfinite(ratio):
        if cosine > 1 - _SAME_UPDATE and abs(ratio - 1) < _SAME_UPDATE:
            return [*found, Statement(RULE, "The update was the plain sum.")]
        small = ": it hardly changed the direction" if cosine > 0.99 else ""
        text = (
            f"The update had cosine {cosine:.3f} with the plain sum and {ratio:.2f} times its "
            f"length{small}."
        )
        found.append(Statement(RULE, text))
    return found


def describe_method(rule: str) -> list[Statement]:
    """What a rule does, as its class says it."""
    method = RULES.get(rule.partition("(")[0].lower())
    return [] if method is None else [Statement(RULE, f"{method.__name__} {method.does}.")]


def _rule_name(rule: str) -> str:
    """The name without its settings: "GradVac" for "gradvac(beta=0.01)"."""
    name = rule.partition("(")[0]
    method = RULES.get(name.lower())
    return method.__name__ if method is not None else name or "The rule"


def describe_influence(influence: statistics.Influence) -> list[Statement]:
    """In short: how many pairs clearly help or harm, and every predicted harm that is clear."""
    labels = task_names.labels(influence.tasks)
    num = len(labels)
    if np.isnan(influence.p_values[~np.eye(num, dtype=bool)]).all():
        text = (
            "Whether tasks help or harm each other is not tested: there are too few independent "
            "records of two tasks with a gradient."
        )
        return [Statement(INFLUENCE, text)]
    helpful, harmful = _clear_pairs(influence, 1), _clear_pairs(influence, -1)
    text = (
        f"Of {count(num * (num - 1), 'pair')} of a task and another, {len(helpful):,} are clearly "
        f"predicted to help and {len(harmful):,} to harm; the rest cannot be told from nothing."
    )
    found = [Statement(INFLUENCE, text)]
    least = float(np.nanmin(influence.p_values[~np.eye(num, dtype=bool)]))
    p_value = min(1.0, least * num * (num - 1))
    by_task: dict[int, list[str]] = {}
    for i, j in harmful:
        by_task.setdefault(i, []).append(labels[j])
    harm = [f"{labels[i]} (by {listed(others, 5)})" for i, others in by_task.items()]
    if harm:
        text = f"Losses that other tasks are predicted to raise: {listed(harm)}."
        found.append(Statement(INFLUENCE, text, claims=True, p_value=p_value))
    worse = [labels[i] for i in _tasks_that_move(influence, -1)]
    if worse:
        text = f"Predicted to get worse by the whole update: {listed(worse)}."
        found.append(Statement(INFLUENCE, text, claims=True))
    return found


def describe_progress(
    influence: statistics.Influence, names: Mapping[str, str] | None = None
) -> list[Statement]:
    """One sentence per task that clearly gets better: where its predicted progress comes from.

    Args:
        influence: Predicted effects of tasks on each other's losses.
        names: Task -> how to call it; others by task name.
    """
    labels = [(names or {}).get(task, task) for task in influence.tasks]
    if len(set(labels)) < len(labels):  # one language, both ways
        labels = list(influence.tasks)
    most = _MOST_CANCELLED * influence.totals
    moving = _tasks_that_move(influence, 1)
    certain = {*_clear_pairs(influence, 1), *_clear_pairs(influence, -1)}
    clear = [i for i in moving if np.nanmax(influence.values[i]) <= most[i]]
    found = [
        Statement(labels[task], _parts(influence, labels, task, certain))
        for task in clear[:_MOST_PROGRESS]
    ]
    if len(clear) > _MOST_PROGRESS:
        num = count(len(clear) - _MOST_PROGRESS, "other task")
        text = f"Clear progress is predicted for {num} too."
        found.append(Statement("", text))
    cancelled = [labels[task] for task in moving if task not in clear]
    if cancelled:
        text = f"Help and harm nearly cancel, so that no shares are given: {listed(cancelled, 12)}."
        found.append(Statement("", text))
    rest = [label for task, label in enumerate(labels) if task not in moving]
    if rest:  # shares of a total near 0 would be large and mean nothing
        text = f"No shares are given where progress is not clear: {listed(rest, 12)}."
        found.append(Statement("", text))
    return found


def _parts(
    influence: statistics.Influence, labels: list[str], task: int, certain: set[tuple[int, int]]
) -> str:
    """Where the predicted progress of a task comes from; only clear help has a name."""
    shares, own_name = influence.shares[task], influence.tasks[task]
    name = labels[task] if labels[task] == own_name else f"{labels[task]} ({own_name})"
    others = [j for j in np.argsort(-shares) if j != task and shares[j] > _WORTH_NAMING]
    named = [j for j in others if (task, j) in certain][:_MOST_HELPERS]
    helpers = [f"{shares[j]:.0%} from {labels[j]}" for j in named]
    rest = [shares[j] for j in others if j not in named]
    helpers += [f"{sum(rest):.0%} from {count(len(rest), 'other')}"] * bool(rest)
    from_itself = f"{shares[task]:.0%} of its predicted progress from its own data"
    text = f"{name} gets {listed([from_itself, *helpers])}"
    against = [j for j in range(len(labels)) if j != task and shares[j] < -_WORTH_NAMING]
    held = [
        f"{labels[j]} ({shares[j]:z.0%}{', can be chance' * ((task, j) not in certain)})"
        for j in sorted(against, key=lambda j: shares[j])
    ]
    return text + (f"; held back by {listed(held, 4)}." if held else ".")


def _clear_pairs(influence: statistics.Influence, sign: int) -> list[tuple[int, int]]:
    """Pairs (task, other) whose help (1) or harm (-1) a test finds, all pairs considered."""
    apart = ~np.eye(len(influence.tasks), dtype=bool)
    adjusted = np.full(apart.shape, np.nan)
    adjusted[apart] = statistics.holm(influence.p_values[apart].tolist())
    found = np.argwhere((adjusted < SIGNIFICANT) & (sign * influence.values > 0))
    return [(int(i), int(j)) for i, j in found]


def _tasks_that_move(influence: statistics.Influence, sign: int) -> list[int]:
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
    reason = views.why_not_compared(first, second)
    if reason:
        return [Statement(about, f"Their similarities are not compared: {reason}.")]
    comparison = views.compared(first, second)
    if comparison is None:
        return [Statement(about, "They have fewer than two tasks in common.")]
    if np.isnan(comparison.change.difference.mean):
        return [Statement(about, "Their similarities are not compared: one of them is unknown.")]
    found = [_verdict(about, comparison, second.name)]
    if a.lines == "training":
        text = "These are raw cosines of training; other batches alone can change them."
        found.append(Statement(about, text))
    if comparison.pattern is not None:
        r, p_value = comparison.pattern
        clear = r > 0 and is_clear(p_value)
        text = (
            f"The same pairs are similar in both (r = {r:z.2f}, {p_text(p_value)})."
            if clear
            else f"Whether the same pairs are similar in both is unclear (r = {r:z.2f}, "
            f"{p_text(p_value)})."
        )
        if np.isnan(p_value):
            text = (
                f"Their pairs correlate by {r:z.2f}, {NOT_TESTED}: they were measured on the same "
                "lines, and share the noise of these lines."
            )
        found.append(Statement(about, text, claims=clear))
    return found


def _verdict(about: str, comparison: statistics.SimilarityComparison, second: str) -> Statement:
    change = comparison.change
    num = len(comparison.tasks)
    text = f"{change.second:z.2f} against {change.first:z.2f}"
    text += f", {range_text(change.difference)}, one seed each"
    p_value = change.difference.p_value
    if not is_clear(p_value) or _shown(change.first, change.second) < statistics.LEAST:
        text = f"Similarity over their {num} tasks, {_why_no_claim(p_value)}: {text}."
        return Statement(about, text)
    more = "more" if change.difference.mean > 0 else "less"
    return Statement(
        about, f"Their {num} tasks are {more} similar in {second} ({text}).", claims=True
    )


def is_clear(p_value: float) -> bool:
    """Whether a test says that something is there; a test that could not be made does not."""
    return bool(p_value < SIGNIFICANT)


def p_text(p_value: float) -> str:
    """A p-value, if there is one."""
    if not np.isfinite(p_value):
        return "too few for a test"
    if p_value < 0.0001:
        return "p < 0.0001"
    digits = 4 if p_value < 0.01 else 3 if p_value < 0.1 else 2
    return f"p = {p_value:.{digits}f}"


def range_text(difference: statistics.Estimate) -> str:
    """The interval of a difference, if there is one."""
    low, high = difference.interval
    if np.isnan(low):
        return f"too few {difference.over} for a test"
    rounded = round(low, 2), round(high, 2)
    digits = 3 if 0 in rounded or rounded[0] == rounded[1] else 2  # "+0.00" is neither side of 0
    return f"difference {low:+z.{digits}f} to {high:+z.{digits}f} over {difference.over}"


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 task", "2 tasks"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in a row, not too many: "a, b and c", "a, b and 7 others"."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1:,} others"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def where(subset: views.TaskSubset) -> str:
    """As in " in the encoder (en-xx)"."""
    return inside(subset.side) + way(subset.direction)


def way(direction: str) -> str:
    """As in " (en-xx)"; nothing where all tasks go the same way."""
    return f" ({direction})" if direction else ""


def inside(side: str) -> str:
    """As in " in the encoder"; nothing for the whole model."""
    return f" in the {side}" if side in views.SIDES else ""
