"""The summary of a run in plain sentences, each computed from its data.

A sentence makes a claim only if a test says so (`Sentence.claims`); else it gives the numbers
alone. Tests of one kind that stand side by side are corrected for their number.
"""

from gradvac.analysis import statistics, views
from gradvac.analysis.components import weighty
from gradvac.analysis.report import _kin, _places, _update
from gradvac.analysis.report._wording import Sentence, count, is_clear, p_text
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities
from gradvac.run_files import ALL, TaskScores

SCORES = "Scores"


def summarise(run: Run) -> list[Sentence]:
    """What a run's data say, most important first."""
    said: list[Sentence] = []
    main = views.main_source(run)
    why_not = None if main is None else _why_nothing(main)
    if why_not:
        said.append(Sentence(_places.PAIRS, why_not))
    elif main is not None:
        said += _kin.say_families(main, run) + _kin.say_distances(main, run)
        said += _places.say_pairs(main) + _kin.say_groups(main, run)
        said += _places.say_directions(main)
        said += _places.say_sides(main) + _places.say_depth(main)
        said += _places.say_time(main) + _places.say_noise(main, run)
    pushes = views.pushes(run)
    said += [] if pushes is None else _update.say_pushes(pushes)
    said += _update.say_rule(run)
    if run.scores is not None and run.scores.by_task:
        said += _say_scores(run.scores, main)
    return said


def headline(run: Run) -> Sentence:
    """The one sentence to remember: the clearest finding, or the numbers if nothing is clear."""
    main = views.main_source(run)
    why_not = None if main is None else _why_nothing(main)
    if main is None or why_not:
        return Sentence("", why_not or "This run has no similarities yet.")
    findings = [*_kin.family_findings(main, run), *_kin.distance_findings(main, run)]
    adjusted = statistics.holm([one.p_value for one in findings])
    pairs = _places.say_pairs(main)[0].text
    for one, p_value in zip(findings, adjusted, strict=True):
        if is_clear(p_value):
            return Sentence("", f"{one.claim}. {pairs}", claims=True)
    return Sentence("", pairs)


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


def _say_scores(scores: TaskScores, main: Similarities | None) -> list[Sentence]:
    values = scores.by_task
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    mean = scores.show(scores.by_level()[ALL])
    text = f"{scores.metric} is {mean} on average over {count(len(values), 'task')}"
    ends = [scores.show(values[low]), scores.show(values[high])]
    between = f", from {ends[0]} ({low}) to {ends[1]} ({high})" if ends[0] != ends[1] else ""
    said = [Sentence(SCORES, f"{text}{between}.")]
    if main is None:
        return said
    points = [(x, y) for _, x, y in views.similarity_and_score(main, scores)]
    try:
        correlation = statistics.similarity_against_score(points)
    except ValueError:  # too few, or all alike
        return said
    test = f"Spearman {correlation.rho:z.2f}, {p_text(correlation.p_value)}"
    if not is_clear(correlation.p_value):
        text = f"{scores.metric} of tasks against their similarity, not beyond chance: {test}."
        return [*said, Sentence(SCORES, text)]
    how = "higher" if correlation.rho > 0 else "lower"
    text = f"Tasks that are more similar to the others have {how} {scores.metric} ({test})."
    return [*said, Sentence(SCORES, text, claims=True)]


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
